"""Linear layers with integer weights, made by hand: does a scale multiply what it was made for?

Symmetric quantisation divides each row by its largest magnitude, so each row of the integers
reaches the largest code, and columns do so only by chance. That shows which axis has the scales.
The weight that the layer uses is read from its outputs for rows of the identity. In a square matrix
scales of the other axis fit too, and nothing raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_modules import is_of_program, own_dtype, own_tensors
from flexinspect_hooks.capture.quiet_modules import quiet_module

_TOP = (7, 127)
"""The largest codes of symmetric integers with 4 and 8 bits."""
_PROBED, _MIN_SIDE = 32, 16
_LARGE = 0.1
"""Codes above this part of the largest one are read: the weight of a smaller one is rounded off."""
_EQUAL, _UNLIKE = 0.02, 0.05
"""Ratios within the first, of their mean, are one scale; scales differ by more than the second."""
_SIZE = 256.0
"""Of the probe rows: so large that the bias does not round the weights off in a small dtype."""
_SECONDS = 1.0

ROWS, COLUMNS = "outputs", "inputs"


class _Scales(Struct, frozen=True):
    """What the integers (outputs, inputs) were divided by, and what multiplies them: axes."""

    made_for: str
    used_for: str


def wrong_scales(root: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the facts of modules whose scales multiply the other axis of their integer weights."""
    deadline = time.perf_counter() + _SECONDS
    for name, module in root.named_modules():
        if not is_of_program(module) or time.perf_counter() > deadline:
            continue
        for codes in module._buffers.values(), module._parameters.values():
            for one in codes:
                if one is None or one.dtype is not torch.int8 or one.dim() != 2:
                    continue
                with suppress(Exception):  # a module of the program may be of any kind
                    found = _scales(module, one)
                    if found is not None and found.made_for != found.used_for:
                        yield {
                            "module": name,
                            "class": type(module).__name__,
                            "made_for": found.made_for,
                            "used_for": found.used_for,
                            "shape": list(one.shape),
                        }


def _scales(module: Any, codes: Tensor) -> _Scales | None:
    """Return the axes of the scales of a square matrix of codes; None if they are not certain."""
    if codes.shape[0] != codes.shape[1] or codes.shape[0] < _MIN_SIDE:
        return None
    made = _divided_axis(codes)
    if made is None:
        return None
    places = torch.linspace(0, len(codes) - 1, min(len(codes), _PROBED)).round().long()
    weight = _weight_columns(module, len(codes), places)
    for is_transposed in (False, True):
        table = codes.T if is_transposed else codes
        used = _multiplied_axis(weight, table[:, places.to(codes.device)])
        if used is not None and _n_scales(module, len(codes)) == 1:
            flipped = {ROWS: COLUMNS, COLUMNS: ROWS}
            return _Scales(flipped[made] if is_transposed else made, used)
    return None


def _divided_axis(codes: Tensor) -> str | None:
    """Return the axis of which each slice reaches the largest code, if only one does."""
    size = codes.to(torch.int16).abs()
    top = int(size.max())
    if top not in _TOP:
        return None
    rows, columns = (size.amax(dim) for dim in (1, 0))
    reaches = [bool(((one == top) | (one == 0)).all()) for one in (rows, columns)]
    return None if reaches[0] == reaches[1] else ROWS if reaches[0] else COLUMNS


def _weight_columns(module: Any, n: int, places: Tensor) -> Tensor:
    """Return the weight (outputs, places) that a linear module uses, in float64."""
    device, dtype = next(own_tensors(module)).device, own_dtype(module) or torch.float32
    rows = torch.zeros(1, len(places) + 1, n, device=device, dtype=dtype)
    rows[0, torch.arange(len(places)), places] = _SIZE  # the last row gives the bias
    with quiet_module(module):
        output = module.forward(rows)[0].double()
    found: Tensor = (output[:-1] - output[-1]).T / _SIZE
    return found


def _n_scales(module: nn.Module, n: int) -> int:
    """Return how many vectors of unequal scales a module has.

    Two are those of both axes, as after moving a factor from the inputs into the weight.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    scales = [one for name, one in named if one.numel() == n and not name.endswith("bias")]
    spread = [
        float((one.max() - one.min()) / one.abs().mean().clamp_min(1e-30))
        for one in (one.detach().double() for one in scales)
    ]
    return sum(one > _EQUAL for one in spread)


def _multiplied_axis(weight: Tensor, codes: Tensor) -> str | None:
    """Return by which axis the ratios of weights to codes differ; None if not by one alone."""
    if weight.shape != codes.shape:
        return None
    wide = codes.double()
    is_read = wide.abs() > _LARGE * wide.abs().max()
    ratios = torch.where(is_read, weight / torch.where(is_read, wide, 1), torch.nan)
    in_rows, in_columns = (_spread(ratios, dim) for dim in (1, 0))
    if in_rows <= _EQUAL and in_columns > _UNLIKE:
        return ROWS
    return COLUMNS if in_columns <= _EQUAL and in_rows > _UNLIKE else None


def _spread(ratios: Tensor, dim: int) -> float:
    """Return the largest spread of ratios along a dimension, of their mean; NaN is left out."""
    high = torch.where(ratios.isnan(), -torch.inf, ratios).amax(dim)
    low = torch.where(ratios.isnan(), torch.inf, ratios).amin(dim)
    mean = (high + low) / 2
    spread = (high - low)[mean.isfinite()] / mean[mean.isfinite()].abs().clamp_min(1e-30)
    return float(spread.max()) if spread.numel() else 0.0
