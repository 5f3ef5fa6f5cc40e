"""The rule for block masks whose block tables do not match their mask_mod, or of a wrong size.

Uncompiled FlexAttention ignores the block tables, compiled FlexAttention follows them. Such a fault
is therefore invisible in an uncompiled debug run. A mask is checked when it is new to the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexinspect.core.text import format_numbers, format_ranges, plural
from flexinspect.masks.algebra import BlockStates, BoolArray, block_row_states
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.mask_views import (
    call_layers,
    calls_by_mask,
    format_call_place,
    format_mask_mod,
    has_wrong_size,
    mask_series,
    wrong_size_finding,
)


@dataclass(frozen=True, slots=True)
class StaleBlocks:
    """Blocks in which the tables and the mask_mod disagree, bool (heads, row blocks, key blocks).

    The mask_mod opens cells of `missing` blocks, which are in no table. It closes cells of `extra`
    blocks, which are in the table of full blocks.
    """

    missing: BoolArray
    extra: BoolArray

    @property
    def heads(self) -> list[int]:
        """The heads that have such blocks."""
        heads: list[int] = np.flatnonzero((self.missing | self.extra).any(axis=(1, 2))).tolist()
        return heads


class BlockTablesRule(Rule):
    """Compares block tables with the mask_mod, and the batch and heads of a mask with the call."""

    name = "tables"
    findings = finding_kinds(
        "mask.stale-tables", "mask.ignores-head", "mask.wrong-size", "mask.block-view"
    )
    handles_standalone_calls = True

    def __init__(self) -> None:
        self._stale_blocks: dict[str, StaleBlocks] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return findings for masks of a step whose tables or sizes do not match."""
        for mask in step.masks:
            if not (mask.compiled or mask.q_len > 1 or self.context.is_standalone):
                continue  # the tables of a single decode row matter to a compiled kernel only
            stale = find_stale_blocks(mask)
            if stale is not None:
                self._stale_blocks[mask.fingerprint] = stale
        alike: dict[tuple[object, ...], tuple[MaskRecord, list[CallRecord]]] = {}
        for fingerprint, calls in calls_by_mask(step).items():
            known = self.context.mask(fingerprint)
            if known is not None and known.kind == "block":
                # Layers that each build their own mask share one finding.
                stale = self._stale_blocks.get(known.fingerprint)
                key = (known.mask_mod, known.batch, known.heads, stale and stale.missing.tobytes())
                alike.setdefault(key, (known, []))[1].extend(calls)
        for mask, calls in alike.values():
            if has_wrong_size(mask, calls[0]):
                yield wrong_size_finding(self, step, "mask.wrong-size", mask, calls)
            stale = self._stale_blocks.get(mask.fingerprint)
            if stale is not None:
                yield self._stale_finding(step, mask, calls, stale)
            elif self.context.is_standalone and _is_one_block(mask):
                yield self._one_block_finding(step, mask)

    def _stale_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord], stale: StaleBlocks
    ) -> Finding:
        n_heads = len(stale.missing)
        by_head = mask.heads == 1 < n_heads and len(stale.heads) < n_heads
        head, row, key = (int(n) for n in np.argwhere(stale.missing | stale.extra)[0])
        n_missing, n_extra = (int(grid.any(axis=0).sum()) for grid in (stale.missing, stale.extra))
        rows, keys = _format_block_span(step, mask, row, key)
        parts = [f"{plural(n_missing, 'open block')} missing"] if n_missing else []
        parts += [f"{plural(n_extra, 'full block')} that the mask_mod closes"] if n_extra else []
        wrong_blocks = " and ".join(parts)
        cause = (
            f"was built for one head (H=None), but its mask_mod depends on the head: for "
            f"{format_numbers('head', stale.heads)} of {n_heads} its tables have {wrong_blocks}"
            if by_head
            else f"has block tables that do not match its mask_mod: {wrong_blocks}"
        )
        sentence = (
            f"{format_call_place(self.context, step, calls)}: the block mask of "
            f"{format_mask_mod(mask)} {cause}, first: rows {rows}, keys {keys}; "
            f"{_format_table_effect(mask)}."
        )
        return self.finding(
            step,
            "mask.ignores-head" if by_head else "mask.stale-tables",
            sentence,
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            layers=call_layers(self.context, calls),
            head=head if by_head else None,
            positions=(step.kv_before + row * (mask.block_q or 1),),
            evidence={
                "mask": mask.fingerprint,
                "mask_mod": mask.mask_mod,
                "missing": n_missing,
                "extra": n_extra,
                "in_tables": _count_visited_blocks(mask),
                "heads": stale.heads,
                "compiled": mask.compiled,
                "first": [row, key],
            },
            series=mask_series(mask, calls),
        )

    def _one_block_finding(self, step: StepRecord, mask: MaskRecord) -> Finding:
        n_open = 0 if mask.cells is None else int(np.count_nonzero(mask.cells[0]))
        sentence = (
            f"A mask of {mask.q_len} x {mask.kv_len} cells, {n_open} of them open, fits into one "
            f"block of {mask.block_q} x {mask.block_kv}: `to_dense()` shows a single open cell, "
            "and up to torch 2.13 `sparsity()` is negative."
        )
        evidence = {
            "mask": mask.fingerprint,
            "open": n_open,
            "cells": mask.q_len * mask.kv_len,
        }
        return self.finding(
            step, "mask.block-view", sentence, evidence=evidence, series="one block"
        )


