"""The rules for masks whose block tables, sizes or lengths do not fit.

Only compiled FlexAttention follows the block tables, so stale ones are invisible in an uncompiled
debug run. FlexAttention rejects a block mask of other lengths (the event of the failed call shows
it), but neither one of another batch or number of heads, nor a dense mask that is too large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flexinspect.core.text import format_numbers, format_ranges, plural
from flexinspect.masks.key_blocks import block_row_states, row_chunks
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import (
    OWN_FUNCTION,
    CallRecord,
    EventRecord,
    InputsRecord,
    MaskRecord,
    StepRecord,
)
from flexinspect.rules.attention.kernel_failures import KERNEL_FAILED_EVENT, event_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import Calls, calls_by_mask, format_call_place, layers_of


class StaleBlocks(NamedTuple):
    """Blocks in which the tables and the mask_mod disagree, bool (heads, row blocks, key blocks).

    The mask_mod opens cells of `missing` blocks, which are in no table. It closes cells of `extra`
    blocks, which are in the table of full blocks.
    """

    missing: BoolArray
    extra: BoolArray


class BlockTablesRule(Rule):
    """Compares block tables with the mask_mod, and the batch and heads of a mask with the call."""

    name = "tables"
    needs = (imported.BLOCKS,)
    findings = finding_kinds(
        "mask.stale-tables", "mask.ignores-head", "mask.wrong-size", "mask.block-view"
    )
    handles_standalone_calls = True

    def __init__(self) -> None:
        self._stale_blocks: dict[str, StaleBlocks] = {}  # by fingerprint, for the whole run

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for masks of a step whose tables or sizes do not match."""
        for mask in step.masks:
            # The tables of a single decode row matter to a compiled kernel only.
            is_used = mask.compiled or mask.q_len > 1 or self.context.is_standalone
            if is_used and (stale := find_stale_blocks(mask)) is not None:
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
            if _wrong_sizes(mask, calls[0]):
                yield _wrong_size_finding(self, step, "mask.wrong-size", mask, calls)
            stale = self._stale_blocks.get(mask.fingerprint)
            if stale is not None:
                yield self._stale_finding(step, mask, calls, stale)
            elif self.context.is_standalone and mask.cells is not None and mask.q_len > 1:
                yield from self._check_one_block(step, mask, mask.cells)

    def _stale_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Calls, stale: StaleBlocks
    ) -> Finding:
        n_heads, wrong = len(stale.missing), stale.missing | stale.extra
        heads: list[int] = np.flatnonzero(wrong.any(axis=(1, 2))).tolist()
        by_head = mask.heads == 1 < n_heads and len(heads) < n_heads
        head, row, key = (int(n) for n in np.argwhere(wrong)[0])
        n_missing, n_extra = (int(grid.any(axis=0).sum()) for grid in stale)
        parts = [f"{plural(n_missing, 'open block')} missing"] if n_missing else []
        parts += [f"{plural(n_extra, 'full block')} that the mask_mod closes"] if n_extra else []
        finding_id, cause = "mask.stale-tables", "has block tables that do not match its mask_mod:"
        if by_head:
            finding_id, which = "mask.ignores-head", format_numbers("head", heads)
            cause = "was built for one head (H=None), but its mask_mod depends on the head: for "
            cause += f"{which} of {n_heads} its tables have"
        effect = "uncompiled FlexAttention is correct, compiled it would follow the tables"
        if mask.compiled:
            effect = "compiled FlexAttention followed the tables, so the executed mask is wrong"
        visited = mask_views.visited_blocks(mask)
        n_visited = 0 if visited is None else int(np.count_nonzero(visited[0]))
        facts: dict[str, Any] = {"mask": mask.fingerprint, "mask_mod": mask.mask_mod}
        facts |= {"missing": n_missing, "extra": n_extra, "in_tables": n_visited}
        facts |= {"heads": heads, "compiled": mask.compiled, "first": [row, key]}
        return self.finding(
            step,
            finding_id,
            f"{format_call_place(self.context, step, calls)}: the block mask of "
            f"{mask_views.format_mask_mod(mask)} {cause} {' and '.join(parts)}, first: "
            f"{_format_block_span(step, mask, row, key)}; {effect}.",
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            layers=mask_views.call_layers(self.context, calls),
            head=head if by_head else None,
            positions=(step.kv_before + row * (mask.block_q or 1),),
            evidence=facts,
            series=_mask_series(mask, calls),
        )

    def _check_one_block(self, step: StepRecord, mask: MaskRecord, cells: BoolArray) -> Findings:
        """Return a finding if a mask is a single block of which only some cells are open."""
        visited = mask_views.visited_blocks(mask)
        if visited is None or visited.shape != (1, 1, 1) or not cells.any() or cells.all():
            return
        n_open = int(np.count_nonzero(cells[0]))
        sentence = (
            f"A mask of {mask.q_len} x {mask.kv_len} cells, {n_open} of them open, fits into one "
            f"block of {mask.block_q} x {mask.block_kv}: `to_dense()` shows a single open cell, "
            "and up to torch 2.13 `sparsity()` is negative."
        )
        n_cells, id_ = mask.q_len * mask.kv_len, "mask.block-view"
        evidence = {"mask": mask.fingerprint, "open": n_open, "cells": n_cells}
        yield self.finding(step, id_, sentence, evidence=evidence, series="one block")


