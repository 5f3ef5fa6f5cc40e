"""Compare one step of two runs: chosen token, logits, masks, paths, and layer statistics.

No I/O and no torch: step records in, differences out. The caller must make sure that both steps
received the same tokens; for steps with different inputs only the chosen token is meaningful.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.records.step import UNKNOWN, LayerStatRecord, LogitsRecord, MaskRecord, StepRecord
from flexinspect.rules.context import read_unpadded
from flexinspect.rules.masks.mask_views import broadcast_rows

ROUNDING_LIMITS = {"float64": 1e-9, "float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""By dtype, the largest relative difference of a layer's statistics that rounding explains."""
JUMP_FACTOR = 4.0  # a layer stands out if it adds this many times what the others add on average
T = TypeVar("T")
FindMask = Callable[[str], MaskRecord | None]
FindMasks = tuple[FindMask, FindMask]
RealPositions = npt.NDArray[np.bool_] | None  # positions that are not padding, bool (positions,)


class LayerDifference(Struct, frozen=True):
    """The relative difference of one layer's output between two runs.

    `added` is what this layer added to the difference of the layer before it. `exact` says whether
    hidden states were compared (level extreme) or only their statistics.
    """

    layer: int
    difference: float
    added: float
    exact: bool = False


class OpenCells(Struct, frozen=True):
    """How many cells only one of two masks opens, and the (row, key) position of the first."""

    cells: int
    first: tuple[int, int]


class MaskDifference(Struct, frozen=True):
    """Layers whose executed masks differ, rows and keys of padding excluded.

    `cells` counts the different cells of the first layer and head that differ, and `first` is the
    (row, key) position of the first of them; both are None when the cells are not known. `only_a`
    and `only_b` are those that one run opens and the other closes.
    """

    layers: tuple[int, ...]
    cells: int | None = None
    first: tuple[int, int] | None = None
    only_a: OpenCells | None = None
    only_b: OpenCells | None = None


class PathDifference(Struct, frozen=True):
    """Layers with another path or dtype; `a` and `b` describe the two, as `sdpa, float32`."""

    layers: tuple[int, ...]
    a: str
    b: str


class StepDifference(Struct, frozen=True):
    """The differences between one step of run A and the same step of run B.

    `tokens` are the chosen ids (the best ones where the choice was not recorded), None without
    logits. `logits` is the largest change of a candidate's logit that both runs recorded; `margins`
    are best minus second. `entered` are candidates of B only, `left` those of A only. `lengths` is
    a text that is set when the two steps had other numbers of rows or keys, `positions` one that is
    set when their position ids differ, and `rows` one that is set when only the rows that both have
    were compared.
    """

    step: int
    tokens: tuple[int, int] | None = None
    logits: float | None = None
    margins: tuple[float, float] | None = None
    entered: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    lengths: str = ""
    positions: str = ""
    masks: tuple[MaskDifference, ...] = ()
    paths: tuple[PathDifference, ...] = ()
    layers: tuple[LayerDifference, ...] = ()
    rows: str = ""

    @property
    def is_diverged(self) -> bool:
        """Whether the two runs continue with different tokens."""
        return self.tokens is not None and self.tokens[0] != self.tokens[1]

    @property
    def is_same(self) -> bool:
        """Whether nothing that was recorded differs."""
        numbers = any(layer.difference for layer in self.layers) or self.logits
        inputs = self.lengths or self.positions or self.masks or self.paths
        return not (self.is_diverged or inputs or self.entered or self.left or numbers)

    @property
    def worst(self) -> LayerDifference | None:
        """The layer with the largest difference."""
        return max(self.layers, key=lambda layer: layer.difference, default=None)


class RunDifference(Struct, frozen=True):
    """The differences between the steps of two runs of the same prompt.

    `steps` are those that both have, up to and including the first with another input or token.
    `limit` is the largest difference between layers that rounding explains.
    """

    steps: tuple[StepDifference, ...] = ()
    limit: float = 0.0

    @property
    def divergence(self) -> StepDifference | None:
        """The step after which the two runs continue with different tokens."""
        return next((step for step in self.steps if step.is_diverged), None)

    @property
    def first_difference(self) -> StepDifference | None:
        """The first step in which anything differs."""
        return next((step for step in self.steps if not step.is_same), None)

    @property
    def first_beyond_rounding(self) -> StepDifference | None:
        """The first step with a difference that rounding does not explain."""
        for step in self.steps:
            is_large = any(layer.difference > self.limit for layer in step.layers)
            if is_large or step.lengths or step.positions or step.masks:
                return step
        return None

    @property
    def jump(self) -> int | None:
        """The layer that adds most of the first difference beyond rounding, None if none does.

        None also if the masks of all layers differ: the first layer then only comes first.
        """
        step = self.first_beyond_rounding
        if step is None:
            return None
        masked = {layer for mask in step.masks for layer in mask.layers}
        jump = find_jump(step.layers, self.limit)
        is_everywhere = masked.issuperset(layer.layer for layer in step.layers)
        return None if jump is None or is_everywhere else jump.layer


