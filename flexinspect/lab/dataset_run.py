"""`run --dataset` by many workers: a folder with their traces, and the results as an index of them.

Each worker writes `worker-N.flextrace` with a generation for each of its samples; `results.jsonl`
says which trace has which sample. A worker that does not see the folder (another machine, without
a shared file system) keeps its trace, which is fetched when it ends.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import FlexInspectError, TraceError, UsageError
from flexinspect.core.text import plural
from flexinspect.lab.ray_cluster import RayOptions
from flexinspect.lab.ray_executor import (
    PluginWorker,
    PoolStatus,
    RayExecutor,
    RemoteWorker,
)
from flexinspect.lab.result_store import ResultStore
from flexinspect.lab.sample_jobs import SampleJob, SampleResult
from flexinspect.records.job import Job
from flexinspect.trace.file.location import close_dead_trace, delete_trace
from flexinspect.trace.reader import open_trace

RESULTS = "results.jsonl"
_TRACE_NAME = re.compile(r"worker-(\d{1,9})\.flextrace")
_SEEN = ".run-"
_CHUNK_BYTES = 8 << 20
_MAX_ROUNDS = 3
"""How often samples run whose traces were lost with their machine."""

_OF_RUN = ("out", "max_samples", "threads", "argv", "overwrite", "control")
"""Fields of a job that change no generation."""


class RecordedSample(SampleResult, frozen=True, kw_only=True, tag="generation"):
    """Where a sample's generation is recorded, its answer, and which process made it.

    `trace` is a file of the folder, `seconds` the time of the generation, `n_tokens` its tokens.
    """

    trace: str = ""
    generation: int = 0
    answer: str = ""
    expected: tuple[str, ...] = ()
    n_tokens: int = 0
    seconds: float = 0.0
    host: str = ""
    pid: int = 0


class ClosedTrace(Struct, frozen=True):
    """What a worker leaves: its trace, in the folder of the run or in one of its own machine."""

    path: str
    n_bytes: int
    is_in_folder: bool


class DatasetWorkerSettings(Struct, frozen=True):
    """What a worker is to do: the generations of `job`, recorded in a trace in `folder`.

    A process that sees the file `seen` shares the folder with the one that started the run.
    """

    job: Job
    folder: str
    seen: str


def trace_name(number: int) -> str:
    """Return the file name of a worker's trace."""
    return f"worker-{number}.flextrace"


def trace_files(folder: Path) -> list[Path]:
    """Return the traces of the workers in a folder, by their numbers."""
    found = [(int(match[1]), file) for file in _listed(folder) if (match := _match(file))]
    return [file for _, file in sorted(found)]


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _match(file: Path) -> re.Match[str] | None:
    return _TRACE_NAME.fullmatch(file.name)


def remove_results(folder: Path) -> None:
    """Remove the traces and the results of an earlier run, and nothing else."""
    for file in trace_files(folder):
        delete_trace(file)
    with suppress(FileNotFoundError):
        (folder / RESULTS).unlink()


def end_dead_traces(folder: Path) -> None:
    """Mark the traces of dead workers as failed, and remove those without a generation.

    They have every finished step. The traces of processes that are alive stay as they are.
    """
    for file in trace_files(folder):
        try:
            with open_trace(file) as reader:
                run, is_open = reader.run(), reader.state == "recording"
                is_empty = not reader.generations()
        except TraceError:
            continue  # whoever opens it is told why
        if not is_open or is_recorder_alive(run):
            continue
        if is_empty:
            delete_trace(file)
        else:
            close_dead_trace(file, "The worker was lost.", int(run["pid"]))