def find_stale_blocks(mask: MaskRecord) -> StaleBlocks | None:
    """Return the blocks in which a mask's tables and mask_mod disagree, None if they agree."""
    # Partial blocks without any open cell do not matter: the mask_mod closes their cells.
    visited, full = mask_views.visited_blocks(mask), mask.full
    if visited is None or mask.kind != "block" or None in (mask.block_q, mask.block_kv):
        return None
    opened, cells, size_q, size_kv = mask.mask_mod_blocks, mask.cells, mask.block_q, mask.block_kv
    if not mask.compiled:  # the cells of an uncompiled call are those of its mask_mod
        if cells is None or size_q is None or size_kv is None:
            return None
        chunks = (cells[:, start:stop] for start, stop in row_chunks(cells.shape[1], size_q))
        opened = np.stack([block_row_states(rows, size_q, size_kv) for rows in chunks], axis=1)
    if opened is None or opened.shape[1:] != visited.shape[1:]:
        return None
    if len(visited) not in (1, len(opened)) and len(opened) != 1:
        return None
    missing = (opened > 0) & ~visited
    extra = np.zeros_like(missing) if full is None else full & (opened < 2)
    return StaleBlocks(missing, extra) if missing.any() or extra.any() else None


def _format_block_span(step: StepRecord, mask: MaskRecord, row: int, key: int) -> str:
    size_q, size_kv = mask.block_q or 1, mask.block_kv or 1
    kv_offset = max(step.kv_after - mask.kv_len, 0)
    first_row, first_key = step.kv_before + row * size_q, kv_offset + key * size_kv
    rows = range(first_row, min(first_row + size_q, step.kv_before + mask.q_len))
    keys = range(first_key, min(first_key + size_kv, kv_offset + mask.kv_len))
    return f"rows {format_ranges(rows)}, keys {format_ranges(keys)}"


def _mask_series(mask: MaskRecord, calls: Calls) -> str:
    return f"{mask.mask_mod} in layers {', '.join(map(str, layers_of(calls)))}"


def _wrong_sizes(mask: MaskRecord, call: CallRecord) -> list[str]:
    """Return in which of batch and heads a mask was built for another size than that of a call."""
    wrong = []
    if mask.batch not in (1, call.batch):
        wrong.append(f"batch {mask.batch}, but the call has {call.batch}")
    if mask.heads not in (1, call.q_heads):
        kv = " (its KV heads)" if mask.heads == call.kv_heads else ""
        wrong.append(f"{plural(mask.heads, 'head')}{kv}, but the call has {call.q_heads}")
    return wrong


