"""The rule that compares executed masks with the declared mask, per layer, head and step.

It compares `MaskRecord.cells`, the cells that the kernel applied; the mask that the layer received
only explains the result. If no mask was declared, declared segments are assumed to be isolated
(their leaks are warnings), and layers that are causal are checked for causality. Layers that
executed the same mask share a finding, and repetitions at later steps are counted.

`position_ids` and `sliding_windows` use `count_pads_by_id` and `call_frame` of this module.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers, plural
from flexinspect.masks import algebra
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind, declared_tokenizer
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext, read_unpadded
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks import mask_difference
from flexinspect.rules.masks.mask_difference import (
    MOVED,
    OPEN,
    OTHER,
    WINDOW,
    CellFrame,
    SegmentParts,
)
from flexinspect.rules.masks.mask_findings import (
    BOOL_ADDED,
    LAYERS_DIFFER,
    MASK_FUTURE,
    MASK_LEAK,
    MASK_LOST,
    MASK_MERGED,
    MASK_NONE,
    MASK_NOT_APPLIED,
    MASK_PADDING,
    NO_MASK,
    LayerGroup,
    MaskCase,
    case_finding_id,
    case_sentence,
    count_pieces,
    describe_run,
    describe_where,
)
from flexinspect.rules.masks.mask_views import broadcast_rows, layers_of, slice_flags

_MAX_EARLIER_SPECS = 8
_MAX_MATCHING = 1024
_MAX_ASSUMED_CELLS = 1 << 22
"""Cells up to which a mask without recorded cells is made up and checked."""


class MasksRule(Rule):
    """Compares the executed cells with the declared mask.

    It needs cells, so at level basic it reports only causal layers without any mask.
    """

    name: ClassVar[str] = "masks"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    findings = finding_kinds(
        MASK_NOT_APPLIED,
        MASK_LEAK,
        MASK_LOST,
        MASK_NONE,
        MASK_FUTURE,
        BOOL_ADDED,
        MASK_MERGED,
        LAYERS_DIFFER,
        MASK_PADDING,
    )

    def __init__(self) -> None:
        self._earlier_specs: deque[tuple[int, MaskSpec]] = deque(maxlen=_MAX_EARLIER_SPECS)
        self._matching: set[tuple[object, ...]] = set()
        self._current_spec: tuple[int, MaskSpec] | None = None

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset what was reported, and keep the declared mask of the previous generation."""
        super().on_generation_start(context)
        previous, declared = self._current_spec, context.declared_mask
        if previous is not None and all(previous[1] != spec for _, spec in self._earlier_specs):
            self._earlier_specs.append(previous)
        self._current_spec = (
            None if declared is None else (context.generation.generation, declared.spec)
        )
        self._parts = segment_parts(context)
        self._unpadded, self._non_bos = unpadded_flags(context), non_bos_flags(context)
        self._paraphrase_flags = (
            paraphrase_flags(context) if declared is not None and declared.assumed else None
        )
        self._reported: dict[tuple[object, ...], str] = {}
        if len(self._matching) > _MAX_MATCHING:
            self._matching.clear()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return a finding for each way in which the masks of a step differ from the expected."""
        if step.kv_before == 0:
            real = read_unpadded(step)
            if real is not None:
                self._unpadded = None if real.all() else real
        groups = self._group_calls(step)
        cases = [case for group in groups for case in self._check_group(step, group)]
        findings = [self._report_case(case) for case in merge_cases(cases)]
        if len(groups) > 1 and not findings:
            return self._find_differing_layers(step, groups)
        return findings

    def _group_calls(self, step: StepRecord) -> list[LayerGroup]:
        """Return the known masks of a step with their layers.

        A layer that is not causal is compared only with a declared mask; calls that attend from
        other rows (cross attention) are left out.
        """
        by_mask: dict[tuple[object, ...], list[CallRecord]] = {}
        for call in step.calls:
            if call.q_len == step.q_len:
                by_mask.setdefault((call.mask, call.window, call.kv_len), []).append(call)
        groups: list[LayerGroup] = []
        n_layers = len({call.layer for call in step.calls}) if by_mask else 0
        is_declared = self.context.declared_spec is not None
        for calls in by_mask.values():
            mask = self.context.mask(calls[0].mask)
            if mask is not None and (calls[0].causal is not False or is_declared):
                add_group(groups, LayerGroup(mask, calls[0], layers_of(calls), n_layers))
        return groups if len(groups) < 2 else add_usual_paths(groups)

    # -- one mask --------------------------------------------------------------------------------

    def _check_group(self, step: StepRecord, group: LayerGroup) -> list[MaskCase]:
        declared, frame = self.context.declared_mask, call_frame(step, group.call)
        spec = self.context.declared_spec
        if spec is not None and group.mask.cells is not None:
            cases = self._check_declared(step, group, frame, spec)
        else:
            cases = self._check_causality(step, group, frame)
            only_notes = all(case.severity is Severity.NOTE for case in cases)
            if only_notes and self._paraphrase_flags is not None and declared is not None:
                cases = self._check_assumed(step, group, frame, declared.spec) or cases
        if not cases and self._unpadded is not None and group.mask.cells is not None:
            cases = self._check_padding(step, group, frame)
        return cases

    def _check_declared(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame, spec: MaskSpec
    ) -> list[MaskCase]:
        """Return how the cells differ from the declared mask."""
        heads, first = self._find_differing_heads(group.mask, spec, frame)
        if first is None:
            return []
        cells, head_frame = first
        unwindowed = replace(head_frame, window=None)
        if frame.window and not mask_difference.count_wrong_cells(cells, spec, unwindowed, limit=1):
            return []  # as declared; `mask.window-lost` reports that the layer's window is missing
        if self._differs_only_in_bos(group.mask, spec, frame):
            return []
        case = self._make_case(step, group, first, spec, heads)
        return [replace(case, expected=f"the declared mask ({spec.name})")]

    def _differs_only_in_bos(self, mask: MaskRecord, spec: MaskSpec, frame: CellFrame) -> bool:
        """Return whether the cells differ from a spec only in which rows see the BOS.

        Conventions differ, and nothing can leak through the BOS, which sees only itself.
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
        """Return where paraphrases see each other; nothing is assumed about other rows."""
        flags, cells = self._paraphrase_flags, group.mask.cells
        if flags is None or cells is None or frame.q_offset >= len(flags):
            return []  # nothing is assumed about generated rows
        rows = slice_flags(flags, frame.q_offset, step.q_len, fill=False)
        keys = slice_flags(flags, frame.kv_offset, frame.n_keys, fill=False)
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
        return [replace(case, assumed=True, expected="the isolation of the declared segments")]

    def _check_causality(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame
    ) -> list[MaskCase]:
        """Return where a causal layer sees the future."""
        mask, call = group.mask, group.call
        if step.q_len == 1 or not call.causal or mask.kind == "none, causal":
            return []
        if self.context.has_custom_mask_mod and mask.kind != NO_MASK:
            return []  # a mask function of the user may see the future on purpose
        if mask.cells is None:
            return self._check_without_cells(step, group)
        heads, first = self._find_differing_heads(mask, None, frame)
        if first is None:
            return []
        case = self._make_case(step, group, first, algebra.causal(), heads)
        case.difference.lost = 0
        case = replace(case, expected="a causal mask", pieces=0, segments=0)
        is_certain = mask.kind == NO_MASK or group.adds_bools
        if is_certain or not mask_difference.is_blockwise(case.difference, *first):
            return [case]
        severity = Severity.WARNING if case.pattern == OPEN else Severity.NOTE
        return [replace(case, pattern=OTHER, severity=severity)]

    def _check_without_cells(self, step: StepRecord, group: LayerGroup) -> list[MaskCase]:
        """Return the same without recorded cells: if there is no mask, every cell is open."""
        if group.mask.kind != NO_MASK or step.q_len * step.kv_after > _MAX_ASSUMED_CELLS:
            return []
        cells = np.ones((1, step.q_len, group.call.kv_len), np.bool_)
        group = replace(group, mask=replace(group.mask, cells=cells))
        return self._check_causality(step, group, call_frame(step, group.call))

    def _check_padding(
        self, step: StepRecord, group: LayerGroup, frame: CellFrame
    ) -> list[MaskCase]:
        """Return which rows see padding keys."""
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
        """Return the heads whose cells differ from a spec, and cells and frame of the first one.

        Without a spec, a head differs if any of its rows sees the future.
        """
        if mask.cells is None:
            return (), None
        n_rows = max(mask.q_len, 1)
        cells = broadcast_rows(mask.cells, n_rows)
        key = (mask.fingerprint, spec, frame.q_offset, frame.kv_offset, frame.n_keys, frame.window)
        is_cached = n_rows > 1 and frame.rows is None and self._unpadded is None
        if is_cached and key in self._matching:
            return (), None
        heads, first = [], None
        for head in range(len(cells)):
            head_frame = self._head_frame(mask, frame, head, n_rows)
            if _head_differs(cells[head], spec, head_frame):
                heads.append(head)
                first = first or (cells[head], head_frame)
        if is_cached and not heads:
            self._matching.add(key)
        return tuple(heads), first

    def _head_frame(self, mask: MaskRecord, frame: CellFrame, head: int, n_rows: int) -> CellFrame:
        """Return the frame of a head, without padding and without averaged rows."""
        if self._unpadded is None and mask.uniform_rows is None:
            return frame
        rows, keys = frame.rows, frame.keys
        if self._unpadded is not None and rows is None:
            rows = slice_flags(self._unpadded, frame.q_offset, n_rows)
            keys = slice_flags(self._unpadded, frame.kv_offset, frame.n_keys)
        if mask.uniform_rows is not None:
            averaged = np.broadcast_to(
                mask.uniform_rows[min(head, len(mask.uniform_rows) - 1)], n_rows
            )
            rows = ~averaged if rows is None else rows & ~averaged
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
        found = mask_difference.find_difference(cells, spec, frame, self._parts)
        pattern, amount = mask_difference.classify_pattern(cells, spec, frame, found)
        earlier = None
        if pattern in (MOVED, OTHER) and step.q_len > 1:
            earlier = self._find_earlier_generation(cells, spec, frame)
        pieces, segments = count_pieces(self.context, found)
        return MaskCase(
            step,
            group,
            found,
            expected=spec.name,
            pattern=pattern,
            amount=amount,
            earlier_generation=earlier,
            heads=heads,
            n_heads=len(group.mask.cells) if group.mask.cells is not None else 1,
            pieces=pieces,
            segments=segments,
        )

    def _find_earlier_generation(
        self, cells: BoolArray, spec: MaskSpec, frame: CellFrame
    ) -> int | None:
        """Return an earlier generation whose mask the cells are, or None."""
        for generation, earlier in self._earlier_specs:
            if earlier != spec and not mask_difference.count_wrong_cells(
                cells, earlier, frame, limit=1
            ):
                return generation
        return None

    # -- findings --------------------------------------------------------------------------------

    def _report_case(self, case: MaskCase) -> Finding:
        """Return the finding of a case, under the id of an earlier one of the same layers.

        A mask that leaks in the prompt leaks in generated rows too, whatever each step looks like.
        """
        found, place = case.difference, (case.step.branch, case.group.layers)
        sides = [side for side, n in (("leaks", found.leaked), ("loses", found.lost)) if n]
        new = [side for side in sides if (*place, side) not in self._reported]
        known = next((self._reported[(*place, s)] for s in sides if s not in new), None)
        finding_id = case_finding_id(case) if known is None else known
        if known is not None and new:
            found.leaked, finding_id = 0, MASK_LOST
        for side in new:
            self._reported[(*place, side)] = finding_id
        return self._finding(case, finding_id, case.severity or case_severity(case, finding_id))

    def _finding(self, case: MaskCase, finding_id: str, severity: Severity) -> Finding:
        found, heads = case.difference, case.heads
        return self.finding(
            case.step,
            finding_id,
            case_sentence(self.context, case, finding_id),
            severity=severity,
            layers=case.group.layers,
            head=heads[0] if heads and len(heads) < case.n_heads else None,
            positions=found.leaking_rows if found.leaked else found.losing_rows,
            evidence=case_evidence(case),
            series="layers " + ", ".join(map(str, case.group.layers)),
        )

    # -- layers that differ ----------------------------------------------------------------------

    def _find_differing_layers(
        self, step: StepRecord, groups: Sequence[LayerGroup]
    ) -> list[Finding]:
        """Return a finding for layers that ran another mask than most layers of their kind.

        Layers of one kind have the same window and the same number of keys.
        """
        kinds: dict[tuple[int | None, int], list[list[LayerGroup]]] = {}
        for group in groups:
            if group.mask.cells is None:
                continue
            classes = kinds.setdefault((group.call.window, group.call.kv_len), [])
            for known in classes:
                if not self._differing_cells(known[0].mask, group.mask, step).any():
                    known.append(group)
                    break
            else:
                classes.append([group])
        findings = []
        for classes in kinds.values():
            norm = max(classes, key=_norm_rank)
            findings += [
                self._layers_differ_finding(step, norm, odd) for odd in classes if odd is not norm
            ]
        return findings

    def _differing_cells(self, a: MaskRecord, b: MaskRecord, step: StepRecord) -> BoolArray:
        """Return where masks differ, bool (heads, rows, keys), except in padded or averaged rows.

        Masks of shapes that cannot be compared count as equal.
        """
        assert a.cells is not None
        assert b.cells is not None
        n_heads = max(len(a.cells), len(b.cells))
        has_same_heads = {len(a.cells), len(b.cells)} <= {1, n_heads}
        if a.cells.shape[1:] != b.cells.shape[1:] or not has_same_heads:
            return np.zeros((1, 1, 1), np.bool_)
        rows = np.ones((1, a.cells.shape[1]), np.bool_)
        if self._unpadded is not None:
            rows &= slice_flags(self._unpadded, step.kv_before, rows.shape[1])
        for mask in (a, b):
            if mask.uniform_rows is not None:
                rows = rows & ~mask.uniform_rows
        differing: BoolArray = (a.cells ^ b.cells) & rows[..., None]
        return differing

    def _layers_differ_finding(
        self, step: StepRecord, norm: Sequence[LayerGroup], odd: Sequence[LayerGroup]
    ) -> Finding:
        layers, others = (
            tuple(sorted(layer for group in groups for layer in group.layers))
            for groups in (odd, norm)
        )
        first, n_layers = odd[0], odd[0].n_layers
        cells = self._differing_cells(norm[0].mask, first.mask, step)
        head, row, key = (int(n) for n in np.argwhere(cells)[0])
        assert first.mask.cells is not None
        opens = bool(first.mask.cells[min(head, len(first.mask.cells) - 1), row, key])
        q_idx = step.kv_before + row
        kv_idx = max(step.kv_after - first.call.kv_len, 0) + key
        n_cells = int(np.count_nonzero(cells.any(axis=0)))
        sentence = (
            f"{describe_where(replace(first, layers=layers))} ran {describe_run(first)}, and "
            f"{format_layers(others, n_layers)} ran {describe_run(norm[0])}: "
            f"{plural(n_cells, 'cell')} {'differs' if n_cells == 1 else 'differ'}, "
            f"{'' if n_cells == 1 else 'first: '}{self.context.format_position(q_idx)} "
            f"{'sees' if opens else 'does not see'} {self.context.format_position(kv_idx)}, unlike "
            f"in {format_layers(others, n_layers)}."
        )
        # The path rule reports a fallback, and several layers are likely a kind by design.
        is_kind = len(layers) > 1 and len(layers) >= _MIN_KIND_SHARE * n_layers
        return self.finding(
            step,
            LAYERS_DIFFER,
            sentence,
            severity=Severity.NOTE if first.is_fallback or is_kind else None,
            layers=layers,
            positions=(q_idx, kv_idx),
            evidence={
                "mask": first.mask.fingerprint,
                "others": norm[0].mask.fingerprint,
                "cells": n_cells,
                "layers": list(layers),
                "path": first.call.path,
                "path_of_others": norm[0].call.path,
                "suppressed_exception": first.call.suppressed_exception,
            },
            series="layers " + ", ".join(map(str, layers)),
        )


