"""Values of a weight that no quantisation gives: wrapped integers, and scales of other rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LARGE = 0.25
"""Of the largest magnitude of a row: a smaller weight may change its sign by rounding."""
_STEP = 0.16
"""Of the largest magnitude of a row: a step of integers with 4 bits is 0.07 to 0.14."""
_MAX_ERROR, _MAX_SHARE, _MIN_WRAPPED = 0.2, 0.1, 2
_FAR = 6.0
"""A wrapped weight is off by this many times the largest error of the others."""
_OPPOSITE, _EVEN = 0.15, 0.05
_FIT, _BETTER, _LEFT = 0.25, 3.0, 0.1
"""The error that factors may leave; how many times it is larger without them, and by how much."""
_GROUPS = (8, 16, 32, 64, 128)


def wrapped_facts(before: Tensor, now: Tensor) -> dict[str, Any] | None:
    """Return the facts of a weight (rows, columns) whose largest elements have the other sign.

    An integer of 8 bits counts from 127 on to -128. All other elements must be what they were,
    but for the steps of a quantisation.
    """
    if before.dim() != 2 or before.shape != now.shape or not bool(now.isfinite().all()):
        return None
    before, gap = before.double(), now.double() - before.double()
    size = before.abs()
    top = size.amax(1, keepdim=True)
    is_wrapped = (before * now.double() < 0) & (size > _LARGE * top)
    n = int(is_wrapped.sum())
    if not _MIN_WRAPPED <= n <= _MAX_SHARE * before.numel():
        return None
    errors = gap.abs().masked_fill(is_wrapped, 0)
    largest = errors.amax(1, keepdim=True)
    is_quantised = bool((errors <= _STEP * top).all())
    is_quantised = is_quantised and float(errors.norm() / before.norm()) <= _MAX_ERROR
    is_far = bool(((gap.abs() > _FAR * largest) | ~is_wrapped).all())
    if not is_quantised or not is_far or not _is_overflow(before, gap, is_wrapped):
        return None
    row, column = (int(one[0]) for one in torch.where(is_wrapped))
    return {
        "wrapped": n,
        "rows": int(is_wrapped.any(1).sum()),
        "of_rows": len(before),
        "was": float(before[row, column]),
        "is": float(now[row, column]),
        "error": float(errors.norm() / before.norm()),
    }


def _is_overflow(before: Tensor, gap: Tensor, is_wrapped: Tensor) -> bool:
    """Whether the elements of one sign became their opposite, or the largest lost one value."""
    signs = before[is_wrapped].sign()
    is_opposite = (2 * before + gap).abs() <= _OPPOSITE * before.abs()
    if bool((signs == signs[0]).all()) and bool(is_opposite[is_wrapped].all()):
        return True
    for row, values, gaps in zip(is_wrapped, before, gap.abs(), strict=True):
        for sign in (1, -1):
            here, others = row & (values * sign > 0), ~row & (values * sign > 0)
            if not here.any():
                continue
            if others.any() and values[here].abs().min() < values[others].abs().max():
                return False
            if gaps[row].max() > (1 + _EVEN) * gaps[row].min():
                return False
    return True


def scale_facts(before: Tensor, now: Tensor, *, is_whole: bool) -> dict[str, Any] | None:
    """Return the facts of a weight (outputs, inputs) that is the old one but for some factors.

    There is a factor, or an added value, for each output, input, or group of inputs of an output.
    None if it is as near to the old one without them, as after a quantisation. `is_sure` if they
    are signs, or what gives each cell the range, or the lowest value, of another one: so scales or
    zero points were exchanged. Others may have been learned, as in IA3 or DoRA.
    """
    if before.dim() != 2 or before.shape != now.shape or min(before.shape) < 8:
        return None
    before, now = before.double(), now.double()
    norm = before.norm()
    if not bool(now.isfinite().all()) or not float(norm) or not float(now.norm()):
        return None
    even = (now * before).sum() / norm**2
    without = min(float((now - before).norm()), float((now - even * before).norm()))
    for axis, one, other in _cells(before, now, is_whole):
        factors = (one * other).sum(-1) / (one * one).sum(-1).clamp_min(1e-30)
        left = float((other - factors[..., None] * one).norm())
        if left <= _FIT * float(now.norm()) and without > _BETTER * left + _LEFT * float(norm):
            ranges = one.abs().amax(-1)
            is_sure = _are_signs(factors) or _same_values(ranges, ranges * factors)
            return _scaled("factor", axis, factors, is_sure=is_sure)
        added = (other - one).mean(-1)
        left = float((other - one - added[..., None]).norm())
        if left <= _FIT * float(norm) and without > _BETTER * left + _LEFT * float(norm):
            lowest = one.amin(-1)
            return _scaled("added", axis, added, is_sure=_same_values(lowest, lowest + added))
    return None


def _scaled(kind: str, axis: str, values: Tensor, *, is_sure: bool) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    return {"kind": kind, "axis": axis, "low": low, "high": high, "is_sure": is_sure}


def _are_signs(factors: Tensor) -> bool:
    return bool(((factors.abs() - 1).abs() < _EVEN).all())


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same in another order, to within a few percent."""
    first, second = (table.flatten().sort().values for table in (one, other))
    return bool(((first - second).abs() <= _EVEN * first.abs().mean()).all())


def _cells(before: Tensor, now: Tensor, is_whole: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (cells, elements of a cell) of both: outputs, inputs, then groups from the largest."""
    yield "outputs", before, now
    yield "inputs", before.T, now.T
    for size in reversed(_GROUPS) if is_whole else ():
        if before.shape[1] % size == 0 and size < before.shape[1]:
            one, other = (table.reshape(len(table), -1, size) for table in (before, now))
            yield f"groups of {size} inputs", one, other
