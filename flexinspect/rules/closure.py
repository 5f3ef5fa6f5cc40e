"""What reaches what through the masks of several layers: the boolean closure, on packed cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexinspect.masks import BoolArray, MaskSpec
from flexinspect.prompts import Segment

PackedRows = npt.NDArray[np.uint64]
"""Cells packed 64 to a word: (rows, words)."""


@dataclass(frozen=True, slots=True)
class TransitiveLeak:
    """Segment `target` depends on `source` from `layer` on, through the rows `carriers`.

    The carriers are all rows outside of both that the target sees and that depend on the source, so
    with them cut nothing is left.
    """

    target: int
    source: int
    layer: int
    carriers: tuple[int, ...]


def pack_rows(cells: BoolArray, n: int, n_rows: int | None = None) -> PackedRows:
    """Return the first n rows and keys of a mask (heads, rows, keys), in any head, 64 to a word.

    A single row stands for all. `n_rows` may ask for fewer rows than keys.
    """
    n_rows = n if n_rows is None else n_rows
    some = cells[:, :n_rows, :n]
    rows = some[0] if len(some) == 1 else some.any(axis=0)
    bits = np.packbits(rows, axis=1)
    padded = np.zeros((len(bits), -(-n // 64) * 8), np.uint8)
    padded[:, : bits.shape[1]] = bits
    words: PackedRows = padded.view(np.uint64)
    return np.broadcast_to(words, (n_rows, words.shape[1]))


def find_transitive_leaks(
    packed: Mapping[int, PackedRows], targets: Sequence[Segment], sources: Sequence[Segment]
) -> list[TransitiveLeak]:
    """Return which targets depend on which sources after all layers, without seeing them directly.

    `packed` are the masks by layer, all of `pack` and one length. A row keeps what it had, as the
    residual stream does. Layers that are not known are taken to pass nothing on.
    """
    layers = sorted(packed)
    n = len(packed[layers[0]])
    leaks: list[TransitiveLeak] = []
    for number, source in enumerate(sources):
        inputs = _rows_reached(packed, layers, source, n)
        for index, target in enumerate(targets):
            if target != source and inputs[-1][target.start : target.stop].any():
                leaks.append(_make_leak(packed, layers, inputs, (index, number), (target, source)))
    return _drop_implied_leaks(leaks, targets, sources)


def _rows_reached(
    packed: Mapping[int, PackedRows], layers: Sequence[int], source: Segment, n: int
) -> list[BoolArray]:
    """Return which rows depend on a segment: before the first layer, and after each."""
    has = np.zeros(n, np.bool_)
    has[source.start : source.stop] = True
    inputs, settled = [has], None
    for layer in layers:
        mask = packed[layer]
        if mask is not settled:
            now: BoolArray = has | (mask & _pack_flags(has)).any(axis=1)
            settled = mask if np.array_equal(now, has) else None
            has = now
        inputs.append(has)
    return inputs


def _make_leak(
    packed: Mapping[int, PackedRows],
    layers: Sequence[int],
    inputs: Sequence[BoolArray],
    names: tuple[int, int],
    segments: tuple[Segment, Segment],
) -> TransitiveLeak:
    """Return the leak of a target that depends on a source; no carriers if it sees it directly."""
    target, source = segments
    carriers = np.zeros_like(inputs[0])
    after = [bool(has[target.start : target.stop].any()) for has in inputs[1:]]
    first = layers[after.index(True)]
    for layer, has in zip(layers, inputs, strict=False):
        rows = packed[layer][target.start : target.stop]
        seen = _unpack_row(np.bitwise_or.reduce(rows), len(has))
        if seen[source.start : source.stop].any():
            return TransitiveLeak(*names, first, ())
        if not _is_sliding_row(packed[layer], target.stop - 1, len(has)):
            carriers |= seen & has
    carriers[target.start : target.stop] = False
    return TransitiveLeak(*names, first, tuple(np.flatnonzero(carriers).tolist()))


def _is_sliding_row(mask: PackedRows, last: int, n: int) -> bool:
    """Say whether a row sees a window of keys that moved on by one from the row before it.

    Such a mask closes what is far, and means to pass it on from row to row.
    """
    runs = [np.flatnonzero(_unpack_row(mask[row], n)) for row in (max(last - 1, 0), last)]
    return all(
        len(keys) > 1 and keys[0] > 0 and keys[-1] == row == keys[0] + len(keys) - 1
        for row, keys in zip((last - 1, last), runs, strict=True)
    ) and len(runs[0]) == len(runs[1])


def _pack_flags(has: BoolArray) -> PackedRows:
    words: PackedRows = pack_rows(has[None, None], len(has), 1)[0]
    return words


def _unpack_row(packed: PackedRows, n: int) -> BoolArray:
    return np.unpackbits(packed.view(np.uint8), count=n).view(np.bool_)


def _drop_implied_leaks(
    leaks: Sequence[TransitiveLeak], targets: Sequence[Segment], sources: Sequence[Segment]
) -> list[TransitiveLeak]:
    """Return the leaks that do not follow from what segments see of each other directly.

    Nor from another leak: what a third segment alone hands on, it got hold of by one of its own.
    """
    spans = [(s.start, s.stop) for s in sources]
    numbers = {span: number for number, span in enumerate(spans)}
    direct = np.eye(len(sources), dtype=np.int64)
    for leak in leaks:
        target = targets[leak.target]
        number = numbers.get((target.start, target.stop))
        if not leak.carriers and number is not None:
            direct[number, leak.source] = 1
    for _ in sources:
        direct = np.minimum(direct @ direct, 1)
    return [
        leak
        for leak in leaks
        if any(not any(a <= pos < b for a, b in spans) for pos in leak.carriers)
        and not direct[numbers[targets[leak.target].start, targets[leak.target].stop], leak.source]
    ]


def spec_reach(
    spec: MaskSpec, targets: Sequence[Segment], sources: Sequence[Segment]
) -> tuple[BoolArray, BoolArray]:
    """Return what a rule joins in one layer, and over any number: bool (targets, sources) each.

    Counted over runs of positions that no border of a segment or of the rule divides: in each, the
    last row sees all that the others see.
    """
    n = max(segment.stop for segment in (*targets, *sources))
    spans = [pos for s in (*targets, *sources) for pos in (s.start, s.stop)]
    borders = {0, n, *spans, *spec.starts, *spec.prefix_stops, *spec.local_starts}
    starts = np.array(sorted(border for border in borders if 0 <= border < n))
    rows = np.append(starts[1:], n) - 1
    region = np.searchsorted(spec.starts, rows, side="right") - 1
    head, low = (
        np.asarray(column)[region][:, None] for column in (spec.prefix_stops, spec.local_starts)
    )
    sees = (starts <= rows[:, None]) & ((starts < head) | (starts >= low))
    closure = sees | np.eye(len(starts), dtype=np.bool_)
    for _ in range(int(np.ceil(np.log2(len(starts)))) + 1):
        closure = (closure.astype(np.int64) @ closure) > 0

    def joined(cells: BoolArray) -> BoolArray:
        inside = [
            [(s.start <= starts) & (starts < s.stop) for s in some] for some in (targets, sources)
        ]
        return np.array([[cells[np.ix_(t, s)].any() for s in inside[1]] for t in inside[0]])

    return joined(sees), joined(closure)