class DatasetRun:
    """One distributed run: samples, the folder of their traces, and the workers."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        options: RayOptions,
        on_status: Callable[[PoolStatus], None] = lambda _status: None,
        on_result: Callable[[RecordedSample], None] = lambda _result: None,
    ) -> None:
        self._job, self._folder, self._options = job, folder.resolve(), options
        self._on_status, self._on_result = on_status, on_result

    def run(self, jobs: Sequence[SampleJob]) -> list[RecordedSample]:
        """Run the samples that have no result and no trace yet; return the results of all.

        Raises what `RayExecutor.run` raises, and `UsageError` for a folder that cannot be used.
        """
        settings = {"run": _compared(self._job)}
        with ResultStore(self._folder / RESULTS, settings, RecordedSample) as store:
            end_dead_traces(self._folder)
            for file in self._folder.glob(f"{_SEEN}*"):  # of a run that was killed
                file.unlink(missing_ok=True)
            if n_stored := len(jobs) - len(self._missing(store, jobs)):
                stored = f"continuing: {n_stored} of {plural(len(jobs), 'sample')} are stored"
                self._on_status(PoolStatus(0, len(jobs) - n_stored, 0, 0, 0, 0.0, stored))
            for _ in range(_MAX_ROUNDS):
                missing = self._missing(store, jobs)
                if not missing:
                    return store.results
                self._run_round(store, missing)
            if missing := self._missing(store, jobs):
                what = f"{len(missing)} samples have no trace: their workers' traces were lost."
                raise FlexInspectError(what, hint="The same command runs these samples again.")
            return store.results

    def _missing(
        self, store: ResultStore[RecordedSample], jobs: Sequence[SampleJob]
    ) -> list[SampleJob]:
        """Return the jobs without a result, or whose trace is not in the folder."""
        waiting = {job.index for job in store.remaining(list(jobs))}
        names = {file.name for file in trace_files(self._folder)}
        waiting |= {one.index for one in store.results if one.trace not in names}
        return [job for job in jobs if job.index in waiting]

    def _run_round(self, store: ResultStore[RecordedSample], jobs: list[SampleJob]) -> None:
        def keep(result: RecordedSample) -> None:
            store.append(result)
            self._on_result(result)

        numbers = [int(match[1]) for file in _listed(self._folder) if (match := _match(file))]
        seen = self._folder / f"{_SEEN}{secrets.token_hex(8)}"
        executor = RayExecutor(
            self._options,
            on_status=self._on_status,
            on_close=self._close_worker,
            first_number=max(numbers, default=0) + 1,
        )
        try:
            seen.touch()
            settings = DatasetWorkerSettings(self._job, str(self._folder), str(seen))
            executor.run(jobs, PluginWorker("dataset-worker", settings), keep)
        finally:
            seen.unlink(missing_ok=True)
            end_dead_traces(self._folder)

    def _close_worker(self, worker: RemoteWorker, error: BaseException | None) -> None:
        """Close the trace of a worker, and fetch it from a machine that does not share the folder.

        Raises `FlexInspectError`.
        """
        state = "finished" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            state = "interrupted"
        closed: ClosedTrace | None = worker.call("close", state)
        if closed is not None and not closed.is_in_folder:
            _fetch(worker, closed, self._folder / trace_name(worker.number))
            worker.call("release")


def _compared(job: Job) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(job)
    return {name: value for name, value in settings.items() if name not in _OF_RUN}


def _fetch(worker: RemoteWorker, closed: ClosedTrace, target: Path) -> None:
    """Copy a trace from the machine of a worker. Raises `FlexInspectError`."""
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    try:
        with part.open("xb") as out:
            while out.tell() < closed.n_bytes:
                out.write(worker.call("read", out.tell(), _CHUNK_BYTES))
        part.replace(target)
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror or error}."
        raise FlexInspectError(what, hint="Make room on the disk.") from error
    finally:
        part.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raise `UsageError` for a place that is no folder."""
    if folder.suffix == ".flextrace" or (folder.exists() and not folder.is_dir()):
        what = f"--out {folder} names a file, and --ray writes one trace per worker."
        raise UsageError(what, hint="Name a folder.")
