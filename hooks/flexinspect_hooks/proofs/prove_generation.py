"""Proofs of the ensemble generation, for `flexinspect prove`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.hub_download import OnLoadProgress as LoadReport
from flexinspect.inputs.job_samples import load_samples
from flexinspect.inputs.samples import Sample
from flexinspect.records.job import Job
from flexinspect.records.step import GenerationRecord
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.ensemble import capture_process
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner, GenerationPlan
from flexinspect_hooks.generation.decoding import generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.loading.model_loader import LoadedModel
from flexinspect_hooks.loading.tokenizers import token_record
from flexinspect_hooks.proofs.cache_check import check_cache
from flexinspect_hooks.proofs.isolation import check_isolation
from flexinspect_hooks.proofs.kernel_weights import check_kernel
from flexinspect_hooks.proofs.proof_subject import OnProgress, RunIds, Subject, config_ids
from flexinspect_hooks.proofs.segment_order import newest_logits, prove_order


def prove_run(
    kind: str, job: Job, *, every: int, load_report: LoadReport, report: OnProgress
) -> Iterator[Proof]:
    """Load a job's model, and yield the proof of each of its samples.

    A cache check recomputes every `every` steps. Raises `FlexInspectError` if the job cannot run.
    """
    torch.set_num_threads(job.threads or capture_process.default_threads())
    samples = load_samples(job)
    source = model_names.resolve(job.model, load_config())
    loaded = capture_process.load_model(job, source, load_report)
    run = _SampleProver(loaded, job, report)
    for sample in samples:
        proof = run.prove(kind, sample, every)
        lines = (f"sample {sample.id}", *proof.lines) if len(samples) > 1 else proof.lines
        yield replace(proof, lines=lines, facts={"sample": sample.id, **proof.facts})


class _SampleProver:
    """Proves samples of a job on one loaded model."""

    def __init__(self, loaded: LoadedModel, job: Job, report: OnProgress) -> None:
        self._model, self._device = loaded.model, torch.device(loaded.device)
        self._job, self._report = job, report
        self._compiled = capture_process.is_compiled(job, loaded.device)
        self._ensemble = EnsembleRunner(loaded, job, compiled=self._compiled)

    def prove(self, kind: str, sample: Sample, every: int) -> Proof:
        """Prove a property of a sample's generation."""
        if kind == "order":
            return self._order(sample)
        with self._patched_plan(sample) as plan:
            if kind == "cache":
                return self._cache(plan, every)
            self._report("generating", None)
            chosen = generate(self._model, plan.prompt, max_new_tokens=self._job.max_new_tokens)
            subject = self._subject(
                plan, chosen.token_ids, lambda ids: self._run_with_cache(plan, ids)
            )
            if kind == "isolation":
                return check_isolation(subject, seed=self._job.seed)
            return check_kernel(subject, steps=1 + self._job.max_new_tokens)

    def _cache(self, plan: GenerationPlan, every: int) -> Proof:
        """Recompute a generation every so many steps."""
        # One token more than there are steps: the last one is not an input.
        n_tokens = self._job.max_new_tokens + 1

        def recompute(ids: Tensor) -> None:
            positions = self._position_ids(plan, ids.shape[1])
            self._model(input_ids=ids, position_ids=positions, use_cache=False)

        subject = self._subject(
            plan, (), lambda _: generate(self._model, plan.prompt, max_new_tokens=n_tokens)
        )
        return check_cache(subject, every=every, recompute=recompute)

    def _order(self, sample: Sample) -> Proof:
        """Swap each pair of paraphrases of a sample."""
        if len(sample.paraphrases) < 2:
            raise UsageError("Order needs at least two paraphrases: use --prompt twice.")
        swapped = []
        for one, other in combinations(range(len(sample.paraphrases)), 2):
            texts = list(sample.paraphrases)
            texts[one], texts[other] = texts[other], texts[one]
            changed = replace(sample, paraphrases=tuple(texts))
            swapped.append((f"paraphrase {one + 1}", f"paraphrase {other + 1}", changed))

        def next_token_logits(one: Sample) -> Tensor:
            with self._patched_plan(one) as plan:
                run = partial(generate, self._model, plan.prompt, max_new_tokens=1)
                return newest_logits(self._model, len(plan.prompt.ids), run)

        text_of, positions = self._ensemble.vocabulary.text_of, self._job.positions
        return prove_order(next_token_logits, sample, swapped, positions, text_of, self._report)

    # -- how a sample is run ---------------------------------------------------------------------

    @contextmanager
    def _patched_plan(self, sample: Sample) -> Iterator[GenerationPlan]:
        plan = self._ensemble.plan(sample)
        with FlexPatch(self._model, plan.source, compiled=self._compiled):
            yield plan

    def _subject(self, plan: GenerationPlan, generated: Sequence[int], run: RunIds) -> Subject:
        """The prompt and generated tokens; the model has the sample's mask."""
        context, vocabulary = RuleContext(), self._ensemble.vocabulary
        context.start_generation(self._generation_record(plan, generated))
        ids = torch.tensor([[*plan.prompt.ids, *generated]], device=self._device)
        return Subject(
            self._model,
            ids,
            context,
            real=np.ones(tuple(ids.shape), np.bool_),
            special=vocabulary.special | config_ids(self._model),
            text_of=vocabulary.text_of,
            run=run,
            report=self._report,
        )

    def _run_with_cache(self, plan: GenerationPlan, ids: Tensor) -> None:
        """Run the prompt's ids, then the following ones one by one, with a cache."""
        from transformers import DynamicCache

        positions = self._position_ids(plan, ids.shape[1])
        cache = DynamicCache(config=self._model.config)
        starts = [0, *range(len(plan.prompt.ids), ids.shape[1]), ids.shape[1]]
        for start, stop in pairwise(starts):
            self._model(
                input_ids=ids[:, start:stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )

    def _position_ids(self, plan: GenerationPlan, n_rows: int) -> Tensor:
        """The position ids (1, rows) of the prompt and of what follows it."""
        prompt = plan.prompt
        following = (prompt.next_position(n) for n in range(n_rows - len(prompt.ids)))
        return torch.tensor([[*prompt.position_ids, *following]], device=self._device)

    def _generation_record(
        self, plan: GenerationPlan, generated_ids: Sequence[int]
    ) -> GenerationRecord:
        """The record of a generation with the tokens that it chose.

        The meaning of a user's mask function is unknown, so its segments count as isolated.
        """
        record = self._ensemble.record_of(0, plan)
        vocabulary, segment = self._ensemble.vocabulary, len(record.segments) - 1
        tokens = list(record.tokens)
        for step, token_id in enumerate(generated_ids):
            text, position_id = vocabulary.text_of(token_id), plan.prompt.next_position(step)
            tokens.append(
                token_record(vocabulary, len(tokens), token_id, text, position_id, segment, step)
            )
        declared = {} if "mask_mod" in plan.declared else plan.declared
        return replace(record, tokens=tuple(tokens), declared=declared)
