"""The times at which this rank enters and leaves collective calls of torch.distributed.

While a log observes, the methods of `ProcessGroup` are replaced, for the whole process, by methods
that do the same and note the time: every Python caller uses them, whatever it imported. A call ends
when its `Work` was waited for. The gradients of `DistributedDataParallel` are reduced in C++; torch
itself keeps the times of that. The functional collectives, which DTensor uses, start in C++ too:
there the functions of their module are replaced.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexinspect.records.collectives import (
    CALLS_STREAM,
    DDP_GRADIENTS,
    KINDS,
    TIMES_STREAM,
    group_number,
)
from flexinspect.records.step import ArrayRecord
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.python_internals.patching import patch

MAX_CALLS = 1 << 16
"""Calls of a step that are kept: a program may call collectives and never end a step."""


class _Method(NamedTuple):
    """A method of `ProcessGroup`: its kind of collective, and the argument that it sends."""

    kind: str
    sent: int


METHODS = {
    "allreduce": _Method("all_reduce", 0),
    "allreduce_coalesced": _Method("all_reduce", 0),
    "allgather": _Method("all_gather", 1),
    "allgather_coalesced": _Method("all_gather", 1),
    "all_gather_single": _Method("all_gather", 1),
    "all_gather_single_coalesced": _Method("all_gather", 1),
    "reduce_scatter": _Method("reduce_scatter", 1),
    "reduce_scatter_single": _Method("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter", 1),
    "alltoall": _Method("all_to_all", 1),
    "all_to_all_single": _Method("all_to_all", 1),
    # The names in torch 2.12 and before:
    "_allgather_base": _Method("all_gather", 1),
    "allgather_into_tensor_coalesced": _Method("all_gather", 1),
    "_reduce_scatter_base": _Method("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": _Method("reduce_scatter", 1),
    "alltoall_base": _Method("all_to_all", 1),
    "broadcast": _Method("broadcast", 0),
    "reduce": _Method("reduce", 0),
    "gather": _Method("gather", 1),
    "scatter": _Method("scatter", 0),
    "barrier": _Method("barrier", 0),
    "send": _Method("send", 0),
    "recv": _Method("recv", 0),
}


FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Functional collectives and their kinds; the first argument is what they send."""


class _CollectiveCall:
    """One call; `left` is NaN until it has ended. Times are seconds since the epoch."""

    __slots__ = ("entered", "group", "is_late", "kind", "left", "n_bytes")

    def __init__(
        self, kind: str, group: int, n_bytes: int, entered: float, left: float = math.nan
    ) -> None:
        self.kind, self.group, self.n_bytes = kind, group, n_bytes
        self.entered, self.left = entered, left
        self.is_late = False  # not ended at the end of its step

    def may_end(self) -> bool:
        """Whether the call waits for its end; one that nobody waits for does so for one step."""
        was_late, self.is_late = self.is_late, True
        return math.isnan(self.left) and not was_late


class CollectiveLog:
    """The calls of this process since the last `take`."""

    def __init__(self) -> None:
        self._calls: list[_CollectiveCall] = []
        self._reducers = ReducerTimes()

    def add(self, call: _CollectiveCall) -> None:
        """Keep a call that begins."""
        if len(self._calls) < MAX_CALLS:
            self._calls.append(call)

    def watch_reducer(self, model: nn.Module) -> None:
        """Take the times of a DistributedDataParallel model too; others are ignored."""
        self._reducers.watch(model)

    def take(self) -> tuple[_CollectiveCall, ...]:
        """Return the calls in the order of their begin, and forget them.

        A call that has not ended is returned by the next `take`.
        """
        calls, self._calls = self._calls, []
        self._calls += (waiting := [one for one in calls if one.may_end()])
        ended = [one for one in calls if one not in waiting]
        ended += self._reducers.take()
        return tuple(sorted(ended, key=lambda one: one.entered))


class ReducerTimes:
    """When DistributedDataParallel began and ended to reduce the gradients of a backward pass."""

    def __init__(self) -> None:
        self._read: Callable[[], tuple[float, float] | None] | None = None
        self._model_id: int | None = None
        self._last: tuple[float, float] | None = None
        self._group = 0

    def watch(self, model: nn.Module) -> None:
        """Let torch keep the times of each backward pass of a model."""
        if id(model) != self._model_id:
            self._model_id = id(model)
            self._read = torch_private.gradient_reduction_times(model)
            self._group = _number_of(getattr(model, "process_group", None))

    def take(self) -> Iterator[_CollectiveCall]:
        """Yield the reduction of the newest backward pass, once."""
        found = self._read() if self._read is not None else None
        if found is not None and found != self._last:
            self._last = found
            yield _CollectiveCall(DDP_GRADIENTS, self._group, 0, *found)


