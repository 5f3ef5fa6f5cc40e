"""Position ids: that they go on, with the cache and with the padding, and restart where meant.

Only differences count: ids that are all shifted by the same amount are as good as any, and where a
segment begins they may begin anew. What is judged are the ids that the layers were handed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding, Severity
from flexinspect.records import StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.isolated import (
    NOT_RESET,
    NOT_RESET_KIND,
    Pair,
    isolated_pairs,
    order_matters,
)
from flexinspect.rules.maskplaces import pads_by_id
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted

JUMP = "positions.jump"
RESTART = "positions.restart"
PADDING = "positions.padding"
DUPLICATE = "positions.duplicate"

_FED = (
    "SELECT step, batch, positions, cached_before FROM inputs "
    "WHERE generation = {generation} AND branch = {branch} ORDER BY step"
)
_LOOK = "Tokens panel, position ids; the column positions of the table inputs, step by step."

Ids = npt.NDArray[Any]


class _Trouble(NamedTuple):
    """A fault in one row of the batch, at column `at` of the step."""

    id: str
    severity: Severity
    words: str
    at: int
    ids: dict[str, int]


class _Told(NamedTuple):
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
        JUMP: FindingKind(
            Severity.WARNING,
            "position ids that leave out some numbers",
            why="Under rotary embeddings the token is as far from the text before it as the gap is "
            "wide; with learnt positions it has another place altogether.",
            confirm=_LOOK,
            fix="Go on from the last id, in decode steps too: a model that makes ids itself counts "
            "the keys of the cache, which differs once the prompt's ids are your own.",
            query=_FED,
        ),
        RESTART: FindingKind(
            Severity.ERROR,
            "position ids that begin anew where the text goes on",
            why="The new token takes a place in front of the text that it follows: distances to "
            "the keys are negative, which no causal model was trained for.",
            confirm=_LOOK,
            fix="In a decode step the id is the last one plus 1, not the row's number within the "
            "step: pass position_ids, or leave them to the model together with the cache.",
            query=_FED,
        ),
        PADDING: FindingKind(
            Severity.WARNING,
            "position ids that disagree with the padding of a batch",
            why="Tokens of a padded row are placed apart from each other in another way than in a "
            "run of that row alone, so the answer depends on what it was batched with.",
            confirm="Arrays inputs.positions and inputs.mask of this step: ids of real tokens "
            "should rise by one; run the row alone and compare.",
            fix="position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0) for the prompt, and "
            "one more per step afterwards.",
            query=_FED,
        ),
        DUPLICATE: FindingKind(
            Severity.WARNING,
            "a position id that two tokens of a sequence share",
            why="Under rotary embeddings the two tokens lie in the same place, and their order is "
            "lost; everything after them is one place too near.",
            confirm=_LOOK,
            fix="Look for an off-by-one at the border of prompt and answer: the first decoded "
            "token has the id of the last prompt token plus 1.",
            query=_FED,
        ),
        NOT_RESET: NOT_RESET_KIND,
    }

    def begin(self, scene: Scene) -> None:
        """Begin with no ids known."""
        super().begin(scene)
        self._last: Ids | None = None
        """The last id of each row of the batch."""
        self._length = 0
        self._real: npt.NDArray[np.bool_] | None = None
        self._told: _Told | None = None
        self._pairs: Sequence[Pair] = ()
        """Isolated segments at ids that run on, until a row is met that sees both."""

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return where the ids of a step do not go on, once per kind of fault."""
        inputs = step.inputs
        if inputs is None or not inputs.positions:
            self._last = None
            return ()
        runs, last = inputs.positions, self._last
        is_usual = inputs.batch == 1 and step.kv_before and len(runs) == 1 and not self._pairs
        # This line is what a healthy decode step costs.
        if is_usual and last is not None and runs[0][0] == last[0] + 1:
            last[0] += runs[0][1]
            self._length = step.kv_after
            return ()
        table = _array(step, "inputs.positions")
        if table is None:  # one row of ids serves all
            table = np.tile(np.asarray(inputs.position_ids), (max(inputs.batch, 1), 1))
        return self._judge(step, table)

    def _judge(self, step: StepRecord, ids: Ids) -> list[Finding]:
        real = _array(step, "inputs.mask")
        if not step.kv_before:
            self._real = real if real is not None and real.shape == ids.shape else None
        found = self._decode(step, ids) if step.kv_before else self._whole(step, ids)
        self._last, self._length = self._ends(step, ids), step.kv_after
        if step.kv_before:
            pairs, self._pairs = self._pairs, ()
        else:
            pairs = self._pairs = isolated_pairs(self.scene, step, ids[0])
        told = order_matters(self.scene, step, pairs)
        if told:
            self._pairs = ()
        return [*found, *told]

    def _ends(self, step: StepRecord, ids: Ids) -> Ids:
        """Return the last id of each row, of its real tokens where padding is on the right."""
        if step.kv_before or self._real is None or self._real[:, -1].all():
            return ids[:, -1].astype(np.int64)
        width = ids.shape[1]
        last = width - 1 - self._real[:, ::-1].argmax(axis=1)
        ends: Ids = ids[np.arange(len(ids)), last].astype(np.int64)
        return ends

    # -- a prompt, or the whole sequence once more -----------------------------------------------

    def _whole(self, step: StepRecord, ids: Ids) -> list[Finding]:
        found: list[Finding] = []
        for row in range(len(ids)):
            trouble = self._padded(ids[row], row)
            if trouble is None and row == 0:
                trouble = self._inside(ids[row])
            if trouble is not None:
                found.append(self._finding(step, trouble, row, len(ids)))
                break
        return found

    def _padded(self, ids: Ids, row: int) -> _Trouble | None:
        """Compare the ids of a padded row's real tokens with each other."""
        real = None if self._real is None else self._real[row]
        if real is None or real.all() or not real.any():
            return None
        places = np.flatnonzero(real)
        mine = ids[places]
        n_pads, n = int(places[0]), len(places)
        broken = np.flatnonzero(np.diff(mine) != 1)
        if len(broken) and not self._are_borders(places[broken + 1]):
            at = int(places[broken[0] + 1])
            a, b = int(mine[broken[0]]), int(mine[broken[0] + 1])
            words = (
                f"{len(broken)} of the {n - 1} steps between real tokens are not 1 (first: "
                f"{self._where(at, row)} has id {b} after {a}): the ids do not follow the "
                "attention mask"
            )
            return _Trouble(PADDING, Severity.WARNING, words, at, {"id": b, "before": a})
        if n_pads and int(mine[0]) == n_pads:
            words = (
                f"the first real token ({self._where(n_pads, row)}) has id {n_pads}: "
                f"{counted(n_pads, 'padding token')} before it {'is' if n_pads == 1 else 'are'} "
                "counted; rotary embeddings do not see that, learnt positions do"
            )
            return _Trouble(PADDING, Severity.NOTE, words, n_pads, {"id": n_pads, "pads": n_pads})
        return None

    def _inside(self, ids: Ids) -> _Trouble | None:
        """Look for ids that do not rise by one where no segment begins."""
        start = self._n_pads(ids)
        places = start + 1 + np.flatnonzero(np.diff(ids[start:]) != 1)
        places = places[~np.isin(places, self._borders())] if len(places) else places
        if not len(places):
            return None
        at = int(places[0])
        before, now = int(ids[at - 1]), int(ids[at])
        # Where nobody named segments, ids that begin anew may be packed documents.
        is_sure = self._is_declared()
        severity = Severity.WARNING if is_sure else Severity.NOTE
        inside = f" inside of {self._label(at)}" if is_sure else ""
        told = {"id": now, "before": before, "places": len(places)}
        others = "" if len(places) == 1 else f" (first of {len(places)} such places)"
        where = f"at {self.scene.position(at)}{inside}{others}"
        if now == before:
            words = f"position id {now} is used twice, again {where}"
            return _Trouble(DUPLICATE, Severity.WARNING, words, at, told)
        if now < before:
            words = f"position ids restart at {now} after {before}, {where}"
            return _Trouble(RESTART, severity, words, at, told)
        words = f"position ids jump from {before} to {now} {where}"
        return _Trouble(JUMP, severity, words, at, told)

    def _n_pads(self, ids: Ids) -> int:
        if self._real is not None and self._real[0].any():
            return int(self._real[0].argmax())
        first = self.scene.segments[0] if self.scene.segments else None
        is_said = first is not None and first.label == "padding"
        return first.stop if first is not None and is_said else pads_by_id(self.scene)

    def _is_declared(self) -> bool:
        """Say whether somebody named segments: without, a prompt is one."""
        return sum(s.label not in ("padding", "prompt") for s in self.scene.segments) > 1

    def _borders(self) -> list[int]:
        return [segment.start for segment in self.scene.segments]

    def _are_borders(self, places: npt.NDArray[np.intp]) -> bool:
        """Say whether ids begin anew only where segments do, or where nobody named any."""
        return bool(np.isin(places, self._borders()).all())

    def _label(self, pos: int) -> str:
        segment = self.scene.segment_at(pos)
        return "no segment" if segment is None else segment.label

    # -- rows on a filled cache ------------------------------------------------------------------

    def _decode(self, step: StepRecord, ids: Ids) -> list[Finding]:
        if self._follows_a_sick_cache(step, ids):
            return []
        last = self._last
        if last is None:
            return self._decode_alone(step, ids)
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
        trouble = self._broken(step, int(last[row]), int(firsts[row]), row)
        told = self._told
        if told is not None and (trouble.severity is not Severity.ERROR or told.is_error):
            trouble = trouble._replace(id=told.id)  # once out of step, all that follows is
        else:
            self._told = _Told(trouble.id, trouble.severity is Severity.ERROR)
        return [self._finding(step, trouble, row, len(rows) if len(ids) > 1 else 1)]

    def _decode_alone(self, step: StepRecord, ids: Ids) -> list[Finding]:
        """Judge the first step that is seen, on a cache that others filled."""
        if step.step or int(ids[0, 0]) != 0 or step.kv_before < 2:
            return []
        words = (
            f"position ids begin at 0 in step {step.step}, on a cache of {step.kv_before} keys "
            f"({self.scene.position(step.kv_before)})"
        )
        told = {"id": 0, "cached": step.kv_before}
        return [self._finding(step, _Trouble(RESTART, Severity.WARNING, words, 0, told), 0, 1)]

    def _follows_a_sick_cache(self, step: StepRecord, ids: Ids) -> bool:
        """Say whether the model counted keys that the first layer lost, which is told elsewhere."""
        held = step.inputs.cached_before if step.inputs is not None else ()
        if not held or held[0] == step.kv_before:
            return False
        return bool((ids[:, 0] == held[0]).all())

    def _broken(self, step: StepRecord, before: int, now: int, row: int) -> _Trouble:
        expected, cached = before + 1, step.kv_before
        told = {"id": now, "expected": expected, "cached": cached}
        where = f"in step {step.step} ({self._where(cached, row)})"
        pads = self._pads_of(row)
        if pads and now == cached:
            words = (
                f"position ids go from {before} to {now} {where}: the prompt's ids leave out its "
                f"{counted(pads, 'padding token')}, and those of the decode steps count them"
            )
            return _Trouble(PADDING, Severity.WARNING, words, 0, {**told, "pads": pads})
        if now == before:
            words = f"position id {now} is used twice, again {where}; {expected} comes next"
            return _Trouble(DUPLICATE, Severity.WARNING, words, 0, told)
        if now < before:
            words = (
                f"position ids restart at {now} {where}; {expected} comes next, and the cache "
                f"holds {cached} keys"
            )
            return _Trouble(RESTART, Severity.ERROR, words, 0, told)
        counts = ": they count the cache, and the prompt's ids do not" if now == cached else ""
        words = f"position ids jump from {before} to {now} {where}{counts}"
        return _Trouble(JUMP, Severity.WARNING, words, 0, told)

    def _pads_of(self, row: int) -> int:
        return 0 if self._real is None else int((~self._real[row]).sum())

    # -- words -----------------------------------------------------------------------------------

    def _where(self, pos: int, row: int) -> str:
        """Return a position with its word, which is known of row 0 alone."""
        return self.scene.position(pos) if row == 0 else f"position {pos}"

    def _finding(self, step: StepRecord, trouble: _Trouble, row: int, n_rows: int) -> Finding:
        many = step.inputs is not None and step.inputs.batch > 1
        words = f"in batch row {row}, {trouble.words}" if many else trouble.words
        if many and step.kv_before and n_rows > 1:
            words = f"in {n_rows} batch rows, first in row {row}: {trouble.words}"
        return Finding(
            id=trouble.id,
            severity=trouble.severity,
            sentence=f"{words[0].upper()}{words[1:]}.",
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            positions=(step.kv_before + trouble.at,),
            evidence={**trouble.ids, "batch_row": row},
            series="decode" if step.kv_before else "prompt",
        )


RULE: type[Rule] = PositionsRule


def _array(step: StepRecord, stream: str) -> Ids | None:
    return next((one.array for one in step.arrays if one.stream == stream), None)
