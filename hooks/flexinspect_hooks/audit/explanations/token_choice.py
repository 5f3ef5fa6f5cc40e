"""Finds by which rule a program chose its tokens, where it is not the best token of each step.

The logits of each step and the token that was fed next are known. A loop of one's own may take the
logits of another row or of the step before, the k-th best token, or samples of a wrong set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence, AuditedStep
from flexinspect_hooks.audit.evidence.row_comparison import RowComparison
from flexinspect_hooks.audit.forward.forward_run import LOGITS, Point, Run
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

MIN_CHOICES = 4
"""Choices that a rule about all of them needs."""
_MIN_SAMPLES = 12
_ROWS_BEFORE = 4
_MIN_ROW_RANK = 3
"""A token that is almost the best one may be meant, as in branches from one prompt."""
_FAR_RANK = 8
_CROSSED_SHARE = 0.6
"""Of the tokens that are far from the best in their row, so many must be good in another one."""
MAX_PROPOSED = 16
"""Rows of a decode step that may be proposals."""
_PROPOSING_SHARE = 0.6
_IMPROBABLE = 0.01
"""How often a sample, of all choices of a sequence, may look as improbable as a kept proposal."""
_FAIR_ODDS = 0.3
"""A proposal with this part of the best token's probability is kept by any rule that samples."""
_BY_CHANCE = 1e-3
"""Choices that samples give with this probability, or a larger one, follow no certain rule."""
_RARE_SHARE = 4
"""Chosen tokens are rare if all are in the last part of the ranks, of so many parts."""


class ChosenToken(Struct, frozen=True):
    """A step, the position and logits (vocabulary,) of a row of it, and the token fed next."""

    generation: int
    step: int
    position: int
    logits: Tensor
    token: int

    @property
    def best(self) -> int:
        """The most probable token."""
        return int(self.logits.argmax())

    @property
    def rank(self) -> int:
        """How many tokens have larger logits than the one that was fed."""
        return int((self.logits > self.logits[self.token]).sum())

    @property
    def probability(self) -> float:
        """That of the token, at temperature 1."""
        return float(self._probabilities()[self.token])

    @property
    def odds(self) -> float:
        """The probability of the token, as a part of that of the best one."""
        return float((self.logits[self.token] - self.logits[self.best]).exp())

    @property
    def tail(self) -> float:
        """How probable a sample is that is no more probable than the token."""
        table = self._probabilities()
        return float(table[table <= table[self.token]].sum())

    def _probabilities(self) -> Tensor:
        logits = self.logits.double()
        return logits.masked_fill(~logits.isfinite(), -torch.inf).softmax(-1)


