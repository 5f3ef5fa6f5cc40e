"""The attention call of every layer: path, lengths, mask received and executed, mass of the row.

One spot sees every backend: models ask `ALL_ATTENTION_FUNCTIONS.get_interface(name, default)` for
the function to call, at every call. While installed, that look-up returns a function that makes
the same call and keeps references to what went in and out. In code that is not ours the kernels are
watched as well (`kernels`), since it may call them where nobody is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.records.step import ArrayRecord, BuildRecord, EventRecord
from flexinspect_hooks.capture.buffer import StepBuffer, Values
from flexinspect_hooks.capture.hook import (
    CaptureContext,
    Remove,
    StepDraft,
    put_activation,
    record_activations,
)
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.generation.flex_patch import BACKEND, LAST_CALL
from flexinspect_hooks.observers.attention.batch_rows import BatchRowChecker, record_batch_rows
from flexinspect_hooks.observers.attention.cache_slots import put_slots, record_slots
from flexinspect_hooks.observers.attention.call_references import (
    AttentionCall,
    CallShape,
    LayerInputs,
    call_of_kernel,
    call_shape,
    kernel_path,
)
from flexinspect_hooks.observers.attention.kernel_calls import (
    KernelCalls,
    KernelReturn,
    ignore_kernels,
)
from flexinspect_hooks.observers.attention.kernel_interception import SDPA, KernelCall
from flexinspect_hooks.observers.attention.mask_capture import CapturedMask, MaskStore
from flexinspect_hooks.observers.attention.scales import (
    put_repeats,
    put_scales,
    record_repeats,
    record_scales,
)
from flexinspect_hooks.observers.attention.segment_attention import (
    SegmentAttentionReducer,
    lost_calls,
    merge_group_results,
)

UNSEEN_LAYERS = "unseen"
MASK_FUNCTION = "mask-function"
KEYS_CHANGED = "keys-changed"

_BACKEND_PATHS = {"sdpa": "sdpa", "eager": "eager"}
_KNOWN_BACKENDS = (*_BACKEND_PATHS, "flex_attention", BACKEND)
"""Backends that do with the mask what is known; of others, the kernels that they call are kept."""


class _AttentionStep(NamedTuple):
    """What goes to the writer thread about a step's calls: no tensors."""

    calls: tuple[CallShape, ...] = ()
    masks: tuple[CapturedMask, ...] = ()
    mask_of_call: tuple[int, ...] = ()
    check_kinds: tuple[str, ...] = ()
    builds: tuple[BuildRecord, ...] = ()