def _wrong_size_finding(
    rule: Rule, step: StepRecord, finding_id: str, mask: MaskRecord, calls: Calls
) -> Finding:
    """Return the finding about a mask that has `_wrong_sizes` for the first of these calls."""
    call, sizes = calls[0], {"mask_batch": mask.batch, "mask_heads": mask.heads}
    sizes |= {"batch": call.batch, "q_heads": call.q_heads, "kv_heads": call.kv_heads}
    outcome = "compiled FlexAttention reads past the end of the block tables and may crash"
    if not mask.compiled:
        outcome = f"uncompiled FlexAttention does not notice, {outcome}"
    return rule.finding(
        step,
        finding_id,
        f"{format_call_place(rule.context, step, calls)}: the mask of "
        f"{mask_views.format_mask_mod(mask)} was built for "
        f"{', and for '.join(_wrong_sizes(mask, call))}; {outcome}.",
        severity=Severity.ERROR if mask.compiled else Severity.WARNING,
        layers=mask_views.call_layers(rule.context, calls),
        evidence={"mask": mask.fingerprint, **sizes},
        series=f"{_mask_series(mask, calls)}: {mask.batch}, {mask.heads}",
    )


class LengthsRule(Rule):
    """Compares the lengths of masks and keys with those of the calls that received them.

    It works at every level. Mask cells, which are recorded from level advanced on, only help to
    decide whether a layer with fewer keys has a sliding window.
    """

    name = "lengths"
    needs = (imported.MASKS,)
    handles_standalone_calls = True
    findings = finding_kinds(
        "lengths.mask-kv", "lengths.mask-q", "lengths.batch-heads", "lengths.layer-keys"
    )

    def reset(self) -> None:
        self._n_cached: int | None = None
        self._lookback: dict[int, int] = {}  # by layer, how far the last prompt row sees back
        self._n_missing_keys: dict[int, int] = {}  # by layer, in the previous step

    def on_event(self, event: EventRecord) -> Findings:
        """Return a finding if a call raised whose lengths are not those of its mask."""
        data, layers = event.data, event_layers(event)
        mismatches = _find_mismatches(data) if event.kind == KERNEL_FAILED_EVENT else []
        if not mismatches:
            return
        places = [f"layer {layer}" for layer in layers]
        places += [] if event.step is None else [f"step {event.step}"]
        notes = [", ".join(places)] if places else []
        if self._n_cached is not None:
            after = self._n_cached + int(data["q_len"])
            and_after = f", {after} after" if after == data["kv_len"] else ""
            notes.append(f"cache holds {self._n_cached} before{and_after}")
        texts, where = [text for _, text in mismatches], f" ({'; '.join(notes)})" if notes else ""
        error, kernel = str(data.get("error")).partition(":")[0], str(data.get("kernel"))
        sentence = f"{', and '.join(texts)}{where}: {kernel} raised {error}."
        id_, facts, query = mismatches[0][0], {**data, "cached": self._n_cached}, "length-event"
        yield self.finding(event, id_, sentence, layers, facts, series=kernel, query=query)

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for masks and layers of a step with wrong lengths."""
        for fingerprint, same_mask in calls_by_mask(step).items():
            mask = self.context.mask(fingerprint)
            if mask is None:
                continue
            if wrong := [call for call in same_mask if _wrong_sizes(mask, call)]:
                yield _wrong_size_finding(self, step, "lengths.batch-heads", mask, wrong)
            if step.kv_before:
                yield from self._check_dense_rows(step, mask, same_mask)
            elif step.inputs is not None and step.masks and mask.cells is not None:
                sees = mask.cells[:, -1].any(axis=0)
                is_known = same_mask[0].path != OWN_FUNCTION or mask.kind != "none, causal"
                if mask.q_len > 1 and sees.any() and is_known:
                    lookback = mask.kv_len - 1 - int(sees.argmax())
                    self._lookback.update(dict.fromkeys(layers_of(same_mask), lookback))
        lengths = {call.kv_len for call in step.calls}
        if step.inputs is not None and step.kv_before and lengths - {step.kv_after}:
            yield from self._check_short_layers(step, step.inputs)
        has_cache = step.inputs is None or bool(step.inputs.cached_after)
        self._n_cached = step.kv_after if has_cache else None

    def _check_dense_rows(self, step: StepRecord, mask: MaskRecord, calls: Calls) -> Findings:
        """Return a finding if a decode step reads a larger dense mask from its first row."""
        # For a prompt, the upper left corner of a larger mask is correct.
        passed = calls[0].mask_passed_to_layer or ""
        is_dense = mask.kind in ("bool", "float") and calls[0].path.startswith("flex")
        shape = re.fullmatch(r"\w+ \(.*?(\d+), (\d+)\)", passed) if is_dense else None
        rows = step.q_len if shape is None else int(shape[1])
        if rows == step.q_len:
            return
        sentence = (
            f"{format_call_place(self.context, step, calls)} received a dense mask of "
            f"{rows} rows in step {step.step}, which has {plural(step.q_len, 'row')} "
            f"({self.context.format_position(step.kv_before)}): FlexAttention reads it from row 0, "
            "so the new row gets the mask of the first token."
        )
        # The query of the kind lists failed calls.
        id_, layers, query = "lengths.mask-q", layers_of(calls), "length-call"
        facts = {"mask_rows": rows, "rows": step.q_len, "mask_passed_to_layer": passed}
        yield self.finding(step, id_, sentence, layers, facts, series="read at row 0", query=query)

    def _check_short_layers(self, step: StepRecord, inputs: InputsRecord) -> Findings:
        """Return a finding for layers that receive fewer keys than their cache holds."""
        # A sliding window explains missing keys if one more is missing at each step and if the
        # prompt did not see further back.
        previous, self._n_missing_keys = self._n_missing_keys, {}
        cached, short = dict(enumerate(inputs.cached_after)), list[CallRecord]()
        for call in step.calls:
            n_missing = step.kv_after - call.kv_len
            is_full = cached.get(call.layer) == step.kv_after
            if n_missing <= 0 or not is_full or call.kv_len <= step.q_len:
                continue
            self._n_missing_keys[call.layer] = n_missing
            sees_less = call.kv_len - 1 < self._lookback.get(call.layer, -1)
            if sees_less or previous.get(call.layer) == n_missing:
                short.append(call)
        if short:
            yield self._short_finding(step, short, previous)

    def _short_finding(
        self, step: StepRecord, short: Calls, previous: Mapping[int, int]
    ) -> Finding:
        first, layers = short[0], layers_of(short)
        lookback = self._lookback.get(first.layer, -1)
        if first.kv_len - 1 < lookback:
            reason = f"the last row of the prompt saw {plural(lookback, 'key')} back"
        else:
            reason = f"the previous step lacked {previous[first.layer]} as well"
        least = min(call.kv_len for call in short)
        others = {call.kv_len for call in step.calls} - {call.kv_len for call in short}
        compared = f"the others get {max(others)}, " if others else ""
        sentence = (
            f"{format_call_place(self.context, step, short)} "
            f"{'gets' if len(layers) == 1 else 'get'} {plural(least, 'key')} in step {step.step}, "
            f"{compared}and the cache holds {step.kv_after}: a sliding window does not explain "
            f"it, because {reason}."
        )
        facts: dict[str, Any] = {"kv_len": {call.layer: call.kv_len for call in step.calls}}
        facts["cached"] = step.kv_after
        facts["reach"] = {call.layer: self._lookback.get(call.layer) for call in short}
        id_, series = "lengths.layer-keys", ",".join(str(call.layer) for call in short)
        return self.finding(step, id_, sentence, layers, facts, series=series)


def _find_mismatches(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (id, text) for each length in which a failed call and its mask differ."""
    q_len, kv_len, shape = (data.get(name) for name in ("q_len", "kv_len", "mask"))
    names = ("mask_q", "mask_kv", "mask_batch", "mask_heads")
    mask_q, mask_kv, mask_batch, mask_heads = (data.get(name) for name in names)
    if isinstance(shape, tuple | list) and len(shape) >= 2:  # of a dense mask
        mask_q, mask_kv = (None if size == 1 else size for size in shape[-2:])
        if len(shape) == 4:
            mask_batch, mask_heads = shape[:2]
    if None in (q_len, kv_len):
        return []
    mismatches = []
    if mask_kv is not None and mask_kv != kv_len:
        mismatches.append(("lengths.mask-kv", f"KV length {kv_len} but mask built for {mask_kv}"))
    if mask_q is not None and mask_q != q_len:
        text = f"q length {q_len} but mask built for {plural(mask_q, 'row')}"
        mismatches.append(("lengths.mask-q", text))
    sizes = (("batch", "batch", mask_batch), ("heads", "number of heads", mask_heads))
    return mismatches or [
        ("lengths.batch-heads", f"{label} {data[name]} but mask built for {size}")
        for name, label, size in sizes
        if size is not None and data.get(name) is not None and size not in (1, data[name])
    ]
