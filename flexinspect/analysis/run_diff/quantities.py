"""The quantities of one step in two runs, in the order in which a model computes them.

Numbers are compared by their relative difference |a - b| / |a|, Euclidean norms over all values of
a quantity: of arrays where both runs have them (level extreme), else of statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.analysis.run_diff.alignment import PER_CALL, ROW_AXES, AlignedPair
from flexinspect.records.step import ArrayRecord, LogitsRecord, StepRecord
from flexinspect.rules import step_diff
from flexinspect.rules.step_diff import RealPositions, StepDifference

QUANTITIES = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "mask": "executed mask",
    "scores": "log-sum-exp of the newest row's scores",
    "attention": "attention of the newest row, by segment",
    "hidden": "output of the layer",
    "logits": "logits of the newest row",
    "token": "chosen token",
}
"""The quantities that are compared, in the order in which a step computes them, in words."""
_STREAMS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "attention.lse": "scores",
    "attention.mass": "attention",
    "hidden": "hidden",
    "logits.row": "logits",
}
STREAMS = ("inputs.mask", *_STREAMS)
"""The streams that a comparison reads."""

Floats = npt.NDArray[np.float64]


class QuantityDifference(Struct, frozen=True):
    """The relative difference of one quantity of a layer (None: of the step) in two runs.

    `reason` is "value", "shape" or "missing": with the latter two, `text` describes both sides and
    the difference is infinite. `exact` is false where only statistics or candidates were compared.
    """

    layer: int | None
    quantity: str
    difference: float
    reason: str = "value"
    exact: bool = True
    text: str = ""


class _Value(NamedTuple):
    array: npt.NDArray[np.generic]
    dtype: str | None


_Values = dict[tuple[int | None, str], _Value]


def compare_quantities(
    pair: AlignedPair,
    found: StepDifference,
    real: RealPositions = None,
    *,
    same_segments: bool = True,
) -> list[QuantityDifference]:
    """Return the differences of all quantities that both steps have, in the order of computation.

    `found` is the comparison of the two steps: of its masks and tokens. Padding, where `real` is
    false, does not count. Attention by segment is left out without `same_segments`.
    """
    a, b = pair.a, pair.b
    one, other = (_values(step, real) for step in (a, b))
    keys = (key for key in one.keys() & other.keys() if same_segments or key[1] != "attention")
    compared = [_compare(key, one[key], other[key]) for key in keys]
    exact = {each.layer for each in compared if each.quantity == "hidden"}
    if real is None:
        compared += _from_statistics(a, b, exact)
    compared += _of_masks(pair, found)
    if not any(each.quantity == "logits" for each in compared) and a.logits and b.logits:
        compared += _from_candidates(a.logits, b.logits)
    if found.tokens is not None:
        differs = math.inf if found.is_diverged else 0.0
        compared.append(QuantityDifference(None, "token", differs))
    rank = {name: n for n, name in enumerate(QUANTITIES)}
    return sorted(compared, key=lambda each: (_order_of(each.layer), rank[each.quantity]))


def recorded_quantities(step: StepRecord) -> frozenset[str]:
    """Return the quantities of which a step has anything."""
    names = {_STREAMS[one.stream] for one in step.arrays if one.stream in _STREAMS}
    if any(call.mask for call in step.calls):
        names.add("mask")
    if step.layer_stats:
        names.add("hidden")
    return frozenset(names | ({"logits", "token"} if step.logits else set()))


def relative_difference(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> float:
    """Return |one - other| / |one|; equal NaN and infinities do not differ, others do infinitely.

    Where `one` is 0 everywhere, it is |other|.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    if is_same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        change = float(np.linalg.norm(np.where(is_same, 0.0, a - b)))
    size = float(np.linalg.norm(a[np.isfinite(a)]))
    return change / (size or 1.0) if math.isfinite(change) else math.inf


def _order_of(layer: int | None) -> float:
    return math.inf if layer is None else layer


