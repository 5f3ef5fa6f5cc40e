"""The distribution that chose the token: top-k, entropy, margin, rank, histogram."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexinspect.records import Array, Candidate, LogitsRecord
from flexinspect_hooks.buffer import StepBuffer, Values
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove, StepDraft

TOP_K = 10
BINS = 64


class LogitsHook:
    """Reduces the newest row of the logits; at level basic without the histogram."""

    name = "logits"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Nothing to install: the root forward's output is on the step."""
        self._text_of = context.text_of
        return ()

    def begin(self, context: CaptureContext) -> None:
        """Nothing to prepare per generation."""

    def open(self, step: StepContext) -> None:
        """Nothing to prepare per step."""

    def reduce(self, step: StepContext, buffer: StepBuffer) -> bool:
        """Send the row to the writer thread (CPU), or reduce it where it is and send numbers.

        On CPU the row needs no copy, and the same few operations cost a quarter of the time when
        the writer thread runs them for several steps in a row (see `recorder.LINGER_S`).
        """
        if step.logits is None:
            return False
        for name, row in (("logits", step.logits), ("scores", step.scores)):
            if row is None:
                continue
            if row.device.type == "cpu":
                buffer.put(f"{name}.all", row.float())
            else:
                _reduce_on_device(name, row.float(), step.chosen, buffer)
        if step.chosen is not None:
            buffer.put("logits.chosen", step.chosen.reshape(()))
        return True

    def record(self, step: StepContext, kept: bool, values: Values, draft: StepDraft) -> None:
        """Write the step's `LogitsRecord`."""
        if not kept:
            return
        chosen = int(values["logits.chosen"]) if "logits.chosen" in values else None
        row = _row_of("logits", values, chosen)
        histogram = row.histogram() if step.level != "basic" else ()
        draft.logits = LogitsRecord(
            entropy=row.entropy,
            margin=row.top[0] - row.top[1] if len(row.top) > 1 else 0.0,
            chosen_id=row.ids[0] if chosen is None else chosen,
            chosen_rank=row.rank,
            chosen_logprob=row.chosen - row.lse,
            n_nan=row.n_nan,
            n_inf=row.n_inf,
            histogram_min=row.low if histogram else 0.0,
            histogram_max=row.high if histogram else 0.0,
            histogram=histogram,
            candidates=self._candidates(row, values),
        )

    def _candidates(self, row: _Row, values: Values) -> tuple[Candidate, ...]:
        scores, score_lse = row.top, row.lse
        if "scores.all" in values:
            other = _row_of("scores", values, None)
            scores, score_lse = values["scores.all"][row.ids].tolist(), other.lse
        elif "scores.top" in values:
            scores, score_lse = values["scores.top"].tolist(), float(values["scores.lse"])
        return tuple(
            Candidate(rank, i, self._text_of(i), logit, logit - row.lse, score, score - score_lse)
            for rank, (i, logit, score) in enumerate(zip(row.ids, row.top, scores, strict=True))
        )


@dataclass(slots=True)
class _Row:
    """A distribution reduced: natural logarithms, `top` and `ids` from the best down."""

    lse: float
    entropy: float
    top: list[float]
    ids: list[int]
    chosen: float
    rank: int
    low: float
    high: float
    n_nan: int
    n_inf: int
    counts: tuple[int, ...] | None = None
    values: Array | None = None

    def histogram(self) -> tuple[int, ...]:
        """Return counts in equal bins from low to high, empty where they are not finite."""
        if self.counts is not None:
            return self.counts
        if self.values is None or not np.isfinite(self.high - self.low):
            return ()
        scale = BINS / max(self.high - self.low, 1e-30)
        index = ((self.values - np.float32(self.low)) * np.float32(scale)).astype(np.int32)
        return tuple(np.bincount(np.minimum(index, BINS - 1), minlength=BINS).tolist())


