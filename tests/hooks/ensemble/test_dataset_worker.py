"""The worker of a distributed run: samples become generations of its trace, wherever that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import DatasetError
from flexinspect.inputs.samples import Sample
from flexinspect.lab.dataset_run import DatasetWorkerSettings
from flexinspect.lab.ray_executor import WORKER_VARIABLE
from flexinspect.lab.sample_jobs import SampleJob
from flexinspect.records.job import Job
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.ensemble.dataset_worker import DatasetWorker

QUESTIONS = (
    Sample("france", ("What is the capital of France?", "Name France's capital."), ("Paris",)),
    Sample("long", ("What is the capital of France? " * 200,)),
    Sample("japan", ("What is the money of Japan called?",), ("yen",)),
)


def worker(folder: Path, seen: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetWorker:
    monkeypatch.setenv(WORKER_VARIABLE, "7")
    job = Job(out="", level="basic", threads=1, control=False)
    return DatasetWorker(DatasetWorkerSettings(job, str(folder), str(seen)))


def test_each_sample_is_a_generation_of_the_trace_and_a_failed_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    seen.touch()
    one = worker(tmp_path, seen, monkeypatch)
    first = one.run(SampleJob(4, QUESTIONS[0]))
    with pytest.raises(DatasetError, match="The prompt needs positions up to"):
        one.run(SampleJob(5, QUESTIONS[1]))
    last = one.run(SampleJob(6, QUESTIONS[2]))
    closed = one.close("finished")
    assert closed is not None
    assert (closed.path, closed.is_in_folder) == (str(tmp_path / "worker-7.flextrace"), True)
    with open_trace(Path(closed.path)) as reader:
        rows = reader.generations()
        assert [row.sample_id for row in rows] == ["france", "japan"]
        for result, row in zip((first, last), rows, strict=True):
            assert result.trace == "worker-7.flextrace"
            assert (result.generation, result.answer) == (row.generation, row.answer)
            assert result.n_tokens == len(reader.steps(row.generation))
        assert reader.state == "finished"
        assert reader.run()["cost"]["steps"] == first.n_tokens + last.n_tokens
    assert (first.answer, first.index, last.index) == ("Paris", 4, 6)


def test_a_trace_outside_of_the_folder_can_be_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(tmp_path / "far", tmp_path / "unseen", monkeypatch)
    one.run(SampleJob(0, QUESTIONS[0]))
    closed = one.close("interrupted")
    assert closed is not None
    assert not closed.is_in_folder
    half = closed.n_bytes // 2
    copy = tmp_path / "copy.flextrace"
    copy.write_bytes(one.read(0, half) + one.read(half, half + 1))
    with open_trace(copy) as reader:
        assert reader.state == "interrupted"
        assert [row.answer for row in reader.generations()] == ["Paris"]
    assert list(tmp_path.iterdir()) == [copy]
    one.release()
    assert not Path(closed.path).parent.exists()


def test_a_worker_without_a_sample_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(tmp_path, tmp_path, monkeypatch)
    assert one.close("finished") is None
    assert list(tmp_path.iterdir()) == []