def compare_runs(
    a: Iterable[StepRecord],
    b: Iterable[StepRecord],
    find_masks: FindMasks,
    real: RealPositions = None,
) -> RunDifference:
    """Compare the steps of two runs of the same prompt; `real` defaults to that of the first."""
    differences: list[StepDifference] = []
    limit = 0.0
    for one, other in zip(a, b, strict=False):
        if not differences:
            limit, real = rounding_limit(one, other), real_positions(one) if real is None else real
        differences.append(compare_steps(one, other, find_masks, real=real))
        if differences[-1].is_diverged or differences[-1].lengths:
            break  # the inputs differ from here on
    return RunDifference(tuple(differences), limit)


def real_positions(step: StepRecord) -> RealPositions:
    """Return which positions of the prompt are not padding, from the recorded attention mask."""
    real = read_unpadded(step)
    return None if real is None or real.all() else real


def compare_steps(
    a: StepRecord, b: StepRecord, find_masks: FindMasks, *, real: RealPositions = None
) -> StepDifference:
    """Return the differences between two steps that received the same tokens.

    `find_masks` look up a mask of run A and of run B by its fingerprint. Masks and layers are
    compared only where both steps computed the same rows over the same keys.
    """
    lengths = _compare_texts(f"{s.q_len} rows after {s.kv_before} keys" for s in (a, b))
    of_a, of_b = ({one.layer: f"{one.path}, {one.dtype}" for one in s.calls} for s in (a, b))
    paths = _layers_by_pair(of_a, of_b, of_a.keys() | of_b.keys(), "no call")
    masks_a, masks_b = ({call.layer: call.mask for call in step.calls} for step in (a, b))
    shared = () if lengths else masks_a.keys() & masks_b.keys()
    pairs = _layers_by_pair(masks_a, masks_b, shared, None)
    masks = (_mask_difference(*pair, find_masks, a, real) for pair in pairs)
    difference = StepDifference(
        step=a.step,
        lengths=lengths,
        positions=_compare_positions(a, b),
        masks=tuple(filter(None, masks)),
        paths=tuple(PathDifference(layers, *pair) for pair, layers in paths),
        layers=() if lengths else _compare_layers(a, b, real),
    )
    return replace(difference, **_compare_logits(a.logits, b.logits))


def rounding_limit(a: StepRecord, b: StepRecord) -> float:
    """Return the largest relative difference that rounding explains, for the coarser dtype."""
    dtypes = {call.dtype for step in (a, b) for call in step.calls} or {"float32"}
    return max(ROUNDING_LIMITS.get(name, 0.1) for name in dtypes)


def find_jump(layers: Sequence[LayerDifference], limit: float) -> LayerDifference | None:
    """Return the layer at which the difference jumps beyond what rounding explains, or None.

    A layer stands out when it adds more than `JUMP_FACTOR` times what the others add on average.
    """
    if not any(layer.difference > limit for layer in layers):
        return None
    jump = max(layers, key=lambda layer: layer.added)
    others = [abs(layer.added) for layer in layers if layer is not jump]
    usual = sum(others) / len(others) if others else 0.0
    return jump if jump.added > JUMP_FACTOR * usual and jump.added > limit / 2 else None


def _compare_texts(texts: Iterable[str]) -> str:
    one, other = texts
    return "" if one == other else f"{one} against {other}"


def _compare_positions(a: StepRecord, b: StepRecord) -> str:
    texts = [
        ", ".join(f"{first}-{first + n - 1}" if n > 1 else f"{first}" for first, n in runs)
        for runs in (step.inputs.positions if step.inputs else () for step in (a, b))
    ]
    return _compare_texts(texts) if all(texts) else ""


def _compare_logits(a: LogitsRecord | None, b: LogitsRecord | None) -> dict[str, Any]:
    """Return the fields of `StepDifference` about tokens and logits."""
    if a is None or b is None:
        return {}
    one, other = ({c.token_id: c.logit for c in logits.candidates} for logits in (a, b))
    changes = (abs(one[id_] - other[id_]) for id_ in one if id_ in other)
    chosen = [
        next(iter(candidates), None) if logits.chosen_id == UNKNOWN else logits.chosen_id
        for logits, candidates in ((a, one), (b, other))
    ]
    return {
        "tokens": None if None in chosen else tuple(chosen),
        "logits": max(filter(math.isfinite, changes), default=None),
        "margins": (a.margin, b.margin),
        "entered": tuple(id_ for id_ in other if id_ not in one),
        "left": tuple(id_ for id_ in one if id_ not in other),
    }


def _layers_by_pair(
    a: Mapping[int, T], b: Mapping[int, T], layers: Iterable[int], default: T
) -> Iterable[tuple[tuple[T, T], tuple[int, ...]]]:
    """Return the layers of each pair of values that differ."""
    found: dict[tuple[T, T], tuple[int, ...]] = {}
    for layer in sorted(layers):
        pair = a.get(layer, default), b.get(layer, default)
        if pair[0] != pair[1]:
            found[pair] = (*found.get(pair, ()), layer)
    return found.items()


