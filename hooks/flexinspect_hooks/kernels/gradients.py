"""The gradients of a kernel that has a backward pass, against those of the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from flexinspect.analysis.kernel_report import ResultError
from flexinspect.core.errors import summarize_error
from flexinspect_hooks.kernels.builtin_kernels import EAGER, built_in
from flexinspect_hooks.kernels.calling import ContractError, Kernel, call_kernel
from flexinspect_hooks.kernels.oracle import Variation, scores_of, weights_of
from flexinspect_hooks.kernels.problem import Problem, seeded
from flexinspect_hooks.kernels.reference import Reference, largest, nan_as_inf

_FACTOR = 3.0
"""That of flash-attention's tests for gradients, where it is larger than that of the output."""

_MAX_SCORE_ROUNDING = 0.1
_CORRELATION = 2.0  # roundings of a range of numbers are not independent


def gradient_errors(kernel: Kernel, bar: Reference) -> tuple[tuple[ResultError, ...], str]:
    """Return the errors of dq, dk and dv for a random gradient of the output.

    Or why they are not compared. The tolerance is a multiple of the error of eager attention in the
    same dtype; its floor is the rounding of the terms that the gradients are the sums of, because
    these cancel where the softmax is saturated or the keys are alike.
    """
    problem = bar.problem
    scores = scores_of(problem, Variation.of(problem))
    score_rounding = largest(scores.abs()) * torch.finfo(torch.float32).eps
    if score_rounding > _MAX_SCORE_ROUNDING:
        return (), "not compared, the scores are so large that their rounding changes the weights"
    upstream = torch.randn(problem.q.shape, generator=seeded().manual_seed(1)).to(problem.device)
    upstream = upstream.masked_fill(~bar.rows[..., None], 0)
    try:
        found = _gradients(kernel, problem, upstream, problem.dtype)
    except ContractError as error:
        reason, _, _ = error.message.partition(". ")
        return (), f"not compared. With requires_grad: {reason}"
    if found is None:
        return (), "not compared, the output has no backward pass"
    eager = built_in(EAGER, problem.device)
    truth = _gradients(eager, problem, upstream, torch.float64)
    expected = _gradients(eager, problem, upstream, problem.dtype)
    assert truth is not None
    assert expected is not None
    factor = max(_FACTOR, bar.tolerance.factor)
    # A backward pass computes the weights again, as exp(score - LSE).
    rounding = _CORRELATION * (torch.finfo(problem.dtype).eps + score_rounding)
    sizes = _term_sizes(problem, upstream.double())
    each = zip(("dq", "dk", "dv"), found, truth, expected, sizes, strict=True)
    return tuple(
        ResultError(
            name,
            largest(nan_as_inf((got.double() - right).abs())),
            factor * (largest((rough.double() - right).abs()) + rounding * size),
        )
        for name, got, right, rough, size in each
    ), ""


def _gradients(
    kernel: Kernel, problem: Problem, upstream: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...] | None:
    """The gradients of q, k and v, 0 for one that the output does not depend on.

    None if autograd finds that it depends on none of them.
    """
    q, k, v = (
        each.detach().to(dtype).requires_grad_() for each in (problem.q, problem.k, problem.v)
    )
    with torch.enable_grad():
        out = call_kernel(kernel, problem, (q, k, v)).out
        if not out.requires_grad:
            return None
        try:
            found = torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype), allow_unused=True)
        except Exception as error:
            text = f"The backward pass failed: {summarize_error(error)}"
            raise ContractError(text, is_fault=True) from error
        pairs = zip((q, k, v), found, strict=True)
        return tuple(torch.zeros_like(one) if got is None else got for one, got in pairs)


def _term_sizes(problem: Problem, upstream: Tensor) -> tuple[float, float, float]:
    """The largest roots of sums of squared terms in dq, dk and dv: independent roundings add so.

    With P the weights and dP = dO V', dS = P (dP - sum P dP), dq = s dS K, dk = s dS' Q and
    dv = P' dO (https://arxiv.org/abs/2205.14135, appendix B.2).
    """
    variation = Variation.of(problem)
    heads, scale = list(variation.kv_head), abs(variation.scale)
    q, grad = problem.q.double().square(), upstream.square()
    k, v = (each[:, heads].double().square() for each in (problem.k, problem.v))
    weights = weights_of(problem, variation).square()
    toward = grad @ v.mT
    score = weights * (toward + (weights * toward).sum(-1, keepdim=True))
    group = len(heads) // problem.config.kv_heads  # the gradients of a key head are added up
    return (
        scale * largest(score @ k) ** 0.5,
        scale * (group * largest(score.mT @ q)) ** 0.5,
        (group * largest(weights.mT @ grad)) ** 0.5,
    )
