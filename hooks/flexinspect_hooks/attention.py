"""The attention call of every layer: path, lengths, mask received and executed, mass of the row.

One spot sees every backend: models ask `ALL_ATTENTION_FUNCTIONS.get_interface(name, default)` for
the function to call, at every call. While installed, that look-up returns a function that makes
the same call and keeps references to what went in and out. In code that is not ours the kernels are
watched as well (`kernels`), since it may call them where nobody is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.records import ArrayRecord, BuildRecord
from flexinspect_hooks.batchrows import BatchRows, record_batch_rows
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.callrefs import (
    Asked,
    CallRef,
    CallShape,
    kernel_path,
    of_kernel,
    shape_of,
)
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove, StepDraft
from flexinspect_hooks.kernelcalls import Done, KernelCalls, seen_as_a_whole
from flexinspect_hooks.kernels import SDPA, KernelCall
from flexinspect_hooks.mass import MassReducer, gathered
from flexinspect_hooks.patching import BACKEND, LAST_CALL
from flexinspect_hooks.received import MaskBook, ReceivedMask
from flexinspect_hooks.repeats import put_repeats, record_repeats
from flexinspect_hooks.scales import put_scales, record_scales
from flexinspect_hooks.slots import put_slots, record_slots
from flexinspect_hooks.store import put_activation, record_activations

UNSEEN = "unseen"
MASK_FUNCTION = "mask-function"

_PATHS = {"sdpa": "sdpa", "eager": "eager"}
_KNOWN = (*_PATHS, "flex_attention", BACKEND)
"""Backends that do with the mask what is known; of others, the kernels that they call are kept."""


class _Kept(NamedTuple):
    """What goes to the writer thread about a step's calls: no tensors."""

    calls: tuple[CallShape, ...] = ()
    masks: tuple[ReceivedMask, ...] = ()
    mask_of_call: tuple[int, ...] = ()
    gate_kinds: tuple[str, ...] = ()
    builds: tuple[BuildRecord, ...] = ()


