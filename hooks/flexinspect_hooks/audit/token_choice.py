"""Finds by which rule a program chose its tokens, where it is not the best token of each step.

The logits of each step and the token that was fed next are known. A loop of one's own may take the
logits of another row or of the step before, the k-th best token, or samples of a wrong set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.fed_sequence import FedSequence, FedStep
from flexinspect_hooks.audit.forward_run import LOGITS, Run
from flexinspect_hooks.audit.reference_model import ReferenceModel

MIN_CHOICES = 4
"""Choices that a rule about all of them needs."""
_MIN_SAMPLES = 12
_ROWS_BEFORE = 4
_RARE_SHARE = 4
"""Chosen tokens are rare if all are in the last part of the ranks, of so many parts."""


class Choice(Struct, frozen=True):
    """A step, the position and logits (vocabulary,) of its newest row, and the token fed next."""

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


def choice_facts(
    reference: ReferenceModel, sequence: FedSequence, steps: Sequence[FedStep], base: Run
) -> dict[str, Any] | None:
    """Return the rule by which tokens were chosen as the data of an event, None if none is known.

    None as well if all tokens are the best ones, and for steps with proposals.
    """
    choices = _choices(sequence, steps)
    wrong = [one for one in choices if one.rank]
    if not wrong:
        return None
    first = choices[0]
    if wrong == [first] and first.step == steps[0].evidence.step:
        return _other_row(reference, sequence, first, base)
    texts = {one.step: set(sequence.ids[: one.position + 1]) for one in choices}
    for test in _TESTS:
        if len(choices) >= MIN_CHOICES and (found := test(choices, wrong, texts)):
            steps_of = [one.step for one in wrong]
            return {"total": len(choices), "wrong": steps_of} | found
    return None


def _choices(sequence: FedSequence, steps: Sequence[FedStep]) -> list[Choice]:
    found = []
    if any(step.evidence.q_len > 1 and step.evidence.kv_before for step in steps):
        return []
    for step, following in pairwise(steps):
        kept, last = step.evidence.values.get((LOGITS, None)), int(step.positions[-1])
        is_newest = int(step.kept[-1]) == step.evidence.q_len - 1 or step.evidence.q_len == 1
        if kept is None or step.row or step.evidence.logit_ids is not None or not is_newest:
            continue
        if following.evidence.q_len == 1 and int(following.positions[0]) == last + 1:
            logits = kept[0, -1].float().cpu()
            choice = Choice(step.evidence.step, last, logits, sequence.ids[last + 1])
            if choice.token < len(logits) and bool(logits.isfinite().any()):
                found.append(choice)
    return found


def _other_row(
    reference: ReferenceModel, sequence: FedSequence, choice: Choice, base: Run
) -> dict[str, Any] | None:
    """Return which row of the prompt the first token is the best one after."""
    rows = [row for row in range(choice.position - _ROWS_BEFORE, choice.position) if row >= 0]
    run = Run(base.positions.clone(), base.ends, base.masks, base.biases, encoder=base.encoder)
    logits = reference.run(sequence.ids, run, rows)[LOGITS, None][0]
    for row, table in zip(reversed(rows), reversed(list(logits)), strict=True):
        if int(table.argmax()) == choice.token:
            facts = {"pattern": "row", "back": choice.position - row, "row": row}
            return facts | {"total": 1, "wrong": [choice.step]}
    return None


# -- rules of all choices --------------------------------------------------------------------------

_Texts = Mapping[int, set[int]]


def _late(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
    """Each token is the best one of the step before."""
    pairs = list(pairwise(choices))
    late = [now for before, now in pairs if now.token == before.best]
    is_all = len(late) == len(pairs) and all(one in late for one in wrong if one is not choices[0])
    return {"pattern": "late"} if is_all else {}


def _ranked(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
    """Each token has the same rank, such as the second or the last one."""
    ranks = {one.rank for one in choices}
    if len(ranks) != 1:
        return {}
    rank, size = ranks.pop(), len(choices[0].logits)
    return {"pattern": "last" if rank == size - 1 else "rank", "rank": rank}


def _from_step(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
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


def _rare(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
    """All tokens are among the least likely ones."""
    size, lowest = len(choices[0].logits), min(one.rank for one in choices)
    if len(choices) < 2 * MIN_CHOICES or lowest < size - size // _RARE_SHARE:
        return {}
    return {"pattern": "rare", "lowest": size - lowest, "size": size}


def _repeats(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
    """Tokens that are in the text already are preferred, or passed over."""
    if len(wrong) < 3:
        return {}
    if all(one.token in texts[one.step] for one in wrong):
        best_in_text = [_best_of(one, texts[one.step]) == one.token for one in wrong]
        if all(best_in_text) and not all(one.best in texts[one.step] for one in wrong):
            return {"pattern": "prefers-text"}
    if all(one.best in texts[one.step] for one in wrong):
        others = [one.token not in texts[one.step] for one in wrong]
        if all(others):
            return {"pattern": "avoids-text"}
    return {}


def _best_of(choice: Choice, tokens: set[int]) -> int:
    known = [token for token in tokens if token < len(choice.logits)]
    return max(known, key=lambda token: float(choice.logits[token]))


def _banned(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
    """One token is never chosen, and the second best one is in its place."""
    best = {one.best for one in wrong}
    if len(best) != 1 or any(one.rank != 1 for one in wrong) or len(wrong) < 2:
        return {}
    token = best.pop()
    if any(one.token == token for one in choices):
        return {}
    return {"pattern": "banned", "token": token}


def _sampled(choices: Sequence[Choice], wrong: Sequence[Choice], texts: _Texts) -> dict[str, Any]:
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


_TESTS: tuple[Callable[[Sequence[Choice], Sequence[Choice], _Texts], dict[str, Any]], ...] = (
    _late,
    _ranked,
    _from_step,
    _banned,
    _repeats,
    _rare,
    _sampled,
)
