"""The subject of a proof: a model, its input ids, how it is run, and what the ids mean."""

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
from flexinspect_hooks.user_code.declared_segments import SegmentArgument, parse_segments
from flexinspect_hooks.user_code.generation_builder import (
    DeclaredPrompt,
    GenerationBuilder,
    IdAdapter,
    TokenizerAdapter,
    TransformersAdapter,
)
from flexinspect_hooks.user_code.step_tracking import StepPlace

RunIds = Callable[[Tensor], Any]
"""Runs the model on ids (batch, rows); its return value is ignored."""
OnProgress = Callable[[str, float | None], None]
"""Called with what is being done, and the finished part of it, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A run that can be repeated with other ids.

    `ids` (batch, rows) are on the model's device. `real` (batch, rows) is false for padding.
    `special` are ids without text, `text_of` gives the text of an id. The segments and tokens of
    `scene` are those of batch row 0.
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
        """Run on the subject's ids, or on other ids of the same shape, without gradients."""
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
    """The subject of a proof of the user's own run; the arguments are those of `prove_isolation`.

    Raises `UsageError` for arguments that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"prove needs a torch module, not a {type(model).__name__}.")
    check_mask(mask)
    adapter = tokenizer_adapter(tokenizer)
    input_ids = _parse_ids(ids, tokenizer).to(device_of(model))
    arguments = _model_arguments(input_ids, attention_mask, position_ids, has_run=run is not None)
    builder = GenerationBuilder.begin(
        DeclaredPrompt(adapter, parse_segments(segments), mask),
        StepPlace(0, 0, True, 0, input_ids.shape[1]),
        InputRows({"input_ids": input_ids, **arguments}, input_ids.shape[1], with_mask=True),
    )
    if builder.problems:
        raise UsageError(builder.problems[0], hint="Segments are spans or texts of ids.")
    scene = RuleContext()
    scene.start_generation(builder.record)
    return Subject(
        model,
        input_ids,
        run or (lambda changed_ids: model(changed_ids, **arguments)),
        scene,
        real=_real_tokens(input_ids, arguments.get("attention_mask")),
        special=adapter.special | config_ids(model),
        text_of=adapter.text_of,
    )


def check_mask(mask: Any) -> None:
    """Raise `UsageError` if `mask` is neither a preset nor a `MaskSpec`."""
    if isinstance(mask, str):
        algebra.check_preset(mask)
    elif mask is not None and not isinstance(mask, MaskSpec):
        raise UsageError(
            "mask must be the name of a preset or a flexinspect.masks.algebra.MaskSpec."
        )


def tokenizer_adapter(tokenizer: Any) -> TokenizerAdapter:
    """The adapter of a tokenizer; without one, ids are their own texts."""
    return IdAdapter() if tokenizer is None else TransformersAdapter(tokenizer)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters, the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def config_ids(model: nn.Module) -> frozenset[int]:
    """The special ids in a model's configuration."""
    config = getattr(model, "config", None)
    named = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    flat: set[int] = set()
    for value in named:
        flat |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(flat)


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


def _model_arguments(
    ids: Tensor, attention_mask: Any, position_ids: Any, *, has_run: bool
) -> dict[str, Any]:
    """The model's other arguments; if the user has a `run`, they only describe its input."""
    arguments: dict[str, Any] = {}
    if attention_mask is not None:
        is_tensor = isinstance(attention_mask, Tensor)
        if has_run and not (is_tensor and attention_mask.shape == ids.shape):
            raise UsageError(
                "With run=, attention_mask says which ids are padding: a 0 or 1 for each id.",
                hint="Pass any other mask to the model in run.",
            )
        arguments["attention_mask"] = attention_mask.to(ids.device) if is_tensor else attention_mask
    if position_ids is not None:
        positions = torch.as_tensor(position_ids, device=ids.device)
        arguments["position_ids"] = positions[None] if positions.dim() == 1 else positions
    return arguments


def _real_tokens(ids: Tensor, attention_mask: Any) -> BoolArray:
    if isinstance(attention_mask, Tensor) and attention_mask.shape == ids.shape:
        real: BoolArray = attention_mask.cpu().numpy().astype(np.bool_)
        return real
    return np.ones(tuple(ids.shape), np.bool_)
