"""Errors that explain why a program samples from other probabilities than those of its logits.

Probabilities that follow from the logits by a temperature and a set of the best tokens (top-k,
top-p, min-p) are right. Others may be meant, as those of several models, of a grammar, or of a
penalty: only what one known error explains in every step is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

MIN_ROWS = 3
"""Steps that must show an error."""
MIN_TOKENS = 5
"""Tokens with a probability that a row must have to be judged."""
_MIN_SPREAD = 20.0
"""The least standard deviation of the log-probabilities, as a multiple of the tolerance."""
_MAX_OVERLAP = 0.6
_MAX_CHANCE = 1e-3
"""How probable it may be that the sizes of other sets fit one top-p."""
_REMOVED = -1e4
"""Programs that cannot write infinity remove tokens with a score below this."""
_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
_TWICE_REST, _FLATTER = 0.02, 0.8
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class SampledRow(Struct):
    """The choice of a token in one step.

    The newest logits (vocabulary,) of the forward before it, the `values` (n,) of batch row 0 from
    which it was chosen, and the `index` among them. They are probabilities, of which one was drawn
    (`draws`), or scores, of which the highest was taken. `token` is the one that the next forward
    was given.
    """

    step: int
    logits: Tensor
    values: Tensor
    index: int
    token: int | None = None
    draws: bool = True

    @property
    def tolerance(self) -> float:
        """By how much log-probabilities may differ, in nats."""
        return _TOLERANCES.get(self.values.dtype, 3e-2)

    @property
    def is_full(self) -> bool:
        """Whether there is a value for each token of the vocabulary."""
        return len(self.values) == len(self.logits)

    @property
    def logs(self) -> Tensor:
        """The log-probabilities, or the scores, in float64 (n,)."""
        values = self.values.double()
        return values.log() if self.draws else values

    @property
    def is_kept(self) -> Tensor:
        """Which values can be chosen (n,)."""
        return self.values > 0 if self.draws else self.values > _REMOVED

    def in_order_of_tokens(self) -> SampledRow:
        """Return the row with its values by token, where they were sorted and the place mapped."""
        if not (self.draws and self.is_full) or self.token in (None, self.index):
            return self
        for descending in (True, False):
            order = self.logits.sort(descending=descending, stable=True).indices
            if int(order[self.index]) == self.token:
                values = torch.empty_like(self.values)
                values[order] = self.values
                return replace(self, values=values, index=self.token)
        return self

    def kept_tokens(self) -> Tensor:
        """Return the tokens that can be chosen; fewer values are those of the best, in order."""
        if self.is_full:
            return self.is_kept.nonzero()[:, 0]
        best = self.logits.sort(descending=True, stable=True).indices[: len(self.values)]
        return best[self.is_kept]


def explain_samples(
    rows: Sequence[SampledRow], text: set[int], prompt: Sequence[int]
) -> dict[str, Any] | None:
    """Return the error that explains the samples of a generation, as the data of an event.

    `text` are the tokens of the prompt and those that were chosen, `prompt` the first of these.
    Raises `RuntimeError` for values that are no probabilities.
    """
    tests = (_ranks, _logits_of_before, _twice, _negated, _other_set, _penalty_sign)
    for test in tests:
        found = test(rows, text)
        if found is not None:
            return {"pattern": test.__name__.strip("_").replace("_", "-"), **found}
    found = _penalty_of_newest(rows, text, prompt) if prompt else None
    return None if found is None else {"pattern": "penalty-of-newest", **found}


def _fit(values: Tensor, row: SampledRow, text: set[int]) -> float | None:
    """Return `a` if the log-probabilities are `a * values + b` wherever they are finite.

    None if they are not. Tokens of the text are left out.
    """
    places = _kept(row, text)
    slope, rest = _line(values.double()[places], row.logs[places])
    return slope if rest <= row.tolerance else None


def _can_be_judged(row: SampledRow, text: set[int]) -> bool:
    """Whether there are enough probabilities, and they differ."""
    places = _kept(row, text)
    if len(places) < MIN_TOKENS:
        return False
    return float(row.logs[places].std()) > _MIN_SPREAD * row.tolerance


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Fit a line; returns its slope, and the largest difference relative to the range of y."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x.square().sum())
    if not 0 < spread < math.inf:
        return math.nan, math.inf
    slope = float((x * y).sum() / spread)
    return slope, float((y - slope * x).abs().max() / y.abs().max())


def _kept(row: SampledRow, text: set[int]) -> Tensor:
    """Return the tokens with a probability, without those of the text."""
    is_kept = row.is_kept
    is_kept[[one for one in text if one < len(is_kept)]] = False
    return is_kept.nonzero()[:, 0]


def _ranks(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """The probabilities were sorted, and the place that was drawn was fed as a token."""
    examples = []
    for row in [one for one in rows if _can_be_judged(one, set())]:
        n, ordered = len(row.values), row.logits.sort(descending=True, stable=True)
        is_sorted = row.draws and bool((row.values.diff() <= 0).all())
        if not is_sorted or _fit(ordered.values[:n], row, set()) is None:
            return None
        token = int(ordered.indices[row.index])
        if row.token is not None and row.token != token:
            if row.token != row.index:
                return None
            examples.append((row, token))
    if len(examples) < MIN_ROWS:
        return None
    row, token = examples[0]
    facts = {"step": row.step, "rank": row.index, "meant": token, "n": len(row.values)}
    return facts | {"total": len(rows)}


def _logits_of_before(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """The probabilities are those of the logits of the step before."""
    pairs = [(a, b) for a, b in pairwise(rows) if b.step == a.step + 1 and _can_be_judged(b, text)]
    if len(pairs) < MIN_ROWS or not all(b.is_full for _, b in pairs):
        return None
    late = [_fit(before.logits, now, text) for before, now in pairs]
    now = [_fit(row.logits, row, text) for _, row in pairs]
    if None in late or any(one is not None for one in now):
        return None
    return {"step": pairs[0][1].step, "total": len(rows)}


def _twice(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """The probabilities are a softmax of a softmax."""
    if not all(row.draws and row.is_full for row in rows):
        return None
    if not all(_is_softmax_twice(row, _kept(row, set())) for row in rows):
        return None
    row = rows[0]
    best, right = float(row.values.max()), float(row.logits.double().softmax(-1).max())
    if best > _FLATTER * right:
        return None  # of a flat distribution a second softmax changes nothing
    return {"step": row.step, "total": len(rows), "best": best, "right": right}


def _is_softmax_twice(row: SampledRow, places: Tensor) -> bool:
    if len(places) < MIN_TOKENS:
        return False
    x, y = row.logits.double()[places], row.logs[places]
    _, rest_of_logits = _line(x, y)
    for temperature in _TEMPERATURES:
        slope, rest = _line((x / temperature).softmax(-1), y)
        if abs(slope - 1) < 0.02 and rest < min(_TWICE_REST, rest_of_logits / 5):
            return True
    return False


def _negated(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """The probabilities fall with the logits."""
    rows = [row for row in rows if _can_be_judged(row, text)]
    slopes = [_fit(row.logits, row, text) if row.is_full else None for row in rows]
    if len(rows) < MIN_ROWS or not all(slope is not None and slope < 0 for slope in slopes):
        return None
    return {"step": rows[0].step, "total": len(rows)}


def _other_set(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """As many tokens are kept as top-p or top-k keeps, but other ones."""
    rows = [row for row in rows if row.draws and _can_be_judged(row, text)]
    if len(rows) < MIN_ROWS:
        return None
    places = [_kept(row, set()) for row in rows]
    slopes = [_fit(row.logits, row, text) if row.is_full else None for row in rows]
    overlaps = []
    for row, kept, slope in zip(rows, places, slopes, strict=True):
        if slope is None or slope <= 0 or len(kept) == len(row.logits):
            return None
        best = row.logits.topk(len(kept)).indices
        overlaps.append(float(torch.isin(kept, best).float().mean()))
    if max(overlaps) > _MAX_OVERLAP:
        return None
    common = {"step": rows[0].step, "total": len(rows), "kept": len(places[0])}
    common["n_best"] = round(overlaps[0] * len(places[0]))
    sizes = {len(one) for one in places}
    are_equal = any(torch.equal(a, b) for a, b in pairwise(places))
    if len(sizes) == 1 and not are_equal:
        return common | {"top_k": sizes.pop()}
    for factors in (slopes, [1.0] * len(rows)):
        masses = [_masses(*one) for one in zip(rows, places, factors, strict=True)]
        low, high = max(low for low, _ in masses), min(high for _, high in masses)
        widths = sorted(high - low for low, high in masses)
        if low < high and math.prod(widths[:-1]) <= _MAX_CHANCE:
            return common | {"top_p": (low + high) / 2}
    return None


def _penalty_sign(rows: Sequence[SampledRow], text: set[int]) -> dict[str, Any] | None:
    """Scores of tokens of the text are scaled by one factor, whatever their sign."""
    return _scaled_by_one_factor(rows, text) or _scaled_by_one_factor(rows, text, of_logs=True)


def _scaled_by_one_factor(
    rows: Sequence[SampledRow], text: set[int], *, of_logs: bool = False
) -> dict[str, Any] | None:
    """Return the factor; with `of_logs` that of the log-probabilities, which are all negative."""
    found = [one for row in rows if (one := _scaled(row, text, of_logs=of_logs)) is not None]
    if len(found) < MIN_ROWS or not all(one.ratios.numel() >= MIN_ROWS for one in found):
        return None
    factor = float(found[0].ratios.median())
    is_same = all(bool(((one.ratios / factor - 1).abs() < 0.01).all()) for one in found)
    n_negative = [int((one.logits < 0).sum()) for one in found]
    if not is_same or abs(factor - 1) < 0.02 or min(n_negative) < 2:
        return None
    n_positive = [len(one.logits) - n for one, n in zip(found, n_negative, strict=True)]
    if factor > 1 and min(n_positive) < 2:
        return None  # a penalty multiplies negative scores
    facts = {"step": found[0].step, "total": len(rows), "factor": factor}
    counts = {"n_negative": n_negative[0], "n_positive": n_positive[0]}
    return facts | counts | ({"of_logs": True} if of_logs else {})


def _penalty_of_newest(
    rows: Sequence[SampledRow], text: set[int], prompt: Sequence[int]
) -> dict[str, Any] | None:
    """A penalty that moves all tokens of the prompt moves the newest token alone afterwards."""
    found = [one for row in rows if (one := _scaled(row, text)) is not None]
    if len(found) < MIN_ROWS + 1 or found[0].step != rows[0].step:
        return None
    first, later = found[0], found[1:]
    before = {one.step: one.token for one in rows}
    is_prompt = torch.isin(first.tokens, torch.tensor(sorted(prompt)))
    n_moved = int(first.is_moved.sum())
    moved_first = set(first.tokens[first.is_moved].tolist())
    if not moved_first - {prompt[-1]} or not bool(first.is_moved[is_prompt].all()):
        return None
    n_still = n_newest = 0
    for one in later:
        moved = set(one.tokens[one.is_moved].tolist())
        if not moved <= {before.get(one.step - 1)}:
            return None
        n_newest += bool(moved)
        is_old = torch.isin(one.tokens, torch.tensor(sorted(prompt)))
        n_still += bool((is_old & ~one.is_moved).any())
    if n_still < MIN_ROWS or n_moved + n_newest < MIN_ROWS:
        return None
    return {"step": later[0].step, "total": len(rows), "moved": n_moved}


class _Scaled(Struct, frozen=True):
    """The tokens of the text that may be drawn in a step, with their logits.

    `ratios` are those of the scores to the logits, for the tokens that were moved.
    """

    step: int
    tokens: Tensor
    logits: Tensor
    ratios: Tensor
    is_moved: Tensor


def _scaled(row: SampledRow, text: set[int], *, of_logs: bool = False) -> _Scaled | None:
    """Compare the scores of tokens of the text with their logits; None if they are not known."""
    if not row.is_full or not _can_be_judged(row, text):
        return None
    places, logits = _kept(row, text), row.logits.double()
    logs = row.logs
    slope, rest = _line(logits[places], logs[places])
    if rest > row.tolerance or slope <= 0:
        return None
    shift = float((logs[places] - slope * logits[places]).mean())
    tokens = torch.tensor([one for one in sorted(text) if one < len(logits)])
    # A filter keeps the best tokens: one of the text that is missing among them was moved.
    floor = logits[places].min()
    tokens = tokens[row.is_kept[tokens] | (logits[tokens] > floor)]
    scores, own = (logs[tokens] - shift) / slope, logits[tokens]
    if of_logs:
        total = logits.logsumexp(-1)
        scores, own = scores - total, own - total
    is_moved = (scores - own).abs() > 0.02 * own.abs().clamp_min(0.1)
    is_large = own.abs() > 0.05  # of others the ratio is not known
    kept = is_moved & is_large & scores.isfinite()
    return _Scaled(row.step, tokens, own[kept], (scores / own)[kept], is_moved)


def _masses(row: SampledRow, kept: Tensor, slope: float | None) -> tuple[float, float]:
    """Return the probability of as many of the best tokens as are `kept`, less one, and of all."""
    sums = ((slope or 1.0) * row.logits.double()).softmax(-1).sort(descending=True).values.cumsum(0)
    return (float(sums[len(kept) - 2]) if len(kept) > 1 else 0.0), float(sums[len(kept) - 1])