def _mask_difference(
    pair: tuple[str | None, str | None],
    layers: tuple[int, ...],
    find_masks: FindMasks,
    step: StepRecord,
    real: RealPositions,
) -> MaskDifference | None:
    """Return how two masks with other fingerprints differ, or None if their cells are equal."""
    if pair[0] is None or pair[1] is None:
        return MaskDifference(layers)
    mask_a, mask_b = find_masks[0](pair[0]), find_masks[1](pair[1])
    if mask_a is None or mask_b is None or mask_a.cells is None or mask_b.cells is None:
        # Fingerprints depend on names and captured values too, so without cells nothing is known.
        return None
    n_rows = max(mask_a.q_len, mask_b.q_len)
    cells_a, cells_b = (broadcast_rows(cells, n_rows) for cells in (mask_a.cells, mask_b.cells))
    n_heads = {len(cells_a), len(cells_b)} - {1}  # heads that share their cells have them once
    if cells_a.shape[1:] != cells_b.shape[1:] or len(n_heads) > 1:
        return MaskDifference(layers)
    cells_a, cells_b = np.broadcast_arrays(
        cells_a, cells_b
    )  # heads that share cells have them once
    differs = cells_a != cells_b
    kv_offset = max(step.kv_after - mask_a.kv_len, 0)
    if real is not None:  # kernels may differ in rows and keys of padding
        pads = np.flatnonzero(~real)
        differs[:, np.isin(np.arange(differs.shape[1]) + step.kv_before, pads)] = False
        differs[:, :, np.isin(np.arange(differs.shape[2]) + kv_offset, pads)] = False
    per_head = differs.reshape(len(differs), -1).sum(1)
    if not per_head.any():
        return None
    head = int(np.argmax(per_head > 0))
    offset = (step.kv_before, kv_offset)
    sides = (_open_cells(differs[head] & cells[head], offset) for cells in (cells_a, cells_b))
    only_a, only_b = sides
    first = min(side.first for side in (only_a, only_b) if side is not None)
    return MaskDifference(layers, int(per_head[head]), first, only_a, only_b)


def _open_cells(cells: npt.NDArray[np.bool_], offset: tuple[int, int]) -> OpenCells | None:
    """Return the number and the first of some cells, bool (rows, keys); None without any."""
    places = np.argwhere(cells)
    if not len(places):
        return None
    row, kv = (int(n) for n in places[0])
    return OpenCells(len(places), (offset[0] + row, offset[1] + kv))


def _compare_layers(
    a: StepRecord, b: StepRecord, real: RealPositions
) -> tuple[LayerDifference, ...]:
    """Return the difference of each layer: of hidden states if both steps have them, else of stats.

    Statistics cover all rows, so they cannot be compared when some rows are padding.
    """
    sizes = _hidden_differences(a, b, real)
    is_exact = bool(sizes)
    if not is_exact and real is None:
        of_a, of_b = ({stat.layer: stat for stat in step.layer_stats} for step in (a, b))
        sizes = {n: relative_change(of_a[n], of_b[n]) for n in of_a.keys() & of_b.keys()}
    differences, previous = [], 0.0
    for layer, size in sorted(sizes.items()):
        differences.append(LayerDifference(layer, size, size - previous, is_exact))
        previous = size
    return tuple(differences)


def _hidden_differences(a: StepRecord, b: StepRecord, real: RealPositions) -> dict[int, float]:
    """Return by layer the relative difference of the hidden states."""
    of_a, of_b = ({one.layer: one for one in s.arrays if one.stream == "hidden"} for s in (a, b))
    differences = {}
    for layer in of_a.keys() & of_b.keys():
        one, other = (to_float32(of[layer].array, of[layer].dtype) for of in (of_a, of_b))
        if layer is None or one.shape != other.shape:
            continue
        if real is not None:
            rows = np.isin(np.arange(len(one)) + a.kv_before, np.flatnonzero(~real), invert=True)
            one, other = one[rows], other[rows]
        size = float(np.linalg.norm(one))
        differences[layer] = float(np.linalg.norm(one - other)) / (size or 1.0)
    return differences


def to_float32(array: npt.NDArray[np.generic], dtype: str | None) -> npt.NDArray[np.float32]:
    """Return a stored array as float32; `dtype` names a type that numpy does not have."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def relative_change(one: LayerStatRecord, other: LayerStatRecord) -> float:
    """Return the largest relative change of a layer's norm, mean, std, min and max."""
    std = max(abs(one.std), abs(other.std), 1e-12)
    extreme = max(abs(one.max), abs(one.min), abs(other.max), abs(other.min), 1e-12)
    norm = max(abs(one.norm), abs(other.norm), 1e-12)
    sizes = {"norm": norm, "std": std, "mean": std, "max": extreme, "min": extreme}
    change = max(abs(getattr(one, k) - getattr(other, k)) / size for k, size in sizes.items())
    return change if math.isfinite(change) else math.inf
