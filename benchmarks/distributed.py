"""What a Ray cluster gains: samples of the laboratory per second, by a plain loop and by workers.

Each worker has one thread of torch. The time in which models are loaded is not counted: a window
begins when every worker has run two samples. Plain loop, one worker and two take turns. The CPU
time of a sample is that of this process and of all that it has started, Ray's own included. On a
machine with other work it tells what the wall clock cannot: two workers, each with a core of its
own, are twice as fast as one, over the growth of a sample's CPU time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from benchmarks.common import markdown, ratio
from flexinspect.inputs import datasets, samples
from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.ray_cluster import Connection, RayOptions, WorkerSlots, connected
from flexinspect.lab.ray_executor import PluginWorker, PoolStatus, WorkerPool
from flexinspect.lab.sample_jobs import SampleJob, jobs_of
from flexinspect.lab.settings import LabSettings
from flexinspect.records.job import Job
from flexinspect_hooks.python_internals.threads import available_cores

WINDOW = 40
ROUNDS = 5
WANTED = 1.5
"""How many times faster two workers must be than one."""


class _WindowIsFull(Exception):
    """Raised to end a pool whose speed is known."""


class Speed(NamedTuple):
    """Samples per second, and seconds of CPU per sample."""

    samples_per_s: float
    cpu_s: float


def _cpu_of_family() -> float:
    """Return the CPU time of this process and of all processes below it, in seconds."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            used = process.cpu_times()
            seconds += used.user + used.system
    return seconds


class Window:
    """Counts the results of a pool once all its workers run, and ends it when they are enough."""

    def __init__(self, n_workers: int, size: int) -> None:
        self._n_workers, self._size, self._n = n_workers, size, 0
        self._n_ignored: int | None = None
        self._started = self._ended = (0.0, 0.0)

    def on_status(self, status: PoolStatus) -> None:
        """Note when the last worker has started."""
        if self._n_ignored is None and status.n_working == self._n_workers:
            self._n_ignored = status.n_done + 2 * self._n_workers

    def on_result(self, _result: LabResult) -> None:
        """Count a result. Raises `_WindowIsFull`."""
        self._n += 1
        if self._n_ignored is None:
            return
        if self._n == self._n_ignored:
            self._started = time.perf_counter(), _cpu_of_family()
        if self._n == self._n_ignored + self._size:
            self._ended = time.perf_counter(), _cpu_of_family()
            raise _WindowIsFull

    def speed(self) -> Speed:
        """Return the speed in the window."""
        (started, cpu), (ended, cpu_then) = self._started, self._ended
        return Speed(self._size / (ended - started), (cpu_then - cpu) / self._size)


def measure() -> dict[str, Any]:
    """Return samples per second of each way, and their ratios."""
    from flexinspect_hooks.lab.lab_worker import LabWorker

    with tempfile.TemporaryDirectory() as folder:
        settings = LabSettings(job=Job(out="", threads=1), orders=0, folder=folder)
        jobs = _jobs()
        worker = LabWorker(settings)
        with connected(RayOptions(workers=2)) as connection:
            ways = {
                "plain": lambda: _plain(worker, jobs),
                "one": lambda: _by_workers(connection, 1, settings, jobs),
                "two": lambda: _by_workers(connection, 2, settings, jobs),
            }
            found: dict[str, list[Speed]] = {name: [] for name in ways}
            loads = []
            for number in range(ROUNDS):
                loads.append(round(os.getloadavg()[0], 1))
                for name in list(ways) if number % 2 else list(ways)[::-1]:
                    found[name].append(ways[name]())
    speeds = {name: [one.samples_per_s for one in all_] for name, all_ in found.items()}
    cpu = {name: [one.cpu_s for one in all_] for name, all_ in found.items()}
    return {
        "window": WINDOW,
        "bound": WANTED,
        "loads": loads,
        "cores": available_cores(),
        "samples_per_s": {name: round(statistics.median(all_), 2) for name, all_ in speeds.items()},
        "cpu_s_per_sample": {name: round(statistics.median(all_), 4) for name, all_ in cpu.items()},
        "one_to_plain": ratio(speeds["one"], speeds["plain"]),
        "two_to_one": ratio(speeds["two"], speeds["one"]),
        "two_to_one_by_cpu": ratio([2 * one for one in cpu["one"]], cpu["two"]),
    }


def _jobs() -> list[SampleJob]:
    """Return the demo's questions again and again; a window ends long before their end."""
    loaded = [samples.choose_paraphrases(one, 5) for one in datasets.load("demo")]
    return jobs_of([one for _ in range(20) for one in loaded])


def _plain(worker: Any, jobs: list[SampleJob]) -> Speed:
    for job in jobs[:2]:
        worker.run(job)
    started, cpu = time.perf_counter(), time.process_time()
    for job in jobs[2 : WINDOW + 2]:
        worker.run(job)
    seconds = time.perf_counter() - started
    return Speed(WINDOW / seconds, (time.process_time() - cpu) / WINDOW)


def _by_workers(
    connection: Connection, n: int, settings: LabSettings, jobs: list[SampleJob]
) -> Speed:
    window = Window(n, WINDOW)
    make_worker = PluginWorker("lab-worker", settings)
    pool = WorkerPool(connection, WorkerSlots(n, 1, 0.0), jobs, make_worker, window.on_result)
    pool.on_status = window.on_status
    try:
        pool.run()
    except _WindowIsFull:
        return window.speed()
    finally:
        pool.close(lambda _worker, _error: None)
    raise RuntimeError("the jobs have ended before the window was full")


def table(facts: dict[str, Any]) -> str:
    """Return samples per second and ratios."""
    speeds, cpu = facts["samples_per_s"], facts["cpu_s_per_sample"]
    columns = {
        "plain": ("plain loop", "", "", "", ""),
        "one": ("one worker", _cell(facts["one_to_plain"]), "", "", ""),
        "two": (
            *("two workers", "", _cell(facts["two_to_one"]), _cell(facts["two_to_one_by_cpu"])),
            str(facts["bound"]),
        ),
    }
    rows = [
        [label, f"{speeds[name]:.1f}", f"{cpu[name]:.3f}", *cells]
        for name, (label, *cells) in columns.items()
    ]
    head = ["", "samples per s", "s of CPU per sample"]
    head += ["times the plain loop", "times one worker", "the same by CPU time", "target"]
    loads = ", ".join(map(str, facts["loads"]))
    note = f"Load average before each round, on {facts['cores']} cores: {loads}."
    return f"{markdown(head, rows)}\n\n{note}"


def _cell(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
