"""Proofs of the ensemble generation, for `flexinspect prove`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.datasets import Sample
from flexinspect.records.job import Job
from flexinspect.records.step import GenerationRecord, TokenRecord
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.ensemble.capture_process import default_threads, load_samples
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner, GenerationPlan
from flexinspect_hooks.generation.decoding import generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.loading.model_loader import LoadedModel, load
from flexinspect_hooks.loading.model_loader import OnLoadProgress as LoadReport
from flexinspect_hooks.proofs.cache_check import check_cache
from flexinspect_hooks.proofs.isolation import check_isolation
from flexinspect_hooks.proofs.kernel_weights import check_kernel
from flexinspect_hooks.proofs.proof_subject import OnProgress, Subject, config_ids
from flexinspect_hooks.proofs.segment_order import measure_swap, newest_logits, order_proof


def prove_run(
    kind: str, job: Job, *, every: int, load_report: LoadReport, report: OnProgress
) -> Iterator[Proof]:
    """Load a job's model, and yield the proof of each of its samples.

    A cache check recomputes every `every` steps. Raises `FlexInspectError` if the job cannot run.
    """
    torch.set_num_threads(job.threads or default_threads())
    samples = load_samples(job)
    loaded = load(
        model_names.resolve(job.model, load_config()),
        device=job.device,
        dtype=job.dtype,
        weights=job.weights,
        seed=job.seed,
        trust_remote_code=job.trust_remote_code,
        report=load_report,
    )
    compiled = loaded.device.startswith("cuda") if job.compile is None else job.compile
    run = _SampleProver(loaded, job, compiled=compiled, report=report)
    provers: dict[str, Callable[[Sample], Proof]] = {
        "isolation": run.isolation,
        "order": run.order,
        "kernel": run.kernel,
        "cache": lambda sample: run.cache(sample, every),
    }
    for sample in samples:
        proof = provers[kind](sample)
        lines = (f"sample {sample.id}", *proof.lines) if len(samples) > 1 else proof.lines
        yield replace(proof, lines=lines, facts={"sample": sample.id, **proof.facts})


class _SampleProver:
    """Proves samples of a job on one loaded model."""

    def __init__(
        self, loaded: LoadedModel, job: Job, *, compiled: bool, report: OnProgress
    ) -> None:
        self._model, self._device = loaded.model, torch.device(loaded.device)
        self._job, self._compiled, self._report = job, compiled, report
        self._ensemble = EnsembleRunner(loaded, job, compiled=compiled)

    def isolation(self, sample: Sample) -> Proof:
        """Change each segment of a sample, prompt and decode steps alike."""
        with self._subject(sample) as subject:
            return check_isolation(subject, seed=self._job.seed, report=self._report)

    def kernel(self, sample: Sample) -> Proof:
        """Call every kernel of the prompt and of some decode steps again."""
        with self._subject(sample) as subject:
            return check_kernel(subject, steps=1 + self._job.max_new_tokens, report=self._report)

    def cache(self, sample: Sample, every: int) -> Proof:
        """Recompute a generation every so many steps."""

        def recompute(ids: Tensor, others: dict[str, Any]) -> None:
            self._model(input_ids=ids, use_cache=False, **others)

        with self._patched_plan(sample) as plan:
            prompt = torch.tensor([plan.prompt.ids], device=self._device)
            subject = self._make_subject(plan, prompt, [])
            # One token more than there are steps: the last one is not an input.
            n_tokens = self._job.max_new_tokens + 1
            return check_cache(
                subject,
                lambda ids: generate(self._model, plan.prompt, max_new_tokens=n_tokens),
                recompute,
                every=every,
                report=self._report,
            )

    def order(self, sample: Sample) -> Proof:
        """Swap each pair of paraphrases of a sample."""
        if len(sample.paraphrases) < 2:
            raise UsageError("Order needs at least two paraphrases: use --prompt twice.")
        before = self._next_token_logits(sample)
        pairs = list(combinations(range(len(sample.paraphrases)), 2))
        swaps = []
        for number, (one, other) in enumerate(pairs):
            names = (f"paraphrase {one + 1}", f"paraphrase {other + 1}")
            self._report(f"swapping {names[0]} and {names[1]}", number / len(pairs))
            texts = list(sample.paraphrases)
            texts[one], texts[other] = texts[other], texts[one]
            after = self._next_token_logits(replace(sample, paraphrases=tuple(texts)))
            swaps.append(measure_swap(*names, before, after))
        return order_proof(swaps, self._job.positions, self._ensemble.vocabulary.text_of)

    # -- how a sample is run ---------------------------------------------------------------------

    def _next_token_logits(self, sample: Sample) -> Tensor:
        with self._patched_plan(sample) as plan:
            prompt = plan.prompt
            run = lambda: generate(self._model, prompt, max_new_tokens=1)  # noqa: E731
            return newest_logits(self._model, len(prompt.ids), run)

    @contextmanager
    def _patched_plan(self, sample: Sample) -> Iterator[GenerationPlan]:
        plan = self._ensemble.plan(sample)
        with FlexPatch(self._model, plan.source, compiled=self._compiled):
            yield plan

    @contextmanager
    def _subject(self, sample: Sample) -> Iterator[Subject]:
        """Patch the model with a sample's mask; the subject is the prompt and generated tokens."""
        with self._patched_plan(sample) as plan:
            n_tokens = self._job.max_new_tokens
            self._report("generating", None)
            chosen = list(generate(self._model, plan.prompt, max_new_tokens=n_tokens).token_ids)
            ids = torch.tensor([[*plan.prompt.ids, *chosen]], device=self._device)
            yield self._make_subject(plan, ids, chosen)

    def _make_subject(self, plan: GenerationPlan, ids: Tensor, generated_ids: list[int]) -> Subject:
        scene, vocabulary = RuleContext(), self._ensemble.vocabulary
        scene.start_generation(self._generation_record(plan, generated_ids))
        return Subject(
            self._model,
            ids,
            lambda changed_ids: self._run_with_cache(plan, changed_ids),
            scene,
            real=np.ones(tuple(ids.shape), np.bool_),
            special=vocabulary.special | config_ids(self._model),
            text_of=vocabulary.text_of,
        )

    def _run_with_cache(self, plan: GenerationPlan, ids: Tensor) -> None:
        """Run the prompt's ids, then the following ones one by one, with a cache."""
        from transformers import DynamicCache

        prompt, cache = plan.prompt, DynamicCache(config=self._model.config)
        n_prompt = len(prompt.ids)
        parts = [(0, n_prompt), *((pos, pos + 1) for pos in range(n_prompt, ids.shape[1]))]
        for start, stop in parts:
            if start:
                positions = [prompt.next_position(start - n_prompt)]
            else:
                positions = list(prompt.position_ids)
            self._model(
                input_ids=ids[:, start:stop],
                position_ids=torch.tensor([positions], device=self._device),
                past_key_values=cache,
                use_cache=True,
            )

    def _generation_record(
        self, plan: GenerationPlan, generated_ids: list[int]
    ) -> GenerationRecord:
        """The record of a generation with the tokens that it chose.

        The meaning of a user's mask function is unknown, so its segments count as isolated.
        """
        record = self._ensemble.record_of(0, plan)
        vocabulary, n_prompt = self._ensemble.vocabulary, len(plan.prompt.ids)
        generated = tuple(
            TokenRecord(
                pos=n_prompt + number,
                token_id=token_id,
                token=vocabulary.token_of(token_id),
                text=vocabulary.text_of(token_id),
                position_id=plan.prompt.next_position(number),
                segment=len(record.segments) - 1,
                step=number,
            )
            for number, token_id in enumerate(generated_ids)
        )
        declared = {} if "rule" in plan.declared else plan.declared
        return replace(record, tokens=(*record.tokens, *generated), declared=declared)
