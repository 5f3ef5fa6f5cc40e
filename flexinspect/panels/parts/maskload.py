"""A mask's sheet from a trace: a part per prefill, a part per 64 decode steps.

Parts are made once and kept; a sheet of them is put together at every step. A mask stands where its
step stood (one that comes again is stored once, with the place that it had first).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from flexinspect.masks import IntArray, MaskRule
from flexinspect.masksheets.counting import (
    CHUNK_ROWS,
    Groups,
    Packed,
    Tally,
    moved,
    packed_rule,
    tally,
)
from flexinspect.panels.parts.maskparts import WHOLE, Fed, Part, Sheet, close_dropped
from flexinspect.panels.source import Source
from flexinspect.trace.bits import (
    Cells,
    StepCalls,
    find_cells,
    mask_arrays,
    most_heads,
    packed_rows,
    step_calls,
)
from flexinspect.trace.branchfacts import own_family

TOGETHER = 64
"""Decode steps of one part."""

REACH = 256
"""A long generation is shown from one to two times this many steps before the current one on ..."""

MOST_STEPS = 1024
"""... and this many steps in all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sheet: of which layer and head, compared with which rule, counted by which groups."""

    generation: int
    branch: int
    step: int
    layer: int
    head: int
    rule: MaskRule | None
    groups: Groups


def load_sheet(source: Source, wanted: Wanted) -> Sheet | None:
    """Return the mask around a step, None when no step fed a row. Raises `TraceError`."""
    reader = source.reader
    owners = own_family(reader, wanted.generation, wanted.branch, wanted.step)
    ends = [(reader.last_step(wanted.generation, owner), stop) for owner, _, stop in owners]
    lasts = [
        last if stop is None else min(last, stop - 1) for last, stop in ends if last is not None
    ]
    if not lasts:
        return None
    last = max(lasts)
    first = _first_step(last, wanted.step)
    parts: list[Part] = []
    for fed in _fed(source, wanted, owners, first, last + 1):
        row = parts[-1].stop if parts else 0
        parts.append(_part(source, fed, row, wanted))
    if not parts:
        return None
    heads = max(part.heads for part in parts)
    head = min(max(wanted.head, 0), heads - 1)
    rule, groups = wanted.rule, wanted.groups
    shown = min(first + MOST_STEPS - 1, last)
    return Sheet(source, tuple(parts), head, heads, rule, groups, first, shown, last + 1)


def _first_step(last: int, step: int) -> int:
    if last < MOST_STEPS:
        return 0
    low, high = step // REACH * REACH - REACH, last // REACH * REACH + REACH - MOST_STEPS
    return max(0, min(low, high))


def _fed(
    source: Source,
    wanted: Wanted,
    owners: list[tuple[int, int, int | None]],
    first: int,
    stop: int,
) -> Iterator[tuple[Fed, ...]]:
    """Yield what the first step fed, then what the steps of the window did, in parts."""
    ranges = [(0, 1)] if first > 0 else []
    stop = min(stop, first + MOST_STEPS)
    ranges += [(low, min(low + TOGETHER, stop)) for low in range(first, stop, TOGETHER)]
    for low, high in ranges:
        for owner, begin, end in reversed(owners):
            own = max(low, begin), high if end is None else min(high, end)
            if own[0] < own[1]:
                yield from _split(_calls(source, wanted.generation, owner, *own), wanted.layer)


def _calls(source: Source, generation: int, branch: int, start: int, stop: int) -> list[StepCalls]:
    # All steps below `stop` are written, so that what is kept will never be different.
    return source.keep(
        ("mask.calls", generation, branch, start, stop),
        lambda: step_calls(source.reader, generation, branch, start, stop),
        lambda calls: sum(256 + 200 * len(call.by_layer) for call in calls),
    )


def _split(calls: list[StepCalls], layer: int) -> Iterator[tuple[Fed, ...]]:
    together: list[Fed] = []
    for call in calls:
        mask, kv_len = call.by_layer.get(layer, (None, call.kv_after))
        offset = max(call.kv_after - kv_len, 0)
        fed = Fed(call.step, call.kv_before, call.q_len, mask, offset, kv_len)
        if call.q_len == 1:
            together.append(fed)
            continue
        if together:
            yield tuple(together)
        together = []
        if call.q_len > 0:
            yield (fed,)
    if together:
        yield tuple(together)


def _part(source: Source, fed: tuple[Fed, ...], row: int, wanted: Wanted) -> Part:
    names = [one.mask for one in fed if one.mask is not None]
    heads = source.keep(
        ("mask.heads", *names), lambda: most_heads(source.reader, names), lambda _: 100 * len(names)
    )
    # A mask that all heads share is one part for all of them.
    wanted = replace(wanted, head=min(max(wanted.head, 0), heads - 1))
    key: Hashable = ("mask.part", fed, row, wanted.head, wanted.rule, wanted.groups)
    return source.keep(key, lambda: _make_part(source, fed, row, wanted), _part_bytes)


def _part_bytes(part: Part) -> int:
    packed = 0 if part.packed is None else part.packed.nbytes
    return 1024 + 256 * len(part.fed) + packed + part.tally.n_bytes


def _make_part(source: Source, fed: tuple[Fed, ...], row: int, wanted: Wanted) -> Part:
    if len(fed) == 1 and fed[0].n_rows > 1:
        return _long_part(source, fed[0], row, wanted)
    found: dict[str, tuple[int, Packed]] = {}
    heads = 1
    for name, cells in mask_arrays(source.reader, [f.mask for f in fed if f.mask], "mask.cells"):
        if cells.ndim == 3 and cells.shape[0] > 0 and cells.shape[1] == 1:
            heads = max(heads, cells.shape[0])
            own = min(wanted.head, cells.shape[0] - 1)
            found[name] = cells.shape[2], np.packbits(cells[own], axis=1)
    width = [found[f.mask][0] if f.mask in found else f.kv_len for f in fed]
    n_keys = max(f.kv_offset + keys for f, keys in zip(fed, width, strict=True))
    packed = np.zeros((len(fed), -(-n_keys // 8)), np.uint8)
    for number, one in enumerate(fed):
        if one.mask in found:
            line = moved(found[one.mask][1], found[one.mask][0], one.kv_offset)
            packed[number, : line.shape[1]] = line[0]
    positions = np.array([one.pos for one in fed], np.int32)
    known = tuple(one.mask in found for one in fed)
    counted = _tally([(0, packed)], positions, n_keys, row, wanted, known, fed)
    return Part(row, fed, positions, n_keys, heads, known, counted, packed)


def _long_part(source: Source, fed: Fed, row: int, wanted: Wanted) -> Part:
    positions = np.arange(fed.pos, fed.pos + fed.n_rows, dtype=np.int32)
    cells = find_cells(source.reader, fed.mask) if fed.mask is not None else None
    if cells is not None and (cells.n_rows not in (1, fed.n_rows) or cells.heads < 1):
        cells = None
    n_keys = fed.kv_offset + (fed.kv_len if cells is None else cells.n_keys)
    if cells is None:
        counted = _tally([], positions, n_keys, row, wanted, False, (fed,))
        return Part(row, (fed,), positions, n_keys, 1, False, counted, None)
    n_bytes = fed.n_rows * -(-n_keys // 8)
    whole = np.empty((fed.n_rows, n_bytes // fed.n_rows), np.uint8) if n_bytes <= WHOLE else None
    chunks = _chunks(source, cells, fed, min(max(wanted.head, 0), cells.heads - 1), whole)
    counted = _tally(chunks, positions, n_keys, row, wanted, True, (fed,))
    return Part(row, (fed,), positions, n_keys, cells.heads, True, counted, whole, cells)


def _chunks(
    source: Source, cells: Cells, fed: Fed, head: int, whole: Packed | None
) -> Iterator[tuple[int, Packed]]:
    """Yield the rows of a mask on the sheet's keys; fill `whole` with them where it is given."""
    if cells.n_rows == 1 < fed.n_rows:  # one row that is broadcast
        row = next(packed_rows(source.reader, cells, head, 0, 1))[1]
        starts = range(0, fed.n_rows, CHUNK_ROWS)
        found: Iterable[tuple[int, Packed]] = (
            (n, row.repeat(min(CHUNK_ROWS, fed.n_rows - n), axis=0)) for n in starts
        )
    else:
        found = packed_rows(source.reader, cells, head, 0, fed.n_rows, at_most=CHUNK_ROWS)
    for start, packed in found:
        rows = moved(packed, cells.n_keys, fed.kv_offset)
        if whole is not None:
            whole[start : start + len(rows)] = rows
        yield start, rows


def _tally(
    chunks: Iterable[tuple[int, Packed]],
    positions: IntArray,
    n_keys: int,
    row: int,
    wanted: Wanted,
    known: bool | tuple[bool, ...],
    fed: tuple[Fed, ...],
) -> Tally:
    rule = wanted.rule

    def declared(start: int, stop: int) -> Packed:
        assert rule is not None
        rows = packed_rule(rule, positions[start:stop], n_keys)
        close_dropped(rows, fed, start)
        if not isinstance(known, bool):
            rows[~np.array(known[start:stop])] = 0  # nothing is lost where nothing is known
        return rows

    return tally(
        chunks,
        positions,
        n_keys,
        first_row=row,
        groups=wanted.groups,
        declared=declared if rule is not None else None,
    )
