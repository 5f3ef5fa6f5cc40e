"""The subject of a proof: a model, its input ids, how it is run, and what the ids mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.masks.mask_presets import BoolArray, MaskSpec
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.loading.tokenizers import IdAdapter, Vocabulary, id_tuple
from flexinspect_hooks.observers.inputs_hook import InputRows
from flexinspect_hooks.user_code import generation_builder
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt, parse_segments
from flexinspect_hooks.user_code.step_tracking import StepPlace

RunIds = Callable[[Tensor], Any]
"""Runs the model on ids (batch, rows); its return value is ignored."""
OnProgress = Callable[[str, float | None], None]
"""Called with what is being done, and the finished part of it, from 0 to 1."""


def _no_report(text: str, fraction: float | None) -> None:
    """Report nothing."""


class Subject(Struct, frozen=True):
    """A run that can be repeated with other ids.

    `ids` (batch, rows) are on the model's device. Without `run`, the model is called with the ids
    and `arguments`. `real` (batch, rows) is false for padding. `special` are ids without text,
    `text_of` gives the text of an id. Segments and tokens of `context` are those of batch row 0.
    `report` is called with what is being done, and the finished part of it.
    """

    model: nn.Module
    ids: Tensor
    context: RuleContext
    real: BoolArray
    special: frozenset[int]
    text_of: Callable[[int], str]
    run: RunIds | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    report: OnProgress = _no_report

    @property
    def n_rows(self) -> int:
        """Rows of each sequence."""
        return int(self.ids.shape[1])

    def forward(self, ids: Tensor | None = None) -> None:
        """Run on the subject's ids, or on other ids of the same shape, without gradients."""
        ids = self.ids if ids is None else ids
        with torch.no_grad():
            self.run(ids) if self.run else self.model(ids, **self.arguments)


def subject_of(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    segments: Iterable[generation_builder.SegmentArgument] | None = None,
    tokenizer: Any = None,
    mask: str | MaskSpec | None = None,
    run: RunIds | None = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    report: OnProgress | None = None,
) -> Subject:
    """The subject of a proof of the user's own run.

    Args:
        model: the model, of which all decoder layers are compared.
        ids: the prompt, (rows,) or (batch, rows), or a text for `tokenizer`.
        segments: as for `flexinspect.watch`: spans (start, stop, label), texts, or (text, label),
            in batch row 0.
        mask: which tokens may attend to which, the name of a preset or a `MaskSpec`. Without it,
            the segments count as isolated, and what follows the last one may attend to all.
        run: `run(ids)` runs the model on `ids` as your code does. Without it, the model is called
            with the ids, `attention_mask` (any kind that the model takes) and `position_ids`.
        attention_mask: with `run`, a 2-D tensor that says which ids are padding.
        report: called with what is being done, and the finished part of it, from 0 to 1.

    Raises `UsageError` for arguments that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"prove needs a torch module, not a {type(model).__name__}.")
    generation_builder.check_declared_mask(mask)
    adapter = IdAdapter() if tokenizer is None else Vocabulary(tokenizer)
    input_ids = _parse_ids(ids, tokenizer).to(device_of(model))
    arguments = _model_arguments(input_ids, attention_mask, position_ids)
    if run is not None:
        check_padding(arguments, input_ids)
    builder = generation_builder.GenerationBuilder(
        DeclaredPrompt(adapter, parse_segments(segments), mask),
        StepPlace(0, 0, True, 0, input_ids.shape[1]),
        InputRows({"input_ids": input_ids, **arguments}, input_ids.shape[1], with_mask=True),
    )
    if builder.problems:
        raise UsageError(builder.problems[0], hint="Segments are spans or texts of ids.")
    context = RuleContext()
    context.start_generation(builder.record)
    padding = arguments.get("attention_mask")
    if not isinstance(padding, Tensor) or padding.shape != input_ids.shape:
        padding = torch.ones_like(input_ids)
    return Subject(
        model,
        input_ids,
        context,
        real=padding.cpu().numpy().astype(np.bool_),
        special=adapter.special | config_ids(model),
        text_of=adapter.text_of,
        run=run,
        arguments=arguments,
        report=report or _no_report,
    )


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters, the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def config_ids(model: nn.Module) -> frozenset[int]:
    """The special ids in a model's configuration."""
    config = getattr(model, "config", None)
    named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return frozenset(chain.from_iterable(map(id_tuple, named)))


def _parse_ids(ids: Any, tokenizer: Any) -> Tensor:
    if isinstance(ids, str):
        if tokenizer is None:
            raise UsageError("A prompt as text needs tokenizer=.")
        ids = tokenizer(ids)["input_ids"]
    try:
        tensor = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"ids must be token ids or a text: {error}") from error
    tensor = tensor[None] if tensor.dim() == 1 else tensor
    if tensor.dim() != 2 or tensor.is_floating_point() or not tensor.numel():
        raise UsageError(
            "ids must be whole numbers of shape (rows,) or (batch, rows), not "
            f"{tuple(tensor.shape)}."
        )
    return tensor.long()


def _model_arguments(ids: Tensor, attention_mask: Any, position_ids: Any) -> dict[str, Any]:
    """The model's other arguments, on the device of the ids."""
    arguments: dict[str, Any] = {}
    if attention_mask is not None:
        is_tensor = isinstance(attention_mask, Tensor)
        arguments["attention_mask"] = attention_mask.to(ids.device) if is_tensor else attention_mask
    if position_ids is not None:
        positions = torch.as_tensor(position_ids, device=ids.device)
        arguments["position_ids"] = positions[None] if positions.dim() == 1 else positions
    return arguments


def check_padding(arguments: Mapping[str, Any], ids: Tensor) -> None:
    """Raise `UsageError` if an attention mask is given that is not padding, 0 or 1 for each id."""
    mask = arguments.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        raise UsageError(
            "With run=, attention_mask says which ids are padding: a 0 or 1 for each id.",
            hint="Pass any other mask to the model in run.",
        )