def find_stale_blocks(mask: MaskRecord) -> StaleBlocks | None:
    """Return the blocks in which a mask's tables and mask_mod disagree, None if they agree.

    Partial blocks without any open cell do not matter: the mask_mod closes their cells.
    """
    tables = _visited_blocks(mask)
    if tables is None:
        return None
    visited, full = tables
    ruled = mask.mask_mod_blocks if mask.compiled else _block_states(mask)
    if ruled is None or ruled.shape[1:] != visited.shape[1:]:
        return None
    if len(visited) not in (1, len(ruled)) and len(ruled) != 1:
        return None
    missing = (ruled > 0) & ~visited
    extra = np.zeros_like(missing) if full is None else full & (ruled < 2)
    return StaleBlocks(missing, extra) if missing.any() or extra.any() else None


def _visited_blocks(mask: MaskRecord) -> tuple[BoolArray, BoolArray | None] | None:
    if mask.kind != "block" or mask.block_q is None or mask.block_kv is None:
        return None
    if mask.partial is None:
        return None
    return (mask.partial if mask.full is None else mask.partial | mask.full), mask.full


def _block_states(mask: MaskRecord) -> BlockStates | None:
    """Return the block states of an uncompiled call, whose cells are those of its mask_mod."""
    cells, size_q, size_kv = mask.cells, mask.block_q, mask.block_kv
    if cells is None or size_q is None or size_kv is None:
        return None
    starts = range(0, cells.shape[1], size_q)
    rows = [block_row_states(cells[:, row : row + size_q], size_q, size_kv) for row in starts]
    return np.stack(rows, axis=1)


def _format_table_effect(mask: MaskRecord) -> str:
    if mask.compiled:
        return "compiled FlexAttention followed the tables, so the executed mask is wrong"
    return "uncompiled FlexAttention is correct, compiled it would follow the tables"


def _format_block_span(step: StepRecord, mask: MaskRecord, row: int, key: int) -> tuple[str, str]:
    size_q, size_kv = mask.block_q or 1, mask.block_kv or 1
    kv_offset = max(step.kv_after - mask.kv_len, 0)
    first_row, first_key = step.kv_before + row * size_q, kv_offset + key * size_kv
    rows = range(first_row, min(first_row + size_q, step.kv_before + mask.q_len))
    keys = range(first_key, min(first_key + size_kv, kv_offset + mask.kv_len))
    return format_ranges(rows), format_ranges(keys)


def _count_visited_blocks(mask: MaskRecord) -> int:
    tables = _visited_blocks(mask)
    return 0 if tables is None else int(np.count_nonzero(tables[0][0]))


def _is_one_block(mask: MaskRecord) -> bool:
    """Return whether the tables are a single block, although only some of its cells are open."""
    tables = _visited_blocks(mask)
    if tables is None or mask.cells is None or tables[0].shape != (1, 1, 1):
        return False
    return mask.q_len > 1 and bool(mask.cells.any()) and not mask.cells.all()
