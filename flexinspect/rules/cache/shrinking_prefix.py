"""Finds a cached prefix that loses its last keys each time that a program goes back to it."""

from __future__ import annotations

from typing import NamedTuple

from flexinspect.core.text import join_labels, plural
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Findings, Rule, finding_kinds

SHRINKS = "cache.prefix-shrinks"
_MAX_LOSS = 4
_MIN_ROWS = 2
_MAX_IDS = 1 << 16


class _Question(NamedTuple):
    """A forward of several rows behind cached keys: their number, and the ids that they are of."""

    n_cached: int
    ids: list[int | None]


class ShrinkingPrefixRule(Rule):
    """Compares how many keys are left where generations of a model continue a cached prefix.

    A program that asks several questions about one document crops its cache after each answer. If
    it crops one key too many, the prefix gets shorter by the same number each time.
    """

    name = "shrinking_prefix"
    needs = (imported.TOKENS,)
    findings = finding_kinds(SHRINKS)

    def __init__(self) -> None:
        self._questions: dict[str, list[_Question]] = {}  # by model, the last three

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; the questions of earlier ones are kept."""
        super().on_generation_start(context)
        self._model = context.generation.model

    def on_step(self, step: StepRecord) -> Findings:
        """Look at a forward that continues a cache with several rows."""
        n = step.kv_before
        if step.branch or not n or step.q_len < _MIN_ROWS or n > _MAX_IDS:
            return
        known = self._questions.setdefault(self._model, [])
        if known and n < known[-1].n_cached and not step.step:
            ids = known[-1].ids[:n]  # those that the cache still has
        else:
            ids = [self._id(pos) for pos in range(n)]
            known.clear()
        first, known_first = self._id(n), known[-1].ids[n] if known else None
        if known and None not in (first, known_first) and first == known_first:
            known.clear()  # the token that is missing is fed again
        known.append(_Question(n, [*ids, *(known[-1].ids[n:] if known else ())]))
        del known[:-3]
        lengths = [one.n_cached for one in known]
        if len(known) < 3:
            return
        loss = lengths[0] - lengths[1]
        if loss != lengths[1] - lengths[2] or not 0 < loss <= _MAX_LOSS:
            return
        known.clear()  # once is enough
        sentence = (
            f"A cached prefix gets shorter by {plural(loss, 'key')} each time that it is continued "
            f"({join_labels([str(one) for one in lengths])} keys): the last tokens of the prefix "
            "are lost, and what follows has other positions, as where the cache is cropped by the "
            "number of generated tokens although the last one was never fed."
        )
        yield self.finding(step, SHRINKS, sentence, evidence={"lengths": lengths, "loss": loss})

    def _id(self, pos: int) -> int | None:
        token = self.context.token(pos)
        return None if token is None else token.token_id
