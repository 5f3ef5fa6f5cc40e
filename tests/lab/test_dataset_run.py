"""A dataset run by many workers: which samples run again, and where the traces are."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.traces import sample_trace

from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.inputs.samples import Sample
from flexinspect.lab import dataset_run
from flexinspect.lab.dataset_run import (
    RESULTS,
    ClosedTrace,
    DatasetRun,
    RecordedSample,
    check_folder,
    end_dead_traces,
    remove_results,
    trace_files,
    trace_name,
)
from flexinspect.lab.ray_cluster import RayOptions
from flexinspect.lab.ray_executor import PluginWorker, PoolStatus
from flexinspect.lab.sample_jobs import SampleJob, jobs_of
from flexinspect.records.job import Job
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

CONTENT = bytes(range(256)) * 40


class FakeExecutor:
    """Runs jobs here, by one worker a run, whose trace is some bytes.

    `rounds` has what each run does: "shared" writes the trace into the folder, "remote" keeps it
    to be fetched, "lost" loses it with the worker, "interrupted" stops after two samples.
    """

    rounds: Sequence[str] = ()
    seen: list[list[int]]
    states: list[str]

    def __init__(self, _options: RayOptions, *, on_close: Any, first_number: int, **_: Any) -> None:
        self.number, self._on_close = first_number, on_close

    def run(
        self,
        jobs: Sequence[SampleJob],
        make_worker: PluginWorker,
        on_result: Callable[[RecordedSample], None],
    ) -> None:
        how = self.rounds[len(self.seen)]
        self.seen.append([job.index for job in jobs])
        self.settings = make_worker.settings
        assert Path(self.settings.seen).exists()
        error = KeyboardInterrupt() if how == "interrupted" else None
        name = trace_name(self.number)
        for number, job in enumerate(jobs[:2] if error else jobs):
            ids = {"index": job.index, "sample_id": job.sample.id, "digest": job.digest}
            on_result(RecordedSample(**ids, trace=name, generation=number))
        if how in ("shared", "interrupted"):
            Path(self.settings.folder, name).write_bytes(CONTENT)
        self.is_remote = how == "remote"
        if how != "lost":
            self._on_close(self, error)
        if error is not None:
            raise error

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "close":
            self.states.append(arguments[0])
            return ClosedTrace("/elsewhere", len(CONTENT), not self.is_remote)
        if method == "release":
            self.states.append("released")
            return None
        start, n = arguments
        return CONTENT[start : start + n]


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> type[FakeExecutor]:
    class Executor(FakeExecutor):
        seen: list[list[int]] = []  # noqa: RUF012
        states: list[str] = []  # noqa: RUF012

    monkeypatch.setattr(dataset_run, "RayExecutor", Executor)
    monkeypatch.setattr(dataset_run, "_CHUNK_BYTES", 1000)
    return Executor


def run(
    folder: Path, n: int = 4, on_status: Any = lambda _status: None, **changes: Any
) -> list[RecordedSample]:
    jobs = jobs_of([Sample(f"s{k}", (f"question {k}",), ("yes",)) for k in range(n)])
    job = Job(out=str(folder), **changes)
    return DatasetRun(job, folder, RayOptions(), on_status).run(jobs)


def test_a_run_continues_with_new_workers_and_only_the_missing_samples(
    tmp_path: Path, executor: type[FakeExecutor]
) -> None:
    executor.rounds = ["interrupted", "shared"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    states: list[PoolStatus] = []
    results = run(tmp_path, on_status=states.append)
    assert [state.note for state in states] == ["continuing: 2 of 4 samples are stored"]
    assert executor.seen == [[0, 1, 2, 3], [2, 3]]
    assert executor.states == ["interrupted", "finished"]
    assert [one.trace for one in results] == [trace_name(1)] * 2 + [trace_name(2)] * 2
    assert run(tmp_path) == results, "nothing is left to run"
    assert len(executor.seen) == 2


def test_a_trace_on_another_machine_is_fetched_whole(
    tmp_path: Path, executor: type[FakeExecutor]
) -> None:
    executor.rounds = ["remote"]
    run(tmp_path)
    assert (tmp_path / trace_name(1)).read_bytes() == CONTENT
    assert executor.states == ["finished", "released"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [RESULTS, trace_name(1)]


def test_samples_whose_trace_is_lost_with_its_machine_run_again(
    tmp_path: Path, executor: type[FakeExecutor]
) -> None:
    executor.rounds = ["lost", "shared"]
    results = run(tmp_path)
    assert executor.seen == [[0, 1, 2, 3]] * 2
    assert {one.trace for one in results} == {trace_name(1)}


def test_a_run_that_never_keeps_a_trace_ends(tmp_path: Path, executor: type[FakeExecutor]) -> None:
    executor.rounds = ["lost"] * 3
    with pytest.raises(FlexInspectError, match="4 samples have no trace"):
        run(tmp_path)
    assert len(executor.seen) == 3


def test_a_removed_trace_is_made_again(tmp_path: Path, executor: type[FakeExecutor]) -> None:
    executor.rounds = ["interrupted", "shared", "shared"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    run(tmp_path)
    (tmp_path / trace_name(1)).unlink()
    results = run(tmp_path)
    assert executor.seen[-1] == [0, 1]
    assert [one.trace for one in results] == [trace_name(3)] * 2 + [trace_name(2)] * 2


def test_more_samples_continue_and_other_settings_are_refused(
    tmp_path: Path, executor: type[FakeExecutor]
) -> None:
    executor.rounds = ["shared"] * 3
    run(tmp_path, 2, max_samples=2, threads=1)
    assert len(run(tmp_path, 5, max_samples=5, threads=2)) == 5
    assert executor.seen == [[0, 1], [2, 3, 4]]
    with pytest.raises(UsageError, match=r"run\.mask is \"causal\" and was \"segment-isolation\""):
        run(tmp_path, mask="causal")


def test_starting_anew_removes_traces_and_results_only(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("notes.txt", "mine.flextrace", "worker-x.flextrace")]
    gone = [tmp_path / name for name in (RESULTS, trace_name(1), trace_name(12))]
    for file in (*kept, *gone):
        file.touch()
    remove_results(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    remove_results(tmp_path / "none")


def test_traces_of_dead_workers_end_and_empty_ones_go(tmp_path: Path) -> None:
    used, empty, alive, damaged = (tmp_path / trace_name(number) for number in range(1, 5))
    sample_trace(used, generations=1, finish=False)
    TraceWriter.create(empty, {"pid": 2**30, "started_at": 1.0})._db.close()
    writer = TraceWriter.create(alive, {"pid": os.getpid(), "started_at": time.time()})
    damaged.write_bytes(b"no trace")
    end_dead_traces(tmp_path)
    with open_trace(used) as reader:
        assert (reader.state, reader.run()["reason"]) == ("failed", "The worker was lost.")
        assert len(reader.steps(0)) > 1
    assert not empty.exists()
    with open_trace(alive) as reader:
        assert reader.state == "recording"
    writer.close()
    assert damaged.read_bytes() == b"no trace"
    assert not [*tmp_path.glob("*-wal")]


def test_traces_are_listed_by_number(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        (tmp_path / trace_name(number)).touch()
    assert [file.name for file in trace_files(tmp_path)] == [trace_name(n) for n in (1, 2, 10)]
    assert trace_files(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["run.flextrace", "file"])
def test_a_file_is_no_place_for_many_traces(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=re.escape(name)):
        check_folder(tmp_path / name)
    check_folder(tmp_path / "new")
