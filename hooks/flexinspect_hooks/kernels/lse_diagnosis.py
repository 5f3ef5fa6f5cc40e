"""Names the class of a wrong LSE, of a kernel whose output is right."""

from __future__ import annotations

import math

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.analysis.kernel_report import KernelDiagnosis, KernelEvaluation
from flexinspect.core.text import plural
from flexinspect_hooks.kernels.calling import ContractError, Kernel, KernelResult, call_kernel
from flexinspect_hooks.kernels.oracle import Variation, attend, low_precision_sums, scores_of
from flexinspect_hooks.kernels.reference import Reference, largest, mean
from flexinspect_hooks.kernels.wrong_inputs import input_faults

EXPLAINED_SHARE = 0.25
"""Of the difference before, what may remain for a fault to count as its reason."""
SIZE_RANGE = (1 / 3, 3.0)
"""How many times the error of low-precision sums an error may be that is judged by its size."""


def lse_diagnosis(
    one: KernelEvaluation, kernel: Kernel, bar: Reference, run: KernelResult
) -> KernelDiagnosis:
    """Return the class of an LSE that is wrong where the output is right."""
    assert one.lse is not None
    assert run.lse is not None
    problem, lse = bar.problem, run.lse.double()
    error, rows = one.lse.max_abs, bar.rows

    def residual(other: Tensor, where: Tensor) -> float:
        where = where & rows & other.isfinite()
        return float((lse - other)[where].abs().max()) if bool(where.any()) else math.inf

    right = Variation.of(problem)
    scores = scores_of(problem, right).masked_fill(~right.cells, -torch.inf)
    guesses = {
        ("lse-log2", "The LSE is in base 2; it must be the natural logarithm."): (
            bar.oracle.lse / math.log(2)
        ),
        ("lse-max", "The LSE is the maximum of the scores, without the sum."): scores.amax(-1),
        ("lse-unscaled", "The LSE is that of the scores without the scale."): attend(
            problem, replace(right, scale=1.0)
        ).lse,
    }
    for block in (16, 32, 64, problem.config.block_size):
        stop = (problem.config.kv_len - 1) // block * block
        if stop:
            text = f"The LSE is stale: that of the keys before the last block of {block}."
            guesses["lse-stale", text] = scores[..., :stop].logsumexp(-1)
    if stale := _stale_call(one, kernel, bar):
        return stale
    for (kind, text), other in guesses.items():
        left = residual(other, torch.ones_like(rows))
        if left <= min(max(one.lse.tolerance, 1e-4), EXPLAINED_SHARE * error):
            return KernelDiagnosis(kind, text, left, error)
    for fault in input_faults(problem, kernel.layout):
        other = attend(problem.with_inputs(fault.qkv)).lse
        left = residual(other, torch.ones_like(rows))
        if left <= min(max(one.lse.tolerance, 1e-4), EXPLAINED_SHARE * error):
            text = f"{fault.sentence} These inputs hide it in the output, not in the LSE."
            return KernelDiagnosis(fault.kind, text, left, error)
    size = mean((lse - bar.oracle.lse)[rows].abs())
    for name, block, result in low_precision_sums(problem):
        expected = mean((result.lse - bar.oracle.lse)[rows].abs())
        if SIZE_RANGE[0] <= size / max(expected, 1e-300) <= SIZE_RANGE[1]:
            text = f"The sum of the weights is rounded to {name}, judged by the size of the error "
            text += f"of the LSE: it is that of sums rounded after every {plural(block, 'key')}."
            return KernelDiagnosis("low-precision-sum", text)
    return KernelDiagnosis("lse", "The output is right, the LSE is not.")


def _stale_call(one: KernelEvaluation, kernel: Kernel, bar: Reference) -> KernelDiagnosis | None:
    """Whether the LSE of a call is that of the call before it."""
    problem = bar.problem
    try:
        call_kernel(kernel, problem, (-problem.q, problem.k, problem.v))
        second = call_kernel(kernel, problem)
        third = call_kernel(kernel, problem)
    except ContractError:
        return None
    if second.lse is None or third.lse is None:
        return None
    change = (second.lse.double() - third.lse.double())[bar.rows].abs()
    if not largest(change) > bar.lse_tolerance:  # NaN is not a change
        return None
    error = (third.lse.double() - bar.oracle.lse)[bar.rows].abs()
    text = "The LSE is stale: it changes between calls on the same inputs, as that of another call."
    assert one.lse is not None
    return KernelDiagnosis("lse-stale", text, float(error.max()), one.lse.max_abs)
