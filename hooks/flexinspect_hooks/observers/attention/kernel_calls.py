"""Kernel calls of one model: in which layer, after what failure, and the masks built for them."""

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

from flexinspect.records.step import BuildRecord
from flexinspect.trace.file.side_files import NO_PLACE, CallPlace
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.capture.hook import CaptureContext, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.python_mods import on_compiled_call
from flexinspect_hooks.interpreter.user_functions import mask_mod_name
from flexinspect_hooks.observers.attention.kernel_interception import (
    BUILD,
    FLEX,
    KernelCall,
    observe_kernels,
    ran_uncompiled,
)
from flexinspect_hooks.observers.memory_hook import peak_bytes


class KernelReturn(NamedTuple):
    """A kernel call that returned, in the layer `layer` (None: in none that is known).

    `module` is the layer's attention module and `handed` the mask that it was given. `swallowed`
    names the exception in whose handler the call was made, or which a kernel raised before in the
    same layer.
    """

    layer: int | None
    call: KernelCall
    output: Any
    mask_passed_to_layer: Any
    suppressed_exception: str | None
    module: nn.Module | None = None


class CurrentLayer(NamedTuple):
    """An attention module whose forward is running, and the mask that it was given."""

    layer: int
    module: nn.Module
    mask_passed_to_layer: Any


class PendingCall(NamedTuple):
    """A call under way: where, what it makes up for, when it began, the peak memory before it."""

    call: KernelCall
    current_layer: CurrentLayer | None
    suppressed_exception: str | None
    started: float
    peak: int


_active: list[KernelCalls] = []
"""Everyone who observes the kernels now."""

_thread = threading.local()


@contextmanager
def ignore_kernels() -> Iterator[None]:
    """While entered, nobody describes the kernels that this thread calls: their caller is seen."""
    _thread.is_quiet = True
    try:
        yield
    finally:
        _thread.is_quiet = False


def _kernels_ignored() -> bool:
    return getattr(_thread, "is_quiet", False)


def is_forward_running() -> bool:
    """Say whether a watched model's forward is running in this thread, recorded or passed over."""
    is_passed = getattr(_thread, "is_passed", False)
    return is_passed or any(each.context.is_open for each in _active)


def set_unrecorded(*, is_unrecorded: bool) -> None:
    """Say whether this thread runs a forward of a watched model that is not recorded."""
    _thread.is_passed = is_unrecorded


_unassigned_builds: deque[BuildRecord] = deque(maxlen=1000)
"""Masks that were built in no step: the next step that is recorded, of whatever model, has them."""


