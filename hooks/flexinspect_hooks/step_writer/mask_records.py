"""Makes records of masks: block tables, cells, variables of the mask_mod, and the fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict, replace

from flexinspect.masks.mask_mod_evaluation import SourceText
from flexinspect.records.step import MaskRecord
from flexinspect_hooks.step_writer.step_draft import StepDraft
from flexinspect_hooks.step_writer.values import Values, with_prefix

SOURCE_EVENT = "source"
"""Kind of the event with the source text of a function, once per function and trace."""

MAX_RUNS = 512
"""So are tensors with more runs of equal elements, in row-major order."""

TINY_BIAS = 1e-3
"""Several values nearer to 0 are recorded as one is: no bias by distance is as small."""

TENSOR_PREFIX = "mask_mod.tensor."

_SIZE_NAMES = ("kind", "batch", "heads", "q_len", "kv_len", "q_offset", "kv_offset", "compiled")
TABLE_NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class MaskFacts(Struct):
    """One distinct mask of a step. `batch` and `heads` are the mask's own sizes.

    `name` and `source` are those of its mask_mod; `code` and `new_sources` are what
    `MaskModCodes.capture` returned. `fingerprint` is set when the mask is recorded.
    """

    number: int
    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int
    compiled: bool
    kind: str = "none"
    batch: int = 1
    heads: int = 1
    identity: str = ""
    block: tuple[int, int] | None = None
    name: str | None = None
    source: str | None = None
    code: dict[str, Any] | None = None
    new_sources: Sequence[SourceText] = ()
    fingerprint: str = ""


class MaskRecords:
    """Makes the records of masks, and remembers which ones the trace already holds."""

    def __init__(self) -> None:
        self._values = MaskModValues()
        self._stored: set[str] = set()
        self._last_key: tuple[Any, ...] = (None, None, None, None)
        self._last_grids: tuple[_Grid | None, _Grid | None] = (None, None)

    def record(self, mask: MaskFacts, values: Values, draft: StepDraft) -> None:
        """Set the mask's fingerprint, and store the mask if it is new (writer thread)."""
        arrays = with_prefix(values, f"mask.{mask.number}.")
        self._values.read_tensors(values)
        record_sources(mask.new_sources, draft)
        partial, full = self._block_grids([arrays.get(name) for name in TABLE_NAMES])
        averaged = arrays.get("averaged")
        block_q, block_kv = mask.block or (None, None)
        record = MaskRecord(
            fingerprint="",
            **{name: getattr(mask, name) for name in _SIZE_NAMES},
            block_q=block_q,
            block_kv=block_kv,
            mask_mod=mask.name,
            added=_added(arrays.get("added"), arrays.get("added_at"), mask),
            cells=_merge_equal_heads(arrays.get("cells")),
            uniform_rows=_merge_equal_heads(averaged if np.any(averaged) else None),
            partial=partial,
            full=full,
            mask_mod_blocks=arrays.get("mask_mod_blocks"),
        )
        mask.fingerprint = fingerprint = _fingerprint(record, mask)
        if fingerprint not in self._stored:
            self._stored.add(fingerprint)
            code = self._values.encode(mask.code)
            record = replace(record, fingerprint=fingerprint, mask_mod_source=mask.source)
            draft.masks.append(replace(record, mask_mod_code=code))

    def _block_grids(self, raw: Sequence[npt.NDArray[Any] | None]) -> Sequence[_Grid | None]:
        """Return the partial and the full blocks, computed only if they changed since last time."""
        key = tuple(None if table is None else (table.shape, table.tobytes()) for table in raw)
        if key != self._last_key:
            full = _block_grid(raw[2], raw[3])
            self._last_key = key
            self._last_grids = _block_grid(raw[0], raw[1]), full if np.any(full) else None
        return self._last_grids


