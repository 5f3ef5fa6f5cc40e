"""Looks for logits processors of the program that scale scores whatever their sign.

Dividing a score by a penalty above 1 makes a token less likely only if the score is positive; a
negative one becomes larger. The scores that a processor got and returned show it, so it is called
no other time.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

MIN_TOKENS = 3  # whose scores were scaled
MIN_OF_EACH_SIGN = 2
MIN_OTHERS = 8  # tokens that are not in the text, whose scores show what else the processor does
RATIOS = 0.05, 20.0  # of a new score to the one before; outside of them it was replaced
_TOLERANCE = 1e-4
_MAX_ROWS = 4


class ScaledScores(Struct, frozen=True):
    """Tokens of a row's text whose scores were scaled, by the sign of the score before.

    `factor` is the one by which the scores were multiplied, the median if they differ.
    """

    row: int
    factor: float
    n_negative: int
    n_positive: int


def scaled_whatever_sign(ids: Tensor, scores: Tensor, result: Tensor) -> ScaledScores | None:
    """Return the first batch row in which scores of tokens of the text were scaled so, else None.

    `ids` are (batch, tokens), `scores` and `result` (batch, vocabulary) before and after the
    processor. A row counts if scores of both signs were all moved towards 0, or all away from it;
    or if negative ones alone were all multiplied by the same factor below 1.
    """
    for row in range(min(len(ids), _MAX_ROWS)):
        if (found := _scaled_in_row(row, ids[row], scores[row], result[row])) is not None:
            return found
    return None


def _scaled_in_row(row: int, ids: Tensor, scores: Tensor, result: Tensor) -> ScaledScores | None:
    in_text = torch.zeros_like(scores, dtype=torch.bool)
    in_text[ids[(ids >= 0) & (ids < len(scores))]] = True
    is_finite = scores.isfinite() & result.isfinite()
    before, after = scores.double(), result.double()
    # A processor may normalise all scores too, which moves them by one number.
    rest = (after - before)[~in_text & is_finite]
    if len(rest) < MIN_OTHERS:
        return None
    shift = rest.median()
    if (rest - shift).abs().max() > _TOLERANCE * (1 + shift.abs()):
        return None  # it changes other tokens, too
    value, new = (before + shift)[in_text & is_finite], after[in_text & is_finite]
    is_changed = (new - value).abs() > _TOLERANCE * (1 + value.abs())
    value, new = value[is_changed], new[is_changed]
    if len(value) < MIN_TOKENS:
        return None
    ratios = new / value
    if not bool(((ratios > RATIOS[0]) & (ratios < RATIOS[1])).all()):
        return None
    n_negative = int((value < 0).sum())
    n_positive = len(value) - n_negative
    is_smaller, is_larger = bool((ratios < 1).all()), bool((ratios > 1).all())
    factor = float(ratios.median())
    if n_positive:
        is_wrong = min(n_negative, n_positive) >= MIN_OF_EACH_SIGN and (is_smaller or is_larger)
    else:
        is_wrong = is_smaller and bool(((ratios - factor).abs() < 10 * _TOLERANCE).all())
    return ScaledScores(row, factor, n_negative, n_positive) if is_wrong else None


class PenaltySign:
    """Looks at the first calls of one processor; `found` has facts once one is wrong."""

    def __init__(self, n_calls: int) -> None:
        self._n_calls, self._n_left = n_calls, n_calls
        self.found: dict[str, Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the next call is looked at."""
        return self._n_left > 0 and self.found is None

    def compare(self, ids: Tensor, scores: Tensor, result: Tensor) -> None:
        """Compare what a call got and returned; both are left as they are."""
        step, self._n_left = self._n_calls - self._n_left, self._n_left - 1
        is_usual = scores.dim() == 2 and result.shape == scores.shape and len(ids) == len(scores)
        if is_usual and (found := scaled_whatever_sign(ids, scores, result)) is not None:
            self.found = {
                "row": found.row,
                "factor": found.factor,
                "n_negative": found.n_negative,
                "n_positive": found.n_positive,
                "step": step,
            }
