"""What is proved: a model, the ids it is run on, how it is run, and what these ids are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.masks import algebra
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.observers.input_rows import InputRows
from flexinspect_hooks.user_code.declared_prompt import SegmentArgument, parse_segments
from flexinspect_hooks.user_code.generation_builder import (
    DeclaredPrompt,
    GenerationBuilder,
    IdAdapter,
    TokenizerAdapter,
    TransformersAdapter,
)
from flexinspect_hooks.user_code.step_tracking import StepPlace

RunIds = Callable[[Tensor], Any]
"""Runs the model on ids (batch, rows); what it returns is not looked at."""
OnProgress = Callable[[str, float | None], None]
"""Told what is being done, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A run that can be repeated with other ids.

    `ids` (batch, rows) lie on the model's device. `real` (batch, rows) is false for padding.
    `special` are ids that stand for no text, `text_of` gives an id's text. Segments
    and words are those of batch row 0.
    """

    model: nn.Module
    ids: Tensor
    run: RunIds
    scene: RuleContext
    real: BoolArray
    special: frozenset[int]
    text_of: Callable[[int], str]

    @property
    def n_rows(self) -> int:
        """Rows of each sequence."""
        return int(self.ids.shape[1])

    def forward(self, ids: Tensor | None = None) -> None:
        """Run on the subject's own ids, or on others of the same shape, without gradients."""
        with torch.no_grad():
            self.run(self.ids if ids is None else ids)


def subject_of(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    run: RunIds | None = None,
    segments: Iterable[SegmentArgument] | None = None,
    tokenizer: Any = None,
    mask: str | MaskSpec | None = None,
    attention_mask: Any = None,
    position_ids: Any = None,
) -> Subject:
    """Return what a proof of the user's own run is about. Raises `UsageError`."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"prove needs a torch module, and got a {type(model).__name__}.")
    check_mask(mask)
    words = tokenizer_adapter(tokenizer)
    fed = _parse_ids(ids, tokenizer).to(device_of(model))
    given = _model_arguments(fed, attention_mask, position_ids, is_own=run is not None)
    wishes = DeclaredPrompt(words, parse_segments(segments), mask)
    story = GenerationBuilder.begin(
        wishes, StepPlace(0, 0, True, 0, fed.shape[1]), _input_rows(fed, given)
    )
    if story.problems:
        raise UsageError(story.problems[0], hint="Segments are spans or texts of the ids given.")
    scene = RuleContext()
    scene.start_generation(story.record)
    return Subject(
        *(model, fed, run or (lambda changed: model(changed, **given)), scene),
        real=_real_tokens(fed, given.get("attention_mask")),
        special=words.special | config_ids(model),
        text_of=words.text_of,
    )


def check_mask(mask: Any) -> None:
    """Raise `UsageError` for what can be no declared mask."""
    if isinstance(mask, str):
        algebra.check_preset(mask)
    elif mask is not None and not isinstance(mask, MaskSpec):
        raise UsageError(
            "mask must be the name of a preset or a flexinspect.masks.algebra.MaskRule."
        )


def tokenizer_adapter(tokenizer: Any) -> TokenizerAdapter:
    """Return the words of a tokenizer, or ids in their place."""
    return IdAdapter() if tokenizer is None else TransformersAdapter(tokenizer)


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's parameters lie."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def config_ids(model: nn.Module) -> frozenset[int]:
    """Return the special ids that a model's configuration names."""
    config = getattr(model, "config", None)
    named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    flat: set[int] = set()
    for value in named:
        flat |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(flat)


def _parse_ids(ids: Any, tokenizer: Any) -> Tensor:
    if isinstance(ids, str):
        if tokenizer is None:
            raise UsageError("A prompt given as text needs tokenizer=.")
        ids = tokenizer(ids)["input_ids"]
    try:
        fed = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"ids must be token ids or a text: {error}") from error
    fed = fed[None] if fed.dim() == 1 else fed
    if fed.dim() != 2 or fed.is_floating_point() or not fed.numel():
        raise UsageError(
            f"ids must be whole numbers of shape (rows,) or (batch, rows), not {tuple(fed.shape)}."
        )
    return fed.long()


def _model_arguments(
    ids: Tensor, attention_mask: Any, position_ids: Any, *, is_own: bool
) -> dict[str, Any]:
    """Return what goes to the model with the ids; with a run of one's own it only tells of pads."""
    given: dict[str, Any] = {}
    if attention_mask is not None:
        is_tensor = isinstance(attention_mask, Tensor)
        if is_own and not (is_tensor and attention_mask.shape == ids.shape):
            raise UsageError(
                "With run=, attention_mask tells which ids are padding: as many 0 and 1 as ids.",
                hint="Hand any other mask to the model in run.",
            )
        given["attention_mask"] = attention_mask.to(ids.device) if is_tensor else attention_mask
    if position_ids is not None:
        positions = torch.as_tensor(position_ids, device=ids.device)
        given["position_ids"] = positions[None] if positions.dim() == 1 else positions
    return given


def _input_rows(ids: Tensor, arguments: dict[str, Any]) -> InputRows:
    return InputRows({"input_ids": ids, **arguments}, ids.shape[1], with_mask=True)


def _real_tokens(ids: Tensor, attention_mask: Any) -> BoolArray:
    if isinstance(attention_mask, Tensor) and attention_mask.shape == ids.shape:
        real: BoolArray = attention_mask.cpu().numpy().astype(np.bool_)
        return real
    return np.ones(tuple(ids.shape), np.bool_)
