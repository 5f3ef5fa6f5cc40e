"""How tokens were chosen: ties that rounding decides, and tokens that were not the best.

Whether a run is greedy is nowhere said, so it is concluded: had the tokens been drawn from the
recorded distributions, the best one would not have come out every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flexinspect.findings import Finding, Severity
from flexinspect.records import UNKNOWN, LogitsRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, printable

NEAR_TIE = "text.near-tie"
NOT_BEST = "text.not-the-best"

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Bits of a number's significand, the first included."""
STEPS_OF_ROUNDING = {"bfloat16": 2, "float16": 2, "float32": 8}
"""Units in the last place by which a logit moves when its sum is taken in another order."""
LARGEST = 2.0
"""No tie is wider than this: units of bfloat16 for logits of 128."""

GREEDY_STEPS = 8
UNLIKELY = math.log(1e-4)
"""Below it, it is no chance that the best token came out so often."""
FEW = 0.05
"""Share of tokens that may not be the best in a run that is greedy all the same."""


@dataclass(slots=True)
class _Run:
    """What was chosen in a branch."""

    n: int = 0
    n_best: int = 0
    chance: float = 0.0
    first: tuple[StepRecord, LogitsRecord] | None = None
    are_scored: bool = True


class ChoiceRule(Rule):
    """Compares the chosen token with the best one."""

    name: ClassVar[str] = "choice"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        NEAR_TIE: FindingKind(
            Severity.NOTE,
            "the two best tokens are closer than the dtype can tell apart",
            why=(
                "Another kernel, batch size or dtype may choose the other token, and from there on "
                "the texts differ: a divergence that begins here says nothing about mask or cache."
            ),
            confirm="Look at the two best tokens in the logits panel; their logits are the same.",
            fix=(
                "Nothing to mend. To compare two runs, force the same tokens on both, or compute "
                "in float32."
            ),
            query=(
                "SELECT rank, token_id, text, logit, logprob FROM candidates WHERE generation = "
                "{generation} AND branch = {branch} AND step = {step} AND rank < 2 ORDER BY rank"
            ),
        ),
        NOT_BEST: FindingKind(
            Severity.WARNING,
            "a greedy run that chose a token which was not the best",
            why=(
                "The token was chosen from something else than these logits: another row, an older "
                "tensor, or scores that a processor changed."
            ),
            confirm="Look at the rank of the chosen token in the logits panel at this step.",
            fix=(
                "In a loop of your own, take argmax of logits[:, -1] of this very forward. In "
                "generate, look for processors (repetition_penalty, min_new_tokens, bad words)."
            ),
            query=(
                "SELECT step, chosen_id, chosen_rank, chosen_logprob, margin FROM steps WHERE "
                "generation = {generation} AND branch = {branch} AND chosen_rank > 0 ORDER BY step"
            ),
        ),
    }

    def begin(self, scene: Scene) -> None:
        """Begin with nothing chosen."""
        super().begin(scene)
        self._runs: dict[int, _Run] = {}

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return a tie; what was not the best is told at the end."""
        logits = step.logits
        if logits is None or not logits.candidates or logits.n_nan:
            return ()
        if logits.chosen_rank != UNKNOWN:
            self._count(step, logits)
        if logits.margin < LARGEST and logits.chosen_rank < 2 and len(logits.candidates) > 1:
            return self._tie(step, logits)
        return ()

    def _count(self, step: StepRecord, logits: LogitsRecord) -> None:
        run = self._runs.get(step.branch)
        if run is None:
            run = self._runs[step.branch] = _Run()
        best = logits.candidates[0]
        is_scored = best.score == best.score
        run.are_scored = run.are_scored and is_scored
        run.n += 1
        if logits.chosen_rank == 0:
            run.n_best += 1
            run.chance += best.score_logprob if is_scored else best.logprob
        elif run.first is None and logits.chosen_logprob < best.logprob:
            run.first = (step, logits)

    # -- ties ------------------------------------------------------------------------------------

    def _tie(self, step: StepRecord, logits: LogitsRecord) -> Sequence[Finding]:
        dtype = step.calls[0].dtype if step.calls else ""
        first, second = logits.candidates[:2]
        if logits.candidates[-1].logit == first.logit and len(logits.candidates) > 2:
            return ()  # no tie of two: the distribution is flat
        if dtype not in BITS or not math.isfinite(first.logit):
            return ()
        if first.score == first.score and first.score != first.logit:
            return ()  # sampled, so no tie is decided by rounding
        unit = math.ldexp(1.0, math.frexp(first.logit)[1] - BITS[dtype])
        if logits.margin > STEPS_OF_ROUNDING[dtype] * unit:
            return ()
        sentence = (
            f'The two best tokens of step {step.step}, "{printable(first.text)}" and '
            f'"{printable(second.text)}", are {logits.margin:.2g} apart at a logit of '
            f"{first.logit:.4g}, where {dtype} has steps of {unit:.2g}: rounding decides between "
            "them."
        )
        evidence = {"margin": logits.margin, "logit": first.logit, "unit": unit, "dtype": dtype}
        at = (step.kv_after,)
        about: dict[str, Any] = {"positions": at, "evidence": evidence, "series": "tie"}
        return [self.finding(step, NEAR_TIE, sentence, **about)]

    # -- not the best ----------------------------------------------------------------------------

    def end(self) -> Sequence[Finding]:
        """Return the first token that was not the best in a run that is greedy by all signs."""
        found = []
        for run in self._runs.values():
            n_off = run.n - run.n_best
            is_greedy = run.n >= GREEDY_STEPS and run.chance < UNLIKELY
            if run.first is not None and is_greedy and n_off <= max(1, FEW * run.n):
                found.append(self._not_best(*run.first, run, n_off))
        return found

    def _not_best(self, step: StepRecord, logits: LogitsRecord, run: _Run, n_off: int) -> Finding:
        best = logits.candidates[0]
        chosen = next((t for t in step.tokens if t.token_id == logits.chosen_id), None)
        word = printable(chosen.text or chosen.token) if chosen else str(logits.chosen_id)
        sentence = (
            f'Step {step.step} chose "{word}" (rank {logits.chosen_rank}, probability '
            f'{math.exp(logits.chosen_logprob):.2g}) over the best token "{printable(best.text)}" '
            f"({math.exp(best.logprob):.2g}), while {run.n_best} of {run.n} tokens are the best of "
            f"theirs: {counted(n_off, 'choice')} that greedy decoding does not make"
        )
        if not run.are_scored:
            sentence += ", unless a processor that was not seen changed the scores"
        evidence = {"rank": logits.chosen_rank, "chosen": logits.chosen_id, "off": n_off}
        severity = Severity.WARNING if run.are_scored else Severity.NOTE
        about: dict[str, Any] = {"severity": severity, "positions": (step.kv_after,)}
        return self.finding(step, NOT_BEST, f"{sentence}.", evidence=evidence, **about)


RULE: type[Rule] = ChoiceRule
