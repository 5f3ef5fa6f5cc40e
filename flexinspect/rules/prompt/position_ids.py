"""Checks that position ids continue with the cache and the padding, and restart only at segments.

Only differences are checked: ids that are all shifted by the same amount are equivalent, and at the
start of a segment they may restart. The ids are those that the layers received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import plural, printable
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.declared_vs_executed import count_pads_by_id

NOT_RESET = "positions.not-reset"
NOT_RESET_KIND = FindingKind(
    Severity.NOTE,
    "isolated segments whose position ids are not restarted",
    why="Inside a segment this changes nothing. Rows that attend to several segments see them at "
    "different distances, so with rotary embeddings the answer depends on their order. This is a "
    "modeling choice, not a fault.",
    confirm="Run again with the two segments in the other order, and compare the logits of the "
    "first generated token (panel logits, step 0).",
    fix="If the order should not matter, restart the position ids of each segment after the shared "
    "prefix, and continue the text after them from the longest segment.",
    query="SELECT t.segment, s.label, min(t.position_id) AS first_id, "
    "max(t.position_id) AS last_id FROM tokens t "
    "JOIN segments s USING (generation, branch, segment) "
    "WHERE t.generation = {generation} AND t.branch = {branch} GROUP BY t.segment",
)

POSITION_JUMP = "positions.jump"
POSITION_RESTART = "positions.restart"
POSITION_PADDING = "positions.padding"
LEARNED_POSITIONS_EVENT = "learnt-positions"
"""Event of a model with learned position embeddings, where absolute ids matter."""

POSITION_DUPLICATE = "positions.duplicate"
_POSITION_QUERY = (
    "SELECT step, batch, positions, cached_before FROM inputs "
    "WHERE generation = {generation} AND branch = {branch} ORDER BY step"
)

_POSITION_CONFIRM = (
    "Check the position ids in the tokens panel, or the column positions of the table inputs step "
    "by step."
)

PositionIds = npt.NDArray[Any]


class _PositionFault(NamedTuple):
    """A fault in one row of the batch, at a column (query row) of the step."""

    id: str
    severity: Severity
    description: str
    column: int
    ids: dict[str, int]


class _ReportedFault(NamedTuple):
    """The first fault reported for decode steps."""

    id: str
    is_error: bool


class PositionsRule(Rule):
    """Compares the position ids of a step with the previous step, the cache and the padding.

    Runs at every capture level. Steps without two-dimensional position ids are skipped.
    """

    name: ClassVar[str] = "positions"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask", "inputs.positions")
    findings: ClassVar[Mapping[str, FindingKind]] = {
        POSITION_JUMP: FindingKind(
            Severity.WARNING,
            "position ids that skip some numbers",
            why="With rotary embeddings the gap is added to the distance between the token and the "
            "text before it; with learned embeddings the token gets another position.",
            confirm=_POSITION_CONFIRM,
            fix="Continue from the last id in decode steps too. A model that creates ids itself "
            "counts the cached keys, which differs if you pass your own ids for the prompt.",
            query=_POSITION_QUERY,
        ),
        POSITION_RESTART: FindingKind(
            Severity.ERROR,
            "position ids that restart where the text continues",
            why="The new token is positioned before the text that it follows: distances to the "
            "keys are negative, which no causal model was trained on.",
            confirm=_POSITION_CONFIRM,
            fix="In a decode step the id is the last one plus 1, not the row index within the "
            "step: pass position_ids, or let the model create them from the cache.",
            query=_POSITION_QUERY,
        ),
        POSITION_PADDING: FindingKind(
            Severity.WARNING,
            "position ids that disagree with the padding of a batch",
            why="The distances between tokens of a padded row differ from those in a run of that "
            "row alone, so the answer depends on the other rows of the batch.",
            confirm="Check the arrays inputs.positions and inputs.mask of this step: ids of real "
            "tokens should rise by one. Run the row alone and compare.",
            fix="Use position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0) for the prompt, "
            "and add 1 in each later step.",
            query=_POSITION_QUERY,
        ),
        POSITION_DUPLICATE: FindingKind(
            Severity.WARNING,
            "a position id that two tokens of a sequence share",
            why="With rotary embeddings the two tokens have the same position and their order is "
            "lost; everything after them is one position too close.",
            confirm=_POSITION_CONFIRM,
            fix="Look for an off-by-one error between prompt and answer: the first generated token "
            "has the id of the last prompt token plus 1.",
            query=_POSITION_QUERY,
        ),
        NOT_RESET: NOT_RESET_KIND,
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the state of a generation."""
        super().on_generation_start(context)
        self._last_ids: PositionIds | None = None
        """The last id of each row of the batch."""
        self._length = 0
        self._unpadded: npt.NDArray[np.bool_] | None = None
        self._reported: _ReportedFault | None = None
        self._counted_pads_severity = Severity.NOTE
        """Severity of ids that count padding: rotary embeddings are not affected."""
        self._isolated_pairs: Sequence[IsolatedPair] = ()
        """Isolated segments without restarted ids, until a row attends to both."""

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Check the position ids of a step."""
        inputs = step.inputs
        if inputs is None or not inputs.positions:
            self._last_ids = None
            return ()
        runs, last = inputs.positions, self._last_ids
        is_usual = (
            inputs.batch == 1 and step.kv_before and len(runs) == 1 and not self._isolated_pairs
        )
        # A decode step without a fault costs only this line.
        if is_usual and last is not None and runs[0][0] == last[0] + 1:
            last[0] += runs[0][1]
            self._length = step.kv_after
            return ()
        table = _stream_array(step, "inputs.positions")
        if table is None:  # all batch rows share one row of ids
            table = np.tile(np.asarray(inputs.position_ids), (max(inputs.batch, 1), 1))
        return self._check_ids(step, table)

    def _check_ids(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        real = _stream_array(step, "inputs.mask")
        if not step.kv_before:
            is_learned = any(event.kind == LEARNED_POSITIONS_EVENT for event in step.events)
            self._counted_pads_severity = Severity.WARNING if is_learned else Severity.NOTE
            self._unpadded = real if real is not None and real.shape == ids.shape else None
        found = (
            self._check_decode_step(step, ids) if step.kv_before else self._check_prompt(step, ids)
        )
        self._last_ids, self._length = self._last_real_ids(step, ids), step.kv_after
        if step.kv_before:
            pairs, self._isolated_pairs = self._isolated_pairs, ()
        else:
            pairs = self._isolated_pairs = find_isolated_pairs(self.context, step, ids[0])
        notes = check_position_order(self.context, step, pairs)
        if notes:
            self._isolated_pairs = ()
        return [*found, *notes]

    def _last_real_ids(self, step: StepRecord, ids: PositionIds) -> PositionIds:
        """The last id of each row; with right padding, that of its last real token."""
        if step.kv_before or self._unpadded is None or self._unpadded[:, -1].all():
            return ids[:, -1].astype(np.int64)
        width = ids.shape[1]
        last = width - 1 - self._unpadded[:, ::-1].argmax(axis=1)
        ends: PositionIds = ids[np.arange(len(ids)), last].astype(np.int64)
        return ends

    # -- a prompt, or the whole sequence again ---------------------------------------------------

    def _check_prompt(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        found: list[Finding] = []
        for row in range(len(ids)):
            fault = self._check_padded_row(ids[row], row)
            if fault is None and row == 0:
                fault = self._check_unpadded_row(ids[row])
            if fault is not None:
                found.append(self._finding(step, fault, row, len(ids)))
                break
        return found

    def _check_padded_row(self, ids: PositionIds, row: int) -> _PositionFault | None:
        """Compare the ids of the real tokens of a padded row with each other."""
        real = None if self._unpadded is None else self._unpadded[row]
        if real is None or real.all() or not real.any():
            return None
        columns = np.flatnonzero(real)
        real_ids = ids[columns]
        n_pads, n = int(columns[0]), len(columns)
        breaks = np.flatnonzero(np.diff(real_ids) != 1)
        if len(breaks) and not np.isin(columns[breaks + 1], self._segment_starts()).all():
            at = int(columns[breaks[0] + 1])
            a, b = int(real_ids[breaks[0]]), int(real_ids[breaks[0] + 1])
            words = (
                f"{len(breaks)} of the {n - 1} steps between real tokens are not 1 (first: "
                f"{self._format_position(at, row)} has id {b} after {a}): the ids do not follow "
                "the attention mask"
            )
            return _PositionFault(
                POSITION_PADDING, Severity.WARNING, words, at, {"id": b, "before": a}
            )
        if n_pads and int(real_ids[0]) == n_pads:
            words = (
                f"the first real token ({self._format_position(n_pads, row)}) has id {n_pads}: "
                f"{plural(n_pads, 'padding token')} before it {'is' if n_pads == 1 else 'are'} "
                "counted; this affects learned position embeddings, but not rotary ones"
            )
            seen = {"id": n_pads, "pads": n_pads}
            return _PositionFault(
                POSITION_PADDING, self._counted_pads_severity, words, n_pads, seen
            )
        return None

    def _check_unpadded_row(self, ids: PositionIds) -> _PositionFault | None:
        """Find ids that do not rise by one where no segment begins."""
        start = self._count_pads(ids)
        breaks = start + 1 + np.flatnonzero(np.diff(ids[start:]) != 1)
        breaks = breaks[~np.isin(breaks, self._segment_starts())] if len(breaks) else breaks
        if not len(breaks):
            return None
        at = int(breaks[0])
        before, now = int(ids[at - 1]), int(ids[at])
        # Without declared segments, ids that restart may belong to packed documents.
        has_segments = self._has_declared_segments()
        severity = Severity.WARNING if has_segments else Severity.NOTE
        inside = f" inside {self._segment_label(at)}" if has_segments else ""
        seen = {"id": now, "before": before, "places": len(breaks)}
        others = "" if len(breaks) == 1 else f" (first of {len(breaks)} such positions)"
        where = f"at {self.context.format_position(at)}{inside}{others}"
        if now == before:
            words = f"position id {now} is used twice, again {where}"
            return _PositionFault(POSITION_DUPLICATE, Severity.WARNING, words, at, seen)
        if now < before:
            words = f"position ids restart at {now} after {before}, {where}"
            return _PositionFault(POSITION_RESTART, severity, words, at, seen)
        words = f"position ids jump from {before} to {now} {where}"
        return _PositionFault(POSITION_JUMP, severity, words, at, seen)

    def _count_pads(self, ids: PositionIds) -> int:
        if self._unpadded is not None and self._unpadded[0].any():
            return int(self._unpadded[0].argmax())
        first = self.context.segments[0] if self.context.segments else None
        if first is not None and first.label == "padding":
            return first.stop
        return count_pads_by_id(self.context)

    def _has_declared_segments(self) -> bool:
        """Whether segments were declared; otherwise the prompt is a single one."""
        return sum(s.label not in ("padding", "prompt") for s in self.context.segments) > 1

    def _segment_starts(self) -> list[int]:
        return [segment.start for segment in self.context.segments]

    def _segment_label(self, pos: int) -> str:
        segment = self.context.segment_at(pos)
        return "no segment" if segment is None else segment.label

    # -- rows on a filled cache ------------------------------------------------------------------

    def _check_decode_step(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        if self._follows_faulty_cache(step, ids):
            return []
        last = self._last_ids
        if last is None:
            return self._check_first_decode_step(step, ids)
        if len(last) != len(ids):
            return []
        firsts = ids[:, 0]
        # After rejected drafts, the cache and the ids go back by the same number.
        gone = self._length - step.kv_before
        bad = (firsts != last + 1) & (firsts != last + 1 - gone)
        rows = np.flatnonzero(bad)
        if not len(rows):
            return []
        row = int(rows[0])
        fault = self._classify_fault(step, int(last[row]), int(firsts[row]), row)
        reported = self._reported
        if reported is not None and (fault.severity is not Severity.ERROR or reported.is_error):
            fault = fault._replace(id=reported.id)  # later steps follow from the first fault
        else:
            self._reported = _ReportedFault(fault.id, fault.severity is Severity.ERROR)
        return [self._finding(step, fault, row, len(rows) if len(ids) > 1 else 1)]

    def _check_first_decode_step(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        """Check the first recorded step if the cache was already filled."""
        if step.step or int(ids[0, 0]) != 0 or step.kv_before < 2:
            return []
        words = (
            f"position ids begin at 0 in step {step.step}, on a cache of {step.kv_before} keys "
            f"({self.context.format_position(step.kv_before)})"
        )
        seen = {"id": 0, "cached": step.kv_before}
        fault = _PositionFault(POSITION_RESTART, Severity.WARNING, words, 0, seen)
        return [self._finding(step, fault, 0, 1)]

    def _follows_faulty_cache(self, step: StepRecord, ids: PositionIds) -> bool:
        """Whether the ids count keys that the first layer lost, which the cache rule reports."""
        held = step.inputs.cached_before if step.inputs is not None else ()
        if not held or held[0] == step.kv_before:
            return False
        return bool((ids[:, 0] == held[0]).all())

    def _classify_fault(self, step: StepRecord, before: int, now: int, row: int) -> _PositionFault:
        expected, cached = before + 1, step.kv_before
        seen = {"id": now, "expected": expected, "cached": cached}
        where = f"in step {step.step} ({self._format_position(cached, row)})"
        pads = self._count_row_pads(row)
        if pads and now == cached:
            words = (
                f"position ids go from {before} to {now} {where}: the ids of the prompt skip its "
                f"{plural(pads, 'padding token')}, and those of the decode steps count them"
            )
            return _PositionFault(
                POSITION_PADDING, Severity.WARNING, words, 0, {**seen, "pads": pads}
            )
        if now == before:
            words = f"position id {now} is used twice, again {where}; {expected} was expected"
            return _PositionFault(POSITION_DUPLICATE, Severity.WARNING, words, 0, seen)
        if now < before:
            words = (
                f"position ids restart at {now} {where}; {expected} was expected, and the cache "
                f"holds {cached} keys"
            )
            return _PositionFault(POSITION_RESTART, Severity.ERROR, words, 0, seen)
        counts = ": they count the cached keys, unlike the prompt's ids" if now == cached else ""
        words = f"position ids jump from {before} to {now} {where}{counts}"
        return _PositionFault(POSITION_JUMP, Severity.WARNING, words, 0, seen)

    def _count_row_pads(self, row: int) -> int:
        return 0 if self._unpadded is None else int((~self._unpadded[row]).sum())

    # -- findings --------------------------------------------------------------------------------

    def _format_position(self, pos: int, row: int) -> str:
        """A position with its word, which is known for batch row 0 only."""
        return self.context.format_position(pos) if row == 0 else f"position {pos}"

    def _finding(self, step: StepRecord, fault: _PositionFault, row: int, n_rows: int) -> Finding:
        many = step.inputs is not None and step.inputs.batch > 1
        words = f"in batch row {row}, {fault.description}" if many else fault.description
        if many and step.kv_before and n_rows > 1:
            words = f"in {n_rows} batch rows, first in row {row}: {fault.description}"
        return Finding(
            id=fault.id,
            severity=fault.severity,
            sentence=f"{words[0].upper()}{words[1:]}.",
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            positions=(step.kv_before + fault.column,),
            evidence={**fault.ids, "batch_row": row},
            series="decode" if step.kv_before else "prompt",
        )


def _stream_array(step: StepRecord, stream: str) -> PositionIds | None:
    return next((one.array for one in step.arrays if one.stream == stream), None)


@dataclass(frozen=True, slots=True)
class IsolatedPair:
    """Two segments that do not attend to each other, and the position ids at which they begin."""

    first: Segment
    second: Segment
    first_id: int
    second_id: int


def find_isolated_pairs(
    context: RuleContext, step: StepRecord, ids: npt.NDArray[Any]
) -> list[IsolatedPair]:
    """Pairs of segments that the executed mask isolates while the position ids continue.

    `ids` are the position ids (rows,) of batch row 0. One layer that isolates them is enough.
    """
    pieces = [
        s for s in context.segments if s.kind is SegmentKind.PARAPHRASE and s.stop <= len(ids)
    ]
    pairs = [(a, b) for a, b in combinations(pieces, 2) if ids[b.start] > ids[a.stop - 1]]
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        cells = _common_cells(context.mask(fingerprint), len(ids))
        isolated = [] if cells is None else [pair for pair in pairs if _is_isolated(cells, *pair)]
        if isolated:
            return [IsolatedPair(a, b, int(ids[a.start]), int(ids[b.start])) for a, b in isolated]
    return []


def check_position_order(
    context: RuleContext, step: StepRecord, pairs: Sequence[IsolatedPair]
) -> list[Finding]:
    """A note on the first of these pairs of which some row of the step attends to both."""
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        mask = context.mask(fingerprint)
        if mask is None or mask.cells is None or mask.kv_offset:
            continue
        for pair in pairs:
            sees_first, sees_second = (
                mask.cells[..., segment.start : segment.stop].any(axis=2)
                for segment in (pair.first, pair.second)
            )
            if (sees_first & sees_second).any():
                return [_not_reset_finding(context, step, pair)]
    return []


def _common_cells(mask: MaskRecord | None, n: int) -> BoolArray | None:
    """The cells (rows, keys) that are open in any head; None if not all `n` positions are known."""
    if mask is None or mask.cells is None or mask.cells.shape[1] != n:
        return None
    if mask.averaged is not None or mask.cells.shape[2] < n:
        return None
    cells: BoolArray = np.any(mask.cells, axis=0)
    return cells


def _is_isolated(cells: BoolArray, first: Segment, second: Segment) -> bool:
    one, other = slice(first.start, first.stop), slice(second.start, second.stop)
    return not cells[other, one].any() and not cells[one, other].any()


def _not_reset_finding(context: RuleContext, step: StepRecord, pair: IsolatedPair) -> Finding:
    a, b = printable(pair.first.label), printable(pair.second.label)
    return Finding(
        id=NOT_RESET,
        severity=Severity.NOTE,
        sentence=(
            f"Position ids are not restarted at {b}: it begins at {pair.second_id} "
            f"({context.format_position(pair.second.start)}), and {a}, to which it does not "
            f"attend, at {pair.first_id}; a row that attends to both sees them at different "
            "distances, so their order may matter (a modeling choice, not a fault)."
        ),
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        positions=(pair.second.start,),
        evidence={
            "first": a,
            "second": b,
            "first_id": pair.first_id,
            "second_id": pair.second_id,
        },
        series="order",
    )
