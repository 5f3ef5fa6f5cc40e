"""Which generations, steps, layers and rows of two runs are compared with each other.

Generations are aligned by their prompt, steps by the keys that they end with, and layers by number;
if the numbers of layers or their heads differ, by heads and statistics. What has no partner is left
out, and named. Step records of B are rewritten with the numbers of A, so that nothing after the
alignment needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import format_ranges
from flexinspect.records.step import ArrayRecord, LayerStatRecord, MaskRecord, StepRecord
from flexinspect.rules import step_diff
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import is_standalone

GAP_COST = 0.35
"""The cost of a layer without a partner; that of a pair is 0 (equal) to 1, 0.5 for other heads."""
PER_CALL = ("attention.lse", "attention.mass", "attention.entropy")
"""Streams with one entry per attention call, in the order of the calls."""
ROW_AXES: Mapping[str, int] = {"q": 1, "k": 1, "v": 1, "hidden": 0}
"""Streams with one entry per row of the step, and the axis of the rows."""

GenerationPair = tuple[GenerationRow | None, GenerationRow | None]
StepPair = tuple[StepRecord | None, StepRecord | None]


class LayerAlignment(Struct, frozen=True):
    """Pairs of layers (of A, of B), and for A and for B the layers that were left out.

    `how` says what they were aligned by, `renamed` is the first pair of module names that differ.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    left_out: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    how: str = "number"
    renamed: tuple[str, str] = ("", "")

    @property
    def is_plain(self) -> bool:
        """Whether each layer is compared with the one of the same number and name."""
        moved = any(one != other for one, other in self.pairs)
        return not (moved or any(self.left_out) or any(self.renamed))

    def lines(self) -> Iterator[str]:
        """Yield what was aligned with what, and what was left out; nothing for a plain one."""
        if self.is_plain:
            return
        ones, others = ([pair[side] for pair in self.pairs] for side in (0, 1))
        names = f" ({self.renamed[0]} with {self.renamed[1]}, ...)" if any(self.renamed) else ""
        yield (
            f"layers aligned by {self.how}: A {format_ranges(ones)} with B "
            f"{format_ranges(others)}{names}"
        )
        for name, layers in zip("AB", self.left_out, strict=True):
            if layers:
                yield f"left out: layer {format_ranges(layers)} of {name} has no partner"


# -- generations ----------------------------------------------------------------------------------


def align_generations(
    a: TraceReader, b: TraceReader, generation: int | None = None
) -> list[GenerationPair]:
    """Return pairs of generations of models: of the same number and prompt, else of one prompt.

    Those that remain are paired by number, and their prompts differ. `generation` selects one of A,
    or one of B that A does not have.
    """
    left, right = (
        {row.generation: row for row in reader.generations() if not is_standalone(row)}
        for reader in (a, b)
    )
    prompts = [
        {number: prompt_ids(reader, number) for number in rows}
        for reader, rows in ((a, left), (b, right))
    ]
    partner = _partners(*prompts)
    used = set(partner.values())
    pairs: list[GenerationPair] = []
    for number, row in left.items():
        other = partner.get(number)
        if other is None and number in right.keys() - used:
            other = number
            used.add(other)
        pairs.append((row, None if other is None else right[other]))
    pairs += [(None, row) for number, row in right.items() if number not in used]
    if generation is None:
        return pairs
    chosen = [one for one in pairs if one[0] is not None and one[0].generation == generation]
    return chosen or [
        one for one in pairs if one[1] is not None and one[1].generation == generation
    ]


def prompt_ids(reader: TraceReader, generation: int) -> tuple[int, ...]:
    """Return the token ids of a prompt."""
    return tuple(one.token_id for one in reader.tokens(generation) if one.step is None)


def _partners(
    left: Mapping[int, tuple[int, ...]], right: Mapping[int, tuple[int, ...]]
) -> dict[int, int]:
    """Return the generation of B with the same prompt, the one of the same number if it has it."""
    partner = {n: n for n, prompt in left.items() if right.get(n) == prompt}
    free = [n for n in right if n not in partner]
    for number, prompt in left.items():
        other = next((n for n in free if right[n] == prompt), None)
        if number not in partner and other is not None:
            partner[number] = other
            free.remove(other)
    return partner


def have_same_segments(a: tuple[TraceReader, int], b: tuple[TraceReader, int]) -> bool:
    """Tell whether the segments of two generations begin at the same positions.

    Only then is their attention by segment comparable; the end of the last one may differ.
    """
    starts = [[one.start for one in reader.segments(number)] for reader, number in (a, b)]
    return starts[0] == starts[1]


