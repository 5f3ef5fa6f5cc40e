"""Makes records of the logits that chose a token: top-k, entropy, margin, rank, histogram."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from flexinspect.records.step import UNKNOWN, Array, ArrayRecord, Candidate, LogitsRecord
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values

TOP_K = 10
LOGITS_ARRAY = "logits.row"
"""The stream with all logits of a step, at level extreme; branches are compared by it."""

PROCESSED_ARRAY = "logits.processed"
"""The beginning of the streams with the candidates' log-probabilities after each processor."""

BINS = 64


class LogitsRecords:
    """Reduces whole rows of logits, and takes what was reduced on a device.

    It works in scratch memory: a row of a real vocabulary is larger than the size from which malloc
    maps and unmaps memory for every temporary array, which costs more than the arithmetic.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self._scratch = np.empty(0, np.float32)

    def record(self, step: StepFacts, kept: bool, values: Values, draft: StepDraft) -> None:
        """Write the step's `LogitsRecord`."""
        if not kept:
            return
        raw = values.get("logits.all")
        row = _from_device(values) if raw is None else self._reduce_row(raw, step.token_id)
        token_id, rank, logit = step.token_id, row.rank, row.chosen
        if token_id is None:
            token_id, rank, logit = UNKNOWN, -1, math.nan
        elif "logits.chosen" in values:
            logit, rank = values["logits.chosen"].tolist()
        low, high, counts = self._histogram(row) if step.level != "basic" else (0.0, 0.0, ())
        draft.logits = LogitsRecord(
            entropy=row.entropy,
            margin=row.top[0] - row.top[1] if len(row.top) > 1 else 0.0,
            chosen_id=token_id,
            chosen_rank=int(rank),
            chosen_logprob=logit - row.lse,
            n_nan=row.n_nan,
            n_inf=row.n_inf,
            histogram_min=low,
            histogram_max=high,
            histogram=counts,
            candidates=self._candidates(row, values, step),
        )
        for number, name in enumerate(step.processors):
            if (processed := values.get(f"processed.{number}")) is not None:
                if len(processed) > len(row.ids):  # a whole row, of a CPU
                    processed = processed[row.ids] - self._reduce_row(processed, None).lse
                stream = f"{PROCESSED_ARRAY}.{number}.{name}"
                draft.arrays.append(ArrayRecord(stream, processed.astype(np.float32)))
        if LOGITS_ARRAY in values:
            draft.arrays.append(ArrayRecord(LOGITS_ARRAY, values[LOGITS_ARRAY]))

    def _candidates(
        self, row: _ReducedLogits, values: Values, step: StepFacts
    ) -> tuple[Candidate, ...]:
        scores, score_lse = row.top, row.lse
        if not step.is_scored:
            scores = [math.nan] * len(row.top)
        elif "scores.all" in values:
            scores = values["scores.all"][row.ids].tolist()
            score_lse = self._reduce_row(values["scores.all"], None).lse
        elif "scores.top" in values:
            scores, score_lse = values["scores.top"].tolist(), float(values["scores.lse"])
        return tuple(
            Candidate(rank, i, self._text_of(i), logit, logit - row.lse, score, score - score_lse)
            for rank, (i, logit, score) in enumerate(zip(row.ids, row.top, scores, strict=True))
        )

    def _reduce_row(self, row: Array, chosen: int | None) -> _ReducedLogits:
        """Reduce a float32 row (V,) in numpy.

        With p = exp(logit - max) the log-sum-exp is max + log(sum p) and the entropy in nats is
        lse - sum(p * logit) / sum p: one exponential serves both (Shannon 1948).
        """
        ids, top = _top_k(row)
        high = top[0]
        with np.errstate(invalid="ignore"):
            p = np.subtract(row, np.float32(high), out=self._scratch_of(row.size))
            np.exp(p, out=p)
            total = float(p.sum())
            weighted = float(np.dot(p, row))
            is_non_finite = not np.isfinite(weighted)
            if is_non_finite:
                weighted = float(np.nan_to_num(p * row, nan=0.0).sum())
        lse = high + math.log(total) if total > 0 else math.nan
        chosen_logit = high if chosen is None else float(row[chosen])
        is_best = chosen_logit == high
        return _ReducedLogits(
            lse=lse,
            entropy=lse - weighted / total if total > 0 else math.nan,
            top=top,
            ids=ids,
            chosen=chosen_logit,
            rank=0 if is_best else int(np.count_nonzero(row > np.float32(chosen_logit))),
            n_nan=int(np.isnan(row).sum()) if is_non_finite else 0,
            n_inf=int(np.isinf(row).sum()) if is_non_finite else 0,
            values=row,
        )

    def _histogram(self, row: _ReducedLogits) -> _Histogram:
        """Return the histogram of a row, without counts if its ends are not finite."""
        if row.histogram is not None:
            return row.histogram
        assert row.values is not None
        low, high = float(row.values.min()), row.top[0]
        if not math.isfinite(high - low):
            return low, high, ()
        scaled = np.subtract(row.values, np.float32(low), out=self._scratch_of(row.values.size))
        np.multiply(scaled, np.float32(BINS / max(high - low, 1e-30)), out=scaled)
        index = np.minimum(scaled, BINS - 1, out=scaled).astype(np.uint8)
        return low, high, tuple(np.bincount(index, minlength=BINS).tolist())

    def _scratch_of(self, size: int) -> Array:
        if self._scratch.size != size:
            self._scratch = np.empty(size, np.float32)
        return self._scratch


_Histogram = tuple[float, float, tuple[int, ...]]
"""Lowest and highest value, and counts in equal bins between them."""


class _ReducedLogits(Struct):
    """A reduced row of logits: natural logarithms, `top` and `ids` sorted from the best down.

    On CPU `values` is the row itself; for other devices `histogram` is set: low, high and counts.
    """

    lse: float
    entropy: float
    top: list[float]
    ids: list[int]
    chosen: float
    rank: int
    n_nan: int
    n_inf: int
    histogram: _Histogram | None = None
    values: Array | None = None


_GROUP_SIZE = 64


def _top_k(row: Array) -> tuple[list[int], list[float]]:
    """Return ids and values of the `TOP_K` best, best first, ties by id; NaN sorts first.

    The k-th largest of the maxima of groups is not larger than the k-th largest value, so only
    values from there on need sorting: a handful.
    """
    k = min(TOP_K, row.size)
    grouped_size = row.size - row.size % _GROUP_SIZE
    # The maximum over columns is ten times faster than over rows.
    maxima = row[:grouped_size].reshape(_GROUP_SIZE, -1).max(axis=0)
    if maxima.size < 2 * k or maxima[-1] != maxima[-1] or not np.isfinite(maxima.max()):
        candidates = np.arange(row.size)
    else:
        threshold = np.partition(maxima, maxima.size - k)[maxima.size - k]
        candidates = np.flatnonzero(row >= threshold)
    values = row[candidates]
    order = np.lexsort((candidates, -values, ~np.isnan(values)))[:k]
    return candidates[order].tolist(), values[order].tolist()


def _from_device(values: Values) -> _ReducedLogits:
    lse, entropy, chosen, low, high, rank, n_nan, n_inf = values["logits.scalars"].tolist()
    counts = tuple(values["logits.histogram"].tolist()) if math.isfinite(high - low) else ()
    return _ReducedLogits(
        lse=lse,
        entropy=entropy,
        top=values["logits.top"].tolist(),
        ids=values["logits.ids"].tolist(),
        chosen=chosen,
        rank=int(rank),
        n_nan=int(n_nan),
        n_inf=int(n_inf),
        histogram=(low, high, counts),
    )
