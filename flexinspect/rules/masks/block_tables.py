"""Block tables that do not fit the rule, and masks that were made for other sizes.

Uncompiled FlexAttention ignores the tables, compiled goes by them: what is wrong here is invisible
while one debugs. A mask is looked at when it is new to the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_layers, format_ranges, plural, printable
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
)

BlockStates = npt.NDArray[np.uint8]
"""What a rule opens of each block: 0 nothing, 1 some, 2 all of its cells."""


@dataclass(frozen=True, slots=True)
class StaleBlocks:
    """Blocks, bool (heads, row blocks, key blocks), in which tables and rule disagree.

    The rule opens cells of `missing` blocks, which are in no table, and closes some of `extra`
    ones, which are in the table of full blocks.
    """

    missing: BoolArray
    extra: BoolArray

    @property
    def heads(self) -> list[int]:
        """The heads that have such blocks."""
        found: list[int] = np.flatnonzero((self.missing | self.extra).any(axis=(1, 2))).tolist()
        return found


class BlockTablesRule(Rule):
    """Compares a block mask's tables with its rule, and its batch and heads with the call's."""

    name: ClassVar[str] = "tables"
    findings: ClassVar[Mapping[str, FindingKind]] = TABLE_KINDS
    handles_standalone_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        self._stale_blocks: dict[str, StaleBlocks] = {}
        """By fingerprint and for the whole run, as a mask is in one step's record only."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing told; masks stay known."""
        super().on_generation_start(context)
        self._is_standalone = context.is_standalone

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return which masks of a step have tables or sizes that do not fit."""
        for mask in step.masks:
            # Of a decode row nobody goes by the tables but a compiled kernel.
            stale = (
                find_stale_blocks(mask)
                if mask.compiled or mask.q_len > 1 or self._is_standalone
                else None
            )
            if stale is not None:
                self._stale_blocks[mask.fingerprint] = stale
        by_mask: dict[str | None, list[CallRecord]] = {}
        for call in step.calls:
            by_mask.setdefault(call.mask, []).append(call)
        alike: dict[tuple[object, ...], tuple[MaskRecord, list[CallRecord]]] = {}
        for fingerprint, calls in by_mask.items():
            known = self.context.mask(fingerprint)
            if known is not None and known.kind == "block":
                # Layers that build a mask each have one of their own, with the same trouble.
                stale = self._stale_blocks.get(known.fingerprint)
                key = (known.rule, known.batch, known.heads, stale and stale.missing.tobytes())
                alike.setdefault(key, (known, []))[1].extend(calls)
        return [f for mask, calls in alike.values() for f in self._check_mask(step, mask, calls)]

    def _check_mask(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord]
    ) -> list[Finding]:
        found = [*self._check_sizes(step, mask, calls)]
        stale = self._stale_blocks.get(mask.fingerprint)
        if stale is not None:
            found.append(self._stale_finding(step, mask, calls, stale))
        elif self.context.is_standalone and _is_one_block(mask):
            found.append(_one_block_finding(step, mask, calls))
        return found

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
        words = [] if not n_missing else [f"{plural(n_missing, 'block')} of the rule missing"]
        words += [] if not n_extra else [f"{plural(n_extra, 'full block')} that the rule closes"]
        cause = (
            f"was built for one head (H=None), but its rule tells heads apart: for "
            f"{_format_head_list(stale.heads)} of {n_heads} its tables have {' and '.join(words)}"
            if by_head
            else f"has tables that are not its rule's: {' and '.join(words)}"
        )
        return Finding(
            id=finding_id,
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            sentence=(
                f"{_format_call_place(step, calls, self.context)}: the block mask of "
                f"{printable(mask.rule or 'an unnamed rule')} {cause}, first: rows {rows}, keys "
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
        """Return whether a mask was made for another batch or another number of heads."""
        call = calls[0]
        wrong = []
        if mask.batch not in (1, call.batch):
            wrong.append(f"batch {mask.batch}, and the queries have {call.batch}")
        if mask.heads not in (1, call.q_heads):
            grouped = call.q_heads != call.kv_heads == mask.heads
            note = " (it was built for the key heads)" if grouped else ""
            wrong.append(f"{mask.heads} heads, and the queries have {call.q_heads}{note}")
        if not wrong:
            return []
        outcome = "compiled, it reads tables that are not there, which may end the process"
        if not mask.compiled:
            outcome = f"uncompiled flex does not notice; {outcome}"
        sentence = (
            f"{_format_call_place(step, calls, self.context)}: the block mask of "
            f"{printable(mask.rule or 'an unnamed rule')} was made for "
            f"{' and for '.join(wrong)}; {outcome}."
        )
        evidence = {
            "mask": mask.fingerprint,
            "mask_batch": mask.batch,
            "mask_heads": mask.heads,
            "batch": call.batch,
            "q_heads": call.q_heads,
            "kv_heads": call.kv_heads,
        }
        severity = Severity.ERROR if mask.compiled else Severity.WARNING
        which = () if self.context.is_standalone else {one.layer for one in calls}
        about: dict[str, Any] = {"severity": severity, "layers": which, "evidence": evidence}
        return [
            self.finding(step, WRONG_SIZE, sentence, series=_table_series(mask, calls), **about)
        ]


def find_stale_blocks(mask: MaskRecord) -> StaleBlocks | None:
    """Return the blocks in which a mask's tables and rule disagree, None where they agree.

    Blocks that the tables visit for nothing are no matter: the rule closes their cells.
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
    """Return what the cells of an uncompiled call, which are its rule's, open of each block."""
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
    """Return (heads, key blocks) of a row of blocks, `whole` unless it sticks out of the mask."""
    opens = np.logical_or.reduceat(cells.any(axis=1), edges, axis=1).astype(np.uint8)
    if whole:
        opens += np.logical_and.reduceat(cells.all(axis=1), edges, axis=1)
    return opens


