"""Whether a forward that was differentiated is the one that ran: its logits against the recorded.

What is kept of a step's logits is bounded, as there may be very many steps: their log-sum-exp, the
chosen token's, and values at places spread evenly over the vocabulary (all of a small one).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

N_SAMPLED_LOGITS = 4096
"""Logits of a step that are kept."""

LOGIT_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""By the dtype of the logits: the difference that rounding makes, as a share of the largest logit.
The forward that ran read a cache, row by row; the other one computes all rows at once."""


@dataclass(frozen=True, slots=True)
class SampledLogits:
    """A step's logits, as far as they are kept: `values` (places,) with the log-sum-exp at the end.

    `token_id` is what the step chose.
    """

    token_id: int
    values: Tensor
    n_logits: int
    tolerance: float


def sample_logits(logits: Tensor, token_id: int) -> SampledLogits:
    """Return what is kept of a row of logits (V,)."""
    tolerance = LOGIT_TOLERANCES.get(logits.dtype, LOGIT_TOLERANCES[torch.float32])
    return SampledLogits(token_id, _sample_row(logits, token_id), len(logits), tolerance)


def logits_distance(sampled: SampledLogits, logits: Tensor) -> float:
    """Return the largest difference to a row of logits (V,), as a share of the largest kept one.

    Values that are not finite must be the same; where they are not, the distance is infinite.
    """
    if len(logits) != sampled.n_logits:
        return torch.inf
    new, old = _sample_row(logits.detach(), sampled.token_id), sampled.values
    finite = old.isfinite()
    if not torch.equal(finite, new.isfinite()) or not _nonfinite_equal(old[~finite], new[~finite]):
        return torch.inf
    if not bool(finite.any()):
        return 0.0
    largest = float(old[finite].abs().max())
    return float((new - old)[finite].abs().max()) / (largest or 1.0)


def _sample_row(logits: Tensor, token_id: int) -> Tensor:
    row = logits.detach().float()
    size = min(N_SAMPLED_LOGITS, len(row))
    places = torch.linspace(0, len(row) - 1, size, device=row.device, dtype=torch.float64)
    chosen = row[token_id : token_id + 1]
    return torch.cat([row[places.round().long()], chosen, torch.logsumexp(row, 0)[None]])


def _nonfinite_equal(old: Tensor, new: Tensor) -> bool:
    return torch.equal(old.isnan(), new.isnan()) and torch.equal(
        old.nan_to_num(nan=0.0), new.nan_to_num(nan=0.0)
    )