@dataclass(slots=True, eq=False)
class KernelCalls:
    """Observes the kernels while the model's forward is open, and what is built in no forward.

    `done` is what a step has seen so far; whoever reduces the step clears it.
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
        """Watch the kernels, and whether the model's forward returns.

        In which layer a kernel is called is read from the stack, so that layers need no hooks.
        """
        self._root = id(self.context.model)
        removes = [self.observe()]

        def close(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            set_unrecorded(is_unrecorded=False)
            # It raised; other hooks may still look at a forward that did not.
            if output is None and self.context.is_open:
                error = sys.exception()
                self.context.exit_reason = describe_error(error) if error is not None else ""
                self.context.is_open = False

        # Copies of a model carry its hooks along: functions, as a method would be copied with us.
        removes.append(self.context.model.register_forward_hook(close, always_call=True).remove)
        return removes

    def observe(self) -> Remove:
        """Watch the kernels alone; returns what ends that."""
        end = observe_kernels(self)
        _active.append(self)

        def remove() -> None:
            end()
            if self in _active:
                _active.remove(self)
            if not _active:
                _unassigned_builds.clear()

        return remove

    def open(self, step: StepContext) -> None:
        """A step begins."""
        self._step = step
        self.done.clear()
        self._builds.clear()
        self._errors.clear()
        self._outer_exception = sys.exception()

    def take_since(self, mark: int) -> list[KernelReturn]:
        """Return the calls after the first `mark`, and keep them no longer."""
        found = self.done[mark:]
        del self.done[mark:]
        return found

    def unassigned_builds(self) -> tuple[BuildRecord, ...]:
        """Return the masks that were built in no step, since the last one."""
        return tuple(_unassigned_builds)

    def take_builds(self) -> tuple[BuildRecord, ...]:
        """Return the masks that were built for the step, before it and in it; once."""
        found = (*self.unassigned_builds(), *self._builds)
        _unassigned_builds.clear()
        self._builds.clear()
        return found

    # -- the observer ----------------------------------------------------------------------------

    def accepts(self, name: str) -> bool:
        """Want the calls of an open step, and masks that are built in no step of anybody."""
        if self.context.is_open:
            return not _kernels_ignored()
        return name == BUILD and not is_forward_running()

    def before(self, call: KernelCall) -> PendingCall | None:
        """Return what has to be known of a call before it is made."""
        peak = peak_bytes(self.context.device) if call.name == BUILD else 0
        place = _current_layer(self.context.layer_of, self._root) if self.context.is_open else None
        layer = None if place is None else place.layer
        if call.compiled and call.name == FLEX:
            given = call.arguments
            rules = (given.get("score_mod"), given.get("block_mask"))
            last_kernel_call.begin_kernel_call(
                self._call_place(layer), given["query"], given["key"], *rules
            )
            on_compiled_call()
        return PendingCall(call, place, self.suppressed_exception(layer), time.perf_counter(), peak)

    def after(self, pending: PendingCall, output: Any) -> None:
        """Keep what it was."""
        if pending.call.compiled:
            last_kernel_call.end_kernel_call()
        if pending.call.name == BUILD:
            (self._builds if self.context.is_open else _unassigned_builds).append(
                self._build_record(pending)
            )
            return
        layer, module, handed = pending.current_layer or (None, None, None)
        call = pending.call
        if call.compiled and call.name == FLEX and ran_uncompiled():
            call = call._replace(compiled=False)
        done = KernelReturn(layer, call, output, handed, pending.suppressed_exception, module)
        self.done.append(done)
        if self.context.on_kernel is not None:
            self.context.on_kernel(done)

    def failed(self, pending: PendingCall, error: BaseException) -> None:
        """Say that a kernel raised."""
        self.report_raised(
            pending.call,
            None if pending.current_layer is None else pending.current_layer.layer,
            error,
        )

    def report_raised(self, call: KernelCall, layer: int | None, error: BaseException) -> None:
        """Say so at once, once for each layer and message: the step may never be recorded."""
        if call.compiled:
            last_kernel_call.end_kernel_call()
        words = describe_error(error)
        if layer is not None:
            self._errors[layer] = words
        key = (layer, call.name, words)
        if key not in self._reported:
            self._reported.add(key)
            where = "" if layer is None else f"Layer {layer}: "
            facts = _call_facts(call)
            lengths = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = f"{where}{call.name} raised {words} ({lengths})"
            data = {"layer": layer, "kernel": call.name, "error": words, **facts}
            self.context.record_event("kernel-failed", text, data)

    def _call_place(self, layer: int | None) -> CallPlace:
        """Return generation, step and layer of a call that is made now."""
        step = self._step if self.context.is_open else None
        if step is None:
            return NO_PLACE
        return step.generation, step.step, -1 if layer is None else layer

    def suppressed_exception(self, layer: int | None) -> str | None:
        """Return what a call that is made now makes up for, None for nothing."""
        error = sys.exception()
        if error is not None and error is not self._outer_exception:
            return describe_error(error)
        return self._errors.get(layer) if layer is not None else None

    def _build_record(self, pending: PendingCall) -> BuildRecord:
        given = pending.call.arguments
        grown = max(peak_bytes(self.context.device) - pending.peak, 0)
        return BuildRecord(
            layer=pending.current_layer.layer if pending.current_layer is not None else None,
            batch=given.get("B"),
            heads=given.get("H"),
            q_len=int(given["Q_LEN"]),
            kv_len=int(given["KV_LEN"]),
            rule=mask_mod_name(given["mask_mod"]),
            wall_ms=(time.perf_counter() - pending.started) * 1e3,
            peak_growth=grown,
        )


_CALL_IMPL = nn.Module._call_impl.__code__
"""What runs a module's forward, whoever replaced that on the instance."""


def _current_layer(layer_of: Mapping[int, int], root: int) -> CurrentLayer | None:
    """Return the innermost attention layer whose forward is running, as the stack tells.

    No further than to the model itself, whose id is `root`.
    """
    frame = sys._getframe(1)
    while (up := frame.f_back) is not None:
        frame = up
        if frame.f_code is not _CALL_IMPL:
            continue
        told = frame.f_locals
        module = told["self"]
        layer = layer_of.get(id(module))
        if layer is not None:
            return CurrentLayer(layer, module, _mask_argument(told["args"], told["kwargs"]))
        if id(module) == root:
            return None
    return None


def describe_error(error: BaseException) -> str:
    """Return an exception as "Type: first line"."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _mask_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the mask that an attention module was called with: by name, else the likely one."""
    if "attention_mask" in kwargs:
        return kwargs["attention_mask"]
    masks = [value for value in args[1:] if isinstance(value, BlockMask) or _is_dense_mask(value)]
    return masks[0] if masks else None


def _is_dense_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


_SIZE_ARGUMENTS = (("batch", "B"), ("heads", "H"))


def _call_facts(call: KernelCall) -> dict[str, Any]:
    """Return the lengths that tell why a call may have failed."""
    given = call.arguments
    if call.name == BUILD:
        sizes = {name: given[key] for name, key in _SIZE_ARGUMENTS if given.get(key) is not None}
        return {"q_len": given.get("Q_LEN"), "kv_len": given.get("KV_LEN"), **sizes}
    facts: dict[str, Any] = {
        "q_len": _row_count(given.get("query")),
        "kv_len": _row_count(given.get("key")),
    }
    query = given.get("query")
    if isinstance(query, Tensor) and query.dim() == 4:
        facts |= {"batch": int(query.shape[0]), "heads": int(query.shape[1])}
    mask = given.get("block_mask" if call.name == FLEX else "attn_mask")
    if isinstance(mask, BlockMask):
        batch, heads, q_len, kv_len = mask.shape
        facts |= {"mask_batch": batch, "mask_heads": heads, "mask_q": q_len, "mask_kv": kv_len}
    elif isinstance(mask, Tensor):
        facts |= {"mask": tuple(mask.shape)}
    return facts


def _row_count(tensor: Any) -> int | None:
    return int(tensor.shape[-2]) if isinstance(tensor, Tensor) and tensor.dim() > 1 else None
