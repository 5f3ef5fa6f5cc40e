"""What `flexinspect lab` costs: all methods on questions of the demo, against a plain loop.

The plain loop makes the same answers with calls of `generate` only: ours for the prompt of all
paraphrases, `model.generate` for each paraphrase alone, and `model.generate` with a logits
processor that fuses the rows of the batch for each fusing method. It stores and scores nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor

from benchmarks.common import Block, Sandwich, cell, compared, machine, markdown
from flexinspect.cli import lab_output
from flexinspect.inputs import datasets
from flexinspect.inputs.samples import Sample
from flexinspect.lab.agreement import majority_vote
from flexinspect.lab.lab_result import LabResult
from flexinspect.lab.method_comparison import compare
from flexinspect.lab.result_store import ResultStore
from flexinspect.lab.sample_jobs import SampleJob, SerialExecutor, jobs_of
from flexinspect.lab.scoring import load_lemmatizer
from flexinspect.lab.settings import FLEX, FUSING, LabSettings
from flexinspect.records.job import Job
from flexinspect_hooks.generation.decoding import generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.lab.fused_decoding import fuse
from flexinspect_hooks.lab.lab_worker import LabWorker, confidences

QUESTIONS, CHUNK = 100, 5
NEW_TOKENS = 32
TARGET = 1.10

Answers = dict[str, str]


def measure() -> dict[str, Any]:
    """Return the ratio of the laboratory to the plain loop, and the time of its tables."""
    torch.set_num_threads(1)
    jobs = jobs_of(datasets.load("demo", max_samples=QUESTIONS))
    settings = LabSettings(job=Job(out="", threads=1, max_new_tokens=NEW_TOKENS), orders=0)
    worker = LabWorker(settings)
    plain = PlainLoop(worker)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.jsonl"
        with ResultStore(file, settings.compared(), LabResult) as store:
            SerialExecutor().run(jobs[:CHUNK], lambda: worker, store.append)  # does not count
            answers, blocks = _blocks(jobs, worker, plain, store)
            results = store.results
        started = time.perf_counter()
        lemmatizer = load_lemmatizer("rules")
        stored = to_builtins(settings.compared())
        comparison = compare(results, settings.methods, settings.counts, lemmatizer)
        lab_output.write_files(Path(folder), stored, results, comparison, lemmatizer, None)
        report_s = time.perf_counter() - started
    return {
        "machine": machine("cpu"),
        "questions": len(jobs),
        "equal_answers": sum(map(_is_equal, results, answers)),
        "wall": compared(blocks, "wall"),
        "cpu": compared(blocks, "cpu", "wall"),
        "lab_s": round(sum(one.case.wall for one in blocks if isinstance(one.case, Block)), 3),
        "plain_s": round(sum(one.bottom("wall") for one in blocks), 3),
        "report_s": round(report_s, 3),
        "target": TARGET,
    }


def _blocks(
    jobs: Sequence[SampleJob],
    worker: LabWorker,
    plain: PlainLoop,
    store: ResultStore[LabResult],
) -> tuple[list[Answers], list[Sandwich]]:
    """Run the questions in chunks, the laboratory between two plain loops over the same ones."""
    answers: list[Answers] = []
    blocks = []
    for start in range(0, len(jobs), CHUNK):
        chunk = jobs[start : start + CHUNK]
        samples = [job.sample for job in chunk]
        before = _timed(lambda: [*map(plain.answer, samples)])  # noqa: B023 - called at once
        case = _timed(lambda: SerialExecutor().run(chunk, lambda: worker, store.append))  # noqa: B023
        after = _timed(lambda: answers.extend(map(plain.answer, samples)))  # noqa: B023
        blocks.append(Sandwich(case, before, after))
    return answers, blocks


def _timed(work: Callable[[], object]) -> Block:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Block(time.perf_counter() - wall, time.process_time() - cpu)


def _is_equal(result: LabResult, answers: Answers) -> bool:
    """Whether the laboratory gave the answers of the plain loop by every method."""
    found = {one.method: one.text for one in result.answers}
    found["majority"] = majority_vote([one.text for one in result.alone]).text
    return found == answers


class PlainLoop:
    """The same answers by calls of `generate`."""

    def __init__(self, worker: LabWorker) -> None:
        self._model, self._ensemble = worker.model, worker.ensemble
        self._tokenizer = self._ensemble.vocabulary.tokenizer

    def answer(self, sample: Sample) -> Answers:
        """Return the answer of each method."""
        answers = {FLEX: self._flex(sample)}
        prompts = [f"{text}\nAnswer:" for text in sample.paraphrases]
        alone = [*map(self._alone, prompts)]
        weights = confidences([log_probability for _, log_probability in alone])
        for method in FUSING:
            answers[method] = self._fused(prompts, method, weights)
        return {**answers, "majority": majority_vote([text for text, _ in alone]).text}

    def _flex(self, sample: Sample) -> str:
        plan = self._ensemble.plan(sample)
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_ids": self._ensemble.eos_ids}
        with FlexPatch(self._model, plan.source):
            token_ids = generate(self._model, plan.prompt, **options).token_ids
        return self._text(token_ids)

    def _alone(self, prompt: str) -> tuple[str, float]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
        out = self._generate(inputs, **options)
        new = out.sequences[0, inputs.input_ids.shape[1] :]
        logits = torch.stack(out.logits)[:, 0].log_softmax(-1)
        return self._text(new.tolist()), float(logits[torch.arange(len(new)), new].sum())

    def _fused(self, prompts: Sequence[str], method: str, weights: Tensor) -> str:
        self._tokenizer.padding_side = "left"
        inputs = self._tokenizer([*prompts], return_tensors="pt", padding=True)

        def fused(_ids: Tensor, scores: Tensor) -> Tensor:
            return fuse(method, scores, weights).expand_as(scores)

        out = self._generate(inputs, logits_processor=[fused])
        return self._text(out[0, inputs.input_ids.shape[1] :].tolist())

    def _generate(self, inputs: Any, **options: Any) -> Any:
        kept = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return self._model.generate(**kept, max_new_tokens=NEW_TOKENS, do_sample=False, **options)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._ensemble.vocabulary.decode_generated(token_ids, one_line=True)


def table(facts: dict[str, Any]) -> str:
    """Return times and ratios as a table in Markdown."""
    n = facts["questions"]
    wall = facts["wall"]
    rows = [
        [
            f"{facts['plain_s']:.1f}",
            f"{facts['lab_s']:.1f}",
            cell(wall),
            cell(facts["cpu"]),
            f"{facts['target']:.2f}",
            f"{facts['report_s']:.1f}",
            f"{facts['equal_answers']} of {n}",
            f"{wall['rounds']} of {wall['rounds'] + wall['left_out']}",
        ]
    ]
    head = ["plain loop, s", "`lab`, s", "ratio", "CPU", "target", "tables and files, s"]
    return markdown([*head, "questions with equal answers", "blocks"], rows)
