"""Records the attention calls of every layer: path, lengths, masks, attention per segment.

Models call `ALL_ATTENTION_FUNCTIONS.get_interface(name, default)` for the function to use, at every
call and for every backend. While the hook is installed, that look-up returns a function that makes
the same call and keeps references to its arguments and its output. In code of the user the kernels
are intercepted as well (`kernel_calls`), because such code may call them directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.core.text import plural
from flexinspect.records.step import OWN_FUNCTION, BuildRecord
from flexinspect.rules.masks.kernel_options import KERNEL_OPTIONS_EVENT, UNREAD_EVENT
from flexinspect.rules.numerics.audit_findings import SCORE_MOD_EVENT
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.generation.flex_patch import BACKEND, LAST_CALL
from flexinspect_hooks.observers.attention import call_checks, paged_pools, segment_attention
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.observers.attention.call_series import CallSeries
from flexinspect_hooks.observers.attention.kernel_calls import (
    SDPA,
    KernelCall,
    KernelCalls,
    this_thread,
)
from flexinspect_hooks.observers.attention.layer_code import LayerCodes
from flexinspect_hooks.observers.attention.loop_variables import find_late_bindings
from flexinspect_hooks.observers.attention.mask_capture import MaskCapture
from flexinspect_hooks.observers.attention.unread_keywords import unread_keywords
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.step_writer.attention_records import (
    AttentionRecords,
    AttentionStep,
    LateBinding,
    LayerCode,
)

UNSEEN_LAYERS = "not-recorded"
MASK_FUNCTION = "mask-function"

_BACKEND_PATHS = {"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex compiled"}
"""Paths of backends that do not report it, by the name under which they are registered."""

_KNOWN_BACKENDS = (*_BACKEND_PATHS, BACKEND)
"""Backends whose use of the mask is known; for others, the kernels that they call are recorded."""


class AttentionHook(Hook):
    """Records each attention call of the watched model, for any backend."""

    name = "attention"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Observe the kernels in code of the user, and the registry except for standalone calls."""
        self._context = context
        self.records = AttentionRecords(is_standalone=context.is_standalone)
        self._refs: list[AttentionCall] = []
        self._n_layers_seen = 0
        self._kernel_options: dict[str, dict[str, Any]] = {}
        self._read_functions: set[int] = set()
        self._mask_capture = MaskCapture()
        self._layer_codes = LayerCodes()
        self._series = CallSeries()
        self._compared_masks: set[tuple[Any, ...]] = set()
        self._segment_reducer = segment_attention.SegmentAttentionReducer()
        self.kernels = KernelCalls(context) if context.sees_kernels else None
        self._wrapped_functions: dict[tuple[str, int], Callable[..., Any]] = {}
        removes = [] if context.is_standalone else [self._wrap_registry()]
        return removes if self.kernels is None else [*removes, *self.kernels.install()]

    def _wrap_registry(self) -> Remove:
        """Replace the look-up of attention functions on transformers' shared registry."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as REGISTRY

        original, wrapped = REGISTRY.get_interface, self._wrapped_functions
        is_dynamo_compiling = torch.compiler.is_dynamo_compiling

        def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Any:
            function = original(attn_implementation, default)
            if is_dynamo_compiling():  # a compiled graph must not contain the wrapper
                return function
            # By identity: a user's function may not be hashable, and its wrapper keeps it alive.
            key = (attn_implementation, id(function))
            if key not in wrapped:
                wrapped[key] = self._wrap_function(attn_implementation, function)
            return wrapped[key]

        return patch(REGISTRY, "get_interface", get_interface)

    def _wrap_function(self, backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
        context, layer_of, kernels = self._context, self._context.layer_of, self.kernels
        series = self._series
        name = BACKEND if backend.startswith(BACKEND) else backend
        path = _BACKEND_PATHS.get(name, OWN_FUNCTION)
        own_module = getattr(function, "__module__", None) or ""
        is_plain = name in ("sdpa", "eager") and own_module.startswith("transformers.")

        # This runs for each layer while the model runs, so an ordinary layer calls few functions.
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = layer_of.get(id(module)) if context.thread == get_ident() else None
            if layer is None:
                return function(module, query, key, value, *args, **kwargs)
            started = perf_counter()
            call = AttentionCall(layer, name, path, module, query, key, value, args, kwargs)
            call.function = function
            if kernels is not None and is_plain and "is_causal" not in kwargs:
                # What a function of transformers does is known, so the call is recorded as a whole:
                # describing its kernel would cost more than everything else in the layer.
                if kernels.errors or sys.exception() is not kernels.outer_exception:
                    call.suppressed_exception = kernels.suppressed_exception(layer)
                this_thread.is_quiet = True
                called = perf_counter()
                try:
                    out = function(module, query, key, value, *args, **kwargs)
                except Exception as error:
                    self._report_failure(kernels, call, error)
                    raise
                finally:
                    this_thread.is_quiet = False
                returned = perf_counter()
                call.output, call.softcap = out[0], kwargs.get("softcap")
                self._refs.append(call)
                series.compare(call)
                context.layers_s += called - started + perf_counter() - returned
                if context.on_call is not None:
                    context.on_call(call)
                return out
            LAST_CALL.path, LAST_CALL.lse, LAST_CALL.softcap = "", None, None
            if kernels is not None:
                return self._call_user_function(kernels, call)
            called = perf_counter()
            out = function(module, query, key, value, *args, **kwargs)
            returned = perf_counter()
            self._keep([_with_output(call, out[0])])
            context.layers_s += called - started + perf_counter() - returned
            return out

        return attention

    def _call_user_function(self, kernels: KernelCalls, call: AttentionCall) -> Any:
        """Call a function of user code: the arguments of its kernels count more than its name."""
        mark = len(kernels.done)
        try:
            # What a function of the user receives besides is read from the stack.
            is_known = call.backend in _KNOWN_BACKENDS
            out = kernels.call_in_layer(call) if is_known else call.run(call.value)
        except Exception as error:
            if call.backend == "eager":  # else the observer of its kernel reports it
                self._report_failure(kernels, call, error)
            raise
        returned = perf_counter()
        with suppress(Exception):  # then the layer counts as unseen, and the step reports it
            self._keep(_calls_of_function(call, out[0], kernels.take_since(mark)))
        self._context.layers_s += perf_counter() - returned
        return out

    def _report_failure(self, kernels: KernelCalls, call: AttentionCall, error: Exception) -> None:
        query, key, value = call.query, call.key, call.value
        tensors = {"query": query, "key": key, "value": value, "attn_mask": call.mask}
        kernel = SDPA if call.path == "sdpa" else call.path
        with suppress(Exception):  # must not replace the exception of the call
            kernels.failed(KernelCall(kernel, tensors, False, call.layer), error)

    def _keep(self, refs: list[AttentionCall]) -> None:
        self._refs += refs
        for ref in refs:
            self._series.compare(ref)
            if self._context.on_call is not None:
                self._context.on_call(ref)

    def begin(self, context: CaptureContext) -> None:
        """Take the generation's segments; masks already stored stay known.

        Each generation patches in its own attention function, so earlier wrappers are dropped.
        """
        self._wrapped_functions.clear()
        self._series.end()
        self._mask_capture.begin()
        self._n_layers_seen = len(set(context.layer_of.values()))
        self._segment_reducer.begin(context.segments)
        self._compared_masks.clear()  # mask_mods may have captured other values

    def _report_score_mods(self, refs: list[AttentionCall], step: StepContext) -> None:
        """Add an event to the first step that has a `score_mod`: a trace does not hold it."""
        if step.step > 1:
            return
        kernels = [(ref.layer, ref.kernel) for ref in refs if ref.kernel is not None]
        layers = [n for n, kernel in kernels if kernel.arguments.get("score_mod") is not None]
        if layers:
            text = f"A score_mod changed the scores of {plural(len(layers), 'layer')}."
            step.events.append((SCORE_MOD_EVENT, text, {"layers": layers}))

    def open(self, step: StepContext) -> None:
        """Drop references that an aborted step may have left."""
        self._refs.clear()
        self._series.open()
        if self.kernels is not None:
            self.kernels.open(step)

    def stop_deferring(self) -> None:
        """Keys are modified in place: from now on their rows are reduced at once."""
        self._segment_reducer.defers = False

    def reduce(self, step: StepContext, buffer: StepBuffer) -> AttentionStep | None:
        """Describe the calls, evaluate each distinct mask once, reduce the newest rows."""
        refs, builds = self.take_calls(step)
        if self._context.keep_calls is not None:
            self._context.keep_calls(refs)
        series = self._series
        is_repeated = series.continues(refs)
        if not is_repeated:
            self._segment_reducer.end_series()
            self._report_unseen_layers(len({ref.layer for ref in refs}), step)
            for ref in refs:
                ref.note_unknown_scale()
            if refs:
                self._report_calls(refs, step)
        if not refs:
            return AttentionStep(builds=builds) if builds else None
        numbers = series.mask_numbers if is_repeated else None
        masks = self._mask_capture.capture_masks(refs, step, buffer, numbers)
        if step.level != "basic":
            self._segment_reducer.reduce(refs, step.kv_after, buffer)
            call_checks.put_batch_rows(refs, self._compared_masks, buffer)
            if self.kernels is not None:
                filled = None if self._context.is_standalone else step.kv_after
                call_checks.put_user_call_checks(refs, step, filled, buffer)
                if filled is not None:
                    paged_pools.put_paged_keys(refs, step, buffer)
        if step.level == "extreme":
            self._store_qkv(refs, buffer)
        for mask in masks:
            mask.cells = mask.averaged = mask.bias = mask.added = mask.mask_mod_blocks = None
        codes: tuple[LayerCode, ...] = ()
        late: tuple[LateBinding, ...] = ()
        calls = series.fields
        if not is_repeated:
            calls = tuple([ref.record_fields() for ref in refs])
            series.begin(refs, calls)
            if self.kernels is not None:
                codes = self._layer_codes.find_new(refs)
                late = find_late_bindings(refs) if not step.step else ()
        kv_lens = tuple([ref.key.shape[2] for ref in refs])
        kinds = tuple([ref.check_kind for ref in refs])
        return AttentionStep(calls, kv_lens, kinds, masks, builds, codes, late)

    def _report_calls(self, refs: list[AttentionCall], step: StepContext) -> None:
        """Add events about the calls of a step that are not those of the step before."""
        if not step.step:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as REGISTERED

            backends = {ref.backend for ref in refs if ref.mask is None} - {*_KNOWN_BACKENDS}
            for name in sorted(backend for backend in backends if backend in REGISTERED):
                step.events.append((MASK_FUNCTION, f"Attention '{name}' has a mask function."))
        self._report_score_mods(refs, step)
        self._report_kernel_options(refs, step)
        self._report_unread_keywords(refs, step)

    def take_calls(self, step: StepContext) -> tuple[list[AttentionCall], tuple[BuildRecord, ...]]:
        """Return the calls of a step and the masks built for it, and drop them."""
        builds: tuple[BuildRecord, ...] = ()
        if self.kernels is not None:
            if self.kernels.done:
                self._add_direct_calls(self.kernels.take_since(0), step)
            builds = self.kernels.take_builds()
        refs, self._refs = self._refs, []
        return refs, builds

    def _add_direct_calls(self, direct: list[KernelCall], step: StepContext) -> None:
        """Add kernel calls that were made directly, as numbered layers if no layers are known."""
        outside = [call for call in direct if call.module is None]
        if outside and self._context.layer_of:
            text = f"{plural(len(outside), 'kernel call')} outside of the known attention layers"
            step.events.append((UNSEEN_LAYERS, f"{text}: not recorded."))
        else:
            for layer, call in enumerate(outside):
                call.layer, call.module = layer, self._context.model
        if direct:
            self._refs += _calls_of_kernels(direct, "direct")
            self._refs.sort(key=lambda ref: ref.layer)  # between calls of the other layers

    def _report_unseen_layers(self, n_seen: int, step: StepContext) -> None:
        """Add an event if fewer layers were seen than there are, when that number changes."""
        if n_seen == self._n_layers_seen:
            return
        self._n_layers_seen, n_layers = n_seen, len(set(self._context.layer_of.values()))
        if n_seen < n_layers:
            text = (
                f"Attention was seen in {n_seen} of {n_layers} layers. The others did not call a "
                "kernel that flexinspect observes (own arithmetic, another library's kernel, a "
                "compiled model)."
            )
            step.events.append((UNSEEN_LAYERS, text))

    def _report_kernel_options(self, refs: list[AttentionCall], step: StepContext) -> None:
        """Add an event if the calls have other kernel options than those before."""
        options = {
            str(ref.layer): {n: v for n, v in given.items() if isinstance(v, bool | int | str)}
            for ref in refs
            if ref.kernel is not None and (given := ref.kernel.arguments.get("kernel_options"))
        }
        if options != self._kernel_options:
            self._kernel_options = options
            text = f"Kernel options of {plural(len(options), 'layer')}."
            step.events.append((KERNEL_OPTIONS_EVENT, text, {"layers": options}))

    def _report_unread_keywords(self, refs: list[AttentionCall], step: StepContext) -> None:
        """Add an event for each own attention function that ignores keywords of its layer."""
        for ref in refs:
            call = ref.layer_call or ref
            function = call.function
            if function is None or id(function) in self._read_functions:
                continue
            self._read_functions.add(id(function))
            if call.backend in _KNOWN_BACKENDS:
                continue
            passed = dict(call.kwargs)
            window = passed.get("sliding_window")
            if call.mask is not None or not window or call.key.shape[2] <= window:
                passed["sliding_window"] = None  # a mask may have it, or no key is outside
            if names := unread_keywords(function, passed):
                facts = {"names": names, "layer": call.layer, "function": str(call.backend)}
                text = f"Attention '{call.backend}' does not read {', '.join(names)}."
                step.events.append((UNREAD_EVENT, text, facts))

    def _store_qkv(self, refs: list[AttentionCall], buffer: StepBuffer) -> None:
        """Store q, k, v of this step's rows; earlier keys are stored with earlier steps."""
        # Of a layer with several calls the last one is stored.
        chosen = {ref.layer: ref for ref in refs if ref.layer in self._context.layers}
        calls, layers = chosen.values(), list(chosen)
        buffer.put_activations("q", layers, [ref.query[0] for ref in calls])
        for name, tensors in (
            ("k", [(ref.key, ref.query.shape[2]) for ref in calls]),
            ("v", [(ref.value, ref.query.shape[2]) for ref in calls]),
        ):
            newest = [tensor[0, :, -rows:] for tensor, rows in tensors]
            buffer.put_activations(name, layers, newest)


