"""The mask of a sequence for one layer and head, in parts of one prefill or some decode steps.

Parts are computed once and cached; every step joins them to a `MaskView`. The rows of a part are at
the positions of its steps, because a mask that occurs again is stored once, with its first place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, count, groupby

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.masks import counting
from flexinspect.masks.attention_row import Bools
from flexinspect.masks.mask_presets import IntArray, MaskSpec
from flexinspect.masks.viewport import BlockLayout
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import Array
from flexinspect.trace import mask_cells
from flexinspect.trace.arrays import damaged_array
from flexinspect.trace.queries import visible_lineage

MAX_PACKED_BYTES = 16 << 20
"""Bytes of packed cells up to which a mask is cached as a whole; of a larger one, bands of rows."""

BAND_ROWS = 1024
_serials = count()

Chunks = Iterable[tuple[int, counting.PackedMask]]
"""Packed rows in pieces, each with the number of its first row."""


class StepMaskRows(Struct, frozen=True):
    """The input rows of a step in a layer, and the mask that the layer received for them.

    `pos` is the position of the first row, `kv_offset` that of the first key, `kv_len` the number
    of keys of the call.
    """

    step: int
    pos: int
    n_rows: int
    mask: str | None
    kv_offset: int
    kv_len: int


def close_dropped_keys(
    rows: counting.PackedMask, steps: Sequence[StepMaskRows], start: int
) -> None:
    """Close the keys that a sliding cache had dropped before the rows, so that none counts as lost.

    `rows` are packed, from row `start` of a part on; `steps` are those of the part.
    """
    shown = steps[start : start + len(rows)] if len(steps) > 1 else steps
    for number, step in enumerate(shown):
        n_bytes, n_bits = divmod(step.kv_offset, 8)
        own = rows if len(steps) == 1 else rows[number : number + 1]
        own[:, :n_bytes] = 0
        if n_bits and n_bytes < own.shape[1]:
            own[:, n_bytes] &= 0xFF >> n_bits


class MaskPart(Struct, frozen=True):
    """Rows of a mask view from `row` on. `known`, bool (rows), says which have recorded cells.

    `packed` is None for a mask that is too large to cache; `cells` is then read in bands.
    """

    row: int
    steps: tuple[StepMaskRows, ...]
    positions: IntArray
    n_keys: int
    heads: int
    known: Bools
    counts: counting.MaskCounts
    packed: counting.PackedMask | None
    cells: mask_cells.StoredCells | None = None
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.positions)

    @property
    def stop(self) -> int:
        """The row of the view after the last one of the part."""
        return self.row + self.n_rows

    def step_at(self, row: int) -> StepMaskRows:
        """Return the step of a row of the view."""
        return self.steps[0] if len(self.steps) == 1 else self.steps[row - self.row]

    def known_spans(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the runs of recorded rows of the view."""
        edges = self.row + np.flatnonzero(np.diff(self.known, prepend=False, append=False))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def rows(self, source: Source, head: int, start: int, stop: int) -> counting.PackedMask:
        """Return packed rows `start <= row < stop`, counted from the first row of the part."""
        if self.packed is not None:
            return self.packed[start:stop]
        if self.cells is None:
            return np.zeros((stop - start, -(-self.n_keys // 8)), np.uint8)
        first, last = start // BAND_ROWS, -(-stop // BAND_ROWS)
        bands = [self._load_band(source, head, band) for band in range(first, last)]
        return np.concatenate(bands)[start - first * BAND_ROWS : stop - first * BAND_ROWS]

    def _load_band(self, source: Source, head: int, band: int) -> counting.PackedMask:
        cells, about = self.cells, self.steps[0]
        assert cells is not None
        start, stop = band * BAND_ROWS, min((band + 1) * BAND_ROWS, self.n_rows)

        def read() -> counting.PackedMask:
            chunks = _read_rows(source, cells, about.kv_offset, head, start, stop)
            return np.concatenate([rows for _, rows in chunks])

        key = ("mask.band", about.mask, about.kv_offset, head, band)
        return source.get_or_create(key, read)


class MaskView(Struct, frozen=True, dict=True):
    """The mask of a layer and head: `parts` one below the other, row 0 first.

    It holds step 0 and the steps `first_step` to `last_step`, of `n_steps` in all.
    """

    source: Source
    parts: tuple[MaskPart, ...]
    head: int
    heads: int
    spec: MaskSpec | None
    groups: counting.PositionGroups
    first_step: int
    last_step: int
    n_steps: int

    @cached_property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.parts[-1].stop if self.parts else 0

    @cached_property
    def n_keys(self) -> int:
        """Number of keys, the columns."""
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

    def rows_of_step(self, step: int) -> range | None:
        """Return the rows of a step, None when they are not in the view."""
        rows = 0
        for step_rows in chain.from_iterable(part.steps for part in self.parts):
            if step_rows.step == step:
                return range(rows, rows + step_rows.n_rows)
            rows += step_rows.n_rows
        return None

    def declared(self, row: int, stop: int, n_keys: int) -> counting.PackedMask:
        """Return the declared rows `row` to `stop`, packed; `spec` must not be None."""
        assert self.spec is not None
        return counting.pack_spec(self.spec, self.positions[row:stop], n_keys)

    def differing_rows(
        self, part: MaskPart, start: int, stop: int
    ) -> tuple[counting.PackedMask, counting.PackedMask]:
        """Return the lost and the leaked cells of rows of a part, packed; `spec` must not be None.

        `start` and `stop` are rows of the view.
        """
        own = slice(start - part.row, stop - part.row)
        packed = part.rows(self.source, self.head, own.start, own.stop)
        declared = self.declared(start, stop, part.n_keys)
        close_dropped_keys(declared, part.steps, own.start)
        declared[~part.known[own]] = 0
        return declared & ~packed, packed & ~declared

    def first_difference(self, rows: range, keys: range) -> tuple[int, int] | None:
        """Return the first lost or leaked cell (row, key) of a rectangle."""
        for part in self.parts if self.spec is not None else ():
            last = min(rows.stop, part.stop)
            for start in range(max(rows.start, part.row), last, counting.CHUNK_ROWS):
                stop = min(start + counting.CHUNK_ROWS, last)
                lost, leaked = self.differing_rows(part, start, stop)
                bits = np.unpackbits(lost | leaked, axis=1)[:, keys.start : keys.stop]
                if bits.any():
                    row, key = np.argwhere(bits)[0].tolist()
                    return start + row, keys.start + key
        return None

    def cell(self, row: int, key: int) -> bool | None:
        """Whether a cell of the executed mask is open, None if it was not recorded."""
        part = self.part_of(row)
        own = row - part.row
        if not part.known[own]:
            return None
        if key >= part.n_keys:
            return False
        packed = part.rows(self.source, self.head, own, own + 1)
        return bool(packed[0, key // 8] >> (7 - key % 8) & 1)

    def row_count(self, row: int) -> int:
        """Return the number of keys that a row attends to."""
        part = self.part_of(row)
        return int(part.counts.open.row_counts[row - part.row])

    def column_count(self, key: int) -> int:
        """Return the number of rows that attend to a key."""
        return sum(int(p.counts.key_counts[key]) for p in self.parts if key < p.n_keys)

    def count(self, kind: str) -> int:
        """Return the number of cells that are "open", "lost" or "leaked"."""
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
        """Return the number of recorded rows."""
        return sum(int(part.known.sum()) for part in self.parts)


PART_STEPS = 64
"""Number of decode steps of one part."""

WINDOW_STEPS = 256
"""The window of a long generation begins one to two times as many steps before the current one."""

MAX_STEPS = 1024
"""Maximum number of steps in the window."""

MAX_WINDOW_CELLS = 1 << 26
"""Cells of a window's decode rows: with very many keys it has fewer steps, down to `MIN_STEPS`."""

MIN_STEPS = 128


def window_size(n_keys: int) -> int:
    """Return the maximum number of steps in a window of rows with `n_keys` keys: a power of two."""
    most = MAX_STEPS
    while most > MIN_STEPS and most * n_keys > MAX_WINDOW_CELLS:
        most //= 2
    return most


PartCells = tuple[
    int, int, Bools, Chunks, counting.PackedMask | None, mask_cells.StoredCells | None
]
"""The cells of a part: `n_keys`, `heads`, `known`, chunks of rows, `packed`, `cells`."""


# by identity: it is part of a cache key, and hashing each of its steps costs more than the look-up
class PartSteps(Struct, frozen=True, eq=False):
    """The steps of one part, and the masks that they name."""

    steps: tuple[StepMaskRows, ...]
    masks: tuple[str, ...]


class MaskLoader(Struct, frozen=True):
    """Loads the mask view of a place; the cells are counted by the groups of positions."""

    source: Source
    place: TracePlace
    spec: MaskSpec | None
    groups: counting.PositionGroups

    def load(self) -> MaskView | None:
        """Return the mask around the step, None when no step has rows. Raises `TraceError`."""
        reader, place = self.source.reader, self.place
        owners = visible_lineage(reader, place.generation, place.branch, place.step)
        lasts = [
            newest if stop is None else min(newest, stop - 1)
            for owner, _, stop in owners
            if (newest := reader.last_step(place.generation, owner)) is not None
        ]
        if not lasts:
            return None
        last, first = max(lasts), 0
        row = reader.step(place.generation, place.step, owners[0][0])
        most = window_size(0 if row is None else row.kv_after)
        if last >= most:
            each = min(WINDOW_STEPS, most // 2)
            low = place.step // each * each - each
            high = last // each * each + each - most
            first = max(0, min(low, high))
        parts: list[MaskPart] = []
        for steps in self._step_rows(owners, first, min(last + 1, first + most)):
            parts.append(self._load_part(steps, parts[-1].stop if parts else 0))
        if not parts:
            return None
        heads = max(part.heads for part in parts)
        return MaskView(
            source=self.source,
            parts=tuple(parts),
            head=min(max(place.head, 0), heads - 1),
            heads=heads,
            spec=self.spec,
            groups=self.groups,
            first_step=first,
            last_step=min(first + most - 1, last),
            n_steps=last + 1,
        )

    def _step_rows(
        self, owners: Sequence[tuple[int, int, int | None]], first: int, stop: int
    ) -> Iterator[PartSteps]:
        """Yield the rows of step 0, then those of the window's steps, grouped in parts."""
        ranges = [(0, 1)] if first > 0 else []
        ranges += [(low, min(low + PART_STEPS, stop)) for low in range(first, stop, PART_STEPS)]
        for low, high in ranges:
            for owner, begin, end in reversed(owners):
                start, last = max(low, begin), high if end is None else min(high, end)
                if start < last:
                    # All steps below `last` are written, so the cached value cannot change.
                    span = (self.place.generation, owner, start, last)
                    key = ("mask.steps", *span, self.place.layer)
                    yield from self.source.get_or_create(key, partial(self._read_parts, span))

    def _read_parts(self, span: tuple[int, int, int, int]) -> tuple[PartSteps, ...]:
        """Return the steps of (generation, branch, start, stop) in parts.

        Steps of one row that follow each other are in one part, every other step in its own.
        """
        read = partial(mask_cells.read_step_calls, self.source.reader, *span)
        calls = self.source.get_or_create(("mask.calls", *span), read, mask_cells.step_calls_bytes)
        found: list[PartSteps] = []
        for is_decode, group in groupby(calls, key=lambda call: call.q_len == 1):
            steps = tuple(self._input_rows(call) for call in group if call.q_len > 0)
            for part in (steps,) if is_decode else [(step,) for step in steps]:
                names = tuple(step.mask for step in part if step.mask is not None)
                found.append(PartSteps(part, names))
        return tuple(found)

    def _input_rows(self, call: mask_cells.StepCalls) -> StepMaskRows:
        mask, kv_len = call.by_layer.get(self.place.layer, (None, call.kv_after))
        offset = max(call.kv_after - kv_len, 0)
        return StepMaskRows(call.step, call.kv_before, call.q_len, mask, offset, kv_len)

    def _load_part(self, part: PartSteps, row: int) -> MaskPart:
        count_heads = partial(mask_cells.max_mask_heads, self.source.reader, part.masks)
        heads = self.source.get_or_create(("mask.heads", part), count_heads)
        # All heads share the part of a mask that is the same for all of them.
        head = min(max(self.place.head, 0), heads - 1)
        # A window that moves on puts the same rows elsewhere: only their tiles depend on where.
        offset = row % counting.TILE
        key: Hashable = ("mask.part", part, offset, head, self.spec, self.groups)
        made = self.source.get_or_create(key, lambda: self._make_part(part.steps, row, head))
        return made if made.row == row else replace(made, row=row)

    def _make_part(self, steps: tuple[StepMaskRows, ...], row: int, head: int) -> MaskPart:
        """Read the cells of some steps, and count them."""
        is_prefill = len(steps) == 1 and steps[0].n_rows > 1
        read = self._read_prefill if is_prefill else self._read_decode_steps
        n_keys, heads, known, chunks, packed, cells = read(steps, head)
        starts = (np.arange(step.pos, step.pos + step.n_rows, dtype=np.int32) for step in steps)
        positions, spec = np.concatenate([*starts]), self.spec

        def declared(start: int, stop: int) -> counting.PackedMask:
            assert spec is not None
            rows = counting.pack_spec(spec, positions[start:stop], n_keys)
            close_dropped_keys(rows, steps, start)
            rows[~known[start:stop]] = 0  # cells that were not recorded are not lost
            return rows

        counts = counting.count_cells(
            chunks,
            positions,
            n_keys,
            first_row=row,
            groups=self.groups,
            declared=declared if spec is not None else None,
        )
        return MaskPart(row, steps, positions, n_keys, heads, known, counts, packed, cells)

    def _read_decode_steps(self, steps: tuple[StepMaskRows, ...], chosen: int) -> PartCells:
        masks: dict[str | None, tuple[int, counting.PackedMask]] = {}
        heads = 1
        names = [step.mask for step in steps if step.mask]
        for name, cells in mask_cells.read_mask_arrays(self.source.reader, names, "mask.cells"):
            if cells.ndim == 3 and cells.shape[0] > 0 and cells.shape[1] == 1:
                heads = max(heads, cells.shape[0])
                head = min(chosen, cells.shape[0] - 1)
                masks[name] = cells.shape[2], np.packbits(cells[head], axis=1)
        widths = [masks[step.mask][0] if step.mask in masks else step.kv_len for step in steps]
        n_keys = max(step.kv_offset + width for step, width in zip(steps, widths, strict=True))
        packed = np.zeros((len(steps), -(-n_keys // 8)), np.uint8)
        for number, step in enumerate(steps):
            if step.mask in masks:
                mask_row = counting.shift_keys(masks[step.mask][1], widths[number], step.kv_offset)
                packed[number, : mask_row.shape[1]] = mask_row[0]
        known = np.array([step.mask in masks for step in steps])
        return n_keys, heads, known, [(0, packed)], packed, None

    def _read_prefill(self, steps: tuple[StepMaskRows, ...], chosen: int) -> PartCells:
        (step,) = steps
        reader, n_rows = self.source.reader, step.n_rows
        cells = mask_cells.find_mask_cells(reader, step.mask) if step.mask is not None else None
        if cells is None or cells.n_rows not in (1, n_rows) or cells.heads < 1:
            return step.kv_offset + step.kv_len, 1, np.zeros(n_rows, bool), [], None, None
        n_keys = step.kv_offset + cells.n_keys
        n_bytes = -(-n_keys // 8)
        fits = n_rows * n_bytes <= MAX_PACKED_BYTES
        whole = np.empty((n_rows, n_bytes), np.uint8) if fits else None

        def read() -> Chunks:
            head = min(chosen, cells.heads - 1)
            for start, rows in _read_rows(self.source, cells, step.kv_offset, head, 0, n_rows):
                if whole is not None:
                    whole[start : start + len(rows)] = rows
                yield start, rows

        return n_keys, cells.heads, np.ones(n_rows, bool), read(), whole, cells


def _read_rows(
    source: Source, cells: mask_cells.StoredCells, kv_offset: int, head: int, start: int, stop: int
) -> Chunks:
    """Yield (row, packed rows from it on, over the view's keys) of the rows `start` to `stop`."""
    if cells.n_rows == 1:  # one row that is broadcast
        packed = next(mask_cells.read_packed_rows(source.reader, cells, head, 0, 1))[1]
        row = counting.shift_keys(packed, cells.n_keys, kv_offset)
        for at in range(start, stop, counting.CHUNK_ROWS):
            yield at, row.repeat(min(counting.CHUNK_ROWS, stop - at), axis=0)
        return
    found = mask_cells.read_packed_rows(
        source.reader, cells, head, start, stop, at_most=counting.CHUNK_ROWS
    )
    for at, packed in found:
        yield at, counting.shift_keys(packed, cells.n_keys, kv_offset)


class BlockPart(Struct, frozen=True):
    """The block tables of a part's rows; `spans` are the rows of the view that have any.

    `is_dense` is True if the rows received dense masks. `size` is (rows, keys) of a block.
    """

    blocks: tuple[BlockLayout, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    is_dense: bool = False
    size: tuple[int, int] | None = None

    def at(self, row: int, key: int) -> str:
        """Return the state of a cell's block: "partial", "full", "not visited", "" if unknown."""
        for layout in self.blocks:
            if layout.rows[0] <= row < layout.rows[-1]:
                line = int(np.searchsorted(layout.rows, row, side="right")) - 1
                column = int(np.searchsorted(layout.keys, key, side="right")) - 1
                if not 0 <= column < layout.full.shape[1]:
                    return "not visited"
                if layout.full[line, column]:
                    return "full"
                return "partial" if layout.partial[line, column] else "not visited"
        return ""

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of blocks that are partial, full and not visited."""
        partial = sum(int(layout.partial.sum()) for layout in self.blocks)
        full = sum(int(layout.full.sum()) for layout in self.blocks)
        return partial, full, sum(layout.full.size for layout in self.blocks) - partial - full


def load_blocks(source: Source, part: MaskPart, head: int) -> BlockPart:
    """Return the block tables of a part. Raises `TraceError`."""
    make = partial(_make_block_part, source, part, head)
    return source.get_or_create(("mask.blocks", part.serial, part.row, head), make)


def _make_block_part(source: Source, part: MaskPart, head: int) -> BlockPart:
    names = list(dict.fromkeys(step.mask for step in part.steps if step.mask is not None))
    masks = {name: source.reader.mask_summary(name) for name in names}
    kinds = {mask.kind for mask in masks.values() if mask is not None}
    if "block" not in kinds:
        return BlockPart(is_dense=bool(kinds))
    tables = {
        stream: dict(mask_cells.read_mask_arrays(source.reader, names, stream))
        for stream in ("mask.partial", "mask.full")
    }
    _check_tables(tables["mask.partial"], tables["mask.full"])
    blocks: list[BlockLayout] = []
    spans: list[tuple[int, int]] = []
    row = part.row

    def block_size(step: StepMaskRows) -> tuple[int, int] | None:
        mask = masks.get(step.mask or "")
        if mask is None or mask.kind != "block" or not mask.block_q or not mask.block_kv:
            return None
        return mask.block_q, mask.block_kv

    def stored_size(step: StepMaskRows) -> tuple[tuple[int, int] | None, int]:
        return block_size(step) if step.mask in tables["mask.partial"] else None, step.kv_offset

    for (size, offset), group in groupby(part.steps, key=stored_size):
        steps = list(group)
        start, row = row, row + sum(step.n_rows for step in steps)
        if size is None:
            continue
        partial, full = (
            _stack_tables(steps, tables[name], tables["mask.partial"], head) for name in tables
        )
        n_rows = 1 if len(steps) > 1 else size[0]
        n_blocks = min(len(partial), -(-(row - start) // n_rows))
        rows = _block_edges(start, n_rows, n_blocks, row)
        keys = _block_edges(offset, size[1], partial.shape[1], part.n_keys)
        blocks.append(BlockLayout(rows, keys, partial, full))
        spans.append((start, row))
    size = next(filter(None, map(block_size, part.steps)), None)
    return BlockPart(tuple(blocks), tuple(spans), size=size)


def _check_tables(partial: Mapping[str, Array], full: Mapping[str, Array]) -> None:
    """Raise `TraceError` if a table is empty, or the two tables of a mask differ in their shape."""
    for name, table in (*partial.items(), *full.items()):
        other = partial.get(name, table)
        if not table.size or other.shape != table.shape:
            shapes = f"{list(table.shape)} beside {list(other.shape)}"
            raise damaged_array(f"the block table of mask {name!r}", f"its shape is {shapes}")


def _block_edges(start: int, size: int, n_blocks: int, stop: int) -> IntArray:
    return np.minimum(start + size * np.arange(n_blocks + 1), stop).astype(np.int32)


def _stack_tables(
    steps: list[StepMaskRows], tables: dict[str, Array], shapes: dict[str, Array], head: int
) -> Array:
    """Stack the tables of some steps, bool (row blocks, key blocks)."""
    n_rows = 1 if len(steps) > 1 else None
    names = (str(step.mask) for step in steps)
    found = (tables.get(name, np.zeros_like(shapes[name])) for name in names)
    own_tables = [table[min(head, len(table) - 1)][:n_rows] for table in found]
    width = max(table.shape[1] for table in own_tables)
    padded = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in own_tables]
    return np.concatenate(padded).astype(np.bool_)