# -- steps and rows -------------------------------------------------------------------------------


def align_steps(a: Iterable[StepRecord], b: Iterable[StepRecord]) -> Iterator[StepPair]:
    """Yield the steps of two runs in order, as pairs that end with the same number of keys.

    A step whose number of keys the other run skips (a prompt in parts) has no partner.
    """
    left, right = iter(a), iter(b)
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        is_pair = one is not None and other is not None and one.kv_after == other.kv_after
        takes_one = other is None or (one is not None and one.kv_after <= other.kv_after)
        takes_other = is_pair or not takes_one
        yield one if takes_one else None, other if takes_other else None
        if takes_one:
            one = next(left, None)
        if takes_other:
            other = next(right, None)


def share_rows(a: StepRecord, b: StepRecord) -> tuple[StepRecord, StepRecord]:
    """Return two steps that end with the same keys, with only the rows that both computed.

    Statistics cover all rows of a step, so they are dropped where the numbers of rows differ.
    """
    if a.q_len == b.q_len:
        return a, b
    n = min(a.q_len, b.q_len)
    one, other = (_last_rows(step, n) for step in (a, b))
    return one, other


class AlignedPair(NamedTuple):
    """Two steps with the same rows and the layers' numbers of A, and what was done for that.

    `rows` says in words how many rows both computed, empty if as many. `finds` look up their masks.
    """

    a: StepRecord
    b: StepRecord
    layers: LayerAlignment
    rows: str
    finds: step_diff.FindMasks


def align_pair(
    a: StepRecord,
    b: StepRecord,
    finds: step_diff.FindMasks,
    layers: LayerAlignment | None = None,
) -> AlignedPair:
    """Align the layers and rows of two steps; `layers` is that of an earlier pair of the runs."""
    layers = align_layers(a, b) if layers is None else layers
    one, other = share_rows(only_aligned(a, layers), renumbered(b, layers))
    if a.q_len == b.q_len:
        return AlignedPair(one, other, layers, "", finds)
    rows, n = f"{a.q_len} against {b.q_len} rows", min(a.q_len, b.q_len)
    last = last_rows_of(finds[0], n), last_rows_of(finds[1], n)
    return AlignedPair(one, other, layers, rows, last)


def _last_rows(step: StepRecord, n: int) -> StepRecord:
    arrays = tuple(
        replace(one, array=np.take(one.array, range(-n, 0), ROW_AXES[one.stream]))
        if one.stream in ROW_AXES and one.array.shape[ROW_AXES[one.stream]] == step.q_len
        else one
        for one in step.arrays
    )
    inputs = step.inputs and replace(step.inputs, positions=_last_positions(step, n))
    begins = step.kv_after - n
    return replace(step, q_len=n, kv_before=begins, arrays=arrays, inputs=inputs, layer_stats=())


def _last_positions(step: StepRecord, n: int) -> tuple[tuple[int, int], ...]:
    ids = [] if step.inputs is None else step.inputs.position_ids[-n:]
    return tuple((id_, 1) for id_ in ids)


def last_rows_of(find: step_diff.FindMask, n_rows: int) -> Callable[[str], MaskRecord | None]:
    """Return a look-up of masks that have only their last `n_rows` rows."""

    def find_last(fingerprint: str) -> MaskRecord | None:
        mask = find(fingerprint)
        if mask is None or mask.cells is None or mask.cells.shape[1] <= n_rows:
            return mask
        return replace(mask, q_len=n_rows, cells=mask.cells[:, -n_rows:])

    return find_last


# -- layers ---------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """What a layer is recognised by: the heads of its attention call, and its statistics."""

    number: int
    heads: tuple[int, int, int] | None
    stat: LayerStatRecord | None


def align_layers(a: StepRecord, b: StepRecord) -> LayerAlignment:
    """Align the layers of two steps of the same prompt.

    With equal numbers of layers and heads each layer is compared with that of its number. Otherwise
    the pairs in order that cost least are taken (Needleman-Wunsch): see `GAP_COST`.
    """
    left, right = _layers(a), _layers(b)
    is_same_shape = [one.heads for one in left] == [one.heads for one in right]
    numbers = [[one.number for one in side] for side in (left, right)]
    if is_same_shape and numbers[0] == numbers[1]:
        pairs, how = tuple(zip(*numbers, strict=True)), "number"
    elif is_same_shape:
        pairs, how = tuple(zip(*numbers, strict=True)), "order"
    else:
        pairs = tuple((left[i].number, right[j].number) for i, j in _cheapest_pairs(left, right))
        how = "heads and statistics"
    kept = [{pair[side] for pair in pairs} for side in (0, 1)]
    missing = [tuple(n for n in own if n not in kept[side]) for side, own in enumerate(numbers)]
    return LayerAlignment(pairs, (missing[0], missing[1]), how, _first_renamed(left, right, pairs))


