"""`profile_model_performance` and the profiler switches: `torch.profiler` with typed results."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerAction, profile, schedule

from flexinspect.core.environment import replace_file
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.inputs.model_sizes import human_count
from flexinspect.records.debug_switches import DictDataclass
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training_debuggers.debug_functions import SwitchBoard
from flexinspect_hooks.training_debuggers.debug_log import log

PROFILER_SWITCH = "enable_autograd_profiler"
TENSORBOARD_SWITCH = "enable_tensorboard_profiler"
PROFILED_STEPS = 10  # steps in one window
N_LOGGED_OPERATORS = 5
PAUSE_FACTOR = 5  # a window is followed by a pause of this many times its own cost
_NO_OPERATOR = re.compile(r"ProfilerStep|^<|\.py\(")  # the profiler's own events, Python frames
_USER_FRAME = re.compile(r"(?!torch/|flexinspect_hooks/|.*/torch/|<).*\.py\(\d+\): ")
"""The event of a Python function outside of torch and of these debuggers."""
_COPY_OPERATORS = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::contiguous", "aten::clone")
_SYNC_OPERATORS = (
    *("aten::item", "aten::_local_scalar_dense"),
    *("cudaStreamSynchronize", "cudaDeviceSynchronize"),
)

WAIT_BATCHES, WARMUP_BATCHES = 1, 1
"""Batches that run before the profiled ones: one unprofiled, one to warm up."""
PROFILE_FOLDER = "./logs/profiler"
N_OPERATORS = 15  # operators in a summary, those with the most self time first


class OperatorCost(DictDataclass):
    """The cost of one operator over the profiled batches; times in ms, memory in bytes.

    `self_*` is without the operators it called; `share` is its share of all `self_*` time. `flops`
    is 0 if torch has no formula for it. `place` is the function, outside of torch, from which most
    of its time was called, as "train.py(12): forward" with the line of its `def`; "" without
    stacks.
    """

    name: str
    calls: int
    cpu_ms: float
    self_cpu_ms: float
    cuda_ms: float
    self_cuda_ms: float
    memory: int
    flops: int
    share: float
    place: str = ""


class ProfileSummary(DictDataclass):
    """The results of `profile_model_performance`.

    Attributes:
        batches: the number of profiled batches.
        batch_ms: wall time of each batch, profiling included.
        batch_memory: bytes of CUDA memory that each batch left allocated; () without CUDA.
        cpu_ms, cuda_ms: self time of all operators over all batches.
        flops: floating-point operations that torch can count, over all batches.
        operators: the most expensive first.
        files: exported traces, for TensorBoard, Perfetto or chrome://tracing.
        advice: sentences on what stands out.
    """

    batches: int
    batch_ms: tuple[float, ...]
    batch_memory: tuple[int, ...]
    cpu_ms: float
    cuda_ms: float
    flops: int
    operators: tuple[OperatorCost, ...]
    files: tuple[str, ...]
    advice: tuple[str, ...]


def profile_model_performance(
    dataloader: Iterable[Any],
    num_batches: int = 10,
    *,
    step: Callable[[Any], Any],
    folder: str | Path | None = PROFILE_FOLDER,
    record_shapes: bool = True,
    with_stack: bool = True,
    profile_memory: bool = True,
    with_flops: bool = True,
    scopes: Iterable[str] = (),
) -> ProfileSummary:
    """Run `step(batch)` over a loader under `torch.profiler`, and summarise where the time went.

    The first batch runs unprofiled, the second warms up, and the next `num_batches` are profiled
    (fewer if the loader has fewer; it needs at least three batches). The traces are exported to
    `folder` for TensorBoard's plug-in (None: no export). `scopes` are names that your code passes
    to `torch.profiler.record_function`; the summary always lists them.

    Raises `UsageError` for a loader with too few batches or a folder that cannot be written.
    """
    argument_checks.check_count(num_batches, "num_batches")
    argument_checks.check_function(step, "step", "a batch")
    argument_checks.check_batches(dataloader, "profile_model_performance")
    n_before = WAIT_BATCHES + WARMUP_BATCHES
    batches = iter(dataloader)
    first = list(islice(batches, n_before + 1))
    if len(first) <= n_before:
        text = f"The loader has {len(first)} batches, but profiling needs at least {n_before + 1}: "
        text += "one to wait, one to warm up, one to profile."
        raise UsageError(text)
    known = _trace_files(folder)
    batch_ms: list[float] = []
    memory: list[int] = []
    with profile(
        schedule=schedule(wait=WAIT_BATCHES, warmup=WARMUP_BATCHES, active=num_batches, repeat=1),
        on_trace_ready=trace_exporter(folder),
        record_shapes=record_shapes,
        with_stack=with_stack,
        profile_memory=profile_memory,
        with_flops=with_flops,
        acc_events=True,
    ) as profiler:
        for batch in islice(chain(first, batches), n_before + num_batches):
            started, allocated = time.perf_counter(), torch.cuda.memory_allocated()
            step(batch)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            batch_ms.append((time.perf_counter() - started) * 1e3)
            memory.append(torch.cuda.memory_allocated() - allocated)
            profiler.step()
    files = sorted(_trace_files(folder) - known)
    return _profile_summary(profiler, batch_ms[n_before:], memory[n_before:], files, {*scopes})


def _profile_summary(
    profiler: Any, batch_ms: list[float], memory: list[int], files: list[str], scopes: set[str]
) -> ProfileSummary:
    costs = operator_costs(profiler)
    if not costs:
        raise FlexInspectError(
            "torch.profiler saw no operator.", hint="Does another profiler run in this process?"
        )
    scoped = [cost for cost in costs[N_OPERATORS:] if cost.name in scopes]
    return ProfileSummary(
        batches=len(batch_ms),
        batch_ms=tuple(batch_ms),
        batch_memory=tuple(memory) if torch.cuda.is_available() else (),
        cpu_ms=sum(cost.self_cpu_ms for cost in costs),
        cuda_ms=sum(cost.self_cuda_ms for cost in costs),
        flops=sum(cost.flops for cost in costs),
        operators=(*costs[:N_OPERATORS], *scoped),
        files=tuple(files),
        advice=tuple(_profile_advice(costs, sum(batch_ms))),
    )


def trace_exporter(folder: str | Path | None) -> Callable[[Any], None] | None:
    """The handler that exports profiles to `folder`, with the FLOPs of each operator.

    Files are named as by `torch.profiler.tensorboard_trace_handler`, so that TensorBoard's plug-in
    finds them. Raises `UsageError` if the folder cannot be made.
    """
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder {folder} for profiles cannot be created: {error.strerror}."
        ) from error

    def export(profiler: Any) -> None:
        worker = f"{socket.gethostname()}_{os.getpid()}"
        path = Path(folder, f"{worker}.{time.time_ns()}.pt.trace.json")
        profiler.export_chrome_trace(str(path))
        _add_flops(path, profiler)

    return export


def _add_flops(path: Path, profiler: Any) -> None:
    """Add the FLOPs that torch counted to the operators of an export, which lacks them."""
    flops = {(one.id, one.name): int(one.flops) for one in profiler.events() if one.flops}
    if not flops:
        return
    try:
        trace = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        return  # torch writes some values, such as NaN, that are not JSON; the plug-in copes
    for event in trace["traceEvents"]:
        args = event.get("args")
        if event.get("cat") == "cpu_op" and isinstance(args, dict):
            n = flops.get((args.get("External id"), event.get("name")))
            if n is not None:
                args["flops"] = n
    replace_file(path, msgspec.json.encode(trace))


def _trace_files(folder: str | Path | None) -> set[str]:
    return set() if folder is None else {str(path) for path in Path(folder).glob("*.pt.trace.json")}


def operator_costs(profiler: Any) -> list[OperatorCost]:
    """The cost of each operator from a finished profiler, the most expensive first."""
    events = [event for event in profiler.key_averages() if not _NO_OPERATOR.search(event.key)]
    cpu = sum(event.self_cpu_time_total for event in events)
    cuda = sum(event.self_device_time_total for event in events)
    places, costs = _call_places(profiler), []
    for event in events:
        own, own_cuda = event.self_cpu_time_total, event.self_device_time_total
        part, whole = (own_cuda, cuda) if cuda else (own, cpu)
        cost = OperatorCost(
            name=event.key,
            calls=event.count,
            cpu_ms=event.cpu_time_total / 1e3,
            self_cpu_ms=own / 1e3,
            cuda_ms=event.device_time_total / 1e3,
            self_cuda_ms=own_cuda / 1e3,
            memory=event.self_cpu_memory_usage + event.self_device_memory_usage,
            flops=int(event.flops or 0),
            share=part / whole if whole else 0.0,
            place=places.get(event.key, ""),
        )
        costs.append(cost)
    return sorted(costs, key=lambda cost: -cost.share)


def _call_places(profiler: Any) -> dict[str, str]:
    """Return for each operator the Python function that most of its time was called from.

    With stacks, the profiler's events of Python functions are the parents of those of operators.
    """
    times: dict[str, dict[str, float]] = {}
    for event in profiler.events():
        if _NO_OPERATOR.search(event.name):
            continue
        frame = event.cpu_parent
        while frame is not None and not _USER_FRAME.match(frame.name):
            frame = frame.cpu_parent
        if frame is not None:
            of = times.setdefault(event.name, {})
            own = event.self_cpu_time_total + event.self_device_time_total
            of[frame.name] = of.get(frame.name, 0.0) + own
    return {name: max(of, key=of.__getitem__) for name, of in times.items()}


def _profile_advice(costs: list[OperatorCost], wall: float) -> Iterable[str]:
    top, cuda = costs[0], sum(cost.self_cuda_ms for cost in costs)
    if top.share >= 0.5:
        yield f"{top.name} takes {top.share:.0%} of the time: a change elsewhere gains little."
    copies = sum(cost.share for cost in costs if cost.name in _COPY_OPERATORS)
    if copies >= 0.15:
        yield f"Copies and conversions take {copies:.0%}: look for dtypes or layouts that differ."
    waits = sum(cost.calls for cost in costs if cost.name in _SYNC_OPERATORS)
    if cuda and waits > 20:
        yield f"The host waited for the device {waits} times: look for .item() in the loop."
    if cuda and cuda < 0.5 * wall:
        yield f"The device worked {cuda / wall:.0%} of the time: larger batches, or faster loading."
    small = sum(cost.calls for cost in costs if cost.self_cpu_ms < 0.005 * cost.calls)
    if not cuda and small > 0.8 * sum(cost.calls for cost in costs):
        yield "Most operators take under 5 µs: calling them is the cost; larger batches help."


class ProfilerWindows:
    """Profiles windows of steps for the profiler switches; each ends in a log line or an export.

    Shapes, memory, FLOPs and stacks are recorded, and each step is an event `ProfilerStep#N`, by
    which TensorBoard's plug-in tells steps apart.
    torch takes long to read a recording (0.1 ms for each operator call), so a pause of
    `PAUSE_FACTOR` times that follows each window. The thread that trains calls `on_step`.
    """

    def __init__(self, board: SwitchBoard, folder: str | Path, steps: int = PROFILED_STEPS) -> None:
        self._board, self._window_steps, self._folder = board, steps, folder
        self._profiler: Any = None
        self._paused_until = 0.0
        self._n_profiled = 0
        self._exports = False

    def on_step(self, step: int) -> None:
        """End a window that is full or switched off; begin one if a switch is on."""
        switches = (PROFILER_SWITCH, TENSORBOARD_SWITCH)
        wanted = [switch for switch in switches if self._board.is_active(switch, step)]
        if self._profiler is not None:
            self._n_profiled += 1
            if self._n_profiled >= self._window_steps or not wanted:
                self.close()
            else:
                self._board.run_guarded(wanted[0], self._profiler.step)
        if not wanted:
            self._paused_until = 0.0
        elif self._profiler is None and time.perf_counter() >= self._paused_until:
            self._board.run_guarded(wanted[0], lambda: self._begin(TENSORBOARD_SWITCH in wanted))

    def close(self) -> None:
        """End the open window, and log its result."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            began = time.perf_counter()
            switch = TENSORBOARD_SWITCH if self._exports else PROFILER_SWITCH
            self._board.run_guarded(switch, lambda: self._end(profiler))
            ended = time.perf_counter()
            self._paused_until = ended + PAUSE_FACTOR * (ended - began)

    def _begin(self, exports: bool) -> None:
        handler = trace_exporter(self._folder if exports else None)
        profiler = profile(
            # Only a profiler with a schedule records its steps; the windows are ended here.
            schedule=lambda step: ProfilerAction.RECORD,
            on_trace_ready=handler,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
            with_stack=True,
            acc_events=True,
        )
        profiler.start()
        self._profiler, self._n_profiled, self._exports = profiler, 0, exports

    def _end(self, profiler: Any) -> None:
        profiler.stop()
        costs = operator_costs(profiler)
        top = ", ".join(map(_cost_text, costs[:N_LOGGED_OPERATORS]))
        where = f", exported to {self._folder}" if self._exports else ""
        flops = sum(cost.flops for cost in costs)
        counted = f"; {human_count(flops)} FLOPs" if flops else ""
        facts = {"steps": self._n_profiled, "flops": flops, "operators": costs}
        text = "Profiler - %d steps: %s%s%s"
        log.debug(text, self._n_profiled, top, counted, where, extra={"facts": facts})


def _cost_text(cost: OperatorCost) -> str:
    """Return an operator with its share and where it was called: "aten::mm 31% (in f, a.py(3))"."""
    file, _, function = cost.place.partition(": ")
    return f"{cost.name} {cost.share:.0%}" + (f" (in {function}, {file})" if function else "")
