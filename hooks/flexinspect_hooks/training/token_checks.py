"""Whether the labels and the padding of a language model fit its tokens.

Values are read on the CPU only, because reading them elsewhere waits for the device. Each check
returns its failures: the name of the check, a sentence without its full stop, and facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flexinspect_hooks.training.loss_checks import IGNORED_LABEL, ClassLoss
from flexinspect_hooks.training.model_checks import Failure

MIN_LABELS = 8  # that must agree with tokens before a shift is told
NEXT, NEXT_BUT_ONE = 1, 2  # tokens after the one that a score is computed from


def check_padding(model: nn.Module, inputs: Mapping[str, Any]) -> list[Failure]:
    """Check the named inputs of a forward pass of a transformers model."""
    config = getattr(model, "config", None)
    ids = inputs.get("input_ids")
    if config is None or not _is_here(ids) or getattr(config, "is_encoder_decoder", False):
        return []
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if mask is not None and not (_is_here(mask) and mask.shape == ids.shape):
        return []
    failures = []
    if mask is not None and _is_here(labels) and labels.shape == ids.shape:
        failures += _check_labels(mask != 0, labels)
    if isinstance(pad := getattr(config, "pad_token_id", None), int):
        failures += _check_attended(model, ids, mask, pad)
    return failures


def _is_here(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a table that can be read without waiting."""
    is_table = isinstance(value, Tensor) and value.dim() == 2 and value.numel() > 0
    return is_table and value.device.type == "cpu" and value.layout is torch.strided


def _check_labels(mask: Tensor, labels: Tensor) -> list[Failure]:
    """Labels (rows, length) at positions whose attention mask is 0.

    The label of the first of them may be the end of the text, where that token is the padding too.
    """
    padding = ~mask
    padding[:, 1:] &= ~mask[:, :-1]
    counted = labels != IGNORED_LABEL
    n, total = int((padding & counted).sum()), int(counted.sum())
    if not n:
        return []
    text = f"{n} of the {total} labels of one batch are at positions that the attention mask "
    text += f"excludes, and none of them is {IGNORED_LABEL}: the loss is computed on padding too"
    return [("padding-in-loss", text, {"n": n, "labels": total})]


def _check_attended(model: nn.Module, ids: Tensor, mask: Tensor | None, pad: int) -> list[Failure]:
    """Token ids (rows, length) of which some rows are padded, and the mask (None: all ones)."""
    padded = ids == pad
    # One such token may be the first or the last of the text.
    first, last = padded[:, :2].all(1), padded[:, -2:].all(1)
    if ids.shape[1] < 3 or bool(padded.all(1).any()):
        return []
    sides = [(first, 0)]
    if any(getattr(one, "is_causal", None) is False for one in model.modules()):
        sides.append((last, -1))  # a causal model does not see what follows
    for rows, at in sides:
        n = int(rows.sum())
        if not 0 < n < len(ids) or (mask is not None and not bool(mask[rows, at].all())):
            continue
        given = "no attention mask is given" if mask is None else "the attention mask is 1 there"
        text = f"{n} of the {len(ids)} rows of one batch {'end' if at else 'begin'} with padding "
        text += f"(token {pad}), and {given}: the model attends to it"
        return [("padding-attended", text, {"n": n, "rows": len(ids), "token": pad})]
    return []


class ShiftCheck:
    """Finds labels that were shifted twice: each score is compared with the next token but one.

    Both the labels that a program shifts for a model that shifts them too, and a model that shifts
    twice, have it. A model with several heads may predict later tokens beside the next one.
    """

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._shifts: set[int] = set()

    def on_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the token ids of a forward pass."""
        given = kwargs.get("input_ids", next(iter(args), None))
        is_tokens = _is_here(given) and not given.is_floating_point() and given.shape[1] > 3
        self._ids = given.detach() if is_tokens else None

    def on_class_loss(self, loss: ClassLoss) -> None:
        """Compare the labels of a loss with the tokens."""
        ids, n = self._ids, loss.target.numel()
        if ids is None or n % len(ids) or not 0 <= ids.shape[1] - n // len(ids) <= NEXT_BUT_ONE:
            return
        labels = loss.target.reshape(len(ids), -1)
        found = [by for by in (NEXT, NEXT_BUT_ONE) if _agree(ids, labels, by, loss.ignored)]
        self._shifts.update(found[:1])  # tokens of a short period agree with both

    def end_step(self) -> list[Failure]:
        """A step has ended; returns what was found in it."""
        shifts, self._shifts, self._ids = self._shifts, set(), None
        if shifts != {NEXT_BUT_ONE}:
            return []
        text = "Every label that the loss is computed from is the next token but one: the labels "
        text += "were shifted twice, by the program and by the model, or twice in the model"
        return [("labels-shifted-twice", text, {"shift": NEXT_BUT_ONE})]


def _agree(ids: Tensor, labels: Tensor, by: int, ignored: int) -> bool:
    n = min(labels.shape[1], ids.shape[1] - by)
    own, tokens = labels[:, :n], ids[:, by : by + n]
    counted = own != ignored
    return int(counted.sum()) >= MIN_LABELS and bool((own[counted] == tokens[counted]).all())