def renumbered(step: StepRecord, alignment: LayerAlignment) -> StepRecord:
    """Return a step of B with the layers' numbers in A; layers without a partner are dropped."""
    if all(one == other for one, other in alignment.pairs) and not alignment.left_out[1]:
        return step
    number = {other: one for one, other in alignment.pairs}
    kept = [index for index, call in enumerate(step.calls) if call.layer in number]
    return replace(
        step,
        calls=tuple(replace(c, layer=number[c.layer]) for c in step.calls if c.layer in number),
        layer_stats=tuple(
            replace(one, layer=number[one.layer]) for one in step.layer_stats if one.layer in number
        ),
        arrays=tuple(_renumbered_arrays(step, number, kept)),
    )


def only_aligned(step: StepRecord, alignment: LayerAlignment) -> StepRecord:
    """Return a step of A without the layers that have no partner."""
    if not alignment.left_out[0]:
        return step
    same = replace(alignment, pairs=tuple((one, one) for one, _ in alignment.pairs))
    return renumbered(step, replace(same, left_out=((), alignment.left_out[0])))


def _renumbered_arrays(
    step: StepRecord, number: Mapping[int, int], kept: Sequence[int]
) -> Iterator[ArrayRecord]:
    for one in step.arrays:
        if one.layer is not None and one.layer in number:
            yield replace(one, layer=number[one.layer])
        elif one.layer is None:
            is_per_call = one.stream in PER_CALL and len(one.array) == len(step.calls)
            yield replace(one, array=one.array[list(kept)]) if is_per_call else one


def _layers(step: StepRecord) -> list[_Layer]:
    heads = {one.layer: (one.q_heads, one.kv_heads, one.head_dim) for one in step.calls}
    stats = {one.layer: one for one in step.layer_stats}
    numbers = sorted(heads.keys() | stats.keys())
    return [_Layer(number, heads.get(number), stats.get(number)) for number in numbers]


def _cheapest_pairs(left: Sequence[_Layer], right: Sequence[_Layer]) -> list[tuple[int, int]]:
    """Return the pairs of indices, in order, of the alignment that costs least."""
    costs = _pair_costs(left, right)
    n, m = costs.shape
    total = np.zeros((n + 1, m + 1))
    total[n, :] = GAP_COST * np.arange(m, -1, -1)
    total[:, m] = GAP_COST * np.arange(n, -1, -1)
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            gap = min(total[i + 1, j], total[i, j + 1]) + GAP_COST
            total[i, j] = min(total[i + 1, j + 1] + costs[i, j], gap)
    pairs, i, j = [], 0, 0
    while i < n and j < m:  # of equal layers the first is taken: a copy after it is left out
        if total[i, j] == total[i + 1, j + 1] + costs[i, j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif total[i, j] == total[i + 1, j] + GAP_COST:
            i += 1
        else:
            j += 1
    return pairs


def _pair_costs(left: Sequence[_Layer], right: Sequence[_Layer]) -> npt.NDArray[np.float64]:
    costs = np.zeros((len(left), len(right)))
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            if one.stat is not None and other.stat is not None:
                costs[i, j] = min(step_diff.relative_change(one.stat, other.stat), 1.0)
            if one.heads != other.heads:
                costs[i, j] = max(costs[i, j], 0.5)
    return costs


def _first_renamed(
    left: Sequence[_Layer], right: Sequence[_Layer], pairs: Iterable[tuple[int, int]]
) -> tuple[str, str]:
    """Return the first pair of names that differ by more than the number of the layer."""
    a, b = ({one.number: one.stat.module for one in side if one.stat} for side in (left, right))
    for one, other in pairs:
        names = (a.get(one, ""), b.get(other, ""))
        plain = [name.replace(str(n), "N") for name, n in zip(names, (one, other), strict=True)]
        if all(names) and plain[0] != plain[1]:
            return names
    return "", ""