def _head_differs(cells: BoolArray, spec: MaskSpec | None, frame: CellFrame) -> bool:
    if spec is None:
        return mask_difference.has_future_keys(cells, frame)
    if (
        len(cells) == 1
        and frame.rows is None
        and mask_difference.row_matches_spec(cells[0], spec, frame)
    ):
        return False
    return mask_difference.count_wrong_cells(cells, spec, frame, limit=1) > 0


_MIN_KIND_SHARE = 0.2
"""At least this share of the layers (and two of them) may be a kind of layer by design."""


def _norm_rank(groups: Sequence[LayerGroup]) -> tuple[int, bool, int]:
    """Return a sort key for the norm: most layers, then no fallback, then the first layer."""
    n_layers = sum(len(group.layers) for group in groups)
    first = min(group.layers[0] for group in groups)
    return n_layers, not any(group.is_fallback for group in groups), -first


def call_frame(step: StepRecord, call: CallRecord) -> CellFrame:
    """Return the frame of a call. A sliding cache has dropped the keys before `kv_offset`."""
    kv_offset = max(step.kv_after - call.kv_len, 0)
    return CellFrame(step.kv_before, kv_offset, min(call.kv_len, step.kv_after), call.window)


def add_group(groups: list[LayerGroup], new: LayerGroup) -> None:
    """Add a group, or add its layers to a group that executed the same cells.

    Layers that each build their own mask have different fingerprints for equal cells.
    """
    for number, known in enumerate(groups):
        if _ran_same_mask(known, new):
            both = tuple(sorted({*known.layers, *new.layers}))
            groups[number] = replace(known, layers=both)
            return
    groups.append(new)


