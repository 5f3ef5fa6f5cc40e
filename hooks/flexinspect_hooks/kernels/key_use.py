"""Kernel truth: which keys a kernel used, whatever its mask says."""

from __future__ import annotations

import torch
from torch import Tensor

from flexinspect.analysis.kernel_report import KeyUse
from flexinspect_hooks.kernels.calling import Kernel, call_kernel
from flexinspect_hooks.kernels.identity_probe import recover_weights
from flexinspect_hooks.kernels.oracle import Variation, weights_of
from flexinspect_hooks.kernels.problem import Problem
from flexinspect_hooks.kernels.reference import nan_as_inf

MIN_WEIGHT = 1e-5
"""An open cell counts as unused if its weight is 0 and the oracle's is above this: float16 holds
weights from 6e-8 on, and kernels round less than that to 0."""


def measure_key_use(kernel: Kernel, problem: Problem) -> tuple[KeyUse, Tensor]:
    """Return which keys the kernel used, and its weights (batch, heads, rows, keys).

    Rows without an open key are left out. Raises `ContractError` if the kernel cannot be called.
    """
    truth = weights_of(problem, Variation.of(problem))
    used = recover_weights(
        problem.v, lambda value: call_kernel(kernel, problem, (problem.q, problem.k, value)).out
    )
    cells = problem.cells.expand(truth.shape)
    rows = cells.any(-1, keepdim=True)
    opened = rows & ~cells & (used != 0) & ~used.isnan()
    closed = cells & (used == 0) & (truth > MIN_WEIGHT)
    unseen = cells & (used == 0) & (truth <= MIN_WEIGHT)
    difference = nan_as_inf((used - truth).abs().masked_fill(~rows, 0))
    use = KeyUse(
        n_cells=int((rows & torch.ones_like(cells)).sum()),
        n_opened=int(opened.sum()),
        n_closed=int(closed.sum()),
        n_unseen=int(unseen.sum()),
        max_weight=float(difference.max()),
        first=_first(opened, closed, used, truth),
    )
    return use, used


def _first(opened: Tensor, closed: Tensor, used: Tensor, truth: Tensor) -> str:
    wrong = (opened | closed).nonzero()
    if not len(wrong):
        return ""
    batch, head, row, key = place = tuple(wrong[0].tolist())
    where = f"batch {batch}, head {head}, row {row}, key {key}"
    if bool(opened[place]):
        return f"{where} is closed and had {float(used[place]):.3g} of the weight"
    return f"{where} is open and had none; {float(truth[place]):.3g} is right"
