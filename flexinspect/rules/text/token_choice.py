"""Checks how tokens were chosen: ties that rounding decides, and tokens that were not the best.

The trace does not say whether decoding is greedy, so this is inferred: sampling from the recorded
distributions would not have chosen the best token every time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import UNKNOWN, LogitsRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds

SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # with the implicit one
ROUNDING_ULPS = {"bfloat16": 2, "float16": 2, "float32": 8}
"""Units in the last place by which a logit changes if its sum is computed in another order."""
MAX_TIE_MARGIN = 2.0  # the largest possible tie: two units of bfloat16 for logits of 128
MIN_GREEDY_STEPS = 8
UNLIKELY_LOGPROB = math.log(1e-4)  # below it, sampling cannot have chosen the best token so often
MAX_NOT_BEST_SHARE = 0.05  # share of other tokens in a run that still counts as greedy


class _ChoiceCounts(Struct):
    """The choices of a branch."""

    n_chosen: int = 0
    n_best: int = 0
    logprob_sum: float = 0.0
    first_not_best: tuple[StepRecord, LogitsRecord] | None = None
    has_scores: bool = True


class TokenChoiceRule(Rule):
    """Compares the chosen token with the best one."""

    name = "choice"
    findings = finding_kinds("text.near-tie", "text.not-the-best")

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the counts."""
        super().on_generation_start(context)
        self._counts = defaultdict[int, _ChoiceCounts](_ChoiceCounts)

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Count the choice of a step, and report a tie."""
        logits = step.logits
        if logits is None or not logits.candidates or logits.n_nan:
            return
        if logits.chosen_rank != UNKNOWN:
            self._count_choice(step, logits)
        if logits.margin < MAX_TIE_MARGIN and logits.chosen_rank < 2 and len(logits.candidates) > 1:
            yield from self._check_tie(step, logits)

    def _count_choice(self, step: StepRecord, logits: LogitsRecord) -> None:
        run = self._counts[step.branch]
        best = logits.candidates[0]
        is_scored = best.score == best.score
        run.has_scores = run.has_scores and is_scored
        run.n_chosen += 1
        if logits.chosen_rank == 0:
            run.n_best += 1
            run.logprob_sum += best.score_logprob if is_scored else best.logprob
        elif run.first_not_best is None and logits.chosen_logprob < best.logprob:
            run.first_not_best = (step, logits)

    def _check_tie(self, step: StepRecord, logits: LogitsRecord) -> Iterator[Finding]:
        dtype = step.calls[0].dtype if step.calls else ""
        first, second = logits.candidates[:2]
        if logits.candidates[-1].logit == first.logit and len(logits.candidates) > 2:
            return  # a flat distribution, not a tie of two
        if dtype not in SIGNIFICAND_BITS or not math.isfinite(first.logit):
            return
        if first.score == first.score and first.score != first.logit:
            return  # sampled, so rounding does not decide
        unit = math.ldexp(1.0, math.frexp(first.logit)[1] - SIGNIFICAND_BITS[dtype])
        if logits.margin > ROUNDING_ULPS[dtype] * unit:
            return
        sentence = (
            f'The two best tokens of step {step.step}, "{printable(first.text)}" and '
            f'"{printable(second.text)}", are {logits.margin:.2g} apart at a logit of '
            f"{first.logit:.4g}, where {dtype} has steps of {unit:.2g}: rounding decides between "
            "them."
        )
        evidence = {"margin": logits.margin, "logit": first.logit, "unit": unit, "dtype": dtype}
        id_, at = "text.near-tie", (step.kv_after,)
        yield self.finding(step, id_, sentence, positions=at, evidence=evidence, series="tie")

    def on_generation_end(self) -> Iterator[Finding]:
        """Report the first token that was not the best in a run that seems greedy."""
        for run in self._counts.values():
            n_off = run.n_chosen - run.n_best
            is_unlikely = run.n_chosen >= MIN_GREEDY_STEPS and run.logprob_sum < UNLIKELY_LOGPROB
            is_greedy = is_unlikely and n_off <= max(1, MAX_NOT_BEST_SHARE * run.n_chosen)
            if run.first_not_best is not None and is_greedy:
                yield self._not_best_finding(*run.first_not_best, run)

    def _not_best_finding(
        self, step: StepRecord, logits: LogitsRecord, run: _ChoiceCounts
    ) -> Finding:
        best, n_off = logits.candidates[0], run.n_chosen - run.n_best
        chosen = next((t for t in step.tokens if t.token_id == logits.chosen_id), None)
        word = printable(chosen.text or chosen.token) if chosen else str(logits.chosen_id)
        sentence = (
            f'Step {step.step} chose "{word}" (rank {logits.chosen_rank}, probability '
            f'{math.exp(logits.chosen_logprob):.2g}) over the best token "{printable(best.text)}" '
            f"({math.exp(best.logprob):.2g}), while {run.n_best} of {run.n_chosen} chosen tokens "
            f"are the best: greedy decoding would not make {plural(n_off, 'other choice')}"
        )
        if not run.has_scores:
            sentence += ", unless a logits processor that was not recorded changed the scores"
        evidence = {"rank": logits.chosen_rank, "chosen": logits.chosen_id, "off": n_off}
        severity = None if run.has_scores else Severity.NOTE
        options: dict[str, Any] = {"severity": severity, "positions": (step.kv_after,)}
        id_ = "text.not-the-best"
        return self.finding(step, id_, f"{sentence}.", evidence=evidence, **options)