class ChoiceReader(Struct, frozen=True):
    """The steps of a sequence whose choices are read; `first_wrong` is the first that differs.

    Steps of earlier generations that filled its cache count as well: each crop of a cache, as after
    rejected proposals, begins a generation.

    Of batch row 0 the program's own logits count. Those of other rows, and of proposals, are the
    reference's in `clean`, as long as the numbers agree.
    """

    reference: ReferenceModel
    comparison: RowComparison
    base: Run
    clean: Mapping[Point, Tensor]
    first_wrong: int | None

    def facts(self) -> dict[str, Any] | None:
        """Return the rule by which tokens were fed as the data of an event, None if none is known.

        None as well if all tokens are the best ones of their steps.
        """
        if found := self._repeated_input():
            return found
        choices = self.choices()
        wrong = [one for one in choices if one.rank]
        if not wrong:
            return None
        first = choices[0]
        if wrong == [first] and first.position + 1 == self.comparison.sequence.n_prompt:
            return self._first_choice(first)
        if found := self._last_rows(choices, wrong) or self._proposals(choices, wrong):
            return found
        ids = self.comparison.sequence.ids
        texts = {one.step: set(ids[: one.position + 1]) for one in choices}
        found = rule_of(choices, texts)
        return _counted(choices, wrong) | found if found else None

    def choices(self) -> list[ChosenToken]:
        """Return the choices of all steps that are judged; of proposals those that were kept."""
        sequence, found = self.comparison.sequence, list[ChosenToken]()
        steps, proposes = sequence.steps, _proposes(sequence)
        for step, following in pairwise(steps):
            is_input = following.evidence.q_len > 1 and following.evidence.kv_before > 0
            place = following.evidence.generation, following.evidence.step
            if (is_input or place in sequence.crops) and not proposes:
                continue  # a further turn, or a chunk of the prompt; or keys were evicted
            is_input = step is steps[0] or not proposes
            first = int(step.positions[-1]) if is_input else int(step.positions[0])
            for position in range(first, int(following.positions[0])):
                logits = self._logits(step, position)
                if logits is None or position + 1 >= len(sequence.ids):
                    continue
                place = step.evidence.generation, step.evidence.step
                choice = ChosenToken(*place, position, logits, sequence.ids[position + 1])
                if choice.token < len(logits) and bool(logits.isfinite().any()):
                    found.append(choice)
        return found

    def _logits(self, step: AuditedStep, position: int) -> Tensor | None:
        evidence, last = step.evidence, int(step.positions[-1])
        kept = evidence.values.get((LOGITS, None))
        is_newest = int(step.kept[-1]) == evidence.q_len - 1 or evidence.q_len == 1
        if evidence.logit_ids is not None:
            return None
        if kept is not None and not step.row and is_newest and position == last:
            return kept[0, -1].float().cpu()
        rows = list(self.comparison.logit_rows)
        is_right = self.first_wrong is None or evidence.step < self.first_wrong
        is_right |= evidence.generation < self.comparison.generation
        if not is_right or position not in rows or (LOGITS, None) not in self.clean:
            return None
        return self.clean[LOGITS, None][0, rows.index(position)].float().cpu()

    # -- single steps ------------------------------------------------------------------------------

    def _repeated_input(self) -> dict[str, Any] | None:
        """Find forwards that begin with tokens that end the cached text, so that it has them twice.

        A single token may be the same by chance. A text that repeats itself goes on with the token
        that the step before chose.
        """
        ids, found = self.comparison.sequence.ids, list[tuple[int, int]]()
        before: AuditedStep | None = None
        for step in self.comparison.steps:
            first, n = int(step.positions[0]), len(step.positions)
            chosen = None if before is None else self._logits(before, first - 1)
            before = step
            if chosen is not None and int(chosen.argmax()) == ids[first]:
                continue
            if step.evidence.q_len < 2 or not step.evidence.kv_before or not first:
                continue
            overlap = next(
                (
                    k
                    for k in range(min(n, first), 0, -1)
                    if ids[first : first + k] == ids[first - k : first]
                ),
                0,
            )
            if overlap:
                found.append((step.evidence.step, overlap))
        if not found:
            return None
        sizes = [overlap for _, overlap in found]
        pattern = "again" if max(sizes) > 1 or len(found) > 1 else "maybe-again"
        return {"pattern": pattern, "tokens": max(sizes), "total": len(found)} | {
            "wrong": [step for step, _ in found]
        }

    def _first_choice(self, choice: ChosenToken) -> dict[str, Any] | None:
        """Return why the first token alone is not the best one: of which row it is."""
        sequence = self.comparison.sequence
        known = _counted([choice], [choice])
        maybe = "maybe-" if choice.rank < _MIN_ROW_RANK else ""
        if n := self._padding_after(choice):
            return known | {"pattern": f"{maybe}padding", "columns": n, "row": choice.position}
        following = self.comparison.steps[1:2]
        is_cached = bool(following) and bool(following[0].evidence.kv_before)
        if choice.token == sequence.ids[choice.position] and is_cached:
            return known | {"pattern": f"{maybe}again", "tokens": 1, "total": 1}
        if choice.rank < _MIN_ROW_RANK:
            return None
        rows = [row for row in range(choice.position - _ROWS_BEFORE, choice.position) if row >= 0]
        base = self.base
        run = replace(base, positions=base.positions.clone(), values={}, routes={})
        logits = self.reference.run(sequence.ids, run, rows)[LOGITS, None][0]
        for row, table in zip(reversed(rows), reversed(list(logits)), strict=True):
            if int(table.argmax()) == choice.token:
                return known | {"pattern": "row", "back": choice.position - row, "row": row}
        return None

    def _padding_after(self, choice: ChosenToken) -> int:
        """Return the columns of padding after a prompt, if the token is the best one after these.

        Any other token may be a sample. What takes the newest column does so in all batch rows.
        """
        step = self.comparison.steps[0]
        padding, best = step.evidence.padding, step.evidence.newest_best
        if padding is None or best is None or len(padding) != len(best):
            return 0
        is_padded = padding[:, -1] == 0
        if not bool(is_padded[step.row]) or int(best[step.row]) != choice.token:
            return 0
        fed = next((one.evidence.ids for one in self.comparison.steps[1:2]), None)
        if fed is not None and fed.shape == (len(best), 1):
            is_other = (fed[:, 0] != best).to(is_padded.device)
            if bool((is_padded & is_other).any()):
                return 0
        return int((padding[step.row].flip(0) != 0).long().argmax())

    def _last_rows(
        self, choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken]
    ) -> dict[str, Any] | None:
        """Find tokens that were taken from the last row of a forward whose proposals were rejected.

        The one that replaces a rejected proposal is that of the last row which was kept.
        """
        best_of_last: dict[tuple[int, int], int] = {}
        for step in self.comparison.sequence.steps[1:]:
            evidence = step.evidence
            kept = evidence.values.get((LOGITS, None))
            is_rejected = int(step.kept[-1]) < evidence.q_len - 1
            if kept is not None and is_rejected and not step.row and evidence.logit_ids is None:
                best_of_last[evidence.generation, evidence.step] = int(kept[0, -1].argmax())
        taken = [one for one in wrong if best_of_last.get((one.generation, one.step)) == one.token]
        if len(taken) < 2 or len(taken) * 2 < len(wrong):
            return None
        return _counted(choices, taken) | {"pattern": "last-row"}

    def _proposals(
        self, choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken]
    ) -> dict[str, Any] | None:
        """Find proposals that were kept although the model's best token is another one.

        Speculative sampling keeps them: what rejection sampling keeps is distributed as samples of
        the model are, and typical acceptance keeps what is probable enough. So they are certainly
        unchecked only if samples would not be as improbable. See
        https://arxiv.org/abs/2211.17192 and https://arxiv.org/abs/2401.10774.
        """
        sequence = self.comparison.sequence
        if not _proposes(sequence) or len(wrong) * 2 > len(choices):
            return None
        proposed = {
            int(place)
            for step in sequence.steps[1:]
            for place in step.positions[1:]
            if step.evidence.q_len > 1
        }
        kept = [one for one in wrong if one.position + 1 in proposed]
        if len(kept) < len(wrong):
            return None
        places = [one.position + 1 for one in kept]
        limit = _IMPROBABLE / len(choices)
        improbable = [one for one in kept if one.tail < limit and one.odds < _FAIR_ODDS]
        return _counted(choices, kept) | {
            "pattern": "proposals" if improbable else "maybe-proposals",
            "positions": places,
            "probability": min(one.probability for one in kept),
        }


