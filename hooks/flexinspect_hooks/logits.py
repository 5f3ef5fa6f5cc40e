"""The distribution that chose the token: top-k, entropy, margin, rank, histogram."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from flexinspect.records import Candidate, LogitsRecord
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
        """Reduce logits (V,) and, when sampling, scores (V,) to a few numbers and k candidates."""
        if step.logits is None:
            return False
        logits = step.logits.float()
        top, ids = torch.topk(logits, min(TOP_K, logits.numel()))
        buffer.put("logits.top", top)
        buffer.put("logits.ids", ids)
        buffer.put("logits.scalars", _scalars(logits, top[0], step.chosen))
        buffer.put("logits.chosen", ids[0] if step.chosen is None else step.chosen.reshape(()))
        if step.scores is not None:
            scores = step.scores.float()
            buffer.put("scores.top", scores[ids])
            buffer.put("scores.lse", torch.logsumexp(scores, 0))
        _put_distribution(logits, step.level, buffer)
        return True

    def record(self, step: StepContext, kept: bool, values: Values, draft: StepDraft) -> None:
        """Write the step's `LogitsRecord`."""
        if not kept:
            return
        lse, entropy, chosen_logit, rank, broken = values["logits.scalars"].tolist()
        top, ids = values["logits.top"].tolist(), values["logits.ids"].tolist()
        n_nan, n_inf = _bad_counts(values) if broken != 0 else (0, 0)
        low, high, counts = _histogram(values, step.level)
        draft.logits = LogitsRecord(
            entropy=entropy,
            margin=top[0] - top[1] if len(top) > 1 else 0.0,
            chosen_id=int(values["logits.chosen"]),
            chosen_rank=int(rank),
            chosen_logprob=chosen_logit - lse,
            n_nan=n_nan,
            n_inf=n_inf,
            histogram_min=low,
            histogram_max=high,
            histogram=counts,
            candidates=self._candidates(ids, top, lse, values),
        )

    def _candidates(
        self, ids: list[int], top: list[float], lse: float, values: Values
    ) -> tuple[Candidate, ...]:
        scores = values["scores.top"].tolist() if "scores.top" in values else top
        score_lse = float(values["scores.lse"]) if "scores.lse" in values else lse
        return tuple(
            Candidate(rank, i, self._text_of(i), logit, logit - lse, score, score - score_lse)
            for rank, (i, logit, score) in enumerate(zip(ids, top, scores, strict=True))
        )


def _scalars(logits: Tensor, best: Tensor, chosen: Tensor | None) -> Tensor:
    """Return (lse, entropy, chosen logit, rank, 0 or NaN) of (V,) logits as one float tensor.

    Entropy in nats is lse - sum(p * logit), which needs one pass over p (Shannon 1948). The last
    number is 0 exactly when every logit is finite, as 0 * x is NaN for NaN and infinite x: far
    cheaper than counting them, which is done only when there is something to count.
    """
    lse = best + torch.log(torch.exp(logits - best).sum())
    p = torch.exp(logits - lse)
    entropy = lse - torch.nan_to_num(p * logits, nan=0.0, posinf=0.0, neginf=0.0).sum()
    mine = best if chosen is None else logits[chosen.reshape(())]
    rank = torch.count_nonzero(logits > mine)
    return torch.stack((lse, entropy, mine, rank.to(lse.dtype), (logits * 0).sum()))


def _put_distribution(logits: Tensor, level: str, buffer: StepBuffer) -> None:
    """On CPU the row itself (no copy), else counts made on the device."""
    if logits.device.type == "cpu":
        buffer.put("logits.all", logits)
        return
    buffer.put("logits.nan", torch.isnan(logits).sum())
    buffer.put("logits.inf", torch.isinf(logits).sum())
    if level != "basic":
        low, high = torch.aminmax(logits)
        span = torch.clamp(high - low, min=1e-30)
        index = torch.nan_to_num((logits - low) * (BINS / span)).long()
        counts = torch.zeros(BINS, dtype=torch.int64, device=logits.device)
        # Not bincount, which synchronises with the device to learn its length.
        counts.scatter_add_(0, torch.clamp(index, 0, BINS - 1), torch.ones_like(index))
        buffer.put("logits.range", torch.stack((low, high)))
        buffer.put("logits.histogram", counts)


def _bad_counts(values: Values) -> tuple[int, int]:
    if "logits.nan" in values:
        return int(values["logits.nan"]), int(values["logits.inf"])
    logits = values["logits.all"]
    return int(np.isnan(logits).sum()), int(np.isinf(logits).sum())


def _histogram(values: Values, level: str) -> tuple[float, float, tuple[int, ...]]:
    """Return (lowest, highest, counts) of the logits, empty counts where they are not finite."""
    if level == "basic":
        return 0.0, 0.0, ()
    if "logits.histogram" in values:
        low, high = values["logits.range"].tolist()
        return low, high, tuple(values["logits.histogram"].tolist())
    logits = values["logits.all"]
    low, high = float(logits.min()), float(logits.max())
    if not np.isfinite([low, high]).all():
        return low, high, ()
    scale = BINS / max(high - low, 1e-30)
    index = ((logits - low) * scale).astype(np.int32)
    counts = np.bincount(np.minimum(index, BINS - 1), minlength=BINS)
    return low, high, tuple(counts.tolist())
