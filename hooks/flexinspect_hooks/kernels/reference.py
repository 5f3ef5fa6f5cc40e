"""The reference of a problem: the oracle, and the tolerance that a kernel's dtype sets."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flexinspect.analysis.kernel_report import ErrorStatistics, Tolerance
from flexinspect.core.errors import UsageError
from flexinspect_hooks.kernels.calling import ContractError, Kernel, call_kernel, check_contract
from flexinspect_hooks.kernels.oracle import Attention, Variation, attend
from flexinspect_hooks.kernels.problem import Problem

_FACTORS = {torch.float16: 2.0, torch.bfloat16: 2.0}
_WIDE_FACTOR = 10.0
_SOFTCAP_FACTOR = 3.0


class Reference:
    """A problem with its oracle and the tolerance that a reference kernel sets."""

    def __init__(self, problem: Problem, kernel: Kernel) -> None:
        """Raises `UsageError` if the reference cannot run the problem."""
        self.problem, self.kernel = problem, kernel
        try:
            check_contract(kernel, problem)
            self.result = call_kernel(kernel, problem)
        except ContractError as error:
            what = f"The reference {kernel.name} cannot run {problem.config.name}: {error.message}"
            raise UsageError(what, hint="The reference eager runs every configuration.") from error

    @cached_property
    def oracle(self) -> Attention:
        """Attention in float64."""
        return attend(self.problem)

    @cached_property
    def rows(self) -> Tensor:
        """The rows that are compared, bool (batch, heads, rows): those with an open key."""
        return ~self.problem.empty_rows.expand(self.oracle.lse.shape)

    @cached_property
    def tolerance(self) -> Tolerance:
        """The largest and the mean error that a kernel may have.

        In float16 and bfloat16 twice the error of the reference, the criterion of flash-attention's
        tests (`tests/test_flash_attn.py` in Dao-AILab/flash-attention; 3 with a softcap, as in
        `hopper/test_flash_attn.py`). In float32 the factor is 10, as in torch's
        `test/inductor/test_flex_attention.py`, which compares mean errors. Both errors are held to
        the factor here: a systematic error shows in the mean first. The floor is one rounding of
        the largest output, because a reference may be exact by chance.
        """
        error = self._error(self.result.out)
        size = self.oracle.out[self.rows].abs()
        rounding = torch.finfo(self.problem.dtype).eps / 2
        factor = _FACTORS.get(self.problem.dtype, _WIDE_FACTOR)
        if self.problem.config.softcap is not None:
            factor = max(factor, _SOFTCAP_FACTOR)
        worst, average = largest(error), mean(error)
        bars = (factor * worst + rounding * largest(size), factor * average + rounding * mean(size))
        return Tolerance(self.kernel.name, factor, worst, average, *bars)

    def tolerance_of(self, variation: Variation, problem: Problem) -> float:
        """The largest error that a kernel with a fault may have from the oracle with that fault.

        `problem` has the inputs that this kernel reads.

        It is at least the tolerance; a fault that makes the softmax sharper amplifies rounding.
        """
        truth = attend(problem, variation).out
        rows = self.rows & variation.cells.any(-1)
        error = (attend(problem, variation, problem.dtype).out.double() - truth)[rows]
        return max(self.tolerance.max_abs, self.tolerance.factor * largest(error.abs()))

    def tolerance_at(self, out: Tensor) -> float:
        """The largest error that a kernel with another formula may have, by the size of its output.

        It is at least the tolerance.
        """
        sizes = [largest(each[self.rows].abs()) for each in (out, self.oracle.out)]
        return self.tolerance.max_abs * max(sizes[0] / max(sizes[1], 1e-300), 1.0)

    @cached_property
    def lse_tolerance(self) -> float:
        """The error that the LSE may have: `factor` times that of the reference, plus rounding."""
        lse = self.oracle.lse[self.rows]
        error = torch.zeros(1)
        if self.result.lse is not None:
            error = (self.result.lse.double()[self.rows] - lse).abs()
        size = float(lse.abs().max()) if lse.numel() else 0.0
        eps = torch.finfo(torch.float32).eps if self.result.lse is not None else 0.01
        return self.tolerance.factor * largest(error) + 4 * eps * max(size, 1.0)

    def _error(self, out: Tensor) -> Tensor:
        return (out.double() - self.oracle.out)[self.rows].abs()

    def is_within(self, error: ErrorStatistics) -> bool:
        """Whether an error has no NaN or Inf and is within the tolerance."""
        bar = self.tolerance
        finite = not error.n_nan and not error.n_inf
        return finite and error.max_abs <= bar.max_abs and error.mean_abs <= bar.mean_abs


def largest(values: Tensor) -> float:
    """Return the largest of some values that are not NaN, 0 without any."""
    finite = values[~values.isnan()]
    return float(finite.max()) if finite.numel() else 0.0


def mean(values: Tensor) -> float:
    """Return the mean of the finite values, 0 without any."""
    finite = values[values.isfinite()]
    return float(finite.double().mean()) if finite.numel() else 0.0


def nan_as_inf(values: Tensor) -> Tensor:
    """Return the values with Inf in place of NaN, so that NaN is the largest error."""
    return values.masked_fill(values.isnan(), torch.inf)