_logs: list[CollectiveLog] = []
_waited: dict[int, _CollectiveCall] = {}
"""Calls that have not ended, by the `id` of the `Work`, or of the tensor, that ends them."""
_inside = threading.local()  # `is_so` in a functional collective, which may call another
_patches = ExitStack()


@contextmanager
def observe_collectives(log: CollectiveLog) -> Iterator[None]:
    """Let a log note calls while the block runs."""
    if not _logs:
        _install()
    _logs.append(log)
    try:
        yield
    finally:
        _logs.remove(log)
        if not _logs:
            _patches.close()
            _waited.clear()


def _install() -> None:
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    group, work = getattr(module, "ProcessGroup", None), getattr(module, "Work", None)
    if group is None or work is None:  # a build without torch.distributed
        return
    for name, method in METHODS.items():
        if (original := getattr(group, name, None)) is not None:
            _patches.callback(patch(group, name, _observed(original, method)))
    _patches.callback(patch(work, "wait", _observed_wait(work.wait)))
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    for name, kind in FUNCTIONAL.items():
        if (original := getattr(functional, name, None)) is not None:
            _patches.callback(patch(functional, name, _observed_functional(original, kind)))
    if (wait := getattr(functional, "wait_tensor", None)) is not None:
        _patches.callback(patch(functional, "wait_tensor", _observed_wait(wait)))


def _observed(original: Callable[..., Any], method: _Method) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        sent = args[method.sent] if len(args) > method.sent else None
        noted = _note(method.kind, group, sent)
        work = None
        try:
            work = original(group, *args, **kwargs)
        finally:
            if work is None:
                noted.left = time.time()
        if work is not None:
            _await_end(work, noted)
        return work

    return call


def _observed_functional(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_inside, "is_so", False):
            return original(*args, **kwargs)
        _inside.is_so, noted, result = True, None, None
        try:
            given = signature.bind(*args, **kwargs).arguments
            noted = _note(kind, _group_of(given.get("group")), args[0] if args else None)
            result = original(*args, **kwargs)
        finally:
            _inside.is_so = False
            if noted is not None and (elem := getattr(result, "elem", None)) is not None:
                _await_end(elem, noted)  # an AsyncCollectiveTensor waits for this tensor
            elif noted is not None:
                noted.left = time.time()
        return result

    return call


def _note(kind: str, group: Any, sent: Any) -> _CollectiveCall:
    noted = _CollectiveCall(kind, _number_of(group), _count_bytes(sent), time.time())
    for log in _logs:
        log.add(noted)
    return noted


def _await_end(awaited: Any, noted: _CollectiveCall) -> None:
    """Let a call end when this `Work` or tensor was waited for."""
    if len(_waited) >= MAX_CALLS:
        _waited.clear()
    _waited[id(awaited)] = noted


def _observed_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(awaited: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(awaited, *args, **kwargs)
        try:
            return original(awaited, *args, **kwargs)
        finally:
            if (noted := _waited.pop(id(awaited), None)) is not None:
                noted.left = time.time()

    return wait


def _group_of(group: Any) -> Any:
    """Return the process group that a functional collective names as a mesh and its dimension."""
    if isinstance(group, tuple):
        return group[0].get_group(group[1])
    return group.get_group() if hasattr(group, "get_group") else group


def _number_of(group: Any) -> int:
    """Return a number for the ranks of a process group; 0 if they are not known."""
    try:
        return group_number(dist.get_process_group_ranks(group))
    except Exception:  # a group that torch does not know, made in C++
        return 0


def _count_bytes(sent: Any) -> int:
    """Return the bytes of a tensor, or of lists of tensors; 0 for options and nothing."""
    if isinstance(sent, Tensor):
        return int(sent.nbytes)
    if isinstance(sent, Sequence) and not isinstance(sent, str):
        return sum(map(_count_bytes, sent))
    return 0


def collective_arrays(calls: Iterable[_CollectiveCall]) -> tuple[ArrayRecord, ...]:
    """Return the calls of a step as arrays of its record; none without calls."""
    rows = [*calls]
    if not rows:
        return ()
    facts = np.array([(KINDS.index(one.kind), one.n_bytes, one.group) for one in rows], np.int64)
    times = np.array([(one.entered, one.left) for one in rows], np.float64)
    return ArrayRecord(CALLS_STREAM, facts), ArrayRecord(TIMES_STREAM, times)
