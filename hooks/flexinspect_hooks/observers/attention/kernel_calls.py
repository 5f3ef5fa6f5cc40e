"""Observes the kernel calls of one model: their layer, suppressed exceptions, and built masks."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.core.errors import summarize_error
from flexinspect.records.step import BuildRecord
from flexinspect.trace.file.side_files import NO_PLACE, CallPlace
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.capture.hook import CaptureContext, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.python_mods import on_compiled_call
from flexinspect_hooks.observers.attention.kernel_interception import (
    BUILD,
    FLEX,
    KernelCall,
    observe_kernels,
    ran_uncompiled,
)
from flexinspect_hooks.observers.memory_hook import peak_bytes
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_name
from flexinspect_hooks.python_internals.torch_private import module_call_code


class KernelReturn(NamedTuple):
    """A kernel call in layer `layer` (None: in no known layer), with its output once it returned.

    `module` is the layer's attention module and `mask_passed_to_layer` the mask that it received.
    `suppressed_exception` names the exception in whose handler the call was made, or which a kernel
    raised earlier in the same layer. `started` is a time of `time.perf_counter`, `peak` the peak
    memory in bytes before a mask is built.
    """

    layer: int | None
    module: nn.Module | None
    mask_passed_to_layer: Any
    call: KernelCall
    suppressed_exception: str | None
    started: float
    peak: int
    output: Any = None


_active: list[KernelCalls] = []
"""All instances that observe the kernels now."""

_thread = threading.local()


@contextmanager
def ignore_kernels() -> Iterator[None]:
    """While entered, kernel calls of this thread are not recorded, because their caller is."""
    _thread.is_quiet = True
    try:
        yield
    finally:
        _thread.is_quiet = False


def is_forward_running() -> bool:
    """Whether this thread runs a forward of a watched model, recorded or not."""
    is_unrecorded = getattr(_thread, "is_unrecorded", False)
    return is_unrecorded or any(calls.context.is_open for calls in _active)


def set_unrecorded(*, is_unrecorded: bool) -> None:
    """Set whether this thread runs a forward of a watched model that is not recorded."""
    _thread.is_unrecorded = is_unrecorded


_unassigned_builds: deque[BuildRecord] = deque(maxlen=1000)
"""Masks that were built outside of a step; the next recorded step of any model takes them."""


@dataclass(slots=True, eq=False)
class KernelCalls:
    """Observes the kernels while the model's forward runs, and masks built outside of a forward.

    `done` are the calls of the step so far, until the hook that reduces the step takes them.
    """

    context: CaptureContext
    done: list[KernelReturn] = field(default_factory=list)
    _builds: list[BuildRecord] = field(default_factory=list)
    _errors: dict[int, str] = field(default_factory=dict)
    _reported: set[tuple[Any, ...]] = field(default_factory=set)
    _outer_exception: BaseException | None = None
    _step: StepContext | None = None
    _root: int = 0

    def install(self) -> Iterable[Remove]:
        """Observe the kernels, and whether the model's forward returns.

        The layer of a kernel call is read from the stack, so that layers need no hooks.
        """
        self._root = id(self.context.model)
        removes = [self.observe()]

        def close(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            set_unrecorded(is_unrecorded=False)
            # The forward raised. Of a forward that returned, other hooks still need `is_open`.
            if output is None and self.context.is_open:
                error = sys.exception()
                self.context.exit_reason = summarize_error(error) if error is not None else ""
                self.context.is_open = False

        # A function: a copy of the model copies its hooks, and with a method this object too.
        removes.append(self.context.model.register_forward_hook(close, always_call=True).remove)
        return removes

    def observe(self) -> Remove:
        """Observe the kernels only; returns a function that stops it."""
        stop_observing = observe_kernels(self)
        _active.append(self)

        def remove() -> None:
            stop_observing()
            if self in _active:
                _active.remove(self)
            if not _active:
                _unassigned_builds.clear()

        return remove

    def open(self, step: StepContext) -> None:
        """Drop the state of the step before."""
        self._step = step
        self.done.clear()
        self._builds.clear()
        self._errors.clear()
        self._outer_exception = sys.exception()

    def take_since(self, mark: int) -> list[KernelReturn]:
        """Return the calls after the first `mark`, and drop them."""
        calls = self.done[mark:]
        del self.done[mark:]
        return calls

    def unassigned_builds(self) -> tuple[BuildRecord, ...]:
        """Return the masks that were built outside of a step, since the last recorded step."""
        return tuple(_unassigned_builds)

    def take_builds(self) -> tuple[BuildRecord, ...]:
        """Return the masks that were built for the step, before it and in it, and drop them."""
        builds = (*self.unassigned_builds(), *self._builds)
        _unassigned_builds.clear()
        self._builds.clear()
        return builds

    # -- the observer ----------------------------------------------------------------------------

    def accepts(self, name: str) -> bool:
        """Accept the calls of the open step, and masks that are built outside of any forward."""
        if self.context.is_open:
            return not getattr(_thread, "is_quiet", False)
        return name == BUILD and not is_forward_running()

    def before(self, call: KernelCall) -> KernelReturn:
        """Return what must be read before the call is made."""
        peak = peak_bytes(self.context.device) if call.name == BUILD else 0
        is_open = self.context.is_open
        place = _current_layer(self.context.layer_of, self._root) if is_open else _NO_LAYER
        layer = place[0]
        if call.compiled and call.name == FLEX:
            arguments = call.arguments
            last_kernel_call.begin_kernel_call(
                self._call_place(layer),
                query=arguments["query"],
                key=arguments["key"],
                score_mod=arguments.get("score_mod"),
                block_mask=arguments.get("block_mask"),
            )
            on_compiled_call()
        suppressed = self.suppressed_exception(layer)
        return KernelReturn(*place, call, suppressed, time.perf_counter(), peak)

    def after(self, pending: KernelReturn, output: Any) -> None:
        """Keep a call that returned, or the record of a mask that was built."""
        call = pending.call
        if call.compiled:
            last_kernel_call.end_kernel_call()
        if call.name == BUILD:
            builds = self._builds if self.context.is_open else _unassigned_builds
            builds.append(self._build_record(pending))
            return
        if call.compiled and call.name == FLEX and ran_uncompiled():
            call = call._replace(compiled=False)
        returned = pending._replace(call=call, output=output)
        self.done.append(returned)
        if self.context.on_kernel is not None:
            self.context.on_kernel(returned)

    def failed(self, pending: KernelReturn, error: BaseException) -> None:
        """Report a kernel call that raised."""
        self.report_raised(pending.call, pending.layer, error)

    def report_raised(self, call: KernelCall, layer: int | None, error: BaseException) -> None:
        """Record an event at once, because the step may never be recorded.

        Each message is recorded once per layer.
        """
        if call.compiled:
            last_kernel_call.end_kernel_call()
        message = summarize_error(error)
        if layer is not None:
            self._errors[layer] = message
        key = (layer, call.name, message)
        if key not in self._reported:
            self._reported.add(key)
            where = "" if layer is None else f"Layer {layer}: "
            facts = _call_facts(call)
            lengths = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = f"{where}{call.name} raised {message} ({lengths})"
            data = {"layer": layer, "kernel": call.name, "error": message, **facts}
            self.context.record_event("kernel-failed", text, data)

    def _call_place(self, layer: int | None) -> CallPlace:
        """Return (generation, step, layer) of a call that is made now; layer -1 if not known."""
        step = self._step if self.context.is_open else None
        if step is None:
            return NO_PLACE
        return step.generation, step.step, -1 if layer is None else layer

    def suppressed_exception(self, layer: int | None) -> str | None:
        """Return the exception after which a call is made now, None if there is none.

        It is being handled in this thread, or a kernel raised it earlier in the same layer.
        """
        error = sys.exception()
        if error is not None and error is not self._outer_exception:
            return summarize_error(error)
        return self._errors.get(layer) if layer is not None else None

    def _build_record(self, pending: KernelReturn) -> BuildRecord:
        arguments = pending.call.arguments
        peak_growth = max(peak_bytes(self.context.device) - pending.peak, 0)
        return BuildRecord(
            layer=pending.layer,
            batch=arguments.get("B"),
            heads=arguments.get("H"),
            q_len=int(arguments["Q_LEN"]),
            kv_len=int(arguments["KV_LEN"]),
            mask_mod=mask_mod_name(arguments["mask_mod"]),
            wall_ms=(time.perf_counter() - pending.started) * 1e3,
            peak_growth=peak_growth,
        )


_MODULE_CALL = module_call_code()


_Place = tuple[int | None, nn.Module | None, Any]
"""An attention layer whose forward is running: its number, its module, the mask it received."""

_NO_LAYER: _Place = (None, None, None)


def _current_layer(layer_of: Mapping[int, int], root: int) -> _Place:
    """Return the innermost attention layer whose forward is running, read from the stack.

    The search ends at the model itself, whose id is `root`.
    """
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is not _MODULE_CALL:
            continue
        variables = frame.f_locals
        module = variables["self"]
        layer = layer_of.get(id(module))
        if layer is not None:
            return layer, module, _mask_argument(variables["args"], variables["kwargs"])
        if id(module) == root:
            break
    return _NO_LAYER


def _mask_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an attention module's mask: `attention_mask`, else the first argument like a mask."""
    if "attention_mask" in kwargs:
        return kwargs["attention_mask"]
    tensors = (value for value in args[1:] if isinstance(value, BlockMask | Tensor))
    return next((mask for mask in tensors if isinstance(mask, BlockMask) or mask.dim() == 4), None)