def _format_table_effect(mask: MaskRecord) -> str:
    if mask.compiled:
        return "compiled flex went by the tables, so that what ran is not the rule"
    return "uncompiled flex goes by the rule and is right, compiled it would go by the tables"


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
    found = tuple(sorted({call.layer for call in calls}))
    return found if len(found) > 1 else ()


def _table_series(mask: MaskRecord, calls: Sequence[CallRecord]) -> str:
    return f"{mask.rule} in layers {', '.join(map(str, sorted({c.layer for c in calls})))}"


def _format_call_place(step: StepRecord, calls: Sequence[CallRecord], context: RuleContext) -> str:
    if context.is_standalone:
        call = calls[0]
        return f"A call of flex_attention ({call.q_len} rows, {call.kv_len} keys)"
    which = sorted({call.layer for call in calls})
    words = format_layers(which, len({call.layer for call in step.calls}))
    return words[0].upper() + words[1:]


def _is_one_block(mask: MaskRecord) -> bool:
    """Say whether the tables show one block where the cells show more."""
    tables = _visited_blocks(mask)
    if tables is None or mask.cells is None or tables[0].shape != (1, 1, 1):
        return False
    return mask.q_len > 1 and bool(mask.cells.any()) and not mask.cells.all()


def _one_block_finding(step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord]) -> Finding:
    cells = mask.cells
    assert cells is not None
    size, n_open = f"{mask.q_len} x {mask.kv_len}", int(np.count_nonzero(cells[0]))
    return Finding(
        id=BLOCK_VIEW,
        severity=Severity.NOTE,
        sentence=(
            f"A mask of {size} cells, {n_open} of them open, lies in one block of {mask.block_q} x "
            f"{mask.block_kv}: `to_dense()` shows it as a single open cell, and up to torch "
            "2.13 `sparsity()` is negative."
        ),
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        evidence={"mask": mask.fingerprint, "open": n_open, "cells": mask.q_len * mask.kv_len},
        series="one block",
    )
