"""What each step was fed: sequences, position ids, and what the cache of every layer held.

Position ids are those that the first decoder layer was handed, whoever made them; lengths are asked
of the cache itself, since a layer may be handed a cache and leave it empty.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.records.step import Array, ArrayRecord, InputsRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import CaptureContext, Remove, StepDraft
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.input_rows import batch_size_of, input_ids_of

CACHE_OFF = "no-cache"
LEARNED_POSITIONS = "learnt-positions"

_Lengths = list[int | None]
"""Keys per layer, None for one whose length is a tensor, which goes through the buffer."""


@dataclass(slots=True)
class _PendingInputs:
    """What is held of a step until it is reduced. The cache is kept alive by whoever uses it."""

    batch: int = 1
    positions: Any = None
    cache: weakref.ref[Any] | None = None
    before: tuple[_Lengths, Tensor | None] = ([], None)
    tables: dict[str, Tensor] = field(default_factory=dict)


class _InputsStep(NamedTuple):
    """What goes to the writer thread about a step's inputs: no tensors."""

    batch: int
    before: _Lengths
    after: _Lengths


class InputsHook:
    """Keeps what the root forward and the first decoder layer are called with."""

    name = "inputs"
    own_code_only = True

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Put a hook on the model's first decoder layer."""
        first = next((block for _, block in context.blocks.values()), None)
        self._pending, self._position_embedding = (
            _PendingInputs(),
            _position_embedding_name(context.model),
        )

        # A function, since a copy of the model copies bound methods, and this hook with them; and
        # a number, since a function that lies in a model must not keep it alive.
        top = id(first)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if id(module) == top and not torch.compiler.is_compiling() and context.is_open:
                self._pending.positions = kwargs.get("position_ids", self._pending.positions)

        if first is not None:
            yield first.register_forward_pre_hook(enter, with_kwargs=True).remove

    def begin(self, context: CaptureContext) -> None:
        """Nothing to prepare per generation."""

    def open(self, step: StepContext) -> None:
        """Take what the forward may change: the lengths, and tables that a loop may write to."""
        arguments = step.arguments
        cache, ids = arguments.get("past_key_values"), input_ids_of(arguments)
        fed = self._pending = _PendingInputs(
            batch_size_of(arguments), arguments.get("position_ids")
        )
        fed.cache, fed.before = _weak_cache(cache), _cached_lengths(cache)
        if step.step == 0 and arguments.get("use_cache") is False:
            step.events.append((CACHE_OFF, "use_cache=False was given: no cache is kept."))
        if ids is not None and fed.batch > 1:
            fed.tables["inputs.ids"] = ids.to(torch.int32, copy=True)
        mask = arguments.get("attention_mask")
        if not step.kv_before and isinstance(mask, Tensor) and mask.dim() == 2:
            fed.tables["inputs.mask"] = mask != 0
            if self._position_embedding and step.step == 0:
                step.events.append(
                    (
                        LEARNED_POSITIONS,
                        f"Position ids are looked up in {self._position_embedding}.",
                    )
                )

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _InputsStep:
        """Put tables and lengths that are tensors; nothing waits for the device."""
        fed, self._pending = self._pending, _PendingInputs()
        if fed.cache is None:
            fed.cache = _weak_cache(getattr(step.output, "past_key_values", None))
        after = _cached_lengths(fed.cache() if fed.cache is not None else None)
        if isinstance(fed.positions, Tensor) and fed.positions.dim() == 2:
            fed.tables["inputs.positions"] = fed.positions.to(torch.int32, copy=True)
        for name, lengths in (("inputs.before", fed.before[1]), ("inputs.after", after[1])):
            if lengths is not None:
                fed.tables[name] = lengths
        for name, table in fed.tables.items():
            buffer.put(name, table)
        return _InputsStep(fed.batch, fed.before[0], after[0])

    def record(
        self, step: StepContext, kept: _InputsStep, values: Values, draft: StepDraft
    ) -> None:
        """Write the step's `InputsRecord`, and the tables of a batch."""
        positions = values.get("inputs.positions")
        draft.inputs = InputsRecord(
            batch=kept.batch,
            positions=_position_runs(positions[0])
            if positions is not None and len(positions)
            else (),
            cached_before=_merge_lengths(kept.before, values.get("inputs.before")),
            cached_after=_merge_lengths(kept.after, values.get("inputs.after")),
        )
        for name in ("inputs.ids", "inputs.positions", "inputs.mask"):
            table = values.get(name)
            if table is not None and (name != "inputs.positions" or len(table) > 1):
                draft.arrays.append(ArrayRecord(name, table))


def _position_embedding_name(model: nn.Module) -> str:
    """Return the name of the module with the vectors of learnt positions, empty without one."""
    for name, module in model.named_modules():
        last = str(name).rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return str(name)
    return ""


def _weak_cache(cache: Any) -> weakref.ref[Any] | None:
    """Return a reference that keeps no cache alive, None for what tells no lengths."""
    if not isinstance(getattr(cache, "layers", None), list):
        return None
    with suppress(TypeError):  # a class with slots may allow no such reference
        return weakref.ref(cache)
    return None


def _cached_lengths(cache: Any) -> tuple[_Lengths, Tensor | None]:
    """Return the keys held per layer; those of static layers, which are tensors, as a copy."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return [], None
    try:
        found = [layer.get_seq_length() for layer in layers]
    except AttributeError:  # linear attention holds a state of fixed size, and counts no keys
        asks = [getattr(layer, "get_seq_length", None) for layer in layers]
        found = [-1 if ask is None else ask() for ask in asks]
    if {*map(type, found)} == {int}:
        return found, None
    tensors = [length for length in found if isinstance(length, Tensor)]
    lengths = [None if isinstance(length, Tensor) else int(length) for length in found]
    return lengths, torch.stack(tensors) if tensors else None


def _merge_lengths(lengths: Sequence[int | None], tensors: Array | None) -> tuple[int, ...]:
    rest = iter(() if tensors is None else tensors.tolist())
    return tuple(next(rest) if length is None else length for length in lengths)


def _position_runs(ids: Array) -> tuple[tuple[int, int], ...]:
    """Return ids (rows,) as runs (first, how many) that rise by one."""
    if ids.size == 1:
        return ((int(ids[0]), 1),)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1]) != 1)
    stops = np.append(starts[1:], ids.size)
    return tuple(zip(ids[starts].tolist(), (stops - starts).tolist(), strict=True))
