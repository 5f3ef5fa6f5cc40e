"""Position ids: that they go on, with the cache and with the padding, and restart where meant.

Only differences count: ids that are all shifted by the same amount are as good as any, and where a
segment begins they may begin anew. What is judged are the ids that the layers were handed.
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
    "isolated segments at position ids that run on over them",
    why="Inside of a segment nothing changes by it. The rows that see several segments have them "
    "at unlike distances, so under rotary embeddings the answer depends on their order. That is a "
    "modelling choice: shown, not judged.",
    confirm="The order-swap check: run it again with the two segments in the other order and "
    "compare the logits of the first generated token (panel logits, step 0).",
    fix="If the order is not to matter, begin the position ids of each segment anew after what "
    "they share, and let the text after them go on from the longest.",
    query="SELECT t.segment, s.label, min(t.position_id) AS first_id, "
    "max(t.position_id) AS last_id FROM tokens t "
    "JOIN segments s USING (generation, branch, segment) "
    "WHERE t.generation = {generation} AND t.branch = {branch} GROUP BY t.segment",
)


@dataclass(frozen=True, slots=True)
class IsolatedPair:
    """Two segments that do not see each other, and the position ids at which they begin."""

    first: Segment
    second: Segment
    first_id: int
    second_id: int


def find_isolated_pairs(
    context: RuleContext, step: StepRecord, ids: npt.NDArray[Any]
) -> list[IsolatedPair]:
    """Return segments that a prompt's executed mask keeps apart while the ids run on over them.

    `ids` are the position ids (rows,) of batch row 0. One layer that keeps them apart is enough.
    """
    pieces = [
        s for s in context.segments if s.kind is SegmentKind.PARAPHRASE and s.stop <= len(ids)
    ]
    pairs = [(a, b) for a, b in combinations(pieces, 2) if ids[b.start] > ids[a.stop - 1]]
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        cells = _common_cells(context.mask(fingerprint), len(ids))
        found = [] if cells is None else [pair for pair in pairs if _is_isolated(cells, *pair)]
        if found:
            return [IsolatedPair(a, b, int(ids[a.start]), int(ids[b.start])) for a, b in found]
    return []


def check_position_order(
    context: RuleContext, step: StepRecord, pairs: Sequence[IsolatedPair]
) -> list[Finding]:
    """Return a note on the first of these pairs that some row of a step sees both of."""
    if not pairs:
        return []
    for fingerprint in {call.mask: None for call in step.calls}:
        mask = context.mask(fingerprint)
        if mask is None or mask.cells is None or mask.kv_offset:
            continue
        for pair in pairs:
            sees = [
                mask.cells[..., segment.start : segment.stop].any(axis=2)
                for segment in (pair.first, pair.second)
            ]
            if (sees[0] & sees[1]).any():
                return [_not_reset_finding(context, step, pair)]
    return []


def _common_cells(mask: MaskRecord | None, n: int) -> BoolArray | None:
    """Return the cells (rows, keys) that any head opens, None where they are not those of all."""
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
            f"({context.format_position(pair.second.start)}), and {a}, which it does not see, at "
            f"{pair.first_id}; a row that sees both has them at unlike distances, so their order "
            "may matter (a modelling choice: shown, not judged)."
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


POSITION_JUMP = "positions.jump"
POSITION_RESTART = "positions.restart"
POSITION_PADDING = "positions.padding"
LEARNED_POSITIONS_EVENT = "learnt-positions"
"""The event that a model looks positions up in a table, so that each id counts by itself."""
POSITION_DUPLICATE = "positions.duplicate"

_POSITION_QUERY = (
    "SELECT step, batch, positions, cached_before FROM inputs "
    "WHERE generation = {generation} AND branch = {branch} ORDER BY step"
)
_POSITION_CONFIRM = (
    "Tokens panel, position ids; the column positions of the table inputs, step by step."
)

PositionIds = npt.NDArray[Any]


class _PositionFault(NamedTuple):
    """A fault in one row of the batch, at column `at` of the step."""

    id: str
    severity: Severity
    description: str
    column: int
    ids: dict[str, int]


class _ReportedFault(NamedTuple):
    """What was said of decode steps first."""

    id: str
    is_error: bool


class PositionsRule(Rule):
    """Compares the ids of a step with those of the step before, and with what they belong to.

    At every level. Where the layers are handed no ids of two dimensions, nothing is said.
    """

    name: ClassVar[str] = "positions"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask", "inputs.positions")
    findings: ClassVar[Mapping[str, FindingKind]] = {
        POSITION_JUMP: FindingKind(
            Severity.WARNING,
            "position ids that leave out some numbers",
            why="Under rotary embeddings the token is as far from the text before it as the gap is "
            "wide; with learnt positions it has another place altogether.",
            confirm=_POSITION_CONFIRM,
            fix="Go on from the last id, in decode steps too: a model that makes ids itself counts "
            "the keys of the cache, which differs once the prompt's ids are your own.",
            query=_POSITION_QUERY,
        ),
        POSITION_RESTART: FindingKind(
            Severity.ERROR,
            "position ids that begin anew where the text goes on",
            why="The new token takes a place in front of the text that it follows: distances to "
            "the keys are negative, which no causal model was trained for.",
            confirm=_POSITION_CONFIRM,
            fix="In a decode step the id is the last one plus 1, not the row's number within the "
            "step: pass position_ids, or leave them to the model together with the cache.",
            query=_POSITION_QUERY,
        ),
        POSITION_PADDING: FindingKind(
            Severity.WARNING,
            "position ids that disagree with the padding of a batch",
            why="Tokens of a padded row are placed apart from each other in another way than in a "
            "run of that row alone, so the answer depends on what it was batched with.",
            confirm="Arrays inputs.positions and inputs.mask of this step: ids of real tokens "
            "should rise by one; run the row alone and compare.",
            fix="position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0) for the prompt, and "
            "one more per step afterwards.",
            query=_POSITION_QUERY,
        ),
        POSITION_DUPLICATE: FindingKind(
            Severity.WARNING,
            "a position id that two tokens of a sequence share",
            why="Under rotary embeddings the two tokens lie in the same place, and their order is "
            "lost; everything after them is one place too near.",
            confirm=_POSITION_CONFIRM,
            fix="Look for an off-by-one at the border of prompt and answer: the first decoded "
            "token has the id of the last prompt token plus 1.",
            query=_POSITION_QUERY,
        ),
        NOT_RESET: NOT_RESET_KIND,
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no ids known."""
        super().on_generation_start(context)
        self._last_ids: PositionIds | None = None
        """The last id of each row of the batch."""
        self._length = 0
        self._unpadded: npt.NDArray[np.bool_] | None = None
        self._reported: _ReportedFault | None = None
        self._counted_pads_severity = Severity.NOTE
        """How bad it is that ids count padding: rotary embeddings do not see it."""
        self._isolated_pairs: Sequence[IsolatedPair] = ()
        """Isolated segments at ids that run on, until a row is met that sees both."""

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return where the ids of a step do not go on, once per kind of fault."""
        inputs = step.inputs
        if inputs is None or not inputs.positions:
            self._last_ids = None
            return ()
        runs, last = inputs.positions, self._last_ids
        is_usual = (
            inputs.batch == 1 and step.kv_before and len(runs) == 1 and not self._isolated_pairs
        )
        # This line is what a healthy decode step costs.
        if is_usual and last is not None and runs[0][0] == last[0] + 1:
            last[0] += runs[0][1]
            self._length = step.kv_after
            return ()
        table = _stream_array(step, "inputs.positions")
        if table is None:  # one row of ids serves all
            table = np.tile(np.asarray(inputs.position_ids), (max(inputs.batch, 1), 1))
        return self._check_ids(step, table)

    def _check_ids(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        real = _stream_array(step, "inputs.mask")
        if not step.kv_before:
            is_learnt = any(event.kind == LEARNED_POSITIONS_EVENT for event in step.events)
            self._counted_pads_severity = Severity.WARNING if is_learnt else Severity.NOTE
            self._unpadded = real if real is not None and real.shape == ids.shape else None
        found = (
            self._check_decode_step(step, ids) if step.kv_before else self._check_prompt(step, ids)
        )
        self._last_ids, self._length = self._last_real_ids(step, ids), step.kv_after
        if step.kv_before:
            pairs, self._isolated_pairs = self._isolated_pairs, ()
        else:
            pairs = self._isolated_pairs = find_isolated_pairs(self.context, step, ids[0])
        told = check_position_order(self.context, step, pairs)
        if told:
            self._isolated_pairs = ()
        return [*found, *told]

    def _last_real_ids(self, step: StepRecord, ids: PositionIds) -> PositionIds:
        """Return the last id of each row, of its real tokens where padding is on the right."""
        if step.kv_before or self._unpadded is None or self._unpadded[:, -1].all():
            return ids[:, -1].astype(np.int64)
        width = ids.shape[1]
        last = width - 1 - self._unpadded[:, ::-1].argmax(axis=1)
        ends: PositionIds = ids[np.arange(len(ids)), last].astype(np.int64)
        return ends

    # -- a prompt, or the whole sequence once more -----------------------------------------------

    def _check_prompt(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        found: list[Finding] = []
        for row in range(len(ids)):
            trouble = self._check_padded_row(ids[row], row)
            if trouble is None and row == 0:
                trouble = self._check_unpadded_row(ids[row])
            if trouble is not None:
                found.append(self._finding(step, trouble, row, len(ids)))
                break
        return found

    def _check_padded_row(self, ids: PositionIds, row: int) -> _PositionFault | None:
        """Compare the ids of a padded row's real tokens with each other."""
        real = None if self._unpadded is None else self._unpadded[row]
        if real is None or real.all() or not real.any():
            return None
        places = np.flatnonzero(real)
        mine = ids[places]
        n_pads, n = int(places[0]), len(places)
        broken = np.flatnonzero(np.diff(mine) != 1)
        if len(broken) and not self._are_segment_starts(places[broken + 1]):
            at = int(places[broken[0] + 1])
            a, b = int(mine[broken[0]]), int(mine[broken[0] + 1])
            words = (
                f"{len(broken)} of the {n - 1} steps between real tokens are not 1 (first: "
                f"{self._format_position(at, row)} has id {b} after {a}): the ids do not follow the "
                "attention mask"
            )
            return _PositionFault(
                POSITION_PADDING, Severity.WARNING, words, at, {"id": b, "before": a}
            )
        if n_pads and int(mine[0]) == n_pads:
            words = (
                f"the first real token ({self._format_position(n_pads, row)}) has id {n_pads}: "
                f"{plural(n_pads, 'padding token')} before it {'is' if n_pads == 1 else 'are'} "
                "counted; rotary embeddings do not see that, learnt positions do"
            )
            told = {"id": n_pads, "pads": n_pads}
            return _PositionFault(
                POSITION_PADDING, self._counted_pads_severity, words, n_pads, told
            )
        return None

    def _check_unpadded_row(self, ids: PositionIds) -> _PositionFault | None:
        """Look for ids that do not rise by one where no segment begins."""
        start = self._count_pads(ids)
        places = start + 1 + np.flatnonzero(np.diff(ids[start:]) != 1)
        places = places[~np.isin(places, self._segment_starts())] if len(places) else places
        if not len(places):
            return None
        at = int(places[0])
        before, now = int(ids[at - 1]), int(ids[at])
        # Where nobody named segments, ids that begin anew may be packed documents.
        is_sure = self._is_declared()
        severity = Severity.WARNING if is_sure else Severity.NOTE
        inside = f" inside of {self._segment_label(at)}" if is_sure else ""
        told = {"id": now, "before": before, "places": len(places)}
        others = "" if len(places) == 1 else f" (first of {len(places)} such places)"
        where = f"at {self.context.format_position(at)}{inside}{others}"
        if now == before:
            words = f"position id {now} is used twice, again {where}"
            return _PositionFault(POSITION_DUPLICATE, Severity.WARNING, words, at, told)
        if now < before:
            words = f"position ids restart at {now} after {before}, {where}"
            return _PositionFault(POSITION_RESTART, severity, words, at, told)
        words = f"position ids jump from {before} to {now} {where}"
        return _PositionFault(POSITION_JUMP, severity, words, at, told)

    def _count_pads(self, ids: PositionIds) -> int:
        if self._unpadded is not None and self._unpadded[0].any():
            return int(self._unpadded[0].argmax())
        first = self.context.segments[0] if self.context.segments else None
        is_said = first is not None and first.label == "padding"
        return first.stop if first is not None and is_said else count_pads_by_id(self.context)

    def _is_declared(self) -> bool:
        """Say whether somebody named segments: without, a prompt is one."""
        return sum(s.label not in ("padding", "prompt") for s in self.context.segments) > 1

    def _segment_starts(self) -> list[int]:
        return [segment.start for segment in self.context.segments]

    def _are_segment_starts(self, places: npt.NDArray[np.intp]) -> bool:
        """Say whether ids begin anew only where segments do, or where nobody named any."""
        return bool(np.isin(places, self._segment_starts()).all())

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
        # Where drafts were rejected, the cache and the ids go back by the same number.
        gone = self._length - step.kv_before
        bad = (firsts != last + 1) & (firsts != last + 1 - gone)
        rows = np.flatnonzero(bad)
        if not len(rows):
            return []
        row = int(rows[0])
        trouble = self._classify_fault(step, int(last[row]), int(firsts[row]), row)
        told = self._reported
        if told is not None and (trouble.severity is not Severity.ERROR or told.is_error):
            trouble = trouble._replace(id=told.id)  # once out of step, all that follows is
        else:
            self._reported = _ReportedFault(trouble.id, trouble.severity is Severity.ERROR)
        return [self._finding(step, trouble, row, len(rows) if len(ids) > 1 else 1)]

    def _check_first_decode_step(self, step: StepRecord, ids: PositionIds) -> list[Finding]:
        """Judge the first step that is seen, on a cache that others filled."""
        if step.step or int(ids[0, 0]) != 0 or step.kv_before < 2:
            return []
        words = (
            f"position ids begin at 0 in step {step.step}, on a cache of {step.kv_before} keys "
            f"({self.context.format_position(step.kv_before)})"
        )
        told = {"id": 0, "cached": step.kv_before}
        return [
            self._finding(
                step, _PositionFault(POSITION_RESTART, Severity.WARNING, words, 0, told), 0, 1
            )
        ]

    def _follows_faulty_cache(self, step: StepRecord, ids: PositionIds) -> bool:
        """Say whether the model counted keys that the first layer lost, which is told elsewhere."""
        held = step.inputs.cached_before if step.inputs is not None else ()
        if not held or held[0] == step.kv_before:
            return False
        return bool((ids[:, 0] == held[0]).all())

    def _classify_fault(self, step: StepRecord, before: int, now: int, row: int) -> _PositionFault:
        expected, cached = before + 1, step.kv_before
        told = {"id": now, "expected": expected, "cached": cached}
        where = f"in step {step.step} ({self._format_position(cached, row)})"
        pads = self._count_row_pads(row)
        if pads and now == cached:
            words = (
                f"position ids go from {before} to {now} {where}: the prompt's ids leave out its "
                f"{plural(pads, 'padding token')}, and those of the decode steps count them"
            )
            return _PositionFault(
                POSITION_PADDING, Severity.WARNING, words, 0, {**told, "pads": pads}
            )
        if now == before:
            words = f"position id {now} is used twice, again {where}; {expected} comes next"
            return _PositionFault(POSITION_DUPLICATE, Severity.WARNING, words, 0, told)
        if now < before:
            words = (
                f"position ids restart at {now} {where}; {expected} comes next, and the cache "
                f"holds {cached} keys"
            )
            return _PositionFault(POSITION_RESTART, Severity.ERROR, words, 0, told)
        counts = ": they count the cache, and the prompt's ids do not" if now == cached else ""
        words = f"position ids jump from {before} to {now} {where}{counts}"
        return _PositionFault(POSITION_JUMP, Severity.WARNING, words, 0, told)

    def _count_row_pads(self, row: int) -> int:
        return 0 if self._unpadded is None else int((~self._unpadded[row]).sum())

    # -- words -----------------------------------------------------------------------------------

    def _format_position(self, pos: int, row: int) -> str:
        """Return a position with its word, which is known of row 0 alone."""
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
