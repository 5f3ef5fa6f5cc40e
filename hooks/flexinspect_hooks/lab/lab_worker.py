"""The laboratory's worker: one loaded model that answers samples by every method."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec.structs import replace

from flexinspect.core.errors import (
    DatasetError,
    FlexInspectError,
    is_out_of_memory,
    summarize_error,
)
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.hub_download import OnLoadProgress
from flexinspect.inputs.samples import Sample
from flexinspect.lab.lab_result import AloneAnswer, LabResult, MethodAnswer, OrderAnswer
from flexinspect.lab.sample_jobs import SampleJob
from flexinspect.lab.settings import FLEX, FUSING, LabSettings
from flexinspect.lab.traced_samples import traced_samples
from flexinspect.records.prompt import Prompt, compose_prompt
from flexinspect_hooks.ensemble import capture_process
from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner, encode_pieces
from flexinspect_hooks.generation.decoding import Choice, StopCriteria, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.lab.fused_decoding import ForcedRule, FusedDecoder, FusingRule, FusionRule
from flexinspect_hooks.lab.sample_trace import record_sample

FlexAnswer = tuple[str, str, list[tuple[int, float]]]
"""The text, why it ended, and each token with its probability."""


class LabWorker:
    """Loads the model of the settings once, and runs all their methods on each sample.

    `report` shows the progress of loading. Raises `FlexInspectError` if the model or the mask
    cannot be used.
    """

    def __init__(self, settings: LabSettings, report: OnLoadProgress | None = None) -> None:
        self._settings, job = settings, settings.job
        torch.set_num_threads(job.threads or capture_process.default_threads())
        source = model_names.resolve(job.model, load_config())
        self._loaded = capture_process.load_model(job, source, report or (lambda _p, _d: None))
        self.model = self._loaded.model
        self._compiled = capture_process.is_compiled(job, self._loaded.device)
        self.ensemble = EnsembleRunner(self._loaded, job, compiled=self._compiled)
        self._vocabulary = self.ensemble.vocabulary
        one_line = job.stop == "newline"
        should_stop = self._vocabulary.ends_line if one_line else None
        self._criteria = StopCriteria(job.max_new_tokens, self.ensemble.eos_ids, should_stop)
        self._traced = traced_samples(settings.traces)

    def run(self, job: SampleJob) -> LabResult:
        """Answer a sample by every method; one that cannot be answered has an `error`.

        That is a prompt that is too long, or a lack of memory. Raises `FlexInspectError` for what
        would fail for other samples too.
        """
        base = LabResult(
            index=job.index,
            sample_id=job.sample.id,
            digest=job.digest,
            paraphrases=job.sample.paraphrases,
            expected=job.sample.answers,
        )
        try:
            result = self._answer(base, job.sample)
        except DatasetError as error:
            return replace(base, error=error.message)
        except Exception as error:
            reason = summarize_error(error)
            if not is_out_of_memory(reason):
                if isinstance(error, FlexInspectError):
                    raise
                what = f"Sample {job.index} ({job.sample.id}) failed: {reason}"
                raise FlexInspectError(what, hint="The samples before it are stored.") from error
            if self._loaded.device.startswith("cuda"):
                torch.cuda.empty_cache()
            return replace(base, error=reason)
        return self._with_trace(result, job) if self._traced(result) else result

    def _with_trace(self, result: LabResult, job: SampleJob) -> LabResult:
        """Run the flex answer again, recorded."""
        file = Path("traces") / f"{job.index:06d}.flextrace"
        count = self._settings.counts[-1]
        record_sample(
            Path(self._settings.folder) / file,
            self._loaded,
            self._settings.job,
            self.ensemble,
            _first(job.sample, count),
        )
        return replace(result, trace=str(file))

    # -- the answers -----------------------------------------------------------------------------

    def _answer(self, base: LabResult, sample: Sample) -> LabResult:
        settings, seconds = self._settings, dict[str, float]()
        flex: dict[int, FlexAnswer] = {}
        orders: list[OrderAnswer] = []
        if FLEX in settings.methods:
            with _timed(seconds, FLEX):
                flex = {count: self._flex(_first(sample, count)) for count in settings.counts}
            with _timed(seconds, "orders"):
                orders = self._orders(sample)
        with _timed(seconds, "own prompts"):
            alone, answers = self._own_prompts(sample, flex)
        return replace(
            base, alone=alone, answers=answers, orders=tuple(orders), seconds=_rounded(seconds)
        )

    def _flex(self, sample: Sample) -> FlexAnswer:
        """Answer all paraphrases in one prompt, under the mask."""
        plan = self.ensemble.plan(sample)
        tokens: list[tuple[int, float]] = []

        def keep(choice: Choice) -> None:
            probability = choice.logits.float().softmax(-1)[choice.token_id]
            tokens.append((choice.token_id, float(probability)))

        with FlexPatch(self.model, plan.source, compiled=self._compiled):
            result = generate(
                self.model,
                plan.prompt,
                max_new_tokens=self._criteria.max_new_tokens,
                eos_ids=self._criteria.eos_ids,
                should_stop=self._criteria.should_stop,
                on_choice=keep,
            )
        return self._text(result.token_ids), result.stop_reason, tokens

    def _orders(self, sample: Sample) -> list[OrderAnswer]:
        """Answer other orders of the paraphrases, as many as the settings say."""
        count = self._settings.counts[-1]
        first = _first(sample, count)
        seed = f"{self._settings.job.seed} {sample.id}"
        answers = []
        for order in other_orders(count, self._settings.orders, seed):
            texts = tuple(first.paraphrases[index] for index in order)
            text, _, _ = self._flex(replace(first, paraphrases=texts))
            answers.append(OrderAnswer(order, text))
        return answers

    def _own_prompts(
        self, sample: Sample, flex: dict[int, FlexAnswer]
    ) -> tuple[tuple[AloneAnswer, ...], tuple[MethodAnswer, ...]]:
        """Answer each paraphrase alone, and all of them by the fusing methods."""
        settings, counts = self._settings, self._settings.counts
        prompts = [self._own_prompt(sample, index) for index in range(counts[-1])]
        decoder = FusedDecoder(self.model, prompts, self._criteria)
        alone = [FusionRule("alone", (index,)) for index in range(counts[-1])]
        rules: list[FusingRule] = [
            ForcedRule(FLEX, range(count), tokens) for count, (_, _, tokens) in flex.items()
        ]
        plain = [name for name in FUSING if not name.startswith("weighted")]
        rules += _rules([name for name in plain if name in settings.methods], counts)
        weighted = [name for name in FUSING if name in settings.methods and name not in plain]
        decoder.decode([*alone, *rules], is_last=not weighted)
        if weighted:
            later = _rules(weighted, counts, confidences([one.log_probability for one in alone]))
            decoder.decode(later)
            rules += later
        own = tuple(
            AloneAnswer(self._text(one.token_ids), one.ended, round(one.log_probability, 6))
            for one in alone
        )
        return own, tuple(self._fused_answer(rule) for rule in rules)

    def _own_prompt(self, sample: Sample, index: int) -> Prompt:
        """The prompt of one paraphrase; its positions do not depend on the positions mode."""
        job = self._settings.job
        one = replace(sample, paraphrases=(sample.paraphrases[index],))
        pieces = encode_pieces(one, job.texts, self._vocabulary)
        prompt = compose_prompt(pieces, max_new_tokens=job.max_new_tokens)
        self.ensemble.check_length(prompt)
        return prompt

    def _fused_answer(self, rule: FusingRule) -> MethodAnswer:
        text = self._text(rule.token_ids)
        votes = rule.votes(self._vocabulary)
        return MethodAnswer(rule.method, len(rule.rows), text, rule.ended, votes)

    def _text(self, token_ids: Sequence[int]) -> str:
        one_line = self._settings.job.stop == "newline"
        return self._vocabulary.decode_generated(token_ids, one_line=one_line)


def _rules(
    methods: Sequence[str], counts: Sequence[int], weights: torch.Tensor | None = None
) -> list[FusingRule]:
    return [
        FusingRule(method, range(count), None if weights is None else weights[:count])
        for method in methods
        for count in counts
    ]


def confidences(log_probabilities: Sequence[float]) -> torch.Tensor:
    """Return the confidence of each paraphrase, (n,), up to a factor: the sum is 1.

    It is the probability that sampling at temperature 1 gives the paraphrase's own greedy answer.
    The self-ensemble project estimates it by the share of 100 sampled answers that match it.
    """
    return torch.tensor(log_probabilities, dtype=torch.float64).softmax(0).float()


def other_orders(count: int, n: int, seed: str) -> list[tuple[int, ...]]:
    """Return at most `n` orders of `count` paraphrases but the first: reversed, then random."""
    first = tuple(range(count))
    wanted = min(n, math.factorial(count) - 1)
    draw = random.Random(seed)
    orders = [first[::-1]][:wanted]
    while len(orders) < wanted:
        order = tuple(draw.sample(first, count))
        if order != first and order not in orders:
            orders.append(order)
    return orders


def _first(sample: Sample, count: int) -> Sample:
    return replace(sample, paraphrases=sample.paraphrases[:count])


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
