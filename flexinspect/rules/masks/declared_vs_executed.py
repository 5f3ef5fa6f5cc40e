"""The rules that compare executed masks with the declared mask, and with the layer's own window.

They compare `MaskRecord.cells`, the cells that the kernel applied; the mask that the layer received
only explains the result. If no mask was declared, declared segments are assumed to be isolated
(their leaks are warnings), and layers that are causal are checked for causality. Layers that
executed the same mask share a finding, and repetitions at later steps are counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from flexinspect.core.text import format_layers, plural
from flexinspect.masks import algebra
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind, declared_tokenizer
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers, read_unpadded
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks import mask_difference, mask_findings
from flexinspect.rules.masks.mask_difference import CellFrame, SegmentParts
from flexinspect.rules.masks.mask_findings import NO_MASK, LayerGroup, MaskCase
from flexinspect.rules.masks.mask_views import broadcast_rows, layers_of, slice_flags

_MAX_EARLIER_SPECS = 8
_MAX_MATCHING = 1024
_MAX_ASSUMED_CELLS = 1 << 22
"""Cells up to which a mask without recorded cells is made up and checked."""


class MasksRule(Rule):
    """Compares the executed cells with the declared mask.

    It needs cells, so at level basic it reports only causal layers without any mask.
    """

    name = "masks"
    streams = ("inputs.mask",)
    findings = finding_kinds(
        "mask.not-applied",
        "mask.leak",
        "mask.lost",
        "mask.none",
        "mask.future",
        "mask.bool-added",
        "mask.merged",
        "mask.layers-differ",
        "mask.padding",
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
        segments, rows = context.segments, np.arange(context.n_prompt)
        starts = np.array([segment.start for segment in segments] or [0])
        is_isolated = [segment.kind is SegmentKind.PARAPHRASE for segment in segments] or [False]
        self._parts = SegmentParts(starts, np.array(is_isolated))
        n_pads = count_pads(context)
        self._unpadded = rows >= n_pads if n_pads else None
        """Which prompt positions are not padding, bool (n_prompt,); None without padding."""
        self._non_bos = _non_bos_flags(context)
        self._paraphrase_flags: BoolArray | None = None  # which are assumed to be isolated
        if declared is not None and declared.assumed:
            spans = [(s.start, s.stop) for s in segments if s.kind is SegmentKind.PARAPHRASE]
            inside = [(rows >= start) & (rows < stop) for start, stop in spans]
            self._paraphrase_flags = np.logical_or.reduce(inside)
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
        cases = [case for group in groups if (case := self._check_group(group)) is not None]
        findings = [self._report_case(case) for case in _merge_cases(cases)]
        if len(groups) > 1 and not findings:
            return self._find_differing_layers(step, groups)
        return findings

    def _group_calls(self, step: StepRecord) -> list[LayerGroup]:
        """Return the known masks of a step with their layers."""
        # A layer that is not causal is compared only with a declared mask; calls that attend from
        # other rows (cross attention) are left out.
        by_mask: dict[tuple[object, ...], list[CallRecord]] = {}
        for call in step.calls:
            if call.q_len == step.q_len:
                by_mask.setdefault((call.mask, call.window, call.kv_len), []).append(call)
        groups: list[LayerGroup] = []
        is_declared = self.context.declared_spec is not None
        for calls in by_mask.values():
            mask = self.context.mask(calls[0].mask)
            if mask is not None and (calls[0].causal is not False or is_declared):
                _add_group(groups, LayerGroup(step, mask, calls[0], layers_of(calls)))
        if len(groups) < 2:
            return groups
        paths = Counter(group.call.path for group in groups for _ in group.layers)
        most = max(paths, key=lambda path: (paths[path], path.startswith("flex")))
        return [replace(g, usual_path=most if g.call.path != most else "") for g in groups]

    def _check_group(self, group: LayerGroup) -> MaskCase | None:
        declared, spec = self.context.declared_mask, self.context.declared_spec
        has_cells = group.mask.cells is not None
        if spec is not None and has_cells:
            case = self._check_declared(group, spec)
        else:
            case = self._check_causality(group)
            is_fault = case is not None and case.severity is not Severity.NOTE
            if not is_fault and self._paraphrase_flags is not None and declared is not None:
                case = self._check_assumed(group, declared.spec, self._paraphrase_flags) or case
        if case is None and self._unpadded is not None and has_cells:
            return self._check_padding(group, self._unpadded)
        return case

    def _check_declared(self, group: LayerGroup, spec: MaskSpec) -> MaskCase | None:
        """Return how the cells differ from the declared mask."""
        frame = call_frame(group.step, group.call)
        heads, first = self._find_differing_heads(group.mask, spec, frame)
        if first is None:
            return None
        cells, head_frame = first
        unwindowed = replace(head_frame, window=None)
        if frame.window and not mask_difference.count_wrong_cells(cells, spec, unwindowed, limit=1):
            return (
                None  # as declared; `mask.window-lost` reports that the layer's window is missing
            )
        if self._differs_only_in_bos(group.mask, spec, frame):
            return None
        case = self._make_case(group, first, spec, heads)
        return replace(case, expected=f"the declared mask ({spec.name})")

    def _differs_only_in_bos(self, mask: MaskRecord, spec: MaskSpec, frame: CellFrame) -> bool:
        """Return whether the cells differ from a spec only in which rows see the BOS."""
        # Conventions differ, and nothing can leak through the BOS, which sees only itself.
        if self._non_bos is None or spec.name == "causal":
            return False
        keys = slice_flags(self._non_bos, frame.kv_offset, frame.n_keys)
        rows = np.ones(max(mask.q_len, 1), np.bool_)
        if self._unpadded is not None:
            keys = keys & slice_flags(self._unpadded, frame.kv_offset, frame.n_keys)
            rows = slice_flags(self._unpadded, frame.q_offset, len(rows))
        others = replace(frame, rows=rows, keys=keys)
        return self._find_differing_heads(mask, spec, others)[1] is None

    def _check_assumed(
        self, group: LayerGroup, spec: MaskSpec, flags: BoolArray
    ) -> MaskCase | None:
        """Return where paraphrases see each other; nothing is assumed about other rows."""
        frame = call_frame(group.step, group.call)
        if group.mask.cells is None or frame.q_offset >= len(flags):
            return None  # nothing is assumed about generated rows
        rows = slice_flags(flags, frame.q_offset, group.step.q_len, fill=False)
        keys = slice_flags(flags, frame.kv_offset, frame.n_keys, fill=False)
        inside = replace(frame, rows=rows, keys=keys)
        heads, first = self._find_differing_heads(group.mask, spec, inside)
        if first is None:
            return None
        case = self._make_case(group, first, spec, heads)
        leaked = case.found.leaked_by_pair
        across = {pair: n for pair, n in leaked.items() if pair[0] != pair[1]}
        case.found.leaked_by_pair, case.found.lost = across, 0
        expected = "the isolation of the declared segments"
        return replace(case, assumed=True, expected=expected) if across else None

    def _check_causality(self, group: LayerGroup) -> MaskCase | None:
        """Return where a causal layer sees the future."""
        step, mask, call = group.step, group.mask, group.call
        if step.q_len == 1 or not call.causal or mask.kind == "none, causal":
            return None
        if mask.kind != NO_MASK and self.context.has_custom_mask_mod:
            return None  # a mask function of the user may see the future on purpose
        if mask.cells is None:
            if mask.kind != NO_MASK or step.q_len * step.kv_after > _MAX_ASSUMED_CELLS:
                return None
            # Without a mask, every cell is open.
            mask = replace(mask, cells=np.ones((1, step.q_len, call.kv_len), np.bool_))
            group = replace(group, mask=mask)
        heads, first = self._find_differing_heads(mask, None, call_frame(step, call))
        if first is None:
            return None
        case = self._make_case(group, first, algebra.causal(), heads)
        case.found.lost = 0
        case = replace(case, expected="a causal mask", pieces=0, segments=0)
        is_certain = mask.kind == NO_MASK or group.adds_bools
        if is_certain or not mask_difference.is_blockwise(case.found, *first):
            return case
        is_open = case.pattern == mask_difference.OPEN
        severity = Severity.WARNING if is_open else Severity.NOTE
        return replace(case, pattern=mask_difference.OTHER, severity=severity)

    def _check_padding(self, group: LayerGroup, real: BoolArray) -> MaskCase | None:
        """Return which rows see padding keys."""
        frame = call_frame(group.step, group.call)
        keys = ~slice_flags(real, frame.kv_offset, frame.n_keys)
        rows = slice_flags(real, frame.q_offset, group.step.q_len)
        if not keys.any() or not rows.any():
            return None
        closed = MaskSpec("no padding", (0,), (0,), (1 << 30,))
        padding = replace(frame, rows=rows, keys=keys)
        heads, first = self._find_differing_heads(group.mask, closed, padding)
        if first is None:
            return None
        return replace(self._make_case(group, first, closed, heads), id="mask.padding")

    def _find_differing_heads(
        self, mask: MaskRecord, spec: MaskSpec | None, frame: CellFrame
    ) -> tuple[tuple[int, ...], tuple[BoolArray, CellFrame] | None]:
        """Return the heads whose cells differ from a spec, and cells and frame of the first one."""
        # Without a spec, a head differs if any of its rows sees the future.
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
            of_head = mask.uniform_rows[min(head, len(mask.uniform_rows) - 1)]
            averaged = np.broadcast_to(of_head, n_rows)
            rows = ~averaged if rows is None else rows & ~averaged
        return replace(frame, rows=rows, keys=keys)

    def _make_case(
        self,
        group: LayerGroup,
        first: tuple[BoolArray, CellFrame],
        spec: MaskSpec,
        heads: tuple[int, ...],
    ) -> MaskCase:
        cells, frame = first
        found = mask_difference.find_difference(cells, spec, frame, self._parts)
        pattern, amount = mask_difference.classify_pattern(cells, spec, frame, found)
        earlier = None
        if pattern in (mask_difference.MOVED, mask_difference.OTHER) and group.step.q_len > 1:
            for generation, other in self._earlier_specs:
                count_wrong = mask_difference.count_wrong_cells
                if other != spec and not count_wrong(cells, other, frame, limit=1):
                    earlier = generation
                    break
        pieces, segments = mask_findings.count_pieces(self.context, found)
        return MaskCase(
            self.context,
            group,
            found,
            expected=spec.name,
            pattern=pattern,
            amount=amount,
            earlier_generation=earlier,
            heads=heads,
            pieces=pieces,
            segments=segments,
        )

    def _report_case(self, case: MaskCase) -> Finding:
        """Return the finding of a case, under the id of an earlier one of the same layers."""
        # A mask that leaks in the prompt leaks in generated rows too, whatever each step looks
        # like.
        found, layers = case.found, case.group.layers
        step = case.group.step
        place = step.branch, layers
        sides = [side for side, n in (("leaks", found.leaked), ("loses", found.lost)) if n]
        new = [side for side in sides if (*place, side) not in self._reported]
        known = next((self._reported[(*place, s)] for s in sides if s not in new), None)
        finding_id = case.finding_id if known is None else known
        if known is not None and new:
            found.leaked, finding_id = 0, "mask.lost"
        for side in new:
            self._reported[(*place, side)] = finding_id
        return self.finding(
            step,
            finding_id,
            case.describe(finding_id),
            severity=case.severity or _case_severity(case, finding_id),
            layers=layers,
            head=case.heads[0] if case.heads and len(case.heads) < case.group.n_heads else None,
            positions=found.leaking_rows if found.leaked else found.losing_rows,
            evidence=_case_evidence(case),
            series="layers " + ", ".join(map(str, layers)),
        )

    def _find_differing_layers(self, step: StepRecord, groups: list[LayerGroup]) -> list[Finding]:
        """Return a finding for layers that ran another mask than most layers of their kind."""
        # Layers of one kind have the same window and the same number of keys.
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
        return [
            self._layers_differ_finding(step, norm, odd)
            for classes in kinds.values()
            for norm in [max(classes, key=_norm_rank)]
            for odd in classes
            if odd is not norm
        ]

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
        differ = "differs, " if n_cells == 1 else "differ, first: "
        sentence = (
            f"{replace(first, layers=layers).describe_where()} ran {first.describe_run()}, and "
            f"{format_layers(others, n_layers)} ran {norm[0].describe_run()}: "
            f"{plural(n_cells, 'cell')} {differ}{self.context.format_position(q_idx)} "
            f"{'sees' if opens else 'does not see'} {self.context.format_position(kv_idx)}, unlike "
            f"in {format_layers(others, n_layers)}."
        )
        # The path rule reports a fallback, and several layers are likely a kind by design.
        is_kind = len(layers) > 1 and len(layers) >= _MIN_KIND_SHARE * n_layers
        return self.finding(
            step,
            "mask.layers-differ",
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
    is_whole_row = len(cells) == 1 and frame.rows is None
    if is_whole_row and mask_difference.row_matches_spec(cells[0], spec, frame):
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


def _add_group(groups: list[LayerGroup], new: LayerGroup) -> None:
    """Add a group, or add its layers to a group that executed the same cells."""
    # Layers that each build their own mask have different fingerprints for equal cells.
    for number, known in enumerate(groups):
        if _ran_same_mask(known, new):
            both = tuple(sorted({*known.layers, *new.layers}))
            groups[number] = replace(known, layers=both)
            return
    groups.append(new)


def _merge_cases(cases: Sequence[MaskCase]) -> list[MaskCase]:
    """Return cases with those merged that are the same fault in layers of different kinds."""
    merged: dict[tuple[object, ...], MaskCase] = {}
    for case in cases:
        group = case.group
        run = (group.mask.kind, group.call.path, group.call.suppressed_exception)
        key = (case.finding_id, case.assumed, case.pattern, case.heads, *run)
        known = merged.setdefault(key, case)
        if known is case:
            continue
        counts = [each.found.leaked + each.found.lost for each in (known, case)]
        larger = known if counts[0] >= counts[1] else case
        layers = tuple(sorted({*known.group.layers, *group.layers}))
        varies = known.varies or counts[0] != counts[1]
        merged[key] = replace(larger, group=replace(larger.group, layers=layers), varies=varies)
    return list(merged.values())


def _ran_same_mask(a: LayerGroup, b: LayerGroup) -> bool:
    one, other = (
        (g.mask.kind, g.call.path, g.call.window, g.call.kv_len, g.call.suppressed_exception)
        for g in (a, b)
    )
    if one != other:
        return False
    if a.mask.cells is None or b.mask.cells is None:
        return a.mask.cells is b.mask.cells and a.mask.kind == NO_MASK
    if not np.array_equal(a.mask.cells, b.mask.cells):
        return False
    if a.mask.uniform_rows is None or b.mask.uniform_rows is None:
        return a.mask.uniform_rows is b.mask.uniform_rows
    return np.array_equal(a.mask.uniform_rows, b.mask.uniform_rows)


def count_pads(context: RuleContext) -> int:
    """Return how many padding tokens a prompt begins with, by its first segment or their ids."""
    first = context.segments[0] if context.segments else None
    if first is not None and first.label == "padding":
        return first.stop
    tokenizer = declared_tokenizer(context.generation.declared)
    if tokenizer.pad is None or tokenizer.pad in (tokenizer.bos, *tokenizer.eos):
        return 0
    n = 0
    while (token := context.token(n)) is not None and token.token_id == tokenizer.pad:
        n += 1
    # A single one does not count: some models begin every text with the pad token.
    return n if 1 < n < context.n_prompt else 0


def _non_bos_flags(context: RuleContext) -> BoolArray | None:
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


def _case_severity(case: MaskCase, finding_id: str) -> Severity:
    """Return the severity of a case: at most a warning if no mask was declared."""
    found = case.found
    if case.assumed:
        return Severity.WARNING
    is_row_0 = finding_id == "mask.lost" and case.group.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != mask_difference.WINDOW and found.last_keys == [0]:
        return Severity.NOTE  # a decode row masked as row 0, which `decode.no-offset` reports
    return Severity.ERROR


def _case_evidence(case: MaskCase) -> dict[str, Any]:
    found, mask, call = case.found, case.group.mask, case.group.call
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
    if case.amount:
        facts["amount"] = case.amount
    if case.earlier_generation is not None:
        facts["earlier"] = case.earlier_generation
    if call.suppressed_exception is not None:
        facts["suppressed_exception"] = call.suppressed_exception
    if case.segments > 1:
        facts |= {"pieces": case.pieces, "segments": case.segments}
    return facts


class SlidingWindowRule(Rule):
    """Compares the executed mask of a layer with the sliding window that the layer declares.

    A custom mask or attention function replaces the model's own, including its window. On texts
    shorter than the window nothing differs.
    """

    name = "windows"
    findings = finding_kinds("mask.window-lost")

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return a finding for each window with rows that see the first key outside of it."""
        wide: dict[int, tuple[list[int], list[CallRecord]]] = {}
        checked: dict[tuple[Any, ...], list[int]] = {}
        for call in step.calls:
            window = call.window
            if window is None or call.causal is False or step.kv_after <= window:
                continue
            key = (call.mask, window, call.kv_len, call.q_len)
            if key not in checked:
                checked[key] = self._rows_beyond_window(step, call, window)
            if checked[key]:
                wide.setdefault(window, (checked[key], []))[1].append(call)
        for window, (rows, calls) in wide.items():
            yield self._window_finding(step, window, calls, rows)

    def _rows_beyond_window(self, step: StepRecord, call: CallRecord, window: int) -> list[int]:
        """Return the positions of rows that see the first key outside of the window."""
        mask, frame = self.context.mask(call.mask), call_frame(step, call)
        if mask is None or mask.cells is None or call.q_len != step.q_len:
            return []
        cells = mask.cells
        if call.q_len == 1:  # the whole cost of a decode step without findings
            key = frame.q_offset - window - frame.kv_offset
            is_inside = 0 <= key < cells.shape[2] and mask.uniform_rows is None
            return [frame.q_offset] if is_inside and cells[:, -1, key].any() else []
        rows = np.arange(call.q_len)
        keys = frame.q_offset + rows - window - frame.kv_offset
        inside = (keys >= 0) & (keys < cells.shape[2])
        rows, keys = rows[inside], keys[inside]
        cell_rows = np.minimum(rows, cells.shape[1] - 1)
        is_open = cells[:, cell_rows, keys].any(axis=0)
        if mask.uniform_rows is not None:
            is_open &= ~mask.uniform_rows[:, cell_rows].any(axis=0)
        return [int(pos) for pos in frame.q_offset + rows[is_open]]

    def _window_finding(
        self, step: StepRecord, window: int, calls: Sequence[CallRecord], rows: Sequence[int]
    ) -> Finding:
        layers = layers_of(calls)
        sentence = (
            f"The sliding window of {format_step_layers(layers, step)} holds "
            f"{plural(window, 'key')}, but in step {step.step} {plural(len(rows), 'row')} "
            f"{'sees' if len(rows) == 1 else 'see'} keys beyond it; first: "
            f"{self.context.format_position(rows[0])} sees "
            f"{self.context.format_position(rows[0] - window)}."
        )
        return self.finding(
            step,
            "mask.window-lost",
            sentence,
            layers=layers,
            positions=rows,
            evidence={"window": window, "rows": len(rows), "path": calls[0].path},
            series="mask.window-lost",
        )