class MaskModValues:
    """Keeps the tensors that mask_mods captured, as runs of equal elements."""

    def __init__(self) -> None:
        self._encoded: dict[int, dict[str, Any]] = {}

    def read_tensors(self, values: Values) -> None:
        """Keep the tensors of a step."""
        for name, array in with_prefix(values, TENSOR_PREFIX).items():
            self._encoded[int(name)] = _encode_runs(array)

    def encode(self, described: Any) -> Any:
        """Return what `capture` returned, with the values of tensors."""
        if isinstance(described, list):
            return [self.encode(item) for item in described]
        if not isinstance(described, dict):
            return described
        if "tensor" in described:
            return self._encoded.get(described["tensor"], {"other": "Tensor"})
        return {name: self.encode(value) for name, value in described.items()}


def record_sources(new: Iterable[SourceText], draft: StepDraft) -> None:
    """Add an event with the source text of each function."""
    for one in new:
        draft.add_event(SOURCE_EVENT, f"{one.name} ({one.source})", asdict(one))


_Grid = npt.NDArray[np.bool_]


def _block_grid(counts: npt.NDArray[Any] | None, indices: npt.NDArray[Any] | None) -> _Grid | None:
    """Return a block list of batch 0 as bool (heads, row blocks, key blocks)."""
    if counts is None or indices is None:
        return None
    n_columns = indices.shape[-1]
    # Entries past a row's count are undefined, so they are sent to a column that is cut off.
    listed = np.where(np.arange(n_columns) < counts[0, ..., None], indices[0], n_columns)
    grid = np.zeros((*listed.shape[:-1], n_columns + 1), np.bool_)
    np.put_along_axis(grid, listed.astype(np.intp), True, axis=-1)
    return grid[..., :n_columns]


def _added(
    values: npt.NDArray[Any] | None, at: npt.NDArray[Any] | None, mask: MaskFacts
) -> dict[str, Any] | None:
    """Return `MaskRecord.added`; None where a mask adds nothing, or a bias of several values."""
    if values is None or at is None:
        return None
    lowest, highest, highest_below = values
    is_one = lowest == highest_below or lowest > -TINY_BIAS
    if not (highest == 0 and lowest < 0 and is_one):  # NaN is none of these
        return None
    row, key = divmod(int(at[0]), mask.kv_len)
    return {
        # As text, because 1e-09 has more digits as a double than the float32 of the mask.
        "lowest": float(str(lowest)),
        "highest": float(str(highest_below)),
        "cells": int(at[1]),
        "first": [*divmod(row, mask.q_len), key],
    }


def _merge_equal_heads(cells: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return cells with one head if all heads are equal, else all cells."""
    if cells is None or len(cells) == 1:
        return cells
    return cells[:1] if all(np.array_equal(cells[0], other) for other in cells[1:]) else cells


def _fingerprint(record: MaskRecord, mask: MaskFacts) -> str:
    """Return a hash of a mask: kind, lengths, mask_mod with captured values, tables and cells.

    Evaluated cells are always included: two mask_mods of one name may have captured different
    values, and a fingerprint stands for the executed mask.
    """
    key = (mask.kind, mask.batch, mask.heads, mask.q_len, mask.kv_len, mask.block, mask.compiled)
    digest = hashlib.blake2b(f"{key}{record.mask_mod or ''}{mask.identity}".encode(), digest_size=8)
    for bits in (record.cells, record.uniform_rows):
        if bits is not None:
            digest.update(np.packbits(bits).tobytes())
    if record.added is not None:
        digest.update(str(record.added).encode())
    for grid in (record.partial, record.full, record.mask_mod_blocks):
        if grid is not None:
            digest.update(grid.tobytes())
    return digest.hexdigest()


def _encode_runs(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the shape of an array, with its runs of equal elements unless there are too many."""
    shape, flat = {"shape": list(array.shape)}, array.reshape(-1)
    is_start = np.ones(len(flat), np.bool_)
    is_start[1:] = flat[1:] != flat[:-1]
    starts = np.flatnonzero(is_start)
    if len(starts) > MAX_RUNS or not np.isfinite(flat).all():
        return shape
    counts = np.diff(np.append(starts, len(flat)))
    return {**shape, "values": flat[starts].tolist(), "counts": counts.tolist()}
