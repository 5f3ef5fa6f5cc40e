"""Block tables of the masks that were received, laid over a sheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from flexinspect.masks import IntArray
from flexinspect.masksheets.windows import BlockLayout
from flexinspect.panels.parts.maskparts import MaskPart, StepMaskRows
from flexinspect.panels.source import Source
from flexinspect.records import Array, MaskRecord
from flexinspect.trace.bits import read_mask_arrays


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The block tables of a part's rows; `spans` are the rows of the sheet that have any.

    `dense` says that the rows were given no block mask at all. `size` is (rows, keys) of a block.
    """

    blocks: tuple[BlockLayout, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    is_dense: bool = False
    size: tuple[int, int] | None = None

    def at(self, row: int, key: int) -> str:
        """Return what the tables say of a cell: "partial", "full", "not visited", "" if nothing."""
        for one in self.blocks:
            if one.rows[0] <= row < one.rows[-1]:
                line = int(np.searchsorted(one.rows, row, side="right")) - 1
                column = int(np.searchsorted(one.keys, key, side="right")) - 1
                if not 0 <= column < one.full.shape[1]:
                    return "not visited"
                if one.full[line, column]:
                    return "full"
                return "partial" if one.partial[line, column] else "not visited"
        return ""

    def counts(self) -> tuple[int, int, int]:
        """Return how many blocks are partial, full and not visited."""
        partial = sum(int(one.partial.sum()) for one in self.blocks)
        full = sum(int(one.full.sum()) for one in self.blocks)
        return partial, full, sum(one.full.size for one in self.blocks) - partial - full


def load_blocks(source: Source, part: MaskPart, head: int) -> BlockPart:
    """Return the block tables of a part. Raises `TraceError`."""
    return source.get_or_create(
        ("mask.blocks", part.serial, head),
        lambda: _make_block_part(source, part, head),
        _block_part_bytes,
    )


def _block_part_bytes(found: BlockPart) -> int:
    return 512 + sum(
        2 * one.full.size + 8 * (len(one.rows) + len(one.keys)) for one in found.blocks
    )


def _make_block_part(source: Source, part: MaskPart, head: int) -> BlockPart:
    names = list(dict.fromkeys(fed.mask for fed in part.steps if fed.mask is not None))
    about = {name: source.reader.mask_summary(name) for name in names}
    kinds = {mask.kind for mask in about.values() if mask is not None}
    if "block" not in kinds:
        return BlockPart(is_dense=bool(kinds))
    tables = {
        stream: dict(read_mask_arrays(source.reader, names, stream))
        for stream in ("mask.partial", "mask.full")
    }
    blocks: list[BlockLayout] = []
    spans: list[tuple[int, int]] = []
    row = part.row
    known = {name: mask for name, mask in about.items() if name in tables["mask.partial"]}
    for (mask, offset), group in groupby(part.steps, key=lambda fed: _block_size(fed, known)):
        steps = list(group)
        start, row = row, row + sum(one.n_rows for one in steps)
        if mask is None:
            continue
        rows = _row_edges(start, row, 1 if len(steps) > 1 else mask[0])
        partial, full = (
            _stack_tables(steps, tables[name], tables["mask.partial"], head) for name in tables
        )
        keys = _key_edges(offset, mask[1], partial.shape[1], part.n_keys)
        blocks.append(BlockLayout(rows[: len(partial) + 1], keys, partial, full))
        spans.append((start, row))
    size = next(
        (m for m, _ in (_block_size(fed, about) for fed in part.steps) if m is not None), None
    )
    return BlockPart(tuple(blocks), tuple(spans), False, size)


def _block_size(
    step_rows: StepMaskRows, about: Mapping[str, MaskRecord | None]
) -> tuple[tuple[int, int] | None, int]:
    """Return the size of a block and the offset of its keys."""
    mask = about.get(step_rows.mask) if step_rows.mask is not None else None
    if mask is None or mask.kind != "block" or not mask.block_q or not mask.block_kv:
        return None, step_rows.kv_offset
    return (mask.block_q, mask.block_kv), step_rows.kv_offset


def _row_edges(start: int, stop: int, size: int) -> IntArray:
    n_blocks = -(-(stop - start) // size)
    return np.minimum(start + size * np.arange(n_blocks + 1), stop).astype(np.int32)


def _key_edges(offset: int, size: int, n_blocks: int, n_keys: int) -> IntArray:
    return np.minimum(offset + size * np.arange(n_blocks + 1), n_keys).astype(np.int32)


def _stack_tables(
    steps: list[StepMaskRows], tables: dict[str, Array], shapes: dict[str, Array], head: int
) -> Array:
    """Return the tables of some steps one below the other, bool (row blocks, key blocks)."""
    found = list(_head_tables(steps, tables, shapes, head))
    width = max(table.shape[1] for table in found)
    stacked = np.zeros((sum(map(len, found)), width), np.bool_)
    row = 0
    for table in found:
        stacked[row : row + len(table), : table.shape[1]] = table
        row += len(table)
    return stacked


def _head_tables(
    steps: list[StepMaskRows], tables: dict[str, Array], shapes: dict[str, Array], head: int
) -> Iterator[Array]:
    for one in steps:
        assert one.mask is not None
        table = tables.get(one.mask, np.zeros_like(shapes[one.mask]))
        own = table[min(head, len(table) - 1)]
        yield own[:1] if len(steps) > 1 else own