def merge_cases(cases: Sequence[MaskCase]) -> list[MaskCase]:
    """Return cases with those merged that are the same fault in layers of different kinds."""
    merged: dict[tuple[object, ...], MaskCase] = {}
    for case in cases:
        group = case.group
        run = (group.mask.kind, group.call.path, group.call.suppressed_exception)
        key = (case_finding_id(case), case.assumed, case.pattern, case.heads, *run)
        known = merged.setdefault(key, case)
        if known is case:
            continue
        counts = [each.difference.leaked + each.difference.lost for each in (known, case)]
        larger = known if counts[0] >= counts[1] else case
        layers = tuple(sorted({*known.group.layers, *group.layers}))
        varies = known.varies or counts[0] != counts[1]
        merged[key] = replace(larger, group=replace(larger.group, layers=layers), varies=varies)
    return list(merged.values())


def _ran_same_mask(a: LayerGroup, b: LayerGroup) -> bool:
    if _run_key(a) != _run_key(b):
        return False
    if a.mask.cells is None or b.mask.cells is None:
        return a.mask.cells is b.mask.cells and a.mask.kind == NO_MASK
    if not np.array_equal(a.mask.cells, b.mask.cells):
        return False
    if a.mask.uniform_rows is None or b.mask.uniform_rows is None:
        return a.mask.uniform_rows is b.mask.uniform_rows
    return np.array_equal(a.mask.uniform_rows, b.mask.uniform_rows)