def _call_facts(call: KernelCall) -> dict[str, Any]:
    """Return the sizes of a call's tensors, which may explain why it failed."""
    arguments = call.arguments
    if call.name == BUILD:
        sizes = {"batch": arguments.get("B"), "heads": arguments.get("H")}
        known = {name: size for name, size in sizes.items() if size is not None}
        return {"q_len": arguments.get("Q_LEN"), "kv_len": arguments.get("KV_LEN"), **known}
    query = arguments.get("query")
    facts: dict[str, Any] = {
        "q_len": _row_count(query),
        "kv_len": _row_count(arguments.get("key")),
    }
    if isinstance(query, Tensor) and query.dim() == 4:
        facts |= {"batch": int(query.shape[0]), "heads": int(query.shape[1])}
    mask = arguments.get("block_mask" if call.name == FLEX else "attn_mask")
    if isinstance(mask, BlockMask):
        batch, heads, q_len, kv_len = mask.shape
        facts |= {"mask_batch": batch, "mask_heads": heads, "mask_q": q_len, "mask_kv": kv_len}
    elif isinstance(mask, Tensor):
        facts |= {"mask": tuple(mask.shape)}
    return facts


def _row_count(tensor: Any) -> int | None:
    return int(tensor.shape[-2]) if isinstance(tensor, Tensor) and tensor.dim() > 1 else None
