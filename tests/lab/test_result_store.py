"""The store of results: what survives a kill, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.inputs.samples import Sample
from flexinspect.lab.result_store import ResultStore, read_results
from flexinspect.lab.sample_jobs import SampleJob, SampleResult, SerialExecutor, jobs_of

SETTINGS = {"model": "demo", "texts": {"cue": "Answer:"}, "counts": (1, 5)}


class Upper(SampleResult, frozen=True, kw_only=True, tag="upper"):
    text: str = ""


class UpperWorker:
    def run(self, job: SampleJob) -> Upper:
        text = job.sample.paraphrases[0].upper()
        return Upper(index=job.index, sample_id=job.sample.id, digest=job.digest, text=text)


def jobs(n: int = 3) -> list[SampleJob]:
    return jobs_of([Sample(f"s{k}", (f"question {k}",), ("yes",), {"x": k}) for k in range(n)])


def store(file: Path, settings: dict[str, object] = SETTINGS) -> ResultStore[Upper]:
    return ResultStore(file, settings, Upper)


def test_an_interrupted_run_continues_with_the_samples_that_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "results.jsonl"
    with store(file) as first:
        SerialExecutor().run(first.remaining(jobs())[:2], UpperWorker, first.append)
    with store(file) as second:
        assert second.finished() == {0, 1}
        assert [job.index for job in second.remaining(jobs())] == [2]
        SerialExecutor().run(second.remaining(jobs()), UpperWorker, second.append)
        assert [one.text for one in second.results] == ["QUESTION 0", "QUESTION 1", "QUESTION 2"]
    settings, results = read_results(file, Upper)
    assert settings["counts"] == [1, 5]
    assert len(results) == 3


def test_a_line_that_a_kill_cut_off_is_removed_and_its_sample_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with store(file) as first:
        SerialExecutor().run(jobs(), UpperWorker, first.append)
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        file.write_bytes(whole[: -cut - 1])
        with store(file) as again:
            assert again.finished() == {0, 1}
            SerialExecutor().run(again.remaining(jobs()), UpperWorker, again.append)
        assert file.read_bytes() == whole


def test_a_header_that_a_kill_cut_off_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    store(file).__exit__()
    file.write_bytes(file.read_bytes()[:20])
    with store(file) as again:
        assert again.finished() == frozenset()
    assert read_results(file, Upper)[1] == []


def test_a_failed_sample_runs_again_and_its_newest_result_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with store(file) as first:
        first.append(Upper(index=0, sample_id="s0", error="out of memory"))
        assert first.finished() == frozenset()
        SerialExecutor().run(first.remaining(jobs(1)), UpperWorker, first.append)
    assert [one.text for one in read_results(file, Upper)[1]] == ["QUESTION 0"]


def test_other_settings_are_refused_by_name_and_leave_the_file_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with store(file) as first:
        SerialExecutor().run(jobs(), UpperWorker, first.append)
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r'texts.cue is "In a sentence:" and was "Answer:"'):
        store(file, {**SETTINGS, "texts": {"cue": "In a sentence:"}})
    assert file.read_bytes() == before


def test_settings_of_a_run_without_a_result_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    store(file).__exit__()
    with store(file, {**SETTINGS, "model": "other"}) as again:
        SerialExecutor().run(jobs(1), UpperWorker, again.append)
    settings, results = read_results(file, Upper)
    assert (settings["model"], len(results)) == ("other", 1)


def test_results_of_another_command_are_refused(tmp_path: Path) -> None:
    class Lower(SampleResult, frozen=True, kw_only=True, tag="lower"):
        text: str = ""

    file = tmp_path / "results.jsonl"
    with store(file) as first:
        SerialExecutor().run(jobs(1), UpperWorker, first.append)
    with pytest.raises(UsageError, match="has results of another command"):
        ResultStore(file, {"run": {}}, Lower)
    with pytest.raises(UsageError, match="has results of another command"):
        read_results(file, Lower)


def test_a_dataset_that_has_changed_is_refused(tmp_path: Path) -> None:
    with store(tmp_path / "results.jsonl") as first:
        SerialExecutor().run(jobs(), UpperWorker, first.append)
        changed = jobs_of([Sample("s0", ("another question",))])
        with pytest.raises(UsageError, match="dataset has changed"):
            first.remaining(changed)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with store(file), pytest.raises(UsageError, match="Another run"):
        store(file)
    with store(file):
        pass


@pytest.mark.parametrize("content", [b"hello\n", b"no line", b"[1]\n", b'{"format": "other"}\n'])
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="no file of results"):
        store(file)
    assert file.read_bytes() == content


def test_jobs_and_results_can_be_pickled_and_jobs_hold_texts_only() -> None:
    job = jobs(1)[0]
    assert pickle.loads(pickle.dumps(job)) == job
    assert job.sample.meta == {}
    result = UpperWorker().run(job)
    assert pickle.loads(pickle.dumps(result)) == result


def test_without_a_job_no_worker_is_made() -> None:
    def fail() -> UpperWorker:
        raise AssertionError

    SerialExecutor().run([], fail, lambda _result: None)
