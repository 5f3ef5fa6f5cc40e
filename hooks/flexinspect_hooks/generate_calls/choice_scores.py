"""How the scores by which a program chooses tokens follow from the logits of its model.

A loop of one's own divides the logits by a temperature, keeps the best tokens, lowers those of the
text, or mixes steps. Here this is read back from the numbers: the scores are a line over the logits
for most tokens, and what lies beside the line was moved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.generate_calls.sampling_errors import MIN_ROWS, MIN_TOKENS, SampledRow

_MIN_SHARE = 0.7
"""The least share of tokens on the line; the others were moved."""
_SAME = 2e-3
"""Relative difference up to which two factors are the same."""
_CLEAR = 0.3
"""A logit that is at least so many standard deviations from 0 is moved by a factor."""
_STEP = 0.05
"""Factors that a program writes down are multiples of this."""
_ALL, _MOST = 0.95, 0.5
"""Shares of the moved tokens for which one amount must hold: in all steps, and in a single one."""
_MAX_LISTED = 8
_MIN_NOISE = 1500
"""Tokens from which the form of a distribution is known."""


class Relation(Struct, frozen=True):
    """The scores of a step over its logits: `slope * logits + constant`, for the tokens `kept`.

    `scores` (n,) are those of the kept tokens, with the constant taken away, and `moved` flags
    those beside the line. Where only the best tokens were scored, `kept` are these.
    """

    row: SampledRow
    slope: float
    kept: Tensor
    scores: Tensor
    moved: Tensor

    @property
    def moved_tokens(self) -> list[int]:
        """The ids of tokens whose scores are not on the line."""
        ids: list[int] = self.kept[self.moved].tolist()
        return ids

    def better_removed(self) -> Tensor:
        """Return the tokens that are not kept although their logits are above those of others."""
        logits = self.row.logits.double()
        on_line = self.kept[~self.moved]
        is_removed = torch.ones(len(logits), dtype=torch.bool)
        is_removed[self.kept] = False
        return (is_removed & (logits > logits[on_line].min())).nonzero()[:, 0]

    def masses(self, slope: float) -> tuple[float, float, float]:
        """Return the probability of the kept tokens less the last, of all, and with the next."""
        full = slope * self.row.logits.double()
        full[self.kept] = self.scores * (slope / self.slope)
        table = full.softmax(-1)
        mass = float(table[self.kept].sum())
        last = float(table[self.kept].min())
        table[self.kept] = 0
        return mass - last, mass, mass + float(table.max())


def relate(row: SampledRow) -> Relation | None:
    """Return the relation of scores to logits, None if most scores are on no rising line."""
    kept = row.kept_tokens()
    if len(kept) < MIN_TOKENS:
        return None
    x, y = row.logits.double()[kept], row.logs[row.is_kept]
    slope = _robust_slope(x, y)
    if not math.isfinite(slope) or slope <= 0:
        return None
    rest = y - slope * x
    scores = y - rest.median()
    limit = row.tolerance * float((y.max() - y.min()).clamp_min(1.0))
    moved = (rest - rest.median()).abs() > limit
    if float(moved.double().mean()) > 1 - _MIN_SHARE:
        return None
    return Relation(row, slope, kept, scores, moved)


def _robust_slope(x: Tensor, y: Tensor) -> float:
    """Return the median slope of pairs of points of which one is high and one is low."""
    order = x.argsort()
    third = max(len(x) // 3, 1)
    low, high = order[:third], order[-third:]
    run = x[high] - x[low]
    is_apart = run > 1e-6
    if not bool(is_apart.any()):
        return math.nan
    return float(((y[high] - y[low])[is_apart] / run[is_apart]).median())


def describe_scores(rows: Sequence[SampledRow], prompt: Sequence[int]) -> dict[str, Any] | None:
    """Return how all steps get their scores, as the data of an event.

    None if they are the logits, or if that is not known. Patterns of `error` are wrong, whatever a
    program means. Raises `RuntimeError` for values that are no scores.
    """
    if len(rows) < MIN_ROWS:
        return None
    facts: dict[str, Any] = {"step": rows[0].step, "total": len(rows), "draws": rows[0].draws}
    relations = [one for row in rows if (one := relate(row)) is not None]
    if len(relations) < len(rows):
        other = _mixed(rows) or _noise(rows)
        return facts | other if other else None
    found = _factor(relations) | _kept(relations) | _moved(relations, prompt)
    return facts | found if found else None


def _factor(relations: Sequence[Relation]) -> dict[str, Any]:
    slopes = [one.slope for one in relations]
    slope = sorted(slopes)[len(slopes) // 2]
    if any(abs(one / slope - 1) > _SAME for one in slopes):
        return {"factors": [min(slopes), max(slopes)]}
    if abs(slope - 1) <= _SAME:
        return {}
    found: dict[str, Any] = {"factor": slope}
    root = math.sqrt(1 / slope)
    if _is_round(slope) and not _is_round(1 / slope):
        found["error"] = "multiplied"
    elif not _is_round(slope) and not _is_round(1 / slope) and _is_round(root):
        found["error"] = "divided-twice"
    return found


def _is_round(value: float) -> bool:
    nearest = round(value / _STEP) * _STEP
    return nearest > 0 and abs(value / nearest - 1) < _SAME / 2


# -- which tokens are kept -------------------------------------------------------------------------


def _kept(relations: Sequence[Relation]) -> dict[str, Any]:
    sizes = [len(one.kept) for one in relations]
    size = len(relations[0].row.logits)
    if min(sizes) == size:
        return {}
    masses = [one.masses(one.slope)[1] for one in relations]
    found: dict[str, Any] = {"kept": [min(sizes), max(sizes)], "size": size}
    found["mass"] = [min(masses), max(masses)]
    better = [one.better_removed() for one in relations]
    if n := max(map(len, better)):
        found["better_removed"] = n
        pairs = zip(relations, better, strict=True)
        n_several = sum(len(one) > 1 for one in better)  # a ban may remove the best one by chance
        if n_several >= MIN_ROWS and all(_are_best_removed(*pair) for pair in pairs):
            return found | {"error": "best-removed"}
        same = set.intersection(*(set(one.tolist()) for one in better))
        found["always_removed"] = sorted(same)[:_MAX_LISTED]
    elif (p := _dropped_crossing(relations)) is not None:
        found |= {"error": "crossing-dropped", "top_p": p}
    return found


def _are_best_removed(relation: Relation, better: Tensor) -> bool:
    """Whether the tokens that are removed are the best ones."""
    best = relation.row.logits.topk(len(better)).indices
    n_removed = len(relation.row.logits) - len(relation.kept)
    return 0 < len(better) == n_removed and bool(torch.isin(better, best).all())


def _dropped_crossing(relations: Sequence[Relation]) -> float | None:
    """Return p if every step keeps what stays below p, and top-p would keep one token more.

    Top-p keeps the smallest set of tokens whose probability is at least p
    (https://arxiv.org/abs/1904.09751).
    """
    several = [one for one in relations if len(one.kept) > 1]
    if len(several) < MIN_ROWS or len({len(one.kept) for one in several}) < 2:
        return None
    for slope_of in (lambda one: one.slope, lambda one: 1.0):
        masses = [one.masses(slope_of(one)) for one in several]
        without, kept, more = ([one[i] for one in masses] for i in range(3))
        if _round_between(max(without), min(kept)) is not None:
            return None  # a set that reaches some p
        if (p := _round_between(max(kept), min(more))) is not None:
            return p
    return None


def _round_between(low: float, high: float) -> float | None:
    """Return a number with two digits between these, None if there is none."""
    nearest = round((low + high) / 2, 2)
    return nearest if low - 1e-6 <= nearest <= high + 1e-6 and 0 < nearest < 1 else None


# -- which tokens are moved ------------------------------------------------------------------------


def _moved(relations: Sequence[Relation], prompt: Sequence[int]) -> dict[str, Any]:
    if not any(one.moved_tokens for one in relations):
        return {}
    texts = _texts(relations, prompt)
    sets = [(set(one.moved_tokens), text) for one, text in zip(relations, texts, strict=True)]
    found: dict[str, Any] = {"moved": max(len(moved) for moved, _ in sets)}
    if all(moved <= text.keys() for moved, text in sets):
        return found | _moved_text(relations, texts, set(prompt))
    same = set.intersection(*(moved for moved, _ in sets))
    return (
        found | {"which": "others", "tokens": sorted(same)[:_MAX_LISTED]} | _amount(relations, None)
    )


def _texts(relations: Sequence[Relation], prompt: Sequence[int]) -> list[Counter[int]]:
    """Return how often each token is in the text before each of these steps.

    Tokens of steps that were not looked at are unknown, and are left out.
    """
    texts = []
    for one in relations:
        known = [r.row.token for r in relations if r.row.step < one.row.step]
        texts.append(Counter([*prompt, *(token for token in known if token is not None)]))
    return texts


def _moved_text(
    relations: Sequence[Relation], texts: Sequence[Counter[int]], prompt: set[int]
) -> dict[str, Any]:
    """Return which tokens of the text are moved, and which that may be drawn are not."""
    newest = {b.row.step: a.row.token for a, b in pairwise(relations)}
    later = [one for one in relations[1:] if one.moved_tokens]
    still, is_prompt_still, is_new_still = 0, False, False
    for one, text in zip(relations, texts, strict=True):
        logits = one.row.logits.double()[one.kept]
        is_large = logits.abs() > _CLEAR * logits.std()  # a factor hardly moves the others
        unmoved = set(one.kept[~one.moved & is_large].tolist()) & text.keys()
        still = max(still, len(unmoved))
        is_prompt_still |= bool(unmoved & prompt)
        is_new_still |= bool(unmoved - prompt)
    which = "text"
    if still and later and all(one.moved_tokens == [newest[one.row.step]] for one in later):
        which = "newest"
    elif is_prompt_still and not is_new_still and len(relations) > MIN_ROWS:
        which = "generated"
    elif is_new_still and not is_prompt_still:
        which = "prompt"
    elif still:
        which = "some"
    return {"which": which, "still": still} | _amount(relations, texts)


def _amount(relations: Sequence[Relation], texts: Sequence[Counter[int]] | None) -> dict[str, Any]:
    """Return by how much scores are moved, or by how much in the first and in the last step."""
    if found := _how(relations, texts):
        return found
    ends = []
    for at in (slice(1), slice(-1, None)):
        found = _how(relations[at], None if texts is None else texts[at], _MOST)
        ends.append(found | {"step": relations[at][0].row.step})
    return {"first": ends[0], "last": ends[1]} if all(len(one) > 1 for one in ends) else {}


def _how(
    relations: Sequence[Relation], texts: Sequence[Counter[int]] | None, share: float = _ALL
) -> dict[str, Any]:
    """Return by which factor, difference, or difference per occurrence, the scores are moved.

    It must hold for this share of the tokens.
    """
    pairs = list(_moves(relations, texts))
    own = torch.tensor([before for before, _, _ in pairs], dtype=torch.float64)
    now = torch.tensor([after for _, after, _ in pairs], dtype=torch.float64)
    counts = torch.tensor([n for _, _, n in pairs], dtype=torch.float64)
    is_large = own.abs() > 0.05
    ratios = (now / own)[is_large]
    penalties = torch.where(own > 0, own / now, now / own)[is_large]
    candidates = {"penalty": penalties, "scaled": ratios, "added": now - own}
    candidates["added_each"] = (now - own) / counts
    for name, values in candidates.items():
        if len(values) and _share_of_median(values) > share:
            return {name: float(values.median())}
    return {}


def _moves(
    relations: Sequence[Relation], texts: Sequence[Counter[int]] | None
) -> Iterator[tuple[float, float, int]]:
    """Yield logit, score, and occurrences in the text, of each token that was moved."""
    for i, one in enumerate(relations):
        ids, logits = one.kept[one.moved], one.row.logits.double()
        scores = one.scores[one.moved] / one.slope
        for token, score in zip(ids.tolist(), scores.tolist(), strict=True):
            yield float(logits[token]), score, 1 if texts is None else max(texts[i][token], 1)


def _share_of_median(values: Tensor) -> float:
    """Return the share of values that are their median, up to 2 %."""
    middle = float(values.median())
    return float(((values / middle - 1).abs() < 0.02).double().mean()) if middle else 0.0


# -- scores that are on no line --------------------------------------------------------------------


def _mixed(rows: Sequence[SampledRow]) -> dict[str, Any] | None:
    """The scores are a sum of the logits of this step and of the scores, or logits, before."""
    pairs = [(a, b) for a, b in pairwise(rows) if b.step == a.step + 1 and a.is_full and b.is_full]
    if len(pairs) < MIN_ROWS - 1:
        return None
    sources: Mapping[str, Any] = {"logits": lambda a: a.logits.double(), "scores": lambda a: a.logs}
    for name, of in sources.items():
        weights = [_weights(b.logits.double(), of(a), b.logs, b.tolerance) for a, b in pairs]
        known = [one for one in weights if one is not None]
        if len(known) < len(pairs):
            continue
        first = known[0]
        is_same = all(abs(x - y) < 0.02 for one in known for x, y in zip(one, first, strict=True))
        if is_same and abs(first[1]) > 0.02:
            return {"mixed": name, "weights": list(first), "step": pairs[0][1].step}
    return None


def _weights(now: Tensor, before: Tensor, y: Tensor, tolerance: float) -> tuple[float, ...] | None:
    if not bool((now.isfinite() & before.isfinite() & y.isfinite()).all()):
        return None
    x = torch.stack([now, before, torch.ones_like(now)], dim=1)
    found = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    rest = (x @ found - y).abs().max() / (y - y.mean()).abs().max()
    return (float(found[0]), float(found[1])) if float(rest) <= tolerance else None


def _noise(rows: Sequence[SampledRow]) -> dict[str, Any] | None:
    """Exponential noise was added to the logits, where Gumbel noise gives samples.

    The largest of logits plus Gumbel noise, -log(-log(u)), is a sample
    (https://arxiv.org/abs/1611.01144); -log(u) has an exponential distribution, of skewness 2.
    """
    if any(not row.is_full or row.draws for row in rows):
        return None
    x = torch.stack([row.logits.double() for row in rows])
    y = torch.stack([row.logs for row in rows])
    if x.numel() < _MIN_NOISE or not bool((x.isfinite() & y.isfinite()).all()):
        return None
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    rest = (y - (x * y).sum() / x.square().sum() * x).flatten()
    rest /= rest.std()
    skewness = float(rest.pow(3).mean())
    above = -float(rest.quantile(0.01))  # nearly the mean over the standard deviation
    is_exponential = abs(above - 1) < 0.15 and 1.6 < skewness < 2.5
    return {"error": "exponential-noise"} if is_exponential else None
