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
from flexinspect.masks import BoolArray, MaskSpec
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules import maskdiff, masklayers
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.maskdiff import MOVED, OPEN, OTHER, CellFrame
from flexinspect.rules.maskkinds import MASK_KINDS
from flexinspect.rules.maskplaces import (
    add_group,
    add_usual_paths,
    call_frame,
    case_evidence,
    case_severity,
    merge_cases,
    non_bos_flags,
    paraphrase_flags,
    segment_parts,
    slice_flags,
    unpadded_flags,
)
from flexinspect.rules.maskwords import (
    MASK_LOST,
    MASK_PADDING,
    NO_MASK,
    LayerGroup,
    MaskCase,
    case_finding_id,
    case_sentence,
    count_pieces,
    padding_sentence,
)
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import MAX_LISTED_POSITIONS

_CAUSAL_SPEC = MaskSpec("causal", (0,), (0,), (0,))
_MAX_EARLIER_SPECS = 8
_MAX_MATCHING = 1024


class MasksRule(Rule):
    """Compares the cells that ran with what was meant; without cells (level basic) it is silent.

    That a causal layer got no mask at all is seen at every level.
    """

    name: ClassVar[str] = "masks"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    findings: ClassVar[Mapping[str, FindingKind]] = MASK_KINDS

    def __init__(self) -> None:
        self._earlier_specs: deque[tuple[int, MaskSpec]] = deque(maxlen=_MAX_EARLIER_SPECS)
        self._matching: set[tuple[object, ...]] = set()
        self._current_spec: tuple[int, MaskSpec] | None = None

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing told; remember what the generation before meant."""
        super().on_generation_start(context)
        before, intent = self._current_spec, context.declared_mask
        if before is not None and all(before[1] != rule for _, rule in self._earlier_specs):
            self._earlier_specs.append(before)
        self._current_spec = (
            None if intent is None else (context.generation.generation, intent.spec)
        )
        self._parts = segment_parts(context)
        self._unpadded, self._non_bos = unpadded_flags(context), non_bos_flags(context)
        self._paraphrase_flags = (
            paraphrase_flags(context) if intent is not None and intent.assumed else None
        )
        self._reported: dict[tuple[object, ...], str] = {}
        if len(self._matching) > _MAX_MATCHING:
            self._matching.clear()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return how the masks of a step differ from what was meant, each difference once."""
        if step.kv_before == 0:
            self._read_padding(step)
        groups = self._group_calls(step)
        cases = [case for group in groups for case in self._check_group(step, group)]
        found = [
            self._report_case(case) for case in (merge_cases(cases) if len(cases) > 1 else cases)
        ]
        if len(groups) > 1 and not found:
            found += masklayers.find_differing_layers(self.context, step, groups, self._unpadded)
        return found

    def _read_padding(self, step: StepRecord) -> None:
        for wide in step.arrays:
            if wide.stream == "inputs.mask" and len(wide.array):
                real = np.asarray(wide.array[0], np.bool_)
                self._unpadded = None if real.all() else real

    def _group_calls(self, step: StepRecord) -> list[LayerGroup]:
        """Return the masks of a step with their layers, those that ran in no known mask left out.

        A layer that is not causal, or attends to other rows (cross attention), is judged only
        against a declared mask over this sequence.
        """
        by_mask: dict[tuple[object, ...], list[CallRecord]] = {}
        for call in step.calls:
            if call.q_len == step.q_len:
                by_mask.setdefault((call.mask, call.window, call.kv_len), []).append(call)
        found: list[LayerGroup] = []
        n_layers = len({call.layer for call in step.calls}) if by_mask else 0
        for calls in by_mask.values():
            mask = self.context.mask(calls[0].mask)
            if mask is not None and (calls[0].causal is not False or self._is_declared):
                which = tuple(sorted({call.layer for call in calls}))
                add_group(found, LayerGroup(mask, calls[0], which, n_layers))
        return found if len(found) < 2 else add_usual_paths(found)

    @property
    def _is_declared(self) -> bool:
        intent = self.context.declared_mask
        return intent is not None and not intent.assumed

    # -- one mask --------------------------------------------------------------------------------

    def _check_group(self, step: StepRecord, group: LayerGroup) -> list[MaskCase]:
        intent = self.context.declared_mask
        frame = call_frame(step, group.call)
        if self._is_declared and group.mask.cells is not None:
            assert intent is not None
            found = self._check_declared(step, group, frame, intent.spec, "the declared mask")
        else:
            found = self._check_causality(step, group, frame)
            is_mild = all(case.severity is Severity.NOTE for case in found)
            if is_mild and self._paraphrase_flags is not None and intent is not None:
                found = self._check_assumed(step, group, frame, intent.spec) or found
        if not found and self._unpadded is not None and group.mask.cells is not None:
            found = self._check_padding(step, group, frame)
        return found

    def _check_declared(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame, spec: MaskSpec, name: str
    ) -> list[MaskCase]:
        """Return how the cells differ from the declared rule."""
        heads, first = self._find_differing_heads(group.mask, spec, frame)
        if first is None:
            return []
        cells, own = first
        whole = replace(own, window=None)
        if frame.window and not maskdiff.count_wrong_cells(cells, spec, whole, limit=1):
            return []  # as declared: that the layer's own window did not apply is its own matter
        if self._differs_only_in_bos(group.mask, spec, frame):
            return []
        case = self._make_case(step, group, (cells, own), spec, heads)
        return [replace(case, expected=f"{name} ({spec.name})")]

    def _differs_only_in_bos(self, mask: MaskRecord, spec: MaskSpec, frame: CellFrame) -> bool:
        """Say whether the cells differ from a rule only in who sees the BOS.

        Conventions differ, and nothing can leak through it: it sees nothing but itself.
        """
        if self._non_bos is None or spec.name == "causal":
            return False
        keys = slice_flags(self._non_bos, frame.kv_offset, frame.n_keys)
        rows = np.ones(max(mask.q_len, 1), np.bool_)
        if self._unpadded is not None:
            keys = keys & slice_flags(self._unpadded, frame.kv_offset, frame.n_keys)
            rows = slice_flags(self._unpadded, frame.q_offset, len(rows))
        return (
            self._find_differing_heads(mask, spec, replace(frame, rows=rows, keys=keys))[1] is None
        )

    def _check_assumed(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame, spec: MaskSpec
    ) -> list[MaskCase]:
        """Return where paraphrases see each other: of others nothing is meant."""
        apart, cells = self._paraphrase_flags, group.mask.cells
        if apart is None or cells is None or frame.q_offset >= len(apart):
            return []  # of generated rows nothing is meant
        rows = slice_flags(apart, frame.q_offset, step.q_len, fill=False)
        keys = slice_flags(apart, frame.kv_offset, frame.n_keys, fill=False)
        heads, first = self._find_differing_heads(
            group.mask, spec, replace(frame, rows=rows, keys=keys)
        )
        if first is None:
            return []
        case = self._make_case(step, group, first, spec, heads)
        across = {
            pair: n for pair, n in case.difference.leaked_by_pair.items() if pair[0] != pair[1]
        }
        if not across:
            return []
        case.difference.leaked_by_pair, case.difference.lost = across, 0
        return [replace(case, assumed=True, expected="what was named")]

    def _check_causality(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame
    ) -> list[MaskCase]:
        """Return where causality is broken in a layer that calls itself causal."""
        mask, call = group.mask, group.call
        if step.q_len == 1 or not call.causal or mask.kind == "none, causal":
            return []
        if self.context.has_custom_mask_mod and mask.kind != NO_MASK:
            return []  # a function of the user's own, which may well look ahead
        if mask.cells is None:
            return self._check_without_cells(step, group)
        heads, first = self._find_differing_heads(mask, None, frame)
        if first is None:
            return []
        case = self._make_case(step, group, first, _CAUSAL_SPEC, heads)
        case.difference.lost = 0
        case = replace(case, expected="a causal mask", pieces=0, segments=0)
        is_sure = mask.kind == NO_MASK or group.adds_bools
        blockwise = not is_sure and maskdiff.is_blockwise(case.difference, *first)
        if not blockwise:
            return [case]
        severity = Severity.WARNING if case.pattern == OPEN else Severity.NOTE
        return [replace(case, pattern=OTHER, severity=severity)]

    def _check_without_cells(self, step: StepRecord, group: LayerGroup) -> list[MaskCase]:
        """Return what is known without cells: with no mask every cell is open."""
        if group.mask.kind != NO_MASK or step.q_len * step.kv_after > 1 << 22:
            return []
        cells = np.ones((1, step.q_len, group.call.kv_len), np.bool_)
        group = replace(group, mask=replace(group.mask, cells=cells))
        return self._check_causality(step, group, call_frame(step, group.call))

    def _check_padding(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame
    ) -> list[MaskCase]:
        """Return which rows see keys of padding."""
        cells, real = group.mask.cells, self._unpadded
        assert cells is not None
        assert real is not None
        keys = ~slice_flags(real, frame.kv_offset, frame.n_keys)
        rows = slice_flags(real, frame.q_offset, step.q_len)
        if not keys.any() or not rows.any():
            return []
        closed = MaskSpec("no padding", (0,), (0,), (1 << 30,))
        heads, first = self._find_differing_heads(
            group.mask, closed, replace(frame, rows=rows, keys=keys)
        )
        if first is None:
            return []
        case = self._make_case(step, group, first, closed, heads)
        return [replace(case, id=MASK_PADDING)]

    # -- comparing -------------------------------------------------------------------------------

    def _find_differing_heads(
        self, mask: MaskRecord, spec: MaskSpec | None, frame: CellFrame
    ) -> tuple[tuple[int, ...], tuple[BoolArray, CellFrame] | None]:
        """Return the heads whose cells differ, and the cells and frame of the first of them.

        Without a rule what is asked is whether a row sees the future.
        """
        cells = mask.cells
        if cells is None:
            return (), None
        n_rows = max(mask.q_len, 1)
        if cells.shape[1] == 1 < n_rows:  # one row that is broadcast
            cells = np.broadcast_to(cells, (len(cells), n_rows, cells.shape[2]))
        key = (mask.fingerprint, spec, frame.q_offset, frame.kv_offset, frame.n_keys, frame.window)
        keep = n_rows > 1 and frame.rows is None and self._unpadded is None
        if keep and key in self._matching:
            return (), None
        heads, first = [], None
        for head in range(len(cells)):
            own = self._head_frame(mask, frame, head, n_rows)
            if _head_differs(cells[head], spec, own):
                heads.append(head)
                first = first or (cells[head], own)
        if keep and not heads:
            self._matching.add(key)
        return tuple(heads), first

    def _head_frame(self, mask: MaskRecord, frame: CellFrame, head: int, n_rows: int) -> CellFrame:
        """Return the frame of a head, without padding and rows that are averaged."""
        if self._unpadded is None and mask.averaged is None:
            return frame
        rows, keys = frame.rows, frame.keys
        if self._unpadded is not None and rows is None:
            rows = slice_flags(self._unpadded, frame.q_offset, n_rows)
            keys = slice_flags(self._unpadded, frame.kv_offset, frame.n_keys)
        if mask.averaged is not None:
            closed = np.broadcast_to(mask.averaged[min(head, len(mask.averaged) - 1)], n_rows)
            rows = ~closed if rows is None else rows & ~closed
        return replace(frame, rows=rows, keys=keys)

    def _make_case(
        self,
        step: StepRecord,
        group: LayerGroup,
        first: tuple[BoolArray, CellFrame],
        spec: MaskSpec,
        heads: tuple[int, ...],
    ) -> MaskCase:
        cells, frame = first
        found = maskdiff.find_difference(cells, spec, frame, self._parts)
        pattern, amount = maskdiff.classify_pattern(cells, spec, frame, found)
        earlier = None
        if pattern in (MOVED, OTHER) and step.q_len > 1:
            rules = [one for one in self._earlier_specs if one[1] != spec]
            same = (n for n, r in rules if not maskdiff.count_wrong_cells(cells, r, frame, limit=1))
            earlier = next(same, None)
        pieces, segments = count_pieces(self.context, found)
        n_heads = len(group.mask.cells) if group.mask.cells is not None else 1
        about = (pattern, amount, earlier, heads, n_heads, pieces, segments)
        return MaskCase(step, group, found, spec.name, False, *about)

    # -- telling ---------------------------------------------------------------------------------

    def _report_case(self, case: MaskCase) -> Finding:
        """Return the finding of a difference: under the id of an earlier one that it goes on with.

        A mask that leaks in the prompt leaks in generated rows too, whatever each step looks like.
        """
        found, place = case.difference, (case.step.branch, case.group.layers)
        sides = [side for side, n in (("leaks", found.leaked), ("loses", found.lost)) if n]
        news = [side for side in sides if (*place, side) not in self._reported]
        known = next((self._reported[(*place, s)] for s in sides if s not in news), None)
        finding_id = case_finding_id(case) if known is None else known
        if known is not None and news:
            found.leaked, finding_id = 0, MASK_LOST
        for side in news:
            self._reported[(*place, side)] = finding_id
        return self._finding(case, finding_id, case.severity or case_severity(case, finding_id))

    def _finding(self, case: MaskCase, finding_id: str, severity: Severity) -> Finding:
        found, group, step = case.difference, case.group, case.step
        words = padding_sentence if finding_id == MASK_PADDING else case_sentence
        positions = found.leaking_rows if found.leaked else found.losing_rows
        heads = case.heads if len(case.heads) < case.n_heads else ()
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=words(self.context, case, finding_id),
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=group.layers[0],
            head=heads[0] if heads else None,
            positions=tuple(positions[:MAX_LISTED_POSITIONS]),
            evidence=case_evidence(case),
            layers=group.layers if len(group.layers) > 1 else (),
            series="layers " + ", ".join(map(str, group.layers)),
        )


def _head_differs(cells: BoolArray, spec: MaskSpec | None, frame: CellFrame) -> bool:
    if spec is None:
        return maskdiff.has_future_keys(cells, frame)
    if len(cells) == 1 and frame.rows is None:
        return not maskdiff.row_matches_spec(cells[0], spec, frame) and bool(
            maskdiff.count_wrong_cells(cells, spec, frame, limit=1)
        )
    return maskdiff.count_wrong_cells(cells, spec, frame, limit=1) > 0
