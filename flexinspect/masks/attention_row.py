"""One row of attention in numpy, from what a trace stores: its weights and the gate that proves it.

The order of things is the kernel's: scaled score, cap, mask, softmax. A row is normalised with the
log-sum-exp that the kernel gave, where there is one: the open weights then sum to 1 when the mask,
the keys and the scale are those that ran, and how far they are from 1 is the gate. It proves the
row's mass, not each key: one without weight may be hidden or shown unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.records.prompt import Segment

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LSE_TOLERANCE = 1e-2
"""A gate above this is no rounding: half precision stays below 5e-3.

The gate is blind below it: a key that is wrongly hidden or shown is seen only where it carries more
than 1 % of the row's mass.
"""

_OUTPUT_TOLERANCE = {"bfloat16": 0.12, "float16": 0.05}
"""Eager attention rounds its scores to the model's type, which an output that is recomputed in
float32 shows: up to 0.05 was measured in bfloat16 and 0.005 in float16, on seven model families
with large scores. Another mask gives up to 1 and more, but may give less.
"""


def check_tolerance(kind: str | None, dtype: str) -> float:
    """Return the gate above which what ran was something else, for sure, in that type."""
    return _OUTPUT_TOLERANCE.get(dtype, LSE_TOLERANCE) if kind == "output" else LSE_TOLERANCE


@dataclass(frozen=True, slots=True)
class LseCheck:
    """How far a picture is from what ran: `value` is None when nothing tells.

    `kind` is "lse" (distance of the row's mass from 1 under the kernel's own log-sum-exp) or
    "output" (relative error of the row's output, recomputed); `dtype` is the type of the queries,
    which says how much of it may be rounding (see `bar`).
    """

    value: float | None = None
    kind: str | None = None
    dtype: str = ""

    @property
    def is_checked(self) -> bool:
        """Whether there is a number at all."""
        return self.value is not None

    @property
    def is_failed(self) -> bool:
        """Whether the picture is not what ran; NaN proves nothing good."""
        return self.value is not None and not self.value <= self.tolerance

    @property
    def tolerance(self) -> float:
        """What is rounding at most."""
        return check_tolerance(self.kind, self.dtype)

    def describe(self) -> str:
        """Return "gate 3e-06 (lse)" or "not checked"; a coarse one says what it is allowed."""
        if self.value is None:
            return "not checked"
        coarse = (
            f", {self.dtype} rounds to {self.tolerance:g}" if self.value > LSE_TOLERANCE else ""
        )
        coarse = "" if self.is_failed else coarse
        return f"gate {self.value:.0e} ({self.kind or 'lse'}{coarse})"


UNCHECKED = LseCheck()
"""The gate of what nothing was compared with."""


def worst_check(checks: Sequence[LseCheck]) -> LseCheck:
    """Return the gate that proves least: a bad one, else one without a number, else the largest."""
    if not checks:
        return UNCHECKED
    return max(checks, key=_check_order)


def _check_order(check: LseCheck) -> tuple[int, float]:
    if check.value is None:
        return 1, 0.0
    value = math.inf if math.isnan(check.value) else check.value
    return (2, value) if check.is_failed else (0, value)


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Weights of one row over its keys, float64 (keys,), 0 where closed.

    `total` is their sum, `lse` the log-sum-exp of the open scores (natural, -inf when none is
    open). `gate` is the distance of `total` from what it must be, None when the kernel's own
    log-sum-exp was not given, so that `total` is 1 by construction.
    """

    weights: Floats
    total: float
    lse: float
    lse_error: float | None


def kv_head_of(head: int, q_heads: int, kv_heads: int) -> int:
    """Return the key head of a query head: neighbouring query heads share one (flex-facts 1)."""
    return head // max(q_heads // max(kv_heads, 1), 1)


def row_scores(
    query: npt.NDArray[Any],
    keys: npt.NDArray[Any],
    scale: float | None,
    softcap: float | None = None,
) -> Floats:
    """Return the scores of `query` (width,) with `keys` (keys, width), float64 (keys,).

    `scale` None stands for width**-0.5; a cap c makes c * tanh(score / c) of each score.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with np.errstate(all="ignore"):
        product = keys.astype(np.float32, copy=False) @ query.astype(np.float32, copy=False)
        scores: Floats = product.astype(np.float64) * factor
        return softcap * np.tanh(scores / softcap) if softcap else scores


def row_weights(scores: Floats, visible: Bools, lse: float | None = None) -> AttentionRow:
    """Return the softmax of `scores` (keys,) over the open cells of `visible` (keys,).

    With the kernel's `lse` the weights are exp(score - lse), and the gate |sum - 1|; for a row that
    saw nothing (lse -inf) the sum must be 0.
    """
    with np.errstate(all="ignore"):
        masked = np.where(visible, scores, -np.inf)
        own = _logsumexp(masked)
        used = own if lse is None else lse
        shift = 0.0 if used == -math.inf else used
        weights: Floats = np.where(visible, np.exp(masked - shift), 0.0)
        total = float(weights.sum())
    expected = 0.0 if used == -math.inf else 1.0
    return AttentionRow(weights, total, own, None if lse is None else abs(total - expected))


def _logsumexp(scores: Floats) -> float:
    top = float(scores.max(initial=-math.inf))
    if not math.isfinite(top):
        return top
    return top + math.log(float(np.exp(scores - top).sum()))


def entropy(weights: Floats) -> float:
    """Return -sum(w ln w) in nats; weights of 0 add nothing.

    Never below 0: weights that sum to a rounding error more than 1 would be.
    """
    with np.errstate(all="ignore"):
        logs = np.log(np.where(weights > 0, weights, 1.0))
        return max(float(-(weights * logs).sum()), 0.0)


def attention_by_segment(
    weights: Floats, segments: Sequence[Segment], first_pos: int = 0
) -> Floats:
    """Return the sum of the weights in each segment, float64 (segments,).

    `first_pos` is the position of key 0; the last segment takes all that lies behind it.
    """
    borders = [max(segment.start - first_pos, 0) for segment in segments]
    stops = [max(segment.stop - first_pos, 0) for segment in segments[:-1]] + [len(weights)]
    sums = [weights[start:stop].sum() for start, stop in zip(borders, stops, strict=False)]
    return np.asarray(sums, np.float64)
