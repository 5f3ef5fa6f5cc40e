"""Judges in which outputs of a fused projection the adapters of its parts landed.

The change of the weight is divided by the factor that reads the input: what is left at each output
is a row of the other factor, or nothing. So the outputs that got an adapter show, also beside those
that other adapters of the layer changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.changed_weights.adapter_factors import Pair, layer_name
from flexinspect_hooks.changed_weights.fused_parts import (
    format_ranges,
    fused_parts,
    head_sizes,
    part_of,
)
from flexinspect_hooks.changed_weights.weight_changes import Delta, rows_of

_SAME, _OTHER = 0.95, 0.5
"""Cosines of a factor and of what is left at some outputs: it is there; it is not."""
_MIN_VALUES = 16
"""Values of a factor that are compared: of fewer, others may look alike by chance."""
_MAX_STEPS = 64
_ALIKE = 0.02
"""Singular values below this part of the largest one are differences of equal factors."""


class _Fused(Struct, frozen=True):
    """The change of a fused weight: `gap` (outputs, inputs) at some outputs and some inputs."""

    name: str
    gap: Tensor
    outputs: Tensor
    inputs: Tensor
    n_inputs: int
    parts: Mapping[str, Tensor]
    is_columns: bool


def misplaced_parts(
    model: nn.Module, deltas: Mapping[str, Delta], pairs: Sequence[Pair]
) -> Iterator[dict[str, Any]]:
    """Yield fused weights in which the adapter of one part was added to outputs of another."""
    named = [pair for pair in pairs if part_of(pair.leaf) is not None]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, delta in deltas.items() if named else ():
        known = layer_name(name)
        if known is None or len(delta.shape) != 2:
            continue
        here = [pair for pair in named if pair.number == known[1]]
        parts = fused_parts(model, name) if here else {}
        here = [pair for pair in here if part_of(pair.leaf) in parts]
        if not here:
            continue
        fused = _fused(model, name, delta, parts)
        for pair in here:
            facts = _misplaced(fused, pair, here, head_sizes(model)[2])
            if facts is not None:
                key = (known[0], pair.series[1:], facts["outputs"])
                entry = found.setdefault(key, {"name": known[0], "layers": [], **facts})
                if known[1] not in entry["layers"]:
                    entry["layers"].append(known[1])
    yield from found.values()


def _fused(model: nn.Module, name: str, delta: Delta, parts: Mapping[str, Tensor]) -> _Fused:
    owner = model.get_submodule(name.rpartition(".")[0])
    is_columns = type(owner).__name__ == "Conv1D"  # of transformers: (inputs, outputs)
    gap = delta.gap.T if is_columns else delta.gap
    sides = (delta.rows.cpu(), delta.columns.cpu())
    outputs, inputs = sides[::-1] if is_columns else sides
    n_inputs = delta.shape[0 if is_columns else 1]
    return _Fused(name, gap, outputs, inputs, n_inputs, parts, is_columns)


def _misplaced(
    fused: _Fused, pair: Pair, all_pairs: Sequence[Pair], head_size: int
) -> dict[str, Any] | None:
    """Return the facts of an adapter that is not in its own part but in other outputs."""
    own = fused.parts[str(part_of(pair.leaf))]
    for left, right in _orders(fused, pair, len(own)):
        others = {
            two.data_ptr(): two
            for other in all_pairs
            for _, two in _orders(fused, other, None)
            if two.data_ptr() not in _addresses(pair)
        }
        at_outputs = _left_factor(fused, right, [*others.values()])
        if _similarity(fused, at_outputs, left, own) >= _OTHER:
            return None
        for places in _placements(fused, len(own), head_size):
            if _similarity(fused, at_outputs, left, places) > _SAME:
                if _is_own(fused, pair, all_pairs, places):
                    return None
                hit = [part for part, one in fused.parts.items() if torch.isin(places, one).any()]
                return {
                    "order": "part",
                    "adapter": pair.name,
                    "own": str(part_of(pair.leaf)),
                    "hit": hit,
                    "axis": "columns" if fused.is_columns else "rows",
                    "outputs": format_ranges(places.tolist()),
                    "own_outputs": format_ranges(own.tolist()),
                }
    return None


def _orders(fused: _Fused, pair: Pair, n_outputs: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (left, right) factors of a pair whose shapes fit; `n_outputs` None fits any."""
    both = [(pair.outer, pair.inner), (pair.inner, pair.outer)]
    for left, right in both[: 1 if pair.is_sure else 2]:
        if len(right) == fused.n_inputs and n_outputs in (None, len(left)):
            yield left, right


def _left_factor(fused: _Fused, right: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return what the change is, at each output, as a sum of the columns of `right`; float64."""
    columns = [rows_of(one, fused.inputs).double() for one in (right, *others)]
    basis = torch.cat(columns, 1)
    if 2 * basis.shape[1] > basis.shape[0]:
        basis = columns[0]
    wanted = fused.gap.T.double()
    # Factors of one value, such as before and after a cast, share what belongs to them.
    solution: Tensor = torch.linalg.lstsq(basis, wanted, rcond=_ALIKE, driver="gelsd").solution
    return solution[: right.shape[1]].T


def _similarity(fused: _Fused, at_outputs: Tensor, left: Tensor, places: Tensor) -> float:
    """Return how similar a factor is to what is left at some outputs, 0 to 1; 0 if unknown."""
    # Of each output that is compared, where it stands among the places.
    where, row = torch.where(fused.outputs[:, None] == places[None])
    one = at_outputs[where]
    other = rows_of(left, row).double()
    if one.numel() < _MIN_VALUES:
        return 0.0
    scale = one.norm() * other.norm()
    return float((one * other).sum().abs() / scale.clamp_min(1e-30))


def _placements(fused: _Fused, length: int, head_size: int) -> Iterator[Tensor]:
    """Yield lists of outputs that an adapter of some length may have been added to."""
    for one in fused.parts.values():
        if len(one) == length:
            yield one
    n = sum(map(len, fused.parts.values()))
    step = math.gcd(length, head_size) if head_size else length
    while (n - length) // step > _MAX_STEPS:
        step *= 2
    for first in {*range(0, n - length + 1, step), *range(0, n - length + 1, length), n - length}:
        yield torch.arange(first, first + length)
    if head_size and not length % head_size and n == 3 * length:
        table = torch.arange(n).view(-1, 3, head_size)
        yield from (table[:, one].flatten() for one in range(3))


def _is_own(fused: _Fused, pair: Pair, all_pairs: Sequence[Pair], places: Tensor) -> bool:
    """Whether the factors also have a name of the part in which they are."""
    return any(
        torch.equal(fused.parts[str(part_of(other.leaf))], places)
        for other in all_pairs
        if _addresses(other) == _addresses(pair)
    )


def _addresses(pair: Pair) -> set[int]:
    return {pair.outer.data_ptr(), pair.inner.data_ptr()}