def _values(step: StepRecord, real: RealPositions) -> _Values:
    found: _Values = {}
    for one in step.arrays:
        name = _STREAMS.get(one.stream)
        if name is None:
            continue
        if one.stream in PER_CALL:
            if len(one.array) == len(step.calls):
                for call, row in zip(step.calls, one.array, strict=True):
                    found.setdefault((call.layer, name), _Value(row, None))
        else:
            found[one.layer, name] = _Value(_without_padding(one, step, real), one.dtype)
    return found


def _without_padding(
    one: ArrayRecord, step: StepRecord, real: RealPositions
) -> npt.NDArray[np.generic]:
    axis = ROW_AXES.get(one.stream)
    if real is None or axis is None or one.array.shape[axis] != step.q_len:
        return one.array
    positions = np.arange(step.q_len) + step.kv_before
    kept = np.isin(positions, np.flatnonzero(~real), invert=True)
    return np.compress(kept, one.array, axis)


def _compare(key: tuple[int | None, str], one: _Value, other: _Value) -> QuantityDifference:
    if one.array.shape != other.array.shape:
        text = f"{one.array.shape} against {other.array.shape}"
        return QuantityDifference(*key, math.inf, "shape", text=text)
    a, b = (
        step_diff.to_float32(*each) if each.dtype == "bfloat16" else each.array
        for each in (one, other)
    )
    return QuantityDifference(*key, relative_difference(a, b))


def _from_statistics(
    a: StepRecord, b: StepRecord, exact: set[int | None]
) -> Iterator[QuantityDifference]:
    of_a, of_b = ({stat.layer: stat for stat in step.layer_stats} for step in (a, b))
    for layer in of_a.keys() & of_b.keys() - exact:
        change = step_diff.relative_change(of_a[layer], of_b[layer])
        yield QuantityDifference(layer, "hidden", change, exact=False)


def _of_masks(pair: AlignedPair, found: StepDifference) -> Iterator[QuantityDifference]:
    """Yield the masks whose cells both runs have: infinitely different, or equal in all cells.

    Masks of one fingerprint are equal, with or without recorded cells.
    """
    differs = {layer: mask for mask in found.masks for layer in mask.layers}
    of_a, of_b = ({call.layer: call.mask for call in step.calls} for step in (pair.a, pair.b))
    known: dict[tuple[str | None, str | None], bool] = {}
    for layer in of_a.keys() & of_b.keys():
        names, mask = (of_a[layer], of_b[layer]), differs.get(layer)
        if mask is not None:
            text = "" if mask.cells is None else f"{mask.cells} cells"
            yield QuantityDifference(layer, "mask", math.inf, "mask", text=text)
        elif not found.lengths:
            if names not in known:
                known[names] = names[0] == names[1] or all(
                    name is not None and (one := find(name)) is not None and one.cells is not None
                    for name, find in zip(names, pair.finds, strict=True)
                )
            if known[names]:
                yield QuantityDifference(layer, "mask", 0.0)


def _from_candidates(a: LogitsRecord, b: LogitsRecord) -> Iterator[QuantityDifference]:
    one, other = ({c.token_id: c.logit for c in logits.candidates} for logits in (a, b))
    shared = [id_ for id_ in one if id_ in other]
    if shared:
        values = (np.array([side[id_] for id_ in shared]) for side in (one, other))
        yield QuantityDifference(None, "logits", relative_difference(*values), exact=False)


# -- the noise floor ------------------------------------------------------------------------------

