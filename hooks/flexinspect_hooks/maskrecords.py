"""What the trace keeps of a received mask: its fingerprint, its cells and its block tables."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexinspect.records import MaskRecord
from flexinspect_hooks.ruleidentity import rule_name, rule_source

if TYPE_CHECKING:
    from flexinspect_hooks.received import ReceivedMask


@dataclass(frozen=True, slots=True)
class Tables:
    """Block tables of batch 0, bool (heads, row blocks, key blocks); None where there are none."""

    partial: npt.NDArray[np.bool_] | None = None
    full: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Executed:
    """What was executed, as `MaskRecord` has it."""

    cells: npt.NDArray[Any] | None
    averaged: npt.NDArray[Any] | None
    ruled: npt.NDArray[Any] | None = None


def shared(cells: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return cells with one head where all heads are equal."""
    if cells is None or len(cells) == 1:
        return cells
    return cells[:1] if all(np.array_equal(cells[0], other) for other in cells[1:]) else cells


def told(averaged: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return which rows are averaged, None when none is."""
    return None if averaged is None or not averaged.any() else shared(averaged)


def fingerprint_of(mask: ReceivedMask, tables: Tables, executed: Executed) -> str:
    """Hash what tells masks apart: kind, lengths, rule with its values, tables and cells.

    The cells count whenever they were evaluated: two rules of one name may have captured different
    things, and what was executed is what a fingerprint stands for.
    """
    key = (mask.kind, mask.batch, mask.heads, mask.q_len, mask.kv_len, mask.block, mask.compiled)
    name = "" if mask.rule is None else rule_name(mask.rule)
    digest = hashlib.blake2b(f"{key}{name}{mask.parameters}".encode(), digest_size=8)
    for bits in (executed.cells, executed.averaged):
        if bits is not None:
            digest.update(np.packbits(bits).tobytes())
    for grid in (tables.partial, tables.full, executed.ruled):
        if grid is not None:
            digest.update(grid.tobytes())
    return digest.hexdigest()


def mask_record(
    mask: ReceivedMask, fingerprint: str, tables: Tables, executed: Executed
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
        rule=None if mask.rule is None else rule_name(mask.rule),
        rule_source=None if mask.rule is None else rule_source(mask.rule),
        compiled=mask.compiled,
        cells=executed.cells,
        averaged=executed.averaged,
        partial=tables.partial,
        full=tables.full,
        ruled=executed.ruled,
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