def _run_key(group: LayerGroup) -> tuple[object, ...]:
    call = group.call
    return group.mask.kind, call.path, call.window, call.kv_len, call.suppressed_exception


def add_usual_paths(groups: list[LayerGroup]) -> list[LayerGroup]:
    """Return groups with `usual_path`, the path of most layers, set where theirs is another."""
    paths = Counter[str]()
    for group in groups:
        paths[group.call.path] += len(group.layers)
    if len(paths) == 1:
        return groups
    most = max(paths, key=lambda path: (paths[path], path.startswith("flex")))
    return [replace(g, usual_path=most if g.call.path != most else "") for g in groups]


def unpadded_flags(context: RuleContext) -> BoolArray | None:
    """Return which prompt positions are not padding, bool (n_prompt,); None without padding."""
    first = context.segments[0] if context.segments else None
    has_padding = first is not None and first.label == "padding"
    n_pads = first.stop if first is not None and has_padding else count_pads_by_id(context)
    return np.arange(context.n_prompt) >= n_pads if n_pads else None


def count_pads_by_id(context: RuleContext) -> int:
    """Return how many padding tokens a prompt begins with, by their ids.

    A single one does not count: some models begin every text with the pad token.
    """
    tokenizer = declared_tokenizer(context.generation.declared)
    if tokenizer.pad is None or tokenizer.pad in (tokenizer.bos, *tokenizer.eos):
        return 0
    n = 0
    while (token := context.token(n)) is not None and token.token_id == tokenizer.pad:
        n += 1
    return n if 1 < n < context.n_prompt else 0


