"""Checks that position ids continue with the cache and the padding, and restart only at segments.

Only differences are checked: ids that are all shifted by the same amount are equivalent, and at the
start of a segment they may restart. The ids are those that the layers received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import capitalize, is_or_are, plural, printable
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.declared_vs_executed import count_pads

LEARNED_POSITIONS_EVENT = "learned-positions"  # absolute ids matter for learned embeddings

PositionIds = npt.NDArray[Any]


class _Fault(NamedTuple):
    """A fault in one row of the batch, at a column (query row) of the step."""

    id: str
    severity: Severity
    description: str
    column: int
    ids: dict[str, int]


class PositionsRule(Rule):
    """Compares the position ids of a step with the previous step, the cache and the padding.

    Runs at every capture level. Steps without two-dimensional position ids are skipped.
    """

    name = "positions"
    needs = (imported.POSITIONS,)
    streams = ("inputs.mask", "inputs.seen", "inputs.positions")
    findings = finding_kinds(
        *("positions.duplicate", "positions.jump", "positions.not-reset", "positions.padding"),
        "positions.restart",
    )

    def reset(self) -> None:
        self._segment_starts = [segment.start for segment in self.context.segments]
        self._last_ids: PositionIds | None = None  # the last id of each row of the batch
        self._length = 0
        self._unpadded: npt.NDArray[np.bool_] | None = None
        self._reported: _Fault | None = None  # the first fault of the decode steps, or first error
        self._counted_pads_severity = Severity.NOTE  # rotary embeddings are not affected
        self._isolated_pairs: Sequence[tuple[Segment, Segment]] = ()  # until a row sees both

    def on_step(self, step: StepRecord) -> Iterable[Finding]:
        """Check the position ids of a step."""
        inputs = step.inputs
        if inputs is None or not inputs.positions:
            self._last_ids = None
            return ()
        runs, last = inputs.positions, self._last_ids
        is_usual = inputs.batch == 1 and step.kv_before and len(runs) == 1
        # A decode step without a fault costs only this line.
        if is_usual and not self._isolated_pairs and last is not None and runs[0][0] == last[0] + 1:
            last[0] += runs[0][1]
            self._length = step.kv_after
            return ()
        table = step_array(step, "inputs.positions")
        if table is None:  # all batch rows share one row of ids
            table = np.tile(np.asarray(inputs.position_ids), (max(inputs.batch, 1), 1))
        return self._check_ids(step, table)

    def _check_ids(self, step: StepRecord, ids: PositionIds) -> Findings:
        last = ids[:, -1]
        if step.kv_before:
            yield from self._check_decode_step(step, ids)
        else:
            real = step_array(step, "inputs.mask")
            if real is None:
                real = step_array(step, "inputs.seen")
            is_learned = any(event.kind == LEARNED_POSITIONS_EVENT for event in step.events)
            self._counted_pads_severity = Severity.WARNING if is_learned else Severity.NOTE
            self._unpadded = real if real is not None and real.shape == ids.shape else None
            self._isolated_pairs = _find_isolated_pairs(self.context, step, ids[0])
            self._prompt_ids = ids[0]
            for row in range(len(ids)):
                fault = self._check_padded_row(ids[row], row)
                if fault is None and row == 0:
                    fault = self._check_unpadded_row(step, ids[row])
                if fault is not None:
                    yield self._fault_finding(step, fault, row, len(ids))
                    break
            if self._unpadded is not None:  # with right padding, that of the last real token
                last_real = ids.shape[1] - 1 - self._unpadded[:, ::-1].argmax(axis=1)
                last = ids[np.arange(len(ids)), last_real]
        self._last_ids, self._length = last.astype(np.int64), step.kv_after
        pair = _find_pair_in_one_row(self.context, step, self._isolated_pairs)
        if pair is not None or step.kv_before:
            self._isolated_pairs = ()
        if pair is not None:
            yield self._not_reset_finding(step, *pair)

    def _check_padded_row(self, ids: PositionIds, row: int) -> _Fault | None:
        """Compare the ids of the real tokens of a padded row with each other."""
        real = None if self._unpadded is None else self._unpadded[row]
        if real is None or real.all() or not real.any():
            return None
        columns = np.flatnonzero(real)
        real_ids, n_pads = ids[columns], int(columns[0])
        breaks = np.flatnonzero(np.diff(real_ids) != 1)
        if len(breaks) and not np.isin(columns[breaks + 1], self._segment_starts).all():
            at = int(columns[breaks[0] + 1])
            a, b = int(real_ids[breaks[0]]), int(real_ids[breaks[0] + 1])
            words = (
                f"{len(breaks)} of the {len(columns) - 1} steps between real tokens are not 1 "
                f"(first: {self._format_position(at, row)} has id {b} after {a}): the ids do not "
                "follow the attention mask"
            )
            return _Fault("positions.padding", Severity.WARNING, words, at, {"id": b, "before": a})
        if n_pads and int(real_ids[0]) == n_pads:
            words = (
                f"the first real token ({self._format_position(n_pads, row)}) has id {n_pads}: "
                f"{plural(n_pads, 'padding token')} before it {is_or_are(n_pads)} counted; this "
                "affects learned position embeddings, but not rotary ones"
            )
            severity, seen = self._counted_pads_severity, {"id": n_pads, "pads": n_pads}
            return _Fault("positions.padding", severity, words, n_pads, seen)
        return None

    def _check_unpadded_row(self, step: StepRecord, ids: PositionIds) -> _Fault | None:
        """Find ids that do not rise by one where no segment begins."""
        start = count_pads(self.context) or _count_closed_rows(self.context, step)
        stop = len(ids)
        if self._unpadded is not None and self._unpadded[0].any():
            real = np.flatnonzero(self._unpadded[0])
            start, stop = int(real[0]), int(real[-1]) + 1
        breaks = start + 1 + np.flatnonzero(np.diff(ids[start:stop]) != 1)
        breaks = breaks[~np.isin(breaks, self._segment_starts)]
        if not len(breaks):
            return None
        at = int(breaks[0])
        before, now = int(ids[at - 1]), int(ids[at])
        # Without declared segments, ids that restart may belong to packed documents.
        labels = [segment.label for segment in self.context.segments]
        has_segments = sum(label not in ("padding", "prompt") for label in labels) > 1
        severity = Severity.WARNING if has_segments else Severity.NOTE
        segment = self.context.segment_at(at)
        label = "no segment" if segment is None else segment.label
        inside = f" inside {label}" if has_segments else ""
        others = "" if len(breaks) == 1 else f" (first of {len(breaks)} such positions)"
        where = f"at {self.context.format_position(at)}{inside}{others}"
        id_, words = "positions.jump", f"position ids jump from {before} to {now} {where}"
        if now == before:
            id_, severity = "positions.duplicate", Severity.WARNING
            words = f"position id {now} is used twice, again {where}"
        elif now < before:
            id_ = "positions.restart"
            words = f"position ids restart at {now} after {before}, {where}"
        seen = {"id": now, "before": before, "places": len(breaks)}
        return _Fault(id_, severity, words, at, seen)

    def _check_decode_step(self, step: StepRecord, ids: PositionIds) -> Findings:
        held = step.inputs.cached_before if step.inputs is not None else ()
        if held and held[0] != step.kv_before and (ids[:, 0] == held[0]).all():
            return  # the ids count keys that the first layer lost, which the cache rule reports
        last, firsts = self._last_ids, ids[:, 0]
        if last is None:
            if step.step == 0 and int(firsts[0]) == 0 and step.kv_before >= 2:
                words = (
                    f"position ids begin at 0 in step {step.step}, on a cache of {step.kv_before} "
                    f"keys ({self.context.format_position(step.kv_before)})"
                )
                seen = {"id": 0, "cached": step.kv_before}
                fault = _Fault("positions.restart", Severity.WARNING, words, 0, seen)
                yield self._fault_finding(step, fault, 0, 1)
            return
        if len(last) != len(ids):
            return
        # After rejected drafts, the cache and the ids go back by the same number.
        gone = self._length - step.kv_before
        rows = np.flatnonzero((firsts != last + 1) & (firsts != last + 1 - gone)).tolist()
        if not rows:
            return
        fault = self._classify_fault(step, int(last[rows[0]]), int(firsts[rows[0]]), rows[0])
        reported, error = self._reported, Severity.ERROR
        if reported is not None and (fault.severity is not error or reported.severity is error):
            fault = fault._replace(id=reported.id)  # later steps follow from the first fault
        else:
            self._reported = fault
        yield self._fault_finding(step, fault, rows[0], len(rows) if len(ids) > 1 else 1)

    def _classify_fault(self, step: StepRecord, before: int, now: int, row: int) -> _Fault:
        expected, cached, severity = before + 1, step.kv_before, Severity.WARNING
        seen = {"id": now, "expected": expected, "cached": cached}
        where = f"in step {step.step} ({self._format_position(cached, row)})"
        pads = 0 if self._unpadded is None else int((~self._unpadded[row]).sum())
        if pads and now == cached:
            id_, seen["pads"] = "positions.padding", pads
            words = (
                f"position ids go from {before} to {now} {where}: the ids of the prompt skip its "
                f"{plural(pads, 'padding token')}, and those of the decode steps count them"
            )
        elif now == before:
            id_ = "positions.duplicate"
            words = f"position id {now} is used twice, again {where}; {expected} was expected"
        elif now < before:
            id_, severity = "positions.restart", Severity.ERROR
            words = (
                f"position ids restart at {now} {where}; {expected} was expected, and the cache "
                f"holds {cached} keys"
            )
            if now == 0 and step.q_len > 1:
                words += ": a new text seems to begin on the cache of the one before"
        else:
            counted = ": they count the cached keys, unlike the prompt's ids"
            id_, words = "positions.jump", f"position ids jump from {before} to {now} {where}"
            words += counted if now == cached else ""
        return _Fault(id_, severity, words, 0, seen)

    def _format_position(self, pos: int, row: int) -> str:
        """A position with its word, which is known for batch row 0 only."""
        return self.context.format_position(pos) if row == 0 else f"position {pos}"

    def _fault_finding(self, step: StepRecord, fault: _Fault, row: int, n_rows: int) -> Finding:
        words = fault.description
        if step.inputs is not None and step.inputs.batch > 1:
            where = f"in batch row {row},"
            if step.kv_before and n_rows > 1:
                where = f"in {n_rows} batch rows, first in row {row}:"
            words = f"{where} {words}"
        options: dict[str, Any] = {"severity": fault.severity}
        options["positions"] = (step.kv_before + fault.column,)
        options["evidence"] = {**fault.ids, "batch_row": row}
        options["series"] = "decode" if step.kv_before else "prompt"
        return self.finding(step, fault.id, f"{capitalize(words)}.", **options)

    def _not_reset_finding(self, step: StepRecord, first: Segment, second: Segment) -> Finding:
        a, b = printable(first.label), printable(second.label)
        id_a, id_b = (int(self._prompt_ids[segment.start]) for segment in (first, second))
        sentence = (
            f"Position ids are not restarted at {b}: it begins at {id_b} "
            f"({self.context.format_position(second.start)}), and {a}, to which it does not "
            f"attend, at {id_a}; a row that attends to both sees them at different "
            "distances, so their order may matter (a modeling choice, not a fault)."
        )
        evidence = {"first": a, "second": b, "first_id": id_a, "second_id": id_b}
        options: dict[str, Any] = {"positions": (second.start,), "series": "order"}
        return self.finding(step, "positions.not-reset", sentence, evidence=evidence, **options)


def _count_closed_rows(context: RuleContext, step: StepRecord) -> int:
    """Return how many rows at the beginning do not attend to themselves, as those of padding."""
    mask = context.mask(step.calls[0].mask) if step.calls else None
    if mask is None or mask.cells is None or mask.cells.shape[1] != step.q_len:
        return 0
    cells: BoolArray = np.any(mask.cells, axis=0)
    is_open = np.diagonal(cells)
    if mask.uniform_rows is not None and len(is_open) == step.q_len:
        is_open = is_open & ~mask.uniform_rows.all(axis=0)
    return int(is_open.argmax()) if is_open.any() else 0


def _find_isolated_pairs(
    context: RuleContext, step: StepRecord, ids: PositionIds
) -> list[tuple[Segment, Segment]]:
    """Pairs of segments that the executed mask isolates while the position ids continue."""
    # `ids` are the position ids (rows,) of batch row 0. One layer that isolates them is enough.
    n = len(ids)
    pieces = [s for s in context.segments if s.kind is SegmentKind.PARAPHRASE and s.stop <= n]
    pairs = [(a, b) for a, b in combinations(pieces, 2) if ids[b.start] > ids[a.stop - 1]]
    for fingerprint in dict.fromkeys(call.mask for call in step.calls) if pairs else ():
        mask = context.mask(fingerprint)
        if mask is None or mask.cells is None or mask.uniform_rows is not None:
            continue
        if mask.cells.shape[1] != n or mask.cells.shape[2] < n:
            continue
        cells: BoolArray = np.any(mask.cells, axis=0)
        isolated = [
            (a, b)
            for a, b in pairs
            if not cells[b.start : b.stop, a.start : a.stop].any()
            and not cells[a.start : a.stop, b.start : b.stop].any()
        ]
        if isolated:
            return isolated
    return []


def _find_pair_in_one_row(
    context: RuleContext, step: StepRecord, pairs: Sequence[tuple[Segment, Segment]]
) -> tuple[Segment, Segment] | None:
    """The first of these pairs of which some row of the step attends to both."""
    for fingerprint in dict.fromkeys(call.mask for call in step.calls) if pairs else ():
        mask = context.mask(fingerprint)
        if mask is None or mask.cells is None or mask.kv_offset:
            continue
        for pair in pairs:
            first, second = (mask.cells[..., one.start : one.stop].any(axis=2) for one in pair)
            if (first & second).any():
                return pair
    return None
