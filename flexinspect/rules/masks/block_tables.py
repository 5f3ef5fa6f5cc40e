"""The rule for block masks whose block tables do not match their mask_mod, or of a wrong size.

Uncompiled FlexAttention ignores the block tables, compiled FlexAttention follows them. Such a fault
is therefore invisible in an uncompiled debug run. A mask is checked when it is new to the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_ranges, plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_findings import (
    BLOCK_VIEW,
    IGNORES_HEAD,
    STALE_TABLES,
    TABLE_KINDS,
    WRONG_SIZE,
    format_mask_mod,
)
from flexinspect.rules.masks.mask_views import format_step_layers

BlockStates = npt.NDArray[np.uint8]
"""Which cells of each block a mask_mod opens: 0 none, 1 some, 2 all."""


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

    name: ClassVar[str] = "tables"
    findings: ClassVar[Mapping[str, FindingKind]] = TABLE_KINDS
    handles_standalone_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        self._stale_blocks: dict[str, StaleBlocks] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Note whether the calls are standalone; masks stay known."""
        super().on_generation_start(context)
        self._is_standalone = context.is_standalone

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return findings for masks of a step whose tables or sizes do not match."""
        for mask in step.masks:
            if not (mask.compiled or mask.q_len > 1 or self._is_standalone):
                continue  # the tables of a single decode row matter to a compiled kernel only
            stale = find_stale_blocks(mask)
            if stale is not None:
                self._stale_blocks[mask.fingerprint] = stale
        by_mask: dict[str | None, list[CallRecord]] = {}
        for call in step.calls:
            by_mask.setdefault(call.mask, []).append(call)
        alike: dict[tuple[object, ...], tuple[MaskRecord, list[CallRecord]]] = {}
        for fingerprint, calls in by_mask.items():
            known = self.context.mask(fingerprint)
            if known is not None and known.kind == "block":
                # Layers that each build their own mask share one finding.
                stale = self._stale_blocks.get(known.fingerprint)
                key = (known.rule, known.batch, known.heads, stale and stale.missing.tobytes())
                alike.setdefault(key, (known, []))[1].extend(calls)
        return [f for mask, calls in alike.values() for f in self._check_mask(step, mask, calls)]

    def _check_mask(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord]
    ) -> list[Finding]:
        findings = self._check_sizes(step, mask, calls)
        stale = self._stale_blocks.get(mask.fingerprint)
        if stale is not None:
            findings.append(self._stale_finding(step, mask, calls, stale))
        elif self.context.is_standalone and _is_one_block(mask):
            findings.append(_one_block_finding(step, mask))
        return findings

    # -- tables ----------------------------------------------------------------------------------

    def _stale_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord], stale: StaleBlocks
    ) -> Finding:
        n_heads = len(stale.missing)
        by_head = mask.heads == 1 < n_heads and len(stale.heads) < n_heads
        finding_id = IGNORES_HEAD if by_head else STALE_TABLES
        head, row, key = (int(n) for n in np.argwhere(stale.missing | stale.extra)[0])
        n_missing, n_extra = (int(grid.any(axis=0).sum()) for grid in (stale.missing, stale.extra))
        rows, keys = _format_block_span(step, mask, row, key)
        parts = []
        if n_missing:
            parts.append(f"{plural(n_missing, 'open block')} missing")
        if n_extra:
            parts.append(f"{plural(n_extra, 'full block')} that the mask_mod closes")
        wrong_blocks = " and ".join(parts)
        cause = (
            f"was built for one head (H=None), but its mask_mod depends on the head: for "
            f"{_format_head_list(stale.heads)} of {n_heads} its tables have {wrong_blocks}"
            if by_head
            else f"has block tables that do not match its mask_mod: {wrong_blocks}"
        )
        return Finding(
            id=finding_id,
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            sentence=(
                f"{_format_call_place(step, calls, self.context)}: the block mask of "
                f"{format_mask_mod(mask)} {cause}, first: rows {rows}, keys "
                f"{keys}; {_format_table_effect(mask)}."
            ),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=calls[0].layer if not self.context.is_standalone else None,
            head=head if by_head else None,
            positions=(step.kv_before + row * (mask.block_q or 1),),
            evidence={
                "mask": mask.fingerprint,
                "rule": mask.rule,
                "missing": n_missing,
                "extra": n_extra,
                "in_tables": _count_visited_blocks(mask),
                "heads": stale.heads,
                "compiled": mask.compiled,
                "first": [row, key],
            },
            layers=_layers_of_several(calls),
            series=_table_series(mask, calls),
        )

    # -- sizes -----------------------------------------------------------------------------------

    def _check_sizes(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord]
    ) -> list[Finding]:
        """Return a finding if a mask was built for another batch or another number of heads."""
        call = calls[0]
        wrong = []
        if mask.batch not in (1, call.batch):
            wrong.append(f"batch {mask.batch}, but the queries have {call.batch}")
        if mask.heads not in (1, call.q_heads):
            grouped = call.q_heads != call.kv_heads == mask.heads
            note = " (it was built for the KV heads)" if grouped else ""
            wrong.append(f"{mask.heads} heads, but the queries have {call.q_heads}{note}")
        if not wrong:
            return []
        outcome = "compiled FlexAttention reads past the end of the block tables and may crash"
        if not mask.compiled:
            outcome = f"uncompiled FlexAttention does not notice, {outcome}"
        sentence = (
            f"{_format_call_place(step, calls, self.context)}: the block mask of "
            f"{format_mask_mod(mask)} was built for {' and for '.join(wrong)}; {outcome}."
        )
        evidence = {
            "mask": mask.fingerprint,
            "mask_batch": mask.batch,
            "mask_heads": mask.heads,
            "batch": call.batch,
            "q_heads": call.q_heads,
            "kv_heads": call.kv_heads,
        }
        finding = self.finding(
            step,
            WRONG_SIZE,
            sentence,
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            layers=() if self.context.is_standalone else {call.layer for call in calls},
            evidence=evidence,
            series=_table_series(mask, calls),
        )
        return [finding]


def find_stale_blocks(mask: MaskRecord) -> StaleBlocks | None:
    """Return the blocks in which a mask's tables and mask_mod disagree, None if they agree.

    Partial blocks without any open cell do not matter: the mask_mod closes their cells.
    """
    tables = _visited_blocks(mask)
    if tables is None:
        return None
    visited, full = tables
    ruled = mask.ruled if mask.compiled else _block_states(mask)
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
    n_rows, n_keys = cells.shape[1:]
    edges = np.arange(0, n_keys, size_kv)
    rows = []
    for start in range(0, n_rows, size_q):
        some = cells[:, start : start + size_q]
        rows.append(_block_row_states(some, edges, whole=some.shape[1] == size_q))
    found = np.stack(rows, axis=1)
    if n_keys % size_kv:
        np.minimum(found[..., -1], 1, out=found[..., -1])
    return found


def _block_row_states(cells: BoolArray, edges: npt.NDArray[Any], *, whole: bool) -> BlockStates:
    """Return the states (heads, key blocks) of a row of blocks; `whole` unless the mask cuts it."""
    opens = np.logical_or.reduceat(cells.any(axis=1), edges, axis=1).astype(np.uint8)
    if whole:
        opens += np.logical_and.reduceat(cells.all(axis=1), edges, axis=1)
    return opens


def _format_table_effect(mask: MaskRecord) -> str:
    if mask.compiled:
        return "compiled FlexAttention followed the tables, so the executed mask is wrong"
    return "uncompiled FlexAttention is correct, compiled it would follow the tables"


def _format_block_span(step: StepRecord, mask: MaskRecord, row: int, key: int) -> tuple[str, str]:
    size_q, size_kv = mask.block_q or 1, mask.block_kv or 1
    kv_offset = max(step.kv_after - mask.kv_len, 0)
    rows = step.kv_before + row * size_q, step.kv_before + min((row + 1) * size_q, mask.q_len) - 1
    keys = kv_offset + key * size_kv, kv_offset + min((key + 1) * size_kv, mask.kv_len) - 1
    return _format_range(*rows), _format_range(*keys)


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _format_head_list(heads: Sequence[int]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {format_ranges(heads)}"


def _count_visited_blocks(mask: MaskRecord) -> int:
    tables = _visited_blocks(mask)
    return 0 if tables is None else int(np.count_nonzero(tables[0][0]))


def _layers_of_several(calls: Sequence[CallRecord]) -> tuple[int, ...]:
    layers = tuple(sorted({call.layer for call in calls}))
    return layers if len(layers) > 1 else ()


def _table_series(mask: MaskRecord, calls: Sequence[CallRecord]) -> str:
    return f"{mask.rule} in layers {', '.join(map(str, sorted({c.layer for c in calls})))}"


def _format_call_place(step: StepRecord, calls: Sequence[CallRecord], context: RuleContext) -> str:
    if context.is_standalone:
        call = calls[0]
        return f"A standalone call of flex_attention ({call.q_len} rows, {call.kv_len} keys)"
    text = format_step_layers({call.layer for call in calls}, step)
    return text[0].upper() + text[1:]


def _is_one_block(mask: MaskRecord) -> bool:
    """Return whether the tables are a single block, although only some of its cells are open."""
    tables = _visited_blocks(mask)
    if tables is None or mask.cells is None or tables[0].shape != (1, 1, 1):
        return False
    return mask.q_len > 1 and bool(mask.cells.any()) and not mask.cells.all()


def _one_block_finding(step: StepRecord, mask: MaskRecord) -> Finding:
    cells = mask.cells
    assert cells is not None
    size, n_open = f"{mask.q_len} x {mask.kv_len}", int(np.count_nonzero(cells[0]))
    return Finding(
        id=BLOCK_VIEW,
        severity=Severity.NOTE,
        sentence=(
            f"A mask of {size} cells, {n_open} of them open, fits into one block of "
            f"{mask.block_q} x {mask.block_kv}: `to_dense()` shows a single open cell, and up to "
            "torch 2.13 `sparsity()` is negative."
        ),
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        evidence={"mask": mask.fingerprint, "open": n_open, "cells": mask.q_len * mask.kv_len},
        series="one block",
    )