class AttentionHook:
    """Sees each attention call of the watched model, whatever the backend."""

    name = "attention"
    is_standalone = False
    """Whether its calls are outside of any model, so that nothing says how many keys are filled."""
    _wrapped_functions: dict[tuple[str, int], Callable[..., Any]]

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Shadow the look-up of attention functions on transformers' shared registry."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        self.prepare(context)
        before = REGISTRY.__dict__.get("get_interface")
        original = REGISTRY.get_interface
        watched = self._wrapped_functions

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Any:
            function = original(attn_implementation, default)
            if torch.compiler.is_compiling():  # a graph must not hold anything of ours
                return function
            # By identity, since a user's function need not be hashable; its watch keeps it alive.
            key = (attn_implementation, id(function))
            if key not in watched:
                watch = self._wrap_function if self._kernels is None else self._wrap_user_function
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
        self._refs: list[AttentionCall] = []
        self._n_layers_seen = 0
        self._mask_store = MaskStore(context.device)
        self._batch_rows = BatchRowChecker()
        self._segment_reducer = SegmentAttentionReducer(context.device)
        self._kernels = KernelCalls(context) if context.sees_kernels else None
        self._wrapped_functions = {}

    def add_kernel_calls(
        self, calls: Iterable[KernelReturn], layer: int, module: nn.Module
    ) -> None:
        """Keep kernels that were called without asking for an attention function."""
        self._refs += _calls_of_kernels(calls, layer, "direct", module)

    def _wrap_function(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context, layer_of, keep = self._context, self._context.layer_of, self._refs.append
        name = BACKEND if backend.startswith(BACKEND) else backend
        path = _backend_path(backend)
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
            ref = AttentionCall(layer, name, path, module, query, key, value, args, kwargs, out[0],
                          note.path, note.lse, note.softcap or kwargs.get("softcap"),
                          function=function)
            # fmt: on
            keep(ref)
            note.lse = None
            if context.on_call is not None:
                context.on_call(ref)
            return out

        return attention

    def _wrap_user_function(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `_watch`, for own code: what its kernels were told goes before what its name says."""
        context, layer_of, kernels = self._context, self._context.layer_of, self._kernels
        assert kernels is not None
        name = BACKEND if backend.startswith(BACKEND) else backend
        path, is_plain = _backend_path(backend), _is_transformers_function(backend, function)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.is_open else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            whole = (layer, name, path, module, query, key, value, args, kwargs)
            if is_plain and "is_causal" not in kwargs:
                told = kernels.suppressed_exception(layer)
                out = _call_without_kernels(kernels, function, whole)
                cap = kwargs.get("softcap")
                ref = AttentionCall(
                    *whole, out[0], "", None, cap, suppressed_exception=told, function=function
                )
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
                    _report_raised(kernels, whole, error)
                raise
            with suppress(Exception):  # the layer is not seen then, and the step says so
                found = _calls_of_function(whole, out[0], kernels.take_since(mark), function)
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
        self._wrapped_functions.clear()
        self._n_layers_seen = len(set(context.layer_of.values()))
        self._segment_reducer.begin(context.segments)
        self._batch_rows.begin()

    def open(self, step: StepContext) -> None:
        """Forget what an aborted step may have left."""
        self._refs.clear()
        if self._kernels is not None:
            self._kernels.open(step)

    def reduce(self, step: StepContext, buffer: StepBuffer) -> _AttentionStep | None:
        """Describe the calls, evaluate each distinct mask once, reduce the newest rows."""
        refs, builds = self.take_calls(step)
        self._report_unseen_layers(len({ref.layer for ref in refs}), step)
        if not step.step:
            step.events += _mask_function_events({ref.backend for ref in refs if ref.mask is None})
        if not refs:
            return _AttentionStep(builds=builds) if builds else None
        masks, numbers = self._mask_store.capture_masks(refs, step, buffer)
        kinds: tuple[str, ...] = ()
        if step.level != "basic":
            kinds = self._segment_reducer.reduce(refs, numbers, masks, step.kv_after, buffer)
            self._batch_rows.put(refs, numbers, masks, buffer)
            if self._context.sees_kernels or self.is_standalone:
                put_repeats(refs, step, buffer)
                put_scales(refs, step, buffer)
                filled = None if self.is_standalone else step.kv_after
                put_slots(refs, numbers, masks, filled, buffer)
        if step.level == "extreme":
            self._store_qkv(refs, buffer)
        for mask in masks:
            mask.drop_tensors()
        return _AttentionStep(
            tuple(map(call_shape, refs)), tuple(masks), tuple(numbers), kinds, builds
        )

    def take_calls(self, step: StepContext) -> tuple[list[AttentionCall], tuple[BuildRecord, ...]]:
        """Return the calls of a step and the masks built for it, and keep them no longer."""
        builds: tuple[BuildRecord, ...] = ()
        if self._kernels is not None:
            builds = self._take_direct_calls(self._kernels, step)
        refs = list(self._refs)
        self._refs.clear()
        return refs, builds

    def _take_direct_calls(
        self, kernels: KernelCalls, step: StepContext
    ) -> tuple[BuildRecord, ...]:
        """Take kernels that were called directly, and return the masks that were built.

        In a model without known layers, the calls of a step are numbered as its layers.
        """
        every, builds = kernels.take_since(0), kernels.take_builds()
        calls = [call for call in every if call.module is None]
        if len(calls) < len(every):
            for call in every:
                if call.module is not None and call.layer is not None:
                    self.add_kernel_calls([call], call.layer, call.module)
            self._refs.sort(key=lambda ref: ref.layer)  # among those of layers that ask
        if calls and self._context.layer_of:
            n = f"{len(calls)} kernel call{'s' if len(calls) > 1 else ''}"
            step.events.append(
                (UNSEEN_LAYERS, f"{n} outside of the known attention layers: not recorded.")
            )
        else:
            for layer, call in enumerate(calls):
                self.add_kernel_calls([call], layer, self._context.model)
        return builds

    def _report_unseen_layers(self, n_seen: int, step: StepContext) -> None:
        """Say when fewer layers were seen than there are, each time that the number changes."""
        if n_seen == self._n_layers_seen:
            return
        self._n_layers_seen, n_layers = n_seen, len(set(self._context.layer_of.values()))
        if n_seen < n_layers:
            step.events.append((UNSEEN_LAYERS, _unseen_text(n_seen, n_layers)))

    def _store_qkv(self, refs: list[AttentionCall], buffer: StepBuffer) -> None:
        """Store q, k, v of this step's rows: earlier keys are in earlier steps."""
        for ref in refs:
            if ref.layer not in self._context.layers:
                continue
            rows = ref.query.shape[2]
            put_activation(buffer, f"q.{ref.layer}", ref.query[0])
            put_activation(buffer, f"k.{ref.layer}", ref.key[0, :, -rows:])
            put_activation(buffer, f"v.{ref.layer}", ref.value[0, :, -rows:])

    def record(
        self, step: StepContext, kept: _AttentionStep | None, values: Values, draft: StepDraft
    ) -> None:
        """Write calls, new masks, attention mass and stored activations."""
        if kept is None:
            return
        draft.builds += kept.builds
        fingerprints = [self._mask_store.record(mask, values, draft) for mask in kept.masks]
        told = {
            "reports_equal": not self.is_standalone
        }  # no rule asks it of calls outside of a model
        record_batch_rows(values, kept.masks, fingerprints, step, draft, **told)
        record_repeats(values, kept.calls, step, draft)
        record_scales(values, kept.calls, step, draft)
        rows = merge_group_results(values, len(kept.calls)) if kept.check_kinds else {}
        gates = rows["gate"].tolist() if rows else []
        lost = _report_lost_rows(values, kept.calls, step, draft)
        for index, call in enumerate(kept.calls):
            mask = fingerprints[kept.mask_of_call[index]]
            kind = kept.check_kinds[index] if gates and index not in lost else ""
            draft.calls.append(call.record(mask, gates[index] if kind else None, kind or None))
        for name in ("mass", "lse", "entropy"):
            if name in rows:
                array = np.asarray(rows[name], np.float32)
                draft.arrays.append(ArrayRecord(f"attention.{name}", array))
        record_slots(values, len(kept.calls), draft)
        if step.level == "extreme":
            record_activations(values, ("q", "k", "v"), draft)


def _report_lost_rows(
    values: Values, calls: Sequence[CallShape], step: StepContext, draft: StepDraft
) -> set[int]:
    """Return the calls whose newest row is lost, and say why there is none (writer thread)."""
    lost = lost_calls(values, len(calls))
    if lost:
        layers = sorted({calls[index].layer for index in lost})
        text = (
            f"Keys or values of layers {layers} were written to before their newest row was "
            "recomputed: its attention mass, LSE and gate are missing."
        )
        place = (step.started_at, step.generation, step.step, {"layers": layers})
        draft.events.append(EventRecord(KEYS_CHANGED, text, *place))
    return lost


def _mask_function_events(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return an event for each own attention that has a mask function, which made no mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as REGISTERED

    names = [
        name for name in sorted(backends) if name not in _KNOWN_BACKENDS and name in REGISTERED
    ]
    return [(MASK_FUNCTION, f"Attention '{name}' has a mask function.") for name in names]


def _is_transformers_function(backend: str, function: Callable[..., Any]) -> bool:
    """Say whether a function is transformers' own, which does with SDPA what is known.

    It is seen as a whole then, as describing each kernel costs more than all else in the layer.
    """
    home = getattr(function, "__module__", None) or ""
    return backend in _BACKEND_PATHS and home.startswith("transformers.")


def _call_without_kernels(
    kernels: KernelCalls, function: Callable[..., Any], whole: tuple[Any, ...]
) -> Any:
    """Make a call without describing its kernel, unless that raises."""
    _, _, _, module, query, key, value, args, kwargs = whole
    try:
        with ignore_kernels():
            return function(module, query, key, value, *args, **kwargs)
    except Exception as error:
        _report_raised(kernels, whole, error)
        raise


def _report_raised(kernels: KernelCalls, whole: tuple[Any, ...], error: BaseException) -> None:
    """Tell of a call that raised, as if it were a kernel's."""
    layer, _, path, _, query, key, value, args, kwargs = whole
    mask = args[0] if args else kwargs.get("attention_mask")
    given = {"query": query, "key": key, "value": value, "attn_mask": mask}
    with suppress(Exception):  # the user's own is on its way
        kernels.report_raised(
            KernelCall(SDPA if path == "sdpa" else path, given, False), layer, error
        )


def _calls_of_function(
    whole: tuple[Any, ...], output: Tensor, inner: list[KernelReturn], function: Callable[..., Any]
) -> list[AttentionCall]:
    """Return the call of an attention function; of one that is not known, the kernels it called."""
    layer, name, path, module, query, key, value, args, kwargs = whole
    if name not in _KNOWN_BACKENDS and (found := _calls_of_kernels(inner, layer, name, module)):
        scale = kwargs.get("scaling", getattr(module, "scaling", None))
        asked = LayerInputs(query, key, scale if isinstance(scale, float) else None)
        return [ref._replace(layer_inputs=asked) for ref in found]
    last = inner[-1] if inner else None
    causal = bool(last.call.arguments.get("is_causal")) if last and path == "sdpa" else None
    lse, cap = LAST_CALL.lse, LAST_CALL.softcap or kwargs.get("softcap")
    told = LAST_CALL.path or (kernel_path(last) if last is not None else "")
    LAST_CALL.lse = None
    return [
        AttentionCall(
            *(layer, name, path, module, query, key, value, args, kwargs, output, told, lse, cap),
            causal=causal,
            suppressed_exception=last.suppressed_exception if last is not None else None,
            function=function,
        )
    ]


def _calls_of_kernels(
    calls: Iterable[KernelReturn], layer: int, backend: str, module: nn.Module
) -> list[AttentionCall]:
    found = (call_of_kernel(call, layer, backend, module) for call in calls)
    return [ref for ref in found if ref is not None]


def _unseen_text(n_seen: int, n_layers: int) -> str:
    return (
        f"Attention was seen in {n_seen} of {n_layers} layers: the others called no kernel that is "
        "watched (own arithmetic, another library's kernel, or a compiled model)."
    )


def _backend_path(backend: str) -> str:
    """Name the path of a backend that is not ours, from the name it was dispatched under."""
    if backend == "flex_attention":
        return "flex compiled"
    return _BACKEND_PATHS.get(backend, "other")
