"""The laboratory's worker on the demo model: its answers, orders, traces, and samples that fail."""

from __future__ import annotations

import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from flexinspect.core.errors import FlexInspectError, MaskError
from flexinspect.inputs import datasets
from flexinspect.inputs.samples import Sample
from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.sample_jobs import SampleJob, SerialExecutor, jobs_of
from flexinspect.lab.settings import FLEX, FUSING, LabSettings
from flexinspect.records.job import Job
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.lab.lab_worker import LabWorker, confidences, other_orders

JOB = Job(out="", threads=1, max_new_tokens=12)
SPLIT = 15
"""A question of the dataset whose second paraphrase is misread when it is alone."""


@pytest.fixture(scope="module")
def jobs() -> list[SampleJob]:
    return jobs_of(datasets.load("demo", max_samples=SPLIT + 1))


@pytest.fixture(scope="module")
def worker() -> LabWorker:
    return LabWorker(LabSettings(job=JOB, counts=(1, 3, 5), orders=3))


@pytest.fixture(scope="module")
def split(worker: LabWorker, jobs: list[SampleJob]) -> LabResult:
    return worker.run(jobs[SPLIT])


def test_every_method_answers_for_every_number_of_paraphrases(split: LabResult) -> None:
    keys = {(one.method, one.count) for one in split.answers}
    assert keys == {(method, count) for method in (FLEX, *FUSING) for count in (1, 3, 5)}
    assert [one.text for one in split.alone] == ["+965", "Kuwait City", "+965", "+965", "+965"]
    assert {one.text for one in split.answers} == {"+965"}
    assert split.sample_id == "held-out/calling_code/kuwait"
    assert (split.error, split.expected) == ("", ("+965",))


def test_an_answer_alone_is_that_of_the_library(worker: LabWorker, split: LabResult) -> None:
    model, tokenizer = worker.model, worker._loaded.tokenizer
    for text, alone in zip(split.paraphrases, split.alone, strict=True):
        inputs = tokenizer(f"{text}\nAnswer:", return_tensors="pt")
        out = model.generate(
            **inputs,
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, inputs.input_ids.shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True).strip() == alone.text
        rows = torch.stack(out.logits)[:, 0].log_softmax(-1)
        total = float(rows[torch.arange(len(new)), new].sum())
        assert alone.log_probability == pytest.approx(total, abs=1e-3)


def test_one_paraphrase_is_the_same_by_every_method(split: LabResult) -> None:
    for answer in split.answers:
        if answer.count == 1:
            assert answer.text == split.alone[0].text
            product = math.prod(vote.probability for vote in answer.tokens)
            assert product == pytest.approx(math.exp(split.alone[0].log_probability), rel=1e-3)


def test_tokens_have_the_distribution_of_each_paraphrase(split: LabResult) -> None:
    flex = next(one for one in split.answers if (one.method, one.count) == (FLEX, 5))
    first = flex.tokens[0]
    assert [vote.text for vote in flex.tokens][:2] == [" +", "965"]
    assert len(first.own) == 5
    assert first.own[1].best.strip() == "Kuwait"
    assert first.own[1].probability < first.own[1].best_probability
    assert first.own[4].probability == first.own[4].best_probability
    assert first.winner != 1


def test_orders_are_permutations_and_repeat(worker: LabWorker, split: LabResult) -> None:
    orders = [one.order for one in split.orders]
    assert orders[0] == (4, 3, 2, 1, 0)
    assert len({*orders, (0, 1, 2, 3, 4)}) == 4
    assert other_orders(3, 99, "seed") == other_orders(3, 99, "seed")
    assert len(set(other_orders(3, 99, "seed"))) == 5
    assert other_orders(1, 5, "seed") == []
    assert other_orders(5, 0, "seed") == []


def test_confidence_is_the_probability_of_the_own_answer() -> None:
    weights = confidences([math.log(0.8), math.log(0.2), math.log(0.6)])
    assert weights.tolist() == pytest.approx([0.5, 0.125, 0.375])


def test_a_prompt_that_is_too_long_is_the_error_of_its_sample_only(
    worker: LabWorker, jobs: list[SampleJob]
) -> None:
    found: list[LabResult] = []
    texts = tuple(f"{number} " * 1100 for number in range(5))
    too_long = SampleJob(1, Sample("long", texts, ("no",)))
    SerialExecutor().run([too_long, jobs[0]], lambda: worker, found.append)
    assert found[0].error.startswith("The prompt needs positions up to ")
    assert (found[1].error, found[1].answers[0].text) == ("", "Paris")


def test_a_lack_of_memory_is_the_error_of_its_sample_and_any_other_failure_ends_the_run(
    worker: LabWorker, jobs: list[SampleJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail(*_: object) -> None:
        raise failure[0]

    monkeypatch.setattr(worker, "_own_prompts", fail)
    assert worker.run(jobs[0]).error == "OutOfMemoryError: CUDA out of memory"
    failure[0] = ValueError("odd")
    with pytest.raises(FlexInspectError, match=r"Sample 0 \(held-out/capital/france\) failed: "):
        worker.run(jobs[0])


def test_a_mask_that_cannot_be_used_ends_the_run(
    tmp_path: Path, jobs: list[SampleJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_lab_mask.py").write_text("def mask(b, h, q, kv):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    settings = LabSettings(job=replace(JOB, mask="wrong_lab_mask:mask"), counts=(2,))
    with pytest.raises(MaskError, match="wrong_lab_mask"):
        LabWorker(settings).run(jobs[0])


def test_a_chosen_sample_has_a_trace_of_its_flex_answer(
    tmp_path: Path, jobs: list[SampleJob]
) -> None:
    settings = LabSettings(job=JOB, counts=(2,), orders=0, traces="0", folder=str(tmp_path))
    worker = LabWorker(settings)
    first, second = worker.run(jobs[0]), worker.run(jobs[1])
    assert (first.trace, second.trace) == ("traces/000000.flextrace", "")
    with open_trace(tmp_path / first.trace) as reader:
        assert reader.run()["state"] == "finished"
        (generation,) = reader.generations()
        assert (generation.answer, generation.sample_id) == ("Paris", jobs[0].sample.id)
        kinds = [segment.kind for segment in reader.segments(0)]
        assert kinds.count("paraphrase") == 2


def test_what_an_executor_sends_to_another_process_can_be_pickled(split: LabResult) -> None:
    make = partial(LabWorker, LabSettings(job=JOB))
    assert pickle.loads(pickle.dumps(make)).args == make.args
    assert pickle.loads(pickle.dumps(split)) == split
