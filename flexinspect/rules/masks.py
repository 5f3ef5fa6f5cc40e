"""The mask that ran against the one that was meant: per layer, head and step.

What is judged is `MaskRecord.cells`, what the kernel honoured; what was received says why it is so.
Where no mask was declared, segments that were named stand for one (their leaks are warnings), and
a layer that calls itself causal for causality. Layers that ran the same mask share a finding, and
what comes back at later steps is counted, not told again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray, MaskRule
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules import maskdiff, masklayers
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.maskdiff import MOVED, OPEN, OTHER, Frame
from flexinspect.rules.maskkinds import MASKS
from flexinspect.rules.maskplaces import (
    evidence_of,
    flags_of,
    frame_of,
    join,
    merged,
    paraphrases,
    parts_of,
    severity_of,
    with_paths,
    without_bos,
    without_padding,
)
from flexinspect.rules.maskwords import (
    LOST,
    NO_MASK,
    PADDING,
    Case,
    Group,
    id_of,
    padding_sentence,
    pieces_left,
    sentence,
)
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import MAX_POSITIONS

_PLAIN = MaskRule("causal", (0,), (0,), (0,))
_EARLIER = 8
_KNOWN = 1024


class MasksRule(Rule):
    """Compares the cells that ran with what was meant; without cells (level basic) it is silent.

    That a causal layer got no mask at all is seen at every level.
    """

    name: ClassVar[str] = "masks"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    findings: ClassVar[Mapping[str, FindingKind]] = MASKS

    def __init__(self) -> None:
        self._earlier: deque[tuple[int, MaskRule]] = deque(maxlen=_EARLIER)
        self._right: set[tuple[object, ...]] = set()
        self._begun: tuple[int, MaskRule] | None = None

    def begin(self, scene: Scene) -> None:
        """Begin with nothing told; remember what the generation before meant."""
        super().begin(scene)
        before, intent = self._begun, scene.intent
        if before is not None and all(before[1] != rule for _, rule in self._earlier):
            self._earlier.append(before)
        self._begun = None if intent is None else (scene.generation.generation, intent.rule)
        self._parts = parts_of(scene)
        self._real, self._no_bos = without_padding(scene), without_bos(scene)
        self._apart = paraphrases(scene) if intent is not None and intent.assumed else None
        self._told: dict[tuple[object, ...], str] = {}
        if len(self._right) > _KNOWN:
            self._right.clear()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return how the masks of a step differ from what was meant, each difference once."""
        if step.kv_before == 0:
            self._take_padding(step)
        groups = self._groups(step)
        cases = [case for group in groups for case in self._judge(step, group)]
        found = [self._tell(case) for case in (merged(cases) if len(cases) > 1 else cases)]
        if len(groups) > 1 and not found:
            found += masklayers.differing(self.scene, step, groups, self._real)
        return found

    def _take_padding(self, step: StepRecord) -> None:
        for wide in step.arrays:
            if wide.stream == "inputs.mask" and len(wide.array):
                real = np.asarray(wide.array[0], np.bool_)
                self._real = None if real.all() else real

    def _groups(self, step: StepRecord) -> list[Group]:
        """Return the masks of a step with their layers, those that ran in no known mask left out.

        A layer that is not causal, or attends to other rows (cross attention), is judged only
        against a declared mask over this sequence.
        """
        by_mask: dict[tuple[object, ...], list[CallRecord]] = {}
        for call in step.calls:
            if call.q_len == step.q_len:
                by_mask.setdefault((call.mask, call.window, call.kv_len), []).append(call)
        found: list[Group] = []
        n_layers = len({call.layer for call in step.calls}) if by_mask else 0
        for calls in by_mask.values():
            mask = self.scene.mask(calls[0].mask)
            if mask is not None and (calls[0].causal is not False or self._is_declared):
                which = tuple(sorted({call.layer for call in calls}))
                join(found, Group(mask, calls[0], which, n_layers))
        return found if len(found) < 2 else with_paths(found)

    @property
    def _is_declared(self) -> bool:
        intent = self.scene.intent
        return intent is not None and not intent.assumed

    # -- one mask --------------------------------------------------------------------------------

    def _judge(self, step: StepRecord, group: Group) -> list[Case]:
        intent = self.scene.intent
        frame = frame_of(step, group.call)
        if self._is_declared and group.mask.cells is not None:
            assert intent is not None
            found = self._against(step, group, frame, intent.rule, "the declared mask")
        else:
            found = self._future(step, group, frame)
            if not found and self._apart is not None and intent is not None:
                found = self._assumed(step, group, frame, intent.rule)
        if not found and self._real is not None and group.mask.cells is not None:
            found = self._padding(step, group, frame)
        return found

    def _against(
        self, step: StepRecord, group: Group, frame: Frame, rule: MaskRule, name: str
    ) -> list[Case]:
        """Return how the cells differ from the declared rule."""
        heads, first = self._differing(group.mask, rule, frame)
        if first is None:
            return []
        cells, own = first
        whole = replace(own, window=None)
        if frame.window and not maskdiff.wrong_cells(cells, rule, whole, most=1):
            return []  # as declared: that the layer's own window did not apply is its own matter
        if self._is_bos_alone(group.mask, rule, frame):
            return []
        case = self._case(step, group, (cells, own), rule, heads)
        return [replace(case, name=f"{name} ({rule.name})")]

    def _is_bos_alone(self, mask: MaskRecord, rule: MaskRule, frame: Frame) -> bool:
        """Say whether the cells differ from a rule only in who sees the BOS.

        Conventions differ, and nothing can leak through it: it sees nothing but itself.
        """
        if self._no_bos is None or rule.name == "causal":
            return False
        keys = flags_of(self._no_bos, frame.kv_offset, frame.n_keys)
        rows = np.ones(max(mask.q_len, 1), np.bool_)
        if self._real is not None:
            keys = keys & flags_of(self._real, frame.kv_offset, frame.n_keys)
            rows = flags_of(self._real, frame.q_offset, len(rows))
        return self._differing(mask, rule, replace(frame, rows=rows, keys=keys))[1] is None

    def _assumed(self, step: StepRecord, group: Group, frame: Frame, rule: MaskRule) -> list[Case]:
        """Return where paraphrases see each other: of others nothing is meant."""
        apart, cells = self._apart, group.mask.cells
        if apart is None or cells is None or frame.q_offset >= len(apart):
            return []  # of generated rows nothing is meant
        rows = flags_of(apart, frame.q_offset, step.q_len, beyond=False)
        keys = flags_of(apart, frame.kv_offset, frame.n_keys, beyond=False)
        heads, first = self._differing(group.mask, rule, replace(frame, rows=rows, keys=keys))
        if first is None:
            return []
        case = self._case(step, group, first, rule, heads)
        across = {pair: n for pair, n in case.found.between.items() if pair[0] != pair[1]}
        if not across:
            return []
        case.found.between, case.found.lost = across, 0
        return [replace(case, assumed=True, name="what was named")]

    def _future(self, step: StepRecord, group: Group, frame: Frame) -> list[Case]:
        """Return where causality is broken in a layer that calls itself causal."""
        mask, call = group.mask, group.call
        if step.q_len == 1 or not call.causal or mask.kind == "none, causal":
            return []
        if self.scene.has_own_rule and mask.kind != NO_MASK:
            return []  # a function of the user's own, which may well look ahead
        if mask.cells is None:
            return self._unseen(step, group)
        heads, first = self._differing(mask, None, frame)
        if first is None:
            return []
        case = self._case(step, group, first, _PLAIN, heads)
        case.found.lost = 0
        case = replace(case, name="a causal mask", pieces=0, segments=0)
        is_sure = mask.kind == NO_MASK or group.is_added
        blockwise = not is_sure and maskdiff.is_blockwise(case.found, *first)
        if not blockwise:
            return [case]
        severity = Severity.WARNING if case.pattern == OPEN else Severity.NOTE
        return [replace(case, pattern=OTHER, severity=severity)]

    def _unseen(self, step: StepRecord, group: Group) -> list[Case]:
        """Return what is known without cells: with no mask every cell is open."""
        if group.mask.kind != NO_MASK or step.q_len * step.kv_after > 1 << 22:
            return []
        cells = np.ones((1, step.q_len, group.call.kv_len), np.bool_)
        group = replace(group, mask=replace(group.mask, cells=cells))
        return self._future(step, group, frame_of(step, group.call))

    def _padding(self, step: StepRecord, group: Group, frame: Frame) -> list[Case]:
        """Return which rows see keys of padding."""
        cells, real = group.mask.cells, self._real
        assert cells is not None
        assert real is not None
        keys = ~flags_of(real, frame.kv_offset, frame.n_keys)
        rows = flags_of(real, frame.q_offset, step.q_len)
        if not keys.any() or not rows.any():
            return []
        closed = MaskRule("no padding", (0,), (0,), (1 << 30,))
        heads, first = self._differing(group.mask, closed, replace(frame, rows=rows, keys=keys))
        if first is None:
            return []
        case = self._case(step, group, first, closed, heads)
        return [replace(case, id=PADDING)]

    # -- comparing -------------------------------------------------------------------------------

    def _differing(
        self, mask: MaskRecord, rule: MaskRule | None, frame: Frame
    ) -> tuple[tuple[int, ...], tuple[BoolArray, Frame] | None]:
        """Return the heads whose cells differ, and the cells and frame of the first of them.

        Without a rule what is asked is whether a row sees the future.
        """
        cells = mask.cells
        if cells is None:
            return (), None
        n_rows = max(mask.q_len, 1)
        if cells.shape[1] == 1 < n_rows:  # one row that is broadcast
            cells = np.broadcast_to(cells, (len(cells), n_rows, cells.shape[2]))
        key = (mask.fingerprint, rule, frame.q_offset, frame.kv_offset, frame.n_keys, frame.window)
        keep = n_rows > 1 and frame.rows is None and self._real is None
        if keep and key in self._right:
            return (), None
        heads, first = [], None
        for head in range(len(cells)):
            own = self._own_frame(mask, frame, head, n_rows)
            if _is_wrong(cells[head], rule, own):
                heads.append(head)
                first = first or (cells[head], own)
        if keep and not heads:
            self._right.add(key)
        return tuple(heads), first

    def _own_frame(self, mask: MaskRecord, frame: Frame, head: int, n_rows: int) -> Frame:
        """Return the frame of a head, without padding and rows that are averaged."""
        if self._real is None and mask.averaged is None:
            return frame
        rows, keys = frame.rows, frame.keys
        if self._real is not None and rows is None:
            rows = flags_of(self._real, frame.q_offset, n_rows)
            keys = flags_of(self._real, frame.kv_offset, frame.n_keys)
        if mask.averaged is not None:
            closed = np.broadcast_to(mask.averaged[min(head, len(mask.averaged) - 1)], n_rows)
            rows = ~closed if rows is None else rows & ~closed
        return replace(frame, rows=rows, keys=keys)

    def _case(
        self,
        step: StepRecord,
        group: Group,
        first: tuple[BoolArray, Frame],
        rule: MaskRule,
        heads: tuple[int, ...],
    ) -> Case:
        cells, frame = first
        found = maskdiff.difference(cells, rule, frame, self._parts)
        pattern, amount = maskdiff.pattern(cells, rule, frame, found)
        earlier = None
        if pattern in (MOVED, OTHER) and step.q_len > 1:
            rules = [one for one in self._earlier if one[1] != rule]
            same = (n for n, r in rules if not maskdiff.wrong_cells(cells, r, frame, most=1))
            earlier = next(same, None)
        pieces, segments = pieces_left(self.scene, found)
        n_heads = len(group.mask.cells) if group.mask.cells is not None else 1
        about = (pattern, amount, earlier, heads, n_heads, pieces, segments)
        return Case(step, group, found, rule.name, False, *about)

    # -- telling ---------------------------------------------------------------------------------

    def _tell(self, case: Case) -> Finding:
        """Return the finding of a difference: under the id of an earlier one that it goes on with.

        A mask that leaks in the prompt leaks in generated rows too, whatever each step looks like.
        """
        found, place = case.found, (case.step.branch, case.group.layers)
        sides = [side for side, n in (("leaks", found.leaked), ("loses", found.lost)) if n]
        news = [side for side in sides if (*place, side) not in self._told]
        known = next((self._told[(*place, s)] for s in sides if s not in news), None)
        finding_id = id_of(case) if known is None else known
        if known is not None and news:
            found.leaked, finding_id = 0, LOST
        for side in news:
            self._told[(*place, side)] = finding_id
        return self._finding(case, finding_id, case.severity or severity_of(case, finding_id))

    def _finding(self, case: Case, finding_id: str, severity: Severity) -> Finding:
        found, group, step = case.found, case.group, case.step
        words = padding_sentence if finding_id == PADDING else sentence
        positions = found.leaking if found.leaked else found.losing
        heads = case.heads if len(case.heads) < case.n_heads else ()
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=words(self.scene, case, finding_id),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=group.layers[0],
            head=heads[0] if heads else None,
            positions=tuple(positions[:MAX_POSITIONS]),
            evidence=evidence_of(case),
            layers=group.layers if len(group.layers) > 1 else (),
            series="layers " + ", ".join(map(str, group.layers)),
        )


RULE: type[Rule] = MasksRule


def _is_wrong(cells: BoolArray, rule: MaskRule | None, frame: Frame) -> bool:
    if rule is None:
        return maskdiff.sees_future(cells, frame)
    if len(cells) == 1 and frame.rows is None:
        return not maskdiff.row_is_meant(cells[0], rule, frame) and bool(
            maskdiff.wrong_cells(cells, rule, frame, most=1)
        )
    return maskdiff.wrong_cells(cells, rule, frame, most=1) > 0