def _calls_of_function(
    call: AttentionCall, output: Tensor, inner: list[KernelCall]
) -> list[AttentionCall]:
    """Return the call of an attention function, or of an unknown one the kernels that it called."""
    if call.backend not in _KNOWN_BACKENDS:
        for kernel in inner:
            kernel.layer, kernel.module = call.layer, call.module
        if refs := _calls_of_kernels(inner, call.backend):
            for ref in refs:
                ref.layer_call = call
            return refs
    call = _with_output(call, output)
    if inner:
        last = inner[-1]
        call.path = LAST_CALL.path or last.path
        if call.backend == "sdpa":
            call.causal = bool(last.arguments.get("is_causal"))
        call.suppressed_exception = last.suppressed_exception
    return [call]


def _with_output(call: AttentionCall, output: Tensor) -> AttentionCall:
    """Complete a call that returned with its output, and with what the patch reports of it."""
    call.output, call.path = output, LAST_CALL.path or call.path
    call.lse, LAST_CALL.lse = LAST_CALL.lse, None
    call.softcap = LAST_CALL.softcap or call.kwargs.get("softcap")
    return call


def _calls_of_kernels(calls: Iterable[KernelCall], backend: str) -> list[AttentionCall]:
    refs = (AttentionCall.of_kernel(call, backend) for call in calls)
    return [ref for ref in refs if ref is not None]