def _proposes(sequence: AuditedSequence) -> bool:
    """Whether decode steps feed some rows at once, as proposals, some of which were rejected."""
    decode = [one.evidence for one in sequence.steps[1:]]
    several = [one for one in decode if 1 < one.q_len <= MAX_PROPOSED and one.kv_before]
    return bool(sequence.crops) and len(several) > max(1, _PROPOSING_SHARE * len(decode))


def rule_of(choices: Sequence[ChosenToken], texts: Mapping[int, Collection[int]]) -> dict[str, Any]:
    """Return the rule that all choices follow, empty if none is known.

    `texts` has the tokens before the choice of each step.
    """
    wrong = [one for one in choices if one.rank]
    if len(choices) < MIN_CHOICES or not wrong:
        return {}
    found = (test(choices, wrong, texts) for test in _TESTS)
    return next((one for one in found if one), {})


def _counted(choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken]) -> dict[str, Any]:
    place = {"generation": wrong[0].generation}
    return place | {"total": len(choices), "wrong": [one.step for one in wrong]}


def crossed_rows(rows: Sequence[Sequence[ChosenToken]]) -> dict[str, Any] | None:
    """Return which batch rows were fed tokens of other rows, from the choices of all rows.

    A token counts as another row's if it is the best or second best one there, and far from it in
    its own row.
    """
    by_step: dict[int, dict[int, ChosenToken]] = {}
    for row, choices in enumerate(rows):
        for one in choices:
            by_step.setdefault(one.step, {})[row] = one
    pairs, n_far = list[tuple[int, int, int]](), 0
    for step, known in by_step.items():
        for row, one in known.items():
            if one.rank < _FAR_RANK:
                continue
            n_far += 1
            others = [
                other
                for other, two in known.items()
                if other != row and _rank_of(two.logits, one.token) < 2
            ]
            pairs += [(step, row, other) for other in others[:1]]
    if len(pairs) < max(2, _CROSSED_SHARE * n_far):
        return None
    first = pairs[0][0]
    listed = [[row, other] for step, row, other in pairs if step == first]
    return {"pattern": "crossed", "pairs": listed, "total": len(by_step)} | {
        "wrong": sorted({step for step, _, _ in pairs})
    }


def _rank_of(logits: Tensor, token: int) -> int:
    return int((logits > logits[token]).sum())


# -- rules of all choices --------------------------------------------------------------------------

_Texts = Mapping[int, Collection[int]]


