"""Says what a module computes in place of what it should, from one input and two outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.difference_shape import ComparedTensors, describe_difference
from flexinspect_hooks.audit.hypotheses.modules import epsilon_of, is_norm


def describe_module(
    module: nn.Module, given: Tensor, compared: ComparedTensors, weights: Mapping[str, Tensor]
) -> list[str]:
    """Return how the output of a module differs, in ends of a sentence about the output.

    `module` is that of the reference and `given` (rows, values) its input. `weights` are all
    parameters of the model by name.
    """
    given = given.double()
    for text, candidate in _candidates(module, given, weights):
        if candidate.shape == compared.ours.shape and compared.fits(candidate):
            return [text]
    if is_norm(module) and (text := _other_epsilon(module, given, compared)):
        return [text]
    return describe_difference(compared)


def _candidates(
    module: Any, given: Tensor, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    yield "is its input, unchanged", given
    if is_norm(module):
        yield from _norms(module, given)
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) and isinstance(weight, Tensor):
        bias = 0 if module.bias is None else module.bias.double()
        right = given @ weight.double().T
        yield "is that without its bias", right
        yield "is its bias added twice", right + 2 * bias
        yield "is its input added to the right one", right + bias + _like(given, right)
        if weight.shape[0] == weight.shape[1]:
            yield "is that of its transposed weight", given @ weight.double() + bias
        for name, other in weights.items():
            if other.shape == weight.shape and other is not weight:
                yield f"is that of another weight, {name}", given @ other.double().T + bias
        yield from _coarser(given, weight, bias)


def _like(given: Tensor, right: Tensor) -> Tensor | float:
    return given if given.shape == right.shape else 0.0


def _coarser(given: Tensor, weight: Tensor, bias: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the output for a weight that is rounded to fewer bits."""
    wide = weight.double()
    for bits in (8, 4):
        top = 2 ** (bits - 1) - 1
        for what, dim in (("one scale", None), ("a scale per output", 1), ("a scale per input", 0)):
            size = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
            step = (size / top).clamp_min(1e-30)
            rounded = (wide / step).round() * step
            yield f"is that of a weight in int{bits} with {what}", given @ rounded.T + bias


def _norms(module: Any, given: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield other normalizations with the same weight."""
    epsilon, weight = epsilon_of(module), getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return
    scale, bias = weight.double(), getattr(module, "bias", None)
    scale = 1 + scale if "gemma" in type(module).__name__.lower() else scale
    shift = bias.double() if isinstance(bias, Tensor) else 0.0
    square = given.square().mean(-1, keepdim=True)
    middle = given - given.mean(-1, keepdim=True)
    spread = middle.square().mean(-1, keepdim=True)
    n = given.shape[-1]
    yield (
        "is that of a LayerNorm (the mean is subtracted)",
        scale * middle / (spread + epsilon).sqrt() + shift,
    )
    yield (
        "is that of an RMSNorm (the mean is not subtracted)",
        scale * given / (square + epsilon).sqrt() + shift,
    )
    yield (
        "has its epsilon added to the root, not under it",
        scale * given / (square.sqrt() + epsilon) + shift,
    )
    yield "is divided by the variance, not by the root", scale * given / (square + epsilon) + shift
    yield (
        "is divided by the standard deviation, not by the root mean square",
        scale * given / (spread + epsilon).sqrt() + shift,
    )
    unbiased = spread * n / max(n - 1, 1)
    yield (
        "is divided by the unbiased standard deviation (n - 1)",
        scale * middle / (unbiased + epsilon).sqrt() + shift,
    )
    yield (
        "is divided by the norm of the row, not by the root of the mean",
        scale * given / (given.norm(dim=-1, keepdim=True) + epsilon) + shift,
    )
    yield "does not use its weight", given / (square + epsilon).sqrt()
    yield (
        "multiplies by 1 + weight, not by the weight",
        (1 + weight) * given / (square + epsilon).sqrt() + shift,
    )
    yield "does not use its bias", scale * middle / (spread + epsilon).sqrt()
    whole = given.square().mean()
    yield "is divided by the root mean square of all rows together", scale * given / whole.sqrt()
    for dtype in (torch.bfloat16, torch.float16):
        low = given.to(dtype)
        root = (low.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        name = str(dtype).removeprefix("torch.")
        rounded = (low * root).double() * scale + shift
        yield f"is computed in {name}, not in float32", rounded


def _other_epsilon(module: Any, given: Tensor, compared: ComparedTensors) -> str:
    """Say which epsilon the norm has, if it is another one."""
    square = given.square().mean(-1)
    ratio = compared.ours.norm(dim=-1) / compared.theirs.norm(dim=-1).clamp_min(1e-30)
    own = epsilon_of(module)
    found = float(((square + own) / ratio.square().clamp_min(1e-30) - square).median())
    if found > 0 and abs(found / own - 1) > 0.05:
        factors = ((square + own) / (square + found)).sqrt()
        if compared.fits(compared.theirs * factors[:, None]):
            return f"has an epsilon of {found:.2g}, not {own:.2g}"
    root = (square + own).sqrt()
    outside = float((root / ratio.clamp_min(1e-30) - square.sqrt()).median())
    if compared.fits(compared.theirs * (root / (square.sqrt() + outside))[:, None]):
        return f"has {outside:.2g} added to the root, not an epsilon of {own:.2g} under it"
    return ""
