"""Reduces the logits that chose a token, or sends them to the writer thread (CPU)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.logits_records import BINS, LOGITS_ARRAY, TOP_K, LogitsRecords


class LogitsHook(Hook):
    """Reduces the newest row of the logits; at level basic without the histogram."""

    name = "logits"

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Nothing to install: the step holds the root forward's output."""
        self.records = LogitsRecords(context.decode)
        return ()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> bool:
        """Send the row to the writer thread (CPU), or reduce it on its device and send numbers.

        On CPU the row needs no copy. In the writer thread the same few operations hardly slow the
        model down in a `WriteWindow`, and cost a quarter of the time when they run for several
        steps in a row (see `recorder.LINGER_S`).
        """
        if step.logits is None:
            return False
        for name, row in (("logits", step.logits), ("scores", step.scores)):
            if row is None:
                continue
            if row.device.type == "cpu":
                # Each operation of torch costs time here, one that changes nothing too.
                plain = row if row.dtype is torch.float32 else row.float()
                buffer.put(f"{name}.all", plain)
            else:
                _reduce_on_device(name, row.float(), step.token_id, buffer)
        if step.level != "basic" and len(step.processed) > 1:
            for number, (_, row) in enumerate(step.processed):
                if row.device.type == "cpu":
                    buffer.put(f"processed.{number}", row)
                else:
                    top = row.log_softmax(-1)[buffer.tensor("logits.ids")]
                    buffer.put(f"processed.{number}", top)
        if step.level == "extreme":
            buffer.put(LOGITS_ARRAY, step.logits.float())
        return True


def reduce_chosen(row: Tensor, chosen: Tensor, buffer: StepBuffer) -> None:
    """Put the logit and rank of the chosen id (1,) in its row (V,), without a sync."""
    logit = row.float().index_select(0, chosen.to(row.device))
    rank = torch.count_nonzero(row.float() > logit).float()
    buffer.put("logits.chosen", torch.stack((logit[0], rank)))


def _reduce_on_device(name: str, row: Tensor, chosen: int | None, buffer: StepBuffer) -> None:
    """Reduce a row (V,) on its device, without waiting for the device."""
    top, ids = torch.topk(row, min(TOP_K, row.numel()))
    p = torch.exp(row - top[0])
    total = p.sum()
    lse = top[0] + torch.log(total)
    if name == "scores":
        # The candidates are those of the logits; a processor may have set some of them to -Inf.
        ids = buffer.tensor("logits.ids")
        buffer.put("scores.top", row[ids])
        buffer.put("scores.lse", lse)
        return
    weighted = torch.nan_to_num(p * row, nan=0.0, posinf=0.0, neginf=0.0).sum()
    # `chosen` is a Python int: indexing with a 0-dim tensor would wait for the device.
    chosen_logit = top[0] if chosen is None else row[chosen]
    low, high = torch.aminmax(row)
    rank = torch.count_nonzero(row > chosen_logit)
    n_nan, n_inf = torch.isnan(row).sum(), torch.isinf(row).sum()
    numbers = (lse, lse - weighted / total, chosen_logit, low, high, rank, n_nan, n_inf)
    buffer.put("logits.top", top)
    buffer.put("logits.ids", ids)
    buffer.put("logits.scalars", torch.stack([number.float() for number in numbers]))
    span = torch.clamp(high - low, min=1e-30)
    index = torch.clamp(torch.nan_to_num((row - low) * (BINS / span)).long(), 0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=row.device)
    # Not bincount, which waits for the device to learn its length.
    buffer.put("logits.histogram", counts.scatter_add_(0, index, torch.ones_like(index)))
