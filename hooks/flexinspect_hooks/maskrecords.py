"""What the trace keeps of a received mask: its fingerprint, its cells and its block tables."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexinspect.records import MaskRecord
from flexinspect_hooks.ruleidentity import mask_mod_name, mask_mod_source

if TYPE_CHECKING:
    from flexinspect_hooks.received import CapturedMask


@dataclass(frozen=True, slots=True)
class BlockGrids:
    """Block tables of batch 0, bool (heads, row blocks, key blocks); None where there are none."""

    partial: npt.NDArray[np.bool_] | None = None
    full: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class ExecutedMask:
    """What was executed, as `MaskRecord` has it."""

    cells: npt.NDArray[Any] | None
    averaged: npt.NDArray[Any] | None
    mask_mod_blocks: npt.NDArray[Any] | None = None


def merge_equal_heads(cells: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return cells with one head where all heads are equal."""
    if cells is None or len(cells) == 1:
        return cells
    return cells[:1] if all(np.array_equal(cells[0], other) for other in cells[1:]) else cells


def averaged_rows(averaged: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return which rows are averaged, None when none is."""
    return None if averaged is None or not averaged.any() else merge_equal_heads(averaged)


def mask_fingerprint(mask: CapturedMask, tables: BlockGrids, executed: ExecutedMask) -> str:
    """Hash what tells masks apart: kind, lengths, rule with its values, tables and cells.

    The cells count whenever they were evaluated: two rules of one name may have captured different
    things, and what was executed is what a fingerprint stands for.
    """
    key = (mask.kind, mask.batch, mask.heads, mask.q_len, mask.kv_len, mask.block, mask.compiled)
    name = "" if mask.mask_mod is None else mask_mod_name(mask.mask_mod)
    digest = hashlib.blake2b(f"{key}{name}{mask.identity}".encode(), digest_size=8)
    for bits in (executed.cells, executed.averaged):
        if bits is not None:
            digest.update(np.packbits(bits).tobytes())
    for grid in (tables.partial, tables.full, executed.mask_mod_blocks):
        if grid is not None:
            digest.update(grid.tobytes())
    return digest.hexdigest()


def mask_record(
    mask: CapturedMask, fingerprint: str, tables: BlockGrids, executed: ExecutedMask
) -> MaskRecord:
    """Return the record of a mask."""
    return MaskRecord(
        fingerprint=fingerprint,
        kind=mask.kind,
        batch=mask.batch,
        heads=mask.heads,
        q_len=mask.q_len,
        kv_len=mask.kv_len,
        q_offset=mask.q_offset,
        kv_offset=mask.kv_offset,
        block_q=mask.block[0] if mask.block else None,
        block_kv=mask.block[1] if mask.block else None,
        rule=None if mask.mask_mod is None else mask_mod_name(mask.mask_mod),
        rule_source=None if mask.mask_mod is None else mask_mod_source(mask.mask_mod),
        compiled=mask.compiled,
        cells=executed.cells,
        averaged=executed.averaged,
        partial=tables.partial,
        full=tables.full,
        ruled=executed.mask_mod_blocks,
    )


def block_grid(
    counts: npt.NDArray[Any] | None, indices: npt.NDArray[Any] | None
) -> npt.NDArray[np.bool_] | None:
    """Return a block list of batch 0 as bool (heads, row blocks, key blocks)."""
    if counts is None or indices is None:
        return None
    n_columns = indices.shape[-1]
    # Entries past a row's count are undefined, so they are sent to a column that is cut off.
    listed = np.where(np.arange(n_columns) < counts[0, ..., None], indices[0], n_columns)
    grid = np.zeros((*listed.shape[:-1], n_columns + 1), np.bool_)
    np.put_along_axis(grid, listed.astype(np.intp), True, axis=-1)
    return grid[..., :n_columns]