def _may_be_samples(choices: Sequence[ChosenToken]) -> bool:
    """Whether samples may have these ranks by chance.

    At any temperature, and from any number of best tokens, the token of rank r (from 0) has at most
    the probability 1 / (r + 1), because r tokens are as probable as it or more.
    """
    return math.prod(1 / (one.rank + 1) for one in choices) >= _BY_CHANCE


def _late(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """Each token is the best one of the step before."""
    pairs = list(pairwise(choices))
    late = [now for before, now in pairs if now.token == before.best]
    is_all = len(late) == len(pairs) and all(one in late for one in wrong if one is not choices[0])
    return {"pattern": "late"} if is_all and not _may_be_samples(wrong) else {}


def _ranked(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """Each token has the same rank, such as the second or the last one."""
    ranks = {one.rank for one in choices}
    if len(ranks) != 1:
        return {}
    rank, size = ranks.pop(), len(choices[0].logits)
    if _may_be_samples(choices):
        return {"pattern": "maybe-rank", "rank": rank}
    return {"pattern": "last" if rank == size - 1 else "rank", "rank": rank}


def _from_step(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """All tokens from some step on have the same rank, or every k-th one has."""
    ranks = {one.rank for one in wrong}
    if len(ranks) != 1 or len(wrong) < 3:
        return {}
    places = [choices.index(one) for one in wrong]
    gaps = {b - a for a, b in pairwise(places)}
    if len(gaps) != 1:
        return {}
    every = gaps.pop()
    if places[-1] + every < len(choices):
        return {}
    return {"pattern": "steps", "rank": ranks.pop(), "every": every, "first": wrong[0].step}


def _rare(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """All tokens are among the least likely ones."""
    size, lowest = len(choices[0].logits), min(one.rank for one in choices)
    if len(choices) < 2 * MIN_CHOICES or lowest < size - size // _RARE_SHARE:
        return {}
    return {"pattern": "rare", "lowest": size - lowest, "size": size}


def _repeats(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """Tokens that are in the text already are preferred, or passed over."""
    if len(wrong) < 3:
        return {}
    if all(one.token in texts[one.step] for one in wrong):
        # What prefers the text also keeps the best token where that is in the text.
        is_preferred = [
            one.best not in texts[one.step] and _best_of(one, texts[one.step]) == one.token
            for one in wrong
        ]
        if all(is_preferred) and not _may_be_samples(wrong):
            return {"pattern": "prefers-text"}
    if all(one.best in texts[one.step] for one in wrong):
        others = [one.token not in texts[one.step] for one in wrong]
        if all(others):
            return {"pattern": "avoids-text"}
    return {}


def _best_of(choice: ChosenToken, tokens: Collection[int]) -> int:
    known = [token for token in tokens if token < len(choice.logits)]
    return max(known, key=lambda token: float(choice.logits[token]))


def _banned(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """One token is never chosen, and the second best one is in its place."""
    best = {one.best for one in wrong}
    if len(best) != 1 or any(one.rank != 1 for one in wrong) or len(wrong) < 2:
        return {}
    token = best.pop()
    if any(one.token == token for one in choices):
        return {}
    return {"pattern": "banned", "token": token}


def _sampled(
    choices: Sequence[ChosenToken], wrong: Sequence[ChosenToken], texts: _Texts
) -> dict[str, Any]:
    """The tokens are samples: the temperature that explains them best, and its range."""
    if len(choices) < _MIN_SAMPLES or len(wrong) * 4 < len(choices):
        return {}
    grid = torch.linspace(-0.5, 4.0, 181, dtype=torch.float64)
    table = torch.stack([one.logits.double() for one in choices])
    table = table.masked_fill(~table.isfinite(), -1e9)
    fed = torch.tensor([one.token for one in choices])
    chosen = table.gather(1, fed[:, None])[:, 0]
    fit = torch.stack([beta * chosen.sum() - (beta * table).logsumexp(-1).sum() for beta in grid])
    near = grid[fit > fit.max() - 2]
    low, best, high = float(near[0]), float(grid[int(fit.argmax())]), float(near[-1])
    if high < 0.4 and low < 0.1:
        return {"pattern": "unrelated"}
    if low <= 0.1 or high >= 3.9:
        return {}
    return {"pattern": "temperature", "value": 1 / best, "low": 1 / high, "high": 1 / low}


_TESTS: tuple[
    Callable[[Sequence[ChosenToken], Sequence[ChosenToken], _Texts], dict[str, Any]], ...
] = (
    _late,
    _ranked,
    _from_step,
    _banned,
    _repeats,
    _rare,
    _sampled,
)
