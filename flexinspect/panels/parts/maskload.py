"""A mask's sheet from a trace: a part per prefill, a part per 64 decode steps.

Parts are made once and kept; a sheet of them is put together at every step. A mask stands where its
step stood (one that comes again is stored once, with the place that it had first).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from flexinspect.masks import IntArray, MaskSpec
from flexinspect.masksheets.counting import (
    CHUNK_ROWS,
    MaskCounts,
    PackedMask,
    PositionGroups,
    count_cells,
    pack_spec,
    shift_keys,
)
from flexinspect.panels.parts.maskparts import (
    MAX_PACKED_BYTES,
    MaskPart,
    MaskView,
    StepMaskRows,
    close_dropped_keys,
)
from flexinspect.panels.source import Source
from flexinspect.trace.bits import (
    StepCalls,
    StoredCells,
    find_mask_cells,
    max_mask_heads,
    read_mask_arrays,
    read_packed_rows,
    read_step_calls,
)
from flexinspect.trace.branchfacts import visible_lineage

PART_STEPS = 64
"""Decode steps of one part."""

WINDOW_STEPS = 256
"""A long generation is shown from one to two times this many steps before the current one on ..."""

MAX_STEPS = 1024
"""... and this many steps in all."""


@dataclass(frozen=True, slots=True)
class MaskViewRequest:
    """Which sheet: of which layer and head, compared with which rule, counted by which groups."""

    generation: int
    branch: int
    step: int
    layer: int
    head: int
    spec: MaskSpec | None
    groups: PositionGroups


def load_mask_view(source: Source, request: MaskViewRequest) -> MaskView | None:
    """Return the mask around a step, None when no step fed a row. Raises `TraceError`."""
    reader = source.reader
    owners = visible_lineage(reader, request.generation, request.branch, request.step)
    ends = [(reader.last_step(request.generation, owner), stop) for owner, _, stop in owners]
    lasts = [
        last if stop is None else min(last, stop - 1) for last, stop in ends if last is not None
    ]
    if not lasts:
        return None
    last = max(lasts)
    first = _first_step(last, request.step)
    parts: list[MaskPart] = []
    for steps in _load_step_rows(source, request, owners, first, last + 1):
        row = parts[-1].stop if parts else 0
        parts.append(_load_part(source, steps, row, request))
    if not parts:
        return None
    heads = max(part.heads for part in parts)
    head = min(max(request.head, 0), heads - 1)
    rule, groups = request.spec, request.groups
    shown = min(first + MAX_STEPS - 1, last)
    return MaskView(source, tuple(parts), head, heads, rule, groups, first, shown, last + 1)


def _first_step(last: int, step: int) -> int:
    if last < MAX_STEPS:
        return 0
    low, high = (
        step // WINDOW_STEPS * WINDOW_STEPS - WINDOW_STEPS,
        last // WINDOW_STEPS * WINDOW_STEPS + WINDOW_STEPS - MAX_STEPS,
    )
    return max(0, min(low, high))


def _load_step_rows(
    source: Source,
    request: MaskViewRequest,
    owners: list[tuple[int, int, int | None]],
    first: int,
    stop: int,
) -> Iterator[tuple[StepMaskRows, ...]]:
    """Yield what the first step fed, then what the steps of the window did, in parts."""
    ranges = [(0, 1)] if first > 0 else []
    stop = min(stop, first + MAX_STEPS)
    ranges += [(low, min(low + PART_STEPS, stop)) for low in range(first, stop, PART_STEPS)]
    for low, high in ranges:
        for owner, begin, end in reversed(owners):
            own = max(low, begin), high if end is None else min(high, end)
            if own[0] < own[1]:
                yield from _split_parts(
                    _load_calls(source, request.generation, owner, *own), request.layer
                )


def _load_calls(
    source: Source, generation: int, branch: int, start: int, stop: int
) -> list[StepCalls]:
    # All steps below `stop` are written, so that what is kept will never be different.
    return source.get_or_create(
        ("mask.calls", generation, branch, start, stop),
        lambda: read_step_calls(source.reader, generation, branch, start, stop),
        lambda calls: sum(256 + 200 * len(call.by_layer) for call in calls),
    )


def _split_parts(calls: list[StepCalls], layer: int) -> Iterator[tuple[StepMaskRows, ...]]:
    together: list[StepMaskRows] = []
    for call in calls:
        mask, kv_len = call.by_layer.get(layer, (None, call.kv_after))
        offset = max(call.kv_after - kv_len, 0)
        step_rows = StepMaskRows(call.step, call.kv_before, call.q_len, mask, offset, kv_len)
        if call.q_len == 1:
            together.append(step_rows)
            continue
        if together:
            yield tuple(together)
        together = []
        if call.q_len > 0:
            yield (step_rows,)
    if together:
        yield tuple(together)


def _load_part(
    source: Source, steps: tuple[StepMaskRows, ...], row: int, request: MaskViewRequest
) -> MaskPart:
    names = [one.mask for one in steps if one.mask is not None]
    heads = source.get_or_create(
        ("mask.heads", *names),
        lambda: max_mask_heads(source.reader, names),
        lambda _: 100 * len(names),
    )
    # A mask that all heads share is one part for all of them.
    request = replace(request, head=min(max(request.head, 0), heads - 1))
    key: Hashable = ("mask.part", steps, row, request.head, request.spec, request.groups)
    return source.get_or_create(key, lambda: _make_part(source, steps, row, request), _part_bytes)


def _part_bytes(part: MaskPart) -> int:
    packed = 0 if part.packed is None else part.packed.nbytes
    return 1024 + 256 * len(part.steps) + packed + part.counts.n_bytes


def _make_part(
    source: Source, steps: tuple[StepMaskRows, ...], row: int, request: MaskViewRequest
) -> MaskPart:
    if len(steps) == 1 and steps[0].n_rows > 1:
        return _make_prefill_part(source, steps[0], row, request)
    found: dict[str, tuple[int, PackedMask]] = {}
    heads = 1
    for name, cells in read_mask_arrays(
        source.reader, [f.mask for f in steps if f.mask], "mask.cells"
    ):
        if cells.ndim == 3 and cells.shape[0] > 0 and cells.shape[1] == 1:
            heads = max(heads, cells.shape[0])
            own = min(request.head, cells.shape[0] - 1)
            found[name] = cells.shape[2], np.packbits(cells[own], axis=1)
    width = [found[f.mask][0] if f.mask in found else f.kv_len for f in steps]
    n_keys = max(f.kv_offset + keys for f, keys in zip(steps, width, strict=True))
    packed = np.zeros((len(steps), -(-n_keys // 8)), np.uint8)
    for number, one in enumerate(steps):
        if one.mask in found:
            line = shift_keys(found[one.mask][1], found[one.mask][0], one.kv_offset)
            packed[number, : line.shape[1]] = line[0]
    positions = np.array([one.pos for one in steps], np.int32)
    known = tuple(one.mask in found for one in steps)
    counted = _count_cells([(0, packed)], positions, n_keys, row, request, known, steps)
    return MaskPart(row, steps, positions, n_keys, heads, known, counted, packed)


def _make_prefill_part(
    source: Source, step_rows: StepMaskRows, row: int, request: MaskViewRequest
) -> MaskPart:
    positions = np.arange(step_rows.pos, step_rows.pos + step_rows.n_rows, dtype=np.int32)
    cells = find_mask_cells(source.reader, step_rows.mask) if step_rows.mask is not None else None
    if cells is not None and (cells.n_rows not in (1, step_rows.n_rows) or cells.heads < 1):
        cells = None
    n_keys = step_rows.kv_offset + (step_rows.kv_len if cells is None else cells.n_keys)
    if cells is None:
        counted = _count_cells([], positions, n_keys, row, request, False, (step_rows,))
        return MaskPart(row, (step_rows,), positions, n_keys, 1, False, counted, None)
    n_bytes = step_rows.n_rows * -(-n_keys // 8)
    whole = (
        np.empty((step_rows.n_rows, n_bytes // step_rows.n_rows), np.uint8)
        if n_bytes <= MAX_PACKED_BYTES
        else None
    )
    chunks = _row_chunks(
        source, cells, step_rows, min(max(request.head, 0), cells.heads - 1), whole
    )
    counted = _count_cells(chunks, positions, n_keys, row, request, True, (step_rows,))
    return MaskPart(row, (step_rows,), positions, n_keys, cells.heads, True, counted, whole, cells)


def _row_chunks(
    source: Source, cells: StoredCells, step_rows: StepMaskRows, head: int, whole: PackedMask | None
) -> Iterator[tuple[int, PackedMask]]:
    """Yield the rows of a mask on the sheet's keys; fill `whole` with them where it is given."""
    if cells.n_rows == 1 < step_rows.n_rows:  # one row that is broadcast
        row = next(read_packed_rows(source.reader, cells, head, 0, 1))[1]
        starts = range(0, step_rows.n_rows, CHUNK_ROWS)
        found: Iterable[tuple[int, PackedMask]] = (
            (n, row.repeat(min(CHUNK_ROWS, step_rows.n_rows - n), axis=0)) for n in starts
        )
    else:
        found = read_packed_rows(
            source.reader, cells, head, 0, step_rows.n_rows, at_most=CHUNK_ROWS
        )
    for start, packed in found:
        rows = shift_keys(packed, cells.n_keys, step_rows.kv_offset)
        if whole is not None:
            whole[start : start + len(rows)] = rows
        yield start, rows


def _count_cells(
    chunks: Iterable[tuple[int, PackedMask]],
    positions: IntArray,
    n_keys: int,
    row: int,
    request: MaskViewRequest,
    known: bool | tuple[bool, ...],
    steps: tuple[StepMaskRows, ...],
) -> MaskCounts:
    rule = request.spec

    def declared(start: int, stop: int) -> PackedMask:
        assert rule is not None
        rows = pack_spec(rule, positions[start:stop], n_keys)
        close_dropped_keys(rows, steps, start)
        if not isinstance(known, bool):
            rows[~np.array(known[start:stop])] = 0  # nothing is lost where nothing is known
        return rows

    return count_cells(
        chunks,
        positions,
        n_keys,
        first_row=row,
        groups=request.groups,
        declared=declared if rule is not None else None,
    )