FLOORS = {"float64": 1e-6, "float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}
"""By dtype, the relative difference of a layer that rounding explains.

Measured on random Llamas of width 256 on CPU, hidden states against those of SDPA in float32:
eager attention in float32 7e-7 (4 layers) and 1.1e-6 (32), float16 2.1e-3 and 3.2e-3, bfloat16
0.013 and 0.023. In float64 eager attention and SDPA differ by 2.6e-7, because the norms, the angles
of the rotation and eager's softmax stay in float32. The floors leave room for larger models.
"""
SHARES_FACTOR = 10.0
"""Of the floor, for attention: a softmax turns the error of a score into a relative one."""
FIRST_LIMITS = {"float32": 1e-6, "float16": 2**-15, "bfloat16": 2**-12}
"""By dtype, the size of a first difference that runs may have which round alike.

Such runs compute the same bits, until something else than rounding differs. A kernel that adds in
another order each time changes the last bit of few numbers at first: in float16 and bfloat16 one
number of 500 by one unit in the last place gives 1/32 of the dtype's epsilon. In float32 every
number may change, which gives 1e-7.
"""
EXACT = ("q", "k", "v", "hidden", "logits")
"""The quantities that are recorded as the model computed them, in its own dtype."""
NOISE_FACTOR = 4.0
"""A quantity differs beyond noise if it differs this many times more than between repeats."""


class Noise(Struct, frozen=True):
    """How far a quantity may differ between two runs that are the same.

    `source` says where that comes from. `floor` is the limit from the dtypes; `measured` are those
    from repeats, by quantity and layer ("hidden 3", "logits"), which replace it if given. `first`
    is the limit of the first number that differs at all, None where only the others hold;
    `first_key` says which one is beyond it ("hidden 3").
    """

    source: str
    floor: float
    measured: Mapping[str, float] = {}
    is_measured: bool = False
    first: float | None = None
    first_key: str = ""

    def limit(self, quantity: str, layer: int | None) -> float:
        """Return the largest relative difference that is noise."""
        if quantity in ("mask", "token"):
            return 0.0
        key = noise_key(quantity, layer)
        if self.first is not None and key == self.first_key:
            return self.first
        factor = SHARES_FACTOR if quantity == "attention" and not self.is_measured else 1.0
        return self.measured.get(key, factor * self.floor)


def noise_of_dtypes(a: StepRecord, b: StepRecord, *, has_first: bool = False) -> Noise:
    """Return the noise of two steps from the dtypes of their calls, the coarser one counts.

    With `has_first`, runs of one dtype have a limit of their first difference too.
    Layers whose dtypes differ while those of most others do not are not noise: see `odd_dtypes`.
    """
    odd = odd_dtypes(a, b)
    one, other = ({call.dtype for call in step.calls if call.layer not in odd} for step in (a, b))
    names = sorted(one | other) or ["float32"]
    limit = max(FLOORS.get(name, 0.1) for name in names)
    known = "" if one | other else ", which is assumed"
    first = FIRST_LIMITS.get(names[0]) if has_first and len(names) == 1 else None
    return Noise(f"rounding in {' and '.join(names)}{known}", limit, first=first)


def noise_of_repeats(repeats: Mapping[str, float], where: str, least: float = 0.0) -> Noise:
    """Return the noise that repeats show: their largest differences, by quantity and layer."""
    limits = {key: max(NOISE_FACTOR * value, least) for key, value in repeats.items()}
    how = "which are equal bit by bit" if not any(repeats.values()) else f"times {NOISE_FACTOR:g}"
    how += f", and at least {least:g} as the dtypes differ" if least else ""
    floor = max(limits.values(), default=least)
    return Noise(f"{where}, {how}", floor, limits, is_measured=True)


def odd_dtypes(a: StepRecord, b: StepRecord) -> dict[int, tuple[str, str]]:
    """Return the layers whose dtypes differ otherwise than those of most layers do."""
    of_a, of_b = ({call.layer: call.dtype for call in step.calls} for step in (a, b))
    pairs = {layer: (of_a[layer], of_b[layer]) for layer in of_a.keys() & of_b.keys()}
    values = list(pairs.values())
    usual = max(values, key=lambda pair: (values.count(pair), pair[0] == pair[1]), default=None)
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1] and pair != usual}


def noise_key(quantity: str, layer: int | None) -> str:
    """Return the name of a quantity of a layer in `Noise.measured`."""
    return quantity if layer is None else f"{quantity} {layer}"
