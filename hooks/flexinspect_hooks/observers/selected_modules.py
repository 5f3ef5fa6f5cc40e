"""Stores the outputs of the modules that `--select` names, at level extreme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.inputs.module_selectors import ModuleSelector, parse_selectors
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.layer_records import SelectedOutputRecords

STREAM = "module"
"""The beginning of the streams: "module.mlp.down_proj" of a layer, or "module.lm_head"."""
SELECTION_EVENT = "selection"
_MAX_KINDS = 12


class _Target(NamedTuple):
    """A selected module: its stream, its layer (None outside of all), and what selected it."""

    stream: str
    layer: int | None
    selectors: tuple[ModuleSelector, ...]


class SelectedModulesHook(Hook):
    """Keeps the last output of each selected module, and stores batch row 0 of it."""

    name = "selected"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a forward hook on each selected module; none without selectors."""
        self._context, self.records = context, SelectedOutputRecords()
        self._outputs: dict[str, tuple[_Target, Tensor]] = {}
        if not context.selectors:
            return []
        removes = []
        blocks = {name: layer for layer, (name, _) in context.blocks.items()}
        for name, module, found in selected_modules(context.model, context.selectors):
            target = _Target(*_stream_of(name, blocks), found)
            removes.append(context.on_output(module, partial(self._keep, name, target)))
        for text in useless_selectors(context.model, context.selectors):
            context.record_event(SELECTION_EVENT, text, {})
        return removes

    def _keep(self, name: str, target: _Target, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is not None:
            self._outputs[name] = (target, tensor)

    def open(self, step: StepContext) -> None:
        self._outputs.clear()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> list[tuple[str, int | None, bool]]:
        """Copy batch row 0 of each output whose layer and dtype are selected."""
        kept, self._outputs = self._outputs, {}
        stored: list[tuple[str, int | None, bool]] = []
        if step.level != "extreme":
            return stored
        for (stream, layer, selectors), tensor in kept.values():
            is_left_out = layer is not None and layer not in self._context.layers
            if is_left_out or not any(one.matches_dtype(str(tensor.dtype)) for one in selectors):
                continue
            row = tensor[0] if tensor.dim() > 1 else tensor
            if row.dtype.itemsize == 1 and row.is_floating_point():  # numpy has no 8-bit floats
                row = row.float()
            # A copy, because the model may write to the tensor before it is on disk.
            buffer.put(f"selected/{len(stored)}", row.detach().clone())
            stored.append((stream, layer, row.dtype is torch.bfloat16))
        return stored


def selected_modules(
    model: nn.Module, selectors: Sequence[ModuleSelector]
) -> Iterator[tuple[str, nn.Module, tuple[ModuleSelector, ...]]]:
    """Yield name, module and selectors of each module below `model` that a selector matches."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if found := tuple(one for one in selectors if name and one.matches(name, kind)):
            yield name, module, found


def useless_selectors(model: nn.Module, selectors: Sequence[ModuleSelector]) -> Iterator[str]:
    """Yield a sentence for each selector that matches no module."""
    matched = {one.text for _, _, found in selected_modules(model, selectors) for one in found}
    for one in selectors:
        if one.text not in matched:
            yield f"The selector '{one.text}' matches no module of this model."


def check_selectors(model: nn.Module, texts: Sequence[str]) -> None:
    """Raise `UsageError` for a selector that is wrong, or that matches no module."""
    for problem in useless_selectors(model, parse_selectors(texts)):
        kinds = sorted({type(module).__name__ for module in model.modules()})
        names = f"{', '.join(kinds[:_MAX_KINDS])}{', …' if len(kinds) > _MAX_KINDS else ''}"
        raise UsageError(problem, hint=f"Its modules (op=…) are {names}.")


def _stream_of(name: str, blocks: Mapping[str, int]) -> tuple[str, int | None]:
    """Return the stream of a module, and the layer whose decoder block it is in."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        layer = blocks.get(".".join(parts[:n]))
        if layer is not None:
            return ".".join([STREAM, *parts[n:]]), layer
    return f"{STREAM}.{name}", None


def _first_tensor(output: Any) -> Tensor | None:
    """Return a tensor, or the first one of a tuple or of a mapping such as a `ModelOutput`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = tuple(output.values())
    parts: Sequence[Any] = output if isinstance(output, Sequence) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)
