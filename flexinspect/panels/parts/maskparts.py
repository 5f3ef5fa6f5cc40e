"""The mask of a sequence as parts: what a step or some decode steps fed into one layer and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import numpy as np

from flexinspect.masks import IntArray, MaskSpec
from flexinspect.masksheets.counting import (
    MaskCounts,
    PackedMask,
    PositionGroups,
    pack_spec,
    shift_keys,
)
from flexinspect.panels.source import Source
from flexinspect.trace.bits import StoredCells, read_packed_rows

MAX_PACKED_BYTES = 16 << 20
"""Bytes of packed cells up to which a mask is kept whole; of larger ones, bands of rows are."""

BAND_ROWS = 1024
_serials = count()


@dataclass(frozen=True, slots=True)
class StepMaskRows:
    """The rows that a step fed into a layer, and the mask that they were given there.

    `pos` is the position of the first row, `kv_offset` that of the first key, `kv_len` the number
    of keys of the call.
    """

    step: int
    pos: int
    n_rows: int
    mask: str | None
    kv_offset: int
    kv_len: int


def close_dropped_keys(rows: PackedMask, steps: Sequence[StepMaskRows], start: int) -> None:
    """Close the keys that a sliding cache had dropped when the rows were fed: nobody lost them.

    `rows` are packed, from row `start` of a part on; `fed` is the part's.
    """
    for number, one in enumerate(steps[start : start + len(rows)] if len(steps) > 1 else steps):
        whole, rest = divmod(one.kv_offset, 8)
        some = rows if len(steps) == 1 else rows[number : number + 1]
        some[:, :whole] = 0
        if rest and whole < some.shape[1]:
            some[:, whole] &= 0xFF >> rest


@dataclass(frozen=True)
class MaskPart:
    """Rows of a sheet from `row` on. `known` says of which rows the cells were recorded.

    `packed` is None for a mask that is too large to be held; `source` reads it then.
    """

    row: int
    steps: tuple[StepMaskRows, ...]
    positions: IntArray
    n_keys: int
    heads: int
    known: bool | tuple[bool, ...]
    counts: MaskCounts
    packed: PackedMask | None
    cells: StoredCells | None = None
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def n_rows(self) -> int:
        """Rows of it."""
        return len(self.positions)

    @property
    def stop(self) -> int:
        """The row of the sheet after its last one."""
        return self.row + self.n_rows

    def step_at(self, row: int) -> StepMaskRows:
        """Return what a row (of the sheet) was fed with."""
        return self.steps[0] if len(self.steps) == 1 else self.steps[row - self.row]

    def is_known(self, row: int) -> bool:
        """Tell whether the cells of a row (of the sheet) were recorded."""
        return self.known if isinstance(self.known, bool) else self.known[row - self.row]

    def known_spans(self) -> Iterator[tuple[int, int]]:
        """Yield (row, row after) of the sheet's rows that are known."""
        if isinstance(self.known, bool):
            if self.known:
                yield self.row, self.stop
            return
        for number, known in enumerate(self.known):
            if known:
                yield self.row + number, self.row + number + 1

    def rows(self, source: Source, head: int, start: int, stop: int) -> PackedMask:
        """Return its packed rows `start <= row < stop`, counted from its own first one."""
        if self.packed is not None:
            return self.packed[start:stop]
        if self.cells is None:
            return np.zeros((stop - start, -(-self.n_keys // 8)), np.uint8)
        bands = [
            self._load_band(source, head, band)
            for band in range(start // BAND_ROWS, -(-stop // BAND_ROWS))
        ]
        first = start // BAND_ROWS * BAND_ROWS
        return np.concatenate(bands)[start - first : stop - first]

    def _load_band(self, source: Source, head: int, band: int) -> PackedMask:
        cells, about = self.cells, self.steps[0]
        assert cells is not None
        start, stop = band * BAND_ROWS, min((band + 1) * BAND_ROWS, self.n_rows)

        def read() -> PackedMask:
            if cells.n_rows == 1:  # one row that is broadcast
                row = next(read_packed_rows(source.reader, cells, head, 0, 1))[1]
                return shift_keys(row, cells.n_keys, about.kv_offset).repeat(stop - start, axis=0)
            found = read_packed_rows(source.reader, cells, head, start, stop)
            return np.concatenate([shift_keys(p, cells.n_keys, about.kv_offset) for _, p in found])

        key = ("mask.band", about.mask, about.kv_offset, head, band)
        return source.get_or_create(key, read, lambda packed: packed.nbytes)


@dataclass(frozen=True)
class MaskView:
    """The mask of a layer and head: `parts` one below the other, row 0 first.

    `first_step` to `last_step` are the steps among them (step 0 always is), of `n_steps` in all.
    """

    source: Source
    parts: tuple[MaskPart, ...]
    head: int
    heads: int
    spec: MaskSpec | None
    groups: PositionGroups
    first_step: int
    last_step: int
    n_steps: int

    @cached_property
    def n_rows(self) -> int:
        """Rows in all."""
        return self.parts[-1].stop if self.parts else 0

    @cached_property
    def n_keys(self) -> int:
        """Keys in all: the columns."""
        return max((part.n_keys for part in self.parts), default=0)

    @cached_property
    def positions(self) -> IntArray:
        """The position of each row."""
        return np.concatenate([part.positions for part in self.parts])

    @property
    def is_truncated(self) -> bool:
        """Whether only a window of the decode steps is shown."""
        return self.last_step - self.first_step + 1 < self.n_steps

    def part_of(self, row: int) -> MaskPart:
        """Return the part that holds a row."""
        return next(part for part in self.parts if row < part.stop)

    def row_of(self, position: int) -> int | None:
        """Return the row of a position, the last one if it was fed again, None without any."""
        found = np.flatnonzero(self.positions == position)
        return int(found[-1]) if len(found) else None

    def rows_of_step(self, step: int) -> range | None:
        """Return the rows that a step fed, None when they are not on the sheet."""
        for part in self.parts:
            if len(part.steps) == 1 and part.steps[0].step == step:
                return range(part.row, part.stop)
            for number, step_rows in enumerate(part.steps):
                if step_rows.step == step:
                    return range(part.row + number, part.row + number + 1)
        return None

    def declared(self, row: int, stop: int, n_keys: int) -> PackedMask:
        """Return the declared rows from one to another, packed; there must be a rule."""
        assert self.spec is not None
        return pack_spec(self.spec, self.positions[row:stop], n_keys)

    def cell(self, row: int, key: int) -> bool | None:
        """Return whether a cell is open in what was executed, None where that is not known."""
        part = self.part_of(row)
        if not part.is_known(row):
            return None
        if key >= part.n_keys:
            return False
        own = row - part.row
        packed = part.rows(self.source, self.head, own, own + 1)
        return bool(packed[0, key // 8] >> (7 - key % 8) & 1)

    def row_count(self, row: int) -> int:
        """Return how many keys a row sees."""
        part = self.part_of(row)
        return int(part.counts.open.row_counts[row - part.row])

    def column_count(self, key: int) -> int:
        """Return how many rows see a key."""
        return sum(int(p.counts.key_counts[key]) for p in self.parts if key < p.n_keys)

    def count(self, kind: str) -> int:
        """Return how many cells are "open", "lost" or "leaked"."""
        planes = [getattr(part.counts, kind) for part in self.parts]
        return sum(plane.n for plane in planes if plane is not None)

    def first_cell(self, kind: str) -> tuple[int, int] | None:
        """Return (row, key) of the first cell that is "lost" or "leaked"."""
        for part in self.parts:
            plane = getattr(part.counts, kind)
            if plane is not None and plane.first is not None:
                return part.row + plane.first[0], plane.first[1]
        return None

    def n_known(self) -> int:
        """Return how many rows were recorded."""
        return sum(stop - start for part in self.parts for start, stop in part.known_spans())