def non_bos_flags(context: RuleContext) -> BoolArray | None:
    """Return which prompt positions are not the BOS at its beginning, None without a BOS."""
    first = context.segments[0] if context.segments else None
    start = first.stop if first is not None and first.label == "padding" else 0
    token, bos = context.token(start), declared_tokenizer(context.generation.declared).bos
    segment = context.segment_at(start)
    is_declared = segment is not None and segment.kind is SegmentKind.BOS
    if not is_declared and (token is None or bos is None or token.token_id != bos):
        return None
    others: BoolArray = np.arange(max(context.n_prompt, start + 1)) != start
    return others


def segment_parts(context: RuleContext) -> SegmentParts:
    """Return the segments of the context, of which paraphrases should be isolated."""
    segments = context.segments
    starts = np.array([segment.start for segment in segments] or [0])
    is_isolated = [segment.kind is SegmentKind.PARAPHRASE for segment in segments] or [False]
    return SegmentParts(starts, np.array(is_isolated))


def paraphrase_flags(context: RuleContext) -> BoolArray:
    """Return which prompt positions belong to paraphrases, bool (n_prompt,)."""
    flags = np.zeros(context.n_prompt, np.bool_)
    for segment in context.segments:
        if segment.kind is SegmentKind.PARAPHRASE:
            flags[segment.start : segment.stop] = True
    return flags


