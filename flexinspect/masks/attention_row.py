"""One row of attention in numpy, from the arrays of a trace: its weights and its LSE check.

A row is normalised with the kernel's own log-sum-exp, if it was recorded: the weights of visible
keys then sum to 1 if mask, keys and scale are those of the kernel. The distance of the sum from 1
is the LSE check. It does not notice a wrong mask on a key with hardly any weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.masks.mask_presets import Segments
from flexinspect.records.step import Array, CallRecord

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LSE_TOLERANCE = 1e-2
"""An LSE check above this is not a rounding error: half precision stays below 5e-3.

Below it, the check notices nothing: a wrongly masked key shows only if it has more than 1 % of the
row's attention.
"""

_OUTPUT_TOLERANCE = {"bfloat16": 0.12, "float16": 0.05}
"""Tolerance of the relative output error, by dtype. Eager attention rounds its scores to the dtype
of the model, so its output differs from one recomputed in float32: by up to 0.05 in bfloat16 and
0.005 in float16, measured on seven model families with large scores. A different mask gives up to 1
and more, but may give less.
"""


class LseCheck(Struct, frozen=True):
    """How far recomputed attention is from the executed one; `value` is None if it is not known.

    `kind` is "lse" (distance of the sum of weights from 1 under the kernel's own log-sum-exp) or
    "output" (relative error of the recomputed output). `dtype` is the dtype of the queries, which
    decides how much of it may be rounding (see `tolerance`).
    """

    value: float | None = None
    kind: str | None = None
    dtype: str = ""

    @property
    def is_checked(self) -> bool:
        """Whether the check has a value."""
        return self.value is not None

    @property
    def is_failed(self) -> bool:
        """Whether recomputed and executed attention differ; NaN counts as a failure."""
        return self.value is not None and not self.value <= self.tolerance

    @property
    def tolerance(self) -> float:
        """The largest value that rounding explains."""
        is_lse = self.kind != "output"
        return LSE_TOLERANCE if is_lse else _OUTPUT_TOLERANCE.get(self.dtype, LSE_TOLERANCE)

    def describe(self) -> str:
        """Return "LSE error 3e-06" or "not checked", with the tolerance if the value is coarse."""
        if self.value is None:
            return "not checked"
        is_coarse = self.value > LSE_TOLERANCE and not self.is_failed
        note = f" ({self.dtype} rounds to {self.tolerance:g})" if is_coarse else ""
        checked = "output" if self.kind == "output" else "LSE"
        value = f"{self.value:.0e}" if self.value else "0"
        return f"{checked} error {value}{note}"


UNCHECKED = LseCheck()  # the check of a row without a recorded log-sum-exp or output


def recorded_check(call: CallRecord) -> LseCheck:
    """Return the check that was made of a call during capture."""
    return LseCheck(call.lse_error, call.check_kind, call.dtype)


def worst_check(checks: Sequence[LseCheck]) -> LseCheck:
    """Return the worst check: a failed one, else one without a value, else the largest."""

    def order(check: LseCheck) -> tuple[int, float]:
        if check.value is None:
            return 1, 0.0
        value = math.inf if math.isnan(check.value) else check.value
        return (2, value) if check.is_failed else (0, value)

    return max(checks, key=order, default=UNCHECKED)


class AttentionRow(Struct, frozen=True):
    """Weights of one row over its keys, float64 (keys,), 0 where masked.

    `total` is their sum, `lse` the natural log-sum-exp of the visible scores (-inf if no key is
    visible). `lse_error` is the distance of `total` from its expected value, None without the
    kernel's own log-sum-exp, as `total` is then 1 by construction.
    """

    weights: Floats
    total: float
    lse: float
    lse_error: float | None


def kv_head_of(head: int, q_heads: int, kv_heads: int) -> int:
    """Return the key head of a query head: neighbouring query heads share one (GQA)."""
    return head // max(q_heads // max(kv_heads, 1), 1)


def row_scores(
    query: Array, keys: Array, scale: float | None, softcap: float | None = None
) -> Floats:
    """Return the scores of `query` (width,) with `keys` (keys, width), float64 (keys,).

    `scale` None means width**-0.5. A softcap c maps each score to c * tanh(score / c).
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    with np.errstate(all="ignore"):
        product = keys.astype(np.float32, copy=False) @ query.astype(np.float32, copy=False)
        scores: Floats = product.astype(np.float64) * factor
        return softcap * np.tanh(scores / softcap) if softcap else scores


def row_weights(scores: Floats, visible: Bools, lse: float | None = None) -> AttentionRow:
    """Return the softmax of `scores` (keys,) over the keys where `visible` (keys,) is True.

    With the kernel's `lse` the weights are exp(score - lse), and `lse_error` is |sum - 1|. For a
    row without visible keys (lse -inf) the sum must be 0.
    """
    with np.errstate(all="ignore"):
        masked = np.where(visible, scores, -np.inf)
        own = float(np.logaddexp.reduce(masked))
        used = own if lse is None else lse
        shift = 0.0 if used == -math.inf else used
        weights: Floats = np.where(visible, np.exp(masked - shift), 0.0)
        total = float(weights.sum())
    expected = 0.0 if used == -math.inf else 1.0
    return AttentionRow(weights, total, own, None if lse is None else abs(total - expected))


def entropy(weights: Floats) -> float:
    """Return -sum(w ln w) in nats; weights of 0 add nothing.

    Never negative, as weights whose sum exceeds 1 by a rounding error would make it.
    """
    with np.errstate(all="ignore"):
        logs = np.log(np.where(weights > 0, weights, 1.0))
        return max(float(-(weights * logs).sum()), 0.0)


def attention_by_segment(weights: Floats, segments: Segments, first_pos: int = 0) -> Floats:
    """Return the sum of the weights in each segment, float64 (segments,).

    `first_pos` is the position of key 0. The last segment also gets all keys after its end.
    """
    borders = [max(segment.start - first_pos, 0) for segment in segments]
    stops = [max(segment.stop - first_pos, 0) for segment in segments[:-1]] + [len(weights)]
    sums = [weights[start:stop].sum() for start, stop in zip(borders, stops, strict=False)]
    return np.asarray(sums, np.float64)