class AttentionHook:
    """Sees each attention call of the watched model, whatever the backend."""

    name = "attention"
    are_loose = False
    """Whether its calls are outside of any model, so that nothing says how many keys are filled."""
    _watched: dict[tuple[str, int], Callable[..., Any]]

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Shadow the look-up of attention functions on transformers' shared registry."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        self.prepare(context)
        before = REGISTRY.__dict__.get("get_interface")
        original = REGISTRY.get_interface
        watched = self._watched

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Any:
            function = original(attn_implementation, default)
            if torch.compiler.is_compiling():  # a graph must not hold anything of ours
                return function
            # By identity, since a user's function need not be hashable; its watch keeps it alive.
            key = (attn_implementation, id(function))
            if key not in watched:
                watch = self._watch if self._kernels is None else self._watch_own
                watched[key] = watch(attn_implementation, function)
            return watched[key]

        def remove() -> None:
            if before is None:
                del REGISTRY.get_interface
            else:
                REGISTRY.get_interface = before

        REGISTRY.get_interface = get_interface
        return [remove, *(self._kernels.install() if self._kernels is not None else ())]

    def prepare(self, context: CaptureContext) -> None:
        """Begin without installing anything."""
        self._context = context
        self._refs: list[CallRef] = []
        self._n_seen = 0
        self._book = MaskBook(context.device)
        self._batch_rows = BatchRows()
        self._mass = MassReducer(context.device)
        self._kernels = KernelCalls(context) if context.sees_kernels else None
        self._watched = {}

    def keep(self, calls: Iterable[Done], layer: int, module: nn.Module) -> None:
        """Keep kernels that were called without asking for an attention function."""
        self._refs += _kernel_calls(calls, layer, "direct", module)

    def _watch(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context, layer_of, keep = self._context, self._context.layer_of, self._refs.append
        name = BACKEND if backend.startswith(BACKEND) else backend
        path = _path(backend)
        note = LAST_CALL

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.is_open else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            note.path, note.lse, note.softcap = "", None, None
            out = function(module, query, key, value, *args, **kwargs)
            # fmt: off
            ref = CallRef(layer, name, path, module, query, key, value, args, kwargs, out[0],
                          note.path, note.lse, note.softcap or kwargs.get("softcap"),
                          function=function)
            # fmt: on
            keep(ref)
            note.lse = None
            if context.on_call is not None:
                context.on_call(ref)
            return out

        return attention

    def _watch_own(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `_watch`, for own code: what its kernels were told goes before what its name says."""
        context, layer_of, kernels = self._context, self._context.layer_of, self._kernels
        assert kernels is not None
        name = BACKEND if backend.startswith(BACKEND) else backend
        path, is_plain = _path(backend), _is_plain(backend, function)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.is_open else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            whole = (layer, name, path, module, query, key, value, args, kwargs)
            if is_plain and "is_causal" not in kwargs:
                told = kernels.swallowed(layer)
                out = _plainly(kernels, function, whole)
                cap = kwargs.get("softcap")
                ref = CallRef(*whole, out[0], "", None, cap, swallowed=told, function=function)
                self._refs.append(ref)
                if context.on_call is not None:
                    context.on_call(ref)
                return out
            LAST_CALL.path, LAST_CALL.lse, LAST_CALL.softcap = "", None, None
            mark = len(kernels.done)
            try:
                out = function(module, query, key, value, *args, **kwargs)
            except Exception as error:
                if name == "eager":  # it calls no kernel that would tell
                    _tell_raised(kernels, whole, error)
                raise
            with suppress(Exception):  # the layer is not seen then, and the step says so
                found = _own_calls(whole, out[0], kernels.since(mark), function)
                self._refs += found
                if context.on_call is not None:
                    for ref in found:
                        context.on_call(ref)
            return out

        return attention

    def begin(self, context: CaptureContext) -> None:
        """Take the generation's segments; masks already stored stay known.

        Each patch brings a function of its own, so those of ended generations are let go.
        """
        self._watched.clear()
        self._n_seen = len(set(context.layer_of.values()))
        self._mass.begin(context.segments)
        self._batch_rows.begin()

    def open(self, step: StepContext) -> None:
        """Forget what an aborted step may have left."""
        self._refs.clear()
        if self._kernels is not None:
            self._kernels.open(step)

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _Kept | None:
        """Describe the calls, evaluate each distinct mask once, reduce the newest rows."""
        refs, builds = self.take(step)
        self._count(len({ref.layer for ref in refs}), step)
        if not step.step:
            step.events += _mask_functions({ref.backend for ref in refs if ref.mask is None})
        if not refs:
            return _Kept(builds=builds) if builds else None
        masks, numbers = self._book.collect(refs, step, buffer)
        kinds: tuple[str, ...] = ()
        if step.level != "basic":
            kinds = self._mass.reduce(refs, numbers, masks, step.kv_after, buffer)
            self._batch_rows.put(refs, numbers, masks, buffer)
            if self._context.sees_kernels or self.are_loose:
                put_repeats(refs, step, buffer)
                put_scales(refs, step, buffer)
                filled = None if self.are_loose else step.kv_after
                put_slots(refs, numbers, masks, filled, buffer)
        if step.level == "extreme":
            self._store(refs, buffer)
        for mask in masks:
            mask.drop_tensors()
        return _Kept(tuple(map(shape_of, refs)), tuple(masks), tuple(numbers), kinds, builds)

    def take(self, step: StepContext) -> tuple[list[CallRef], tuple[BuildRecord, ...]]:
        """Return the calls of a step and the masks built for it, and keep them no longer."""
        builds: tuple[BuildRecord, ...] = ()
        if self._kernels is not None:
            builds = self._take_loose(self._kernels, step)
        refs = list(self._refs)
        self._refs.clear()
        return refs, builds

    def _take_loose(self, kernels: KernelCalls, step: StepContext) -> tuple[BuildRecord, ...]:
        """Take kernels that were called directly, and return the masks that were built.

        In a model without known layers, the calls of a step are numbered as its layers.
        """
        every, builds = kernels.since(0), kernels.take_builds()
        calls = [call for call in every if call.module is None]
        if len(calls) < len(every):
            for call in every:
                if call.module is not None and call.layer is not None:
                    self.keep([call], call.layer, call.module)
            self._refs.sort(key=lambda ref: ref.layer)  # among those of layers that ask
        if calls and self._context.layer_of:
            n = f"{len(calls)} kernel call{'s' if len(calls) > 1 else ''}"
            step.events.append(
                (UNSEEN, f"{n} outside of the known attention layers: not recorded.")
            )
        else:
            for layer, call in enumerate(calls):
                self.keep([call], layer, self._context.model)
        return builds

    def _count(self, n_seen: int, step: StepContext) -> None:
        """Say when fewer layers were seen than there are, each time that the number changes."""
        if n_seen == self._n_seen:
            return
        self._n_seen, n_layers = n_seen, len(set(self._context.layer_of.values()))
        if n_seen < n_layers:
            step.events.append((UNSEEN, _unseen(n_seen, n_layers)))

    def _store(self, refs: list[CallRef], buffer: StepBuffer) -> None:
        """Store q, k, v of this step's rows: earlier keys are in earlier steps."""
        for ref in refs:
            if ref.layer not in self._context.layers:
                continue
            rows = ref.query.shape[2]
            put_activation(buffer, f"q.{ref.layer}", ref.query[0])
            put_activation(buffer, f"k.{ref.layer}", ref.key[0, :, -rows:])
            put_activation(buffer, f"v.{ref.layer}", ref.value[0, :, -rows:])

    def record(
        self, step: StepContext, kept: _Kept | None, values: Values, draft: StepDraft
    ) -> None:
        """Write calls, new masks, attention mass and stored activations."""
        if kept is None:
            return
        draft.builds += kept.builds
        fingerprints = [self._book.record(mask, values, draft) for mask in kept.masks]
        told = {"tells_alike": not self.are_loose}  # no rule asks it of calls outside of a model
        record_batch_rows(values, kept.masks, fingerprints, step, draft, **told)
        record_repeats(values, kept.calls, step, draft)
        record_scales(values, kept.calls, step, draft)
        rows = gathered(values, len(kept.calls)) if kept.gate_kinds else {}
        gates = rows["gate"].tolist() if rows else []
        for index, call in enumerate(kept.calls):
            mask = fingerprints[kept.mask_of_call[index]]
            gate = gates[index] if gates else None
            kind = kept.gate_kinds[index] if gates else None
            draft.calls.append(call.record(mask, gate if kind else None, kind or None))
        for name in ("mass", "lse", "entropy"):
            if name in rows:
                array = np.asarray(rows[name], np.float32)
                draft.arrays.append(ArrayRecord(f"attention.{name}", array))
        record_slots(values, len(kept.calls), draft)
        if step.level == "extreme":
            record_activations(values, ("q", "k", "v"), draft)


def _mask_functions(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return an event for each own attention that has a mask function, which made no mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as REGISTERED

    names = [name for name in sorted(backends) if name not in _KNOWN and name in REGISTERED]
    return [(MASK_FUNCTION, f"Attention '{name}' has a mask function.") for name in names]


def _is_plain(backend: str, function: Callable[..., Any]) -> bool:
    """Say whether a function is transformers' own, which does with SDPA what is known.

    It is seen as a whole then, as describing each kernel costs more than all else in the layer.
    """
    home = getattr(function, "__module__", None) or ""
    return backend in _PATHS and home.startswith("transformers.")


def _plainly(kernels: KernelCalls, function: Callable[..., Any], whole: tuple[Any, ...]) -> Any:
    """Make a call without describing its kernel, unless that raises."""
    _, _, _, module, query, key, value, args, kwargs = whole
    try:
        with seen_as_a_whole():
            return function(module, query, key, value, *args, **kwargs)
    except Exception as error:
        _tell_raised(kernels, whole, error)
        raise


def _tell_raised(kernels: KernelCalls, whole: tuple[Any, ...], error: BaseException) -> None:
    """Tell of a call that raised, as if it were a kernel's."""
    layer, _, path, _, query, key, value, args, kwargs = whole
    mask = args[0] if args else kwargs.get("attention_mask")
    given = {"query": query, "key": key, "value": value, "attn_mask": mask}
    with suppress(Exception):  # the user's own is on its way
        kernels.raised(KernelCall(SDPA if path == "sdpa" else path, given, False), layer, error)


def _own_calls(
    whole: tuple[Any, ...], output: Tensor, inner: list[Done], function: Callable[..., Any]
) -> list[CallRef]:
    """Return the call of an attention function; of one that is not known, the kernels it called."""
    layer, name, path, module, query, key, value, args, kwargs = whole
    if name not in _KNOWN and (found := _kernel_calls(inner, layer, name, module)):
        scale = kwargs.get("scaling", getattr(module, "scaling", None))
        asked = Asked(query, key, scale if isinstance(scale, float) else None)
        return [ref._replace(asked=asked) for ref in found]
    last = inner[-1] if inner else None
    causal = bool(last.call.given.get("is_causal")) if last and path == "sdpa" else None
    lse, cap = LAST_CALL.lse, LAST_CALL.softcap or kwargs.get("softcap")
    told = LAST_CALL.path or (kernel_path(last) if last is not None else "")
    LAST_CALL.lse = None
    return [
        CallRef(
            *(layer, name, path, module, query, key, value, args, kwargs, output, told, lse, cap),
            causal=causal,
            swallowed=last.swallowed if last is not None else None,
            function=function,
        )
    ]


def _kernel_calls(
    calls: Iterable[Done], layer: int, backend: str, module: nn.Module
) -> list[CallRef]:
    found = (of_kernel(call, layer, backend, module) for call in calls)
    return [ref for ref in found if ref is not None]


def _unseen(n_seen: int, n_layers: int) -> str:
    return (
        f"Attention was seen in {n_seen} of {n_layers} layers: the others called no kernel that is "
        "watched (own arithmetic, another library's kernel, or a compiled model)."
    )


def _path(backend: str) -> str:
    """Name the path of a backend that is not ours, from the name it was dispatched under."""
    if backend == "flex_attention":
        return "flex compiled"
    return _PATHS.get(backend, "other")