def case_severity(case: MaskCase, finding_id: str) -> Severity:
    """Return the severity of a case: at most a warning if no mask was declared."""
    found = case.difference
    if case.assumed:
        return Severity.WARNING
    is_row_0 = finding_id == MASK_LOST and case.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != WINDOW and found.last_keys == [0]:
        return Severity.NOTE  # a decode row masked as row 0, which `decode.no-offset` reports
    return Severity.ERROR


def case_evidence(case: MaskCase) -> dict[str, Any]:
    """Return the evidence of a case."""
    found, mask, call = case.difference, case.group.mask, case.group.call
    facts: dict[str, Any] = {
        "mask": mask.fingerprint,
        "kind": mask.kind,
        "mask_mod": mask.mask_mod,
        "path": call.path,
        "backend": call.backend,
        "meant": case.expected,
        "open": found.n_open,
        "meant_open": found.n_expected,
        "leaked": found.leaked,
        "lost": found.lost,
        "future": found.future,
        "first_leaked": found.first_leaked,
        "first_across": found.first_across,
        "first_lost": found.first_lost,
        "pattern": case.pattern,
        "heads": list(case.heads),
    }
    extra = {
        "amount": case.amount or None,
        "earlier": case.earlier_generation,
        "suppressed_exception": call.suppressed_exception,
    }
    if case.segments > 1:
        extra |= {"pieces": case.pieces, "segments": case.segments}
    return facts | {name: fact for name, fact in extra.items() if fact is not None}