def _row_of(name: str, values: Values, chosen: int | None) -> _Row:
    return _reduce_here(values[f"{name}.all"], chosen) if f"{name}.all" in values else _sent(values)


def _reduce_here(row: Array, chosen: int | None) -> _Row:
    """Reduce a float32 row (V,) in numpy.

    With p = exp(logit - max) the log-sum-exp is max + log(sum p) and the entropy in nats is
    lse - sum(p * logit) / sum p: one exponential serves both (Shannon 1948).
    """
    low, high = float(row.min()), float(row.max())
    healthy = np.isfinite(high - low)
    n_nan, n_inf = (0, 0) if healthy else (int(np.isnan(row).sum()), int(np.isinf(row).sum()))
    with np.errstate(invalid="ignore"):
        p = np.exp(row - np.float32(high))
        total = float(p.sum())
        lse = high + float(np.log(total))
        weighted = np.dot(p, row) if healthy else np.nan_to_num(p * row, nan=0.0).sum()
        entropy = lse - float(weighted) / total
    ids, top = _top(row)
    mine = top[0] if chosen is None else float(row[chosen])
    rank = 0 if mine == top[0] else int(np.count_nonzero(row > np.float32(mine)))
    return _Row(lse, entropy, top, ids, mine, rank, low, high, n_nan, n_inf, values=row)


def _top(row: Array) -> tuple[list[int], list[float]]:
    """Return ids and values of the k best, best first, NaN last, ties by id."""
    k = min(TOP_K, row.size)
    keys = row if not np.isnan(row.max()) else np.nan_to_num(row, nan=-np.inf)
    part = np.argpartition(keys, row.size - k)[row.size - k :]
    part = np.sort(part)
    order = part[np.argsort(-keys[part], kind="stable")]
    return order.tolist(), row[order].tolist()


def _reduce_on_device(name: str, row: Tensor, chosen: Tensor | None, buffer: StepBuffer) -> None:
    """Reduce a row (V,) where it is, without waiting for the device."""
    top, ids = torch.topk(row, min(TOP_K, row.numel()))
    p = torch.exp(row - top[0])
    total = p.sum()
    lse = top[0] + torch.log(total)
    if name == "scores":
        # The candidates are those of the logits; a processor may have closed some of them.
        ids = buffer.tensor("logits.ids")
        buffer.put("scores.top", row[ids])
        buffer.put("scores.lse", lse)
        return
    weighted = torch.nan_to_num(p * row, nan=0.0, posinf=0.0, neginf=0.0).sum()
    mine = top[0] if chosen is None else row[chosen.reshape(())]
    low, high = torch.aminmax(row)
    counted = (torch.count_nonzero(row > mine), torch.isnan(row).sum(), torch.isinf(row).sum())
    numbers = (lse, lse - weighted / total, mine, low, high, *counted)
    buffer.put("logits.top", top)
    buffer.put("logits.ids", ids)
    buffer.put("logits.scalars", torch.stack([number.float() for number in numbers]))
    buffer.put("logits.histogram", _device_histogram(row, low, high))


def _device_histogram(row: Tensor, low: Tensor, high: Tensor) -> Tensor:
    span = torch.clamp(high - low, min=1e-30)
    index = torch.clamp(torch.nan_to_num((row - low) * (BINS / span)).long(), 0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=row.device)
    # Not bincount, which waits for the device to learn its length.
    return counts.scatter_add_(0, index, torch.ones_like(index))


def _sent(values: Values) -> _Row:
    lse, entropy, mine, low, high, rank, n_nan, n_inf = values["logits.scalars"].tolist()
    finite = np.isfinite(high - low)
    return _Row(
        lse,
        entropy,
        values["logits.top"].tolist(),
        values["logits.ids"].tolist(),
        mine,
        int(rank),
        low,
        high,
        int(n_nan),
        int(n_inf),
        counts=tuple(values["logits.histogram"].tolist()) if finite else (),
    )
