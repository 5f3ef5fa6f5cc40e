"""The rules that compare executed masks with the declared mask, and with the layer's own window.

They compare the cells that the kernel applied. If no mask was declared, declared segments are
assumed to be isolated (their leaks are warnings), and causal layers are checked for causality.
Layers that executed the same mask share a finding.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from flexinspect.core.text import plural, printable
from flexinspect.masks import mask_presets
from flexinspect.masks.attention_row import recorded_check
from flexinspect.masks.mask_presets import BoolArray, MaskSpec
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind, declared_tokenizer
from flexinspect.records.step import OWN_FUNCTION, CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers, read_unpadded
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_findings, mask_views
from flexinspect.rules.masks.mask_findings import NO_MASK, CellFrame, LayerGroup, MaskCase
from flexinspect.rules.masks.mask_views import broadcast_rows, layers_of, slice_flags
from flexinspect.rules.numerics.audit_findings import SCORE_MOD_EVENT

FORWARD_ERROR_EVENT = "error"  # a forward raised, with the exception as its text

_MAX_EARLIER_SPECS = 8
_MAX_MATCHING = 1024
_MAX_ASSUMED_CELLS = 1 << 22  # up to this many, a mask without recorded cells is made up


class _DifferingHeads(NamedTuple):
    """The heads that differ from a mask, and the cells of the first one."""

    heads: tuple[int, ...]
    frame: CellFrame


class MasksRule(Rule):
    """Compares the executed cells with the declared mask.

    It needs cells, so at level basic it reports only causal layers without any mask.
    """

    name = "masks"
    needs = (imported.MASKS,)
    streams = ("inputs.mask",)
    findings = finding_kinds(
        *("mask.not-applied", "mask.leak", "mask.lost", "mask.none", "mask.future"),
        *("mask.bool-added", "mask.merged", "mask.layers-differ", "mask.padding"),
        "mask.unchecked",
    )

    def __init__(self) -> None:
        self._earlier_specs: deque[tuple[int, MaskSpec]] = deque(maxlen=_MAX_EARLIER_SPECS)
        self._matching: set[tuple[object, ...]] = set()
        self._current_spec: tuple[int, MaskSpec] | None = None
        self._raised: tuple[int, str] | None = None  # the last generation whose forward raised

    def reset(self) -> None:
        """Reset what was reported, and keep the declared mask of the previous generation."""
        previous, declared = self._current_spec, self.context.declared_mask
        if previous is not None and all(previous[1] != spec for _, spec in self._earlier_specs):
            self._earlier_specs.append(previous)
        self._current_spec = declared and (self.context.generation.generation, declared.spec)
        n_pads = count_pads(self.context)
        self._unpadded = np.arange(self.context.n_prompt) >= n_pads if n_pads else None
        """Which prompt positions are not padding, bool (n_prompt,); None without padding."""
        self._non_bos = _non_bos_flags(self.context)
        self._paraphrase_flags: BoolArray | None = None  # which are assumed to be isolated
        if declared is not None and declared.assumed:
            self._paraphrase_flags = np.zeros(self.context.n_prompt, np.bool_)
            for segment in mask_views.paraphrase_segments(self.context.segments):
                self._paraphrase_flags[segment.start : segment.stop] = True
        self._reported: dict[tuple[object, ...], str] = {}
        if len(self._matching) > _MAX_MATCHING:
            self._matching.clear()

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Keep the exception of a forward: the program may go on without what raised it."""
        if event.kind == FORWARD_ERROR_EVENT and event.generation is not None:
            self._raised = event.generation, event.text
        return ()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return a finding for each way in which the masks of a step differ from the expected."""
        if step.kv_before == 0:
            real = read_unpadded(step)
            if real is not None:
                self._unpadded = None if real.all() else real
        groups, findings = self._group_calls(step), list[Finding]()
        if self.context.declared_spec is not None and any(map(_is_unknown, groups)):
            unknown = sorted({n for group in groups if _is_unknown(group) for n in group.layers})
            findings.append(self._unchecked_finding(step, unknown))
            groups = [group for group in groups if not _is_unknown(group)]
        cases = [case for group in groups if (case := self._check_group(group)) is not None]
        findings += [self._report_case(case) for case in _merge_cases(cases)]
        if len(groups) > 1 and not findings:
            return self._find_differing_layers(step, groups)
        return findings

    def _unchecked_finding(self, step: StepRecord, layers: Sequence[int]) -> Finding:
        """Return that a function of the program ran, whose own masking no record shows."""
        spec = self.context.declared_spec
        assert spec is not None
        backend = printable(next(c.backend for c in step.calls if c.layer == layers[0]))
        sentence = (
            f"The declared mask ({spec.name}) cannot be compared cell by cell in "
            f"{format_step_layers(layers, step)}: attention '{backend}' received no mask and calls "
            "no known kernel, and what it masks by itself is not recorded. The audit compares its "
            "numbers with the declared mask."
        )
        series = _layers_series(layers)
        return self.finding(step, "mask.unchecked", sentence, layers, series=series)

    def _group_calls(self, step: StepRecord) -> list[LayerGroup]:
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
            if mask is None or (calls[0].causal is False and not is_declared):
                continue
            # Layers that each build their own mask have different fingerprints for equal cells.
            new = LayerGroup(step, mask, calls[0], layers_of(calls))
            same = next((n for n, known in enumerate(groups) if _ran_same_mask(known, new)), None)
            if same is None:
                groups.append(new)
            else:
                both = tuple(sorted({*groups[same].layers, *new.layers}))
                groups[same] = replace(groups[same], layers=both)
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
        frame = call_frame(group.step, group.call)
        differing = self._find_differing_heads(group.mask, spec, frame)
        if differing is None or self._differs_only_in_free_keys(group.mask, spec, frame):
            return None
        if frame.window and _matches(replace(differing.frame, window=None), spec):
            return None  # `mask.window-lost` reports that the layer's window is missing
        case = self._make_case(group, differing, spec)
        return replace(case, expected=f"the declared mask ({spec.name})")

    def _differs_only_in_free_keys(
        self, mask: MaskRecord, spec: MaskSpec, frame: CellFrame
    ) -> bool:
        """Whether only keys differ about which conventions differ: the BOS, and empty rows."""
        # Nothing can leak through the BOS, which sees only itself, nor through rows that see
        # nothing, such as isolated separators.
        bos = None if spec.name == "causal" else self._non_bos
        free = mask_findings.find_empty_rows(spec, max(self.context.n_prompt, 1))
        if bos is None and not free.any():
            return False
        n_rows = max(mask.q_len, 1)
        real = np.ones(len(free), np.bool_) if self._unpadded is None else self._unpadded
        rows = slice_flags(real, frame.q_offset, n_rows)
        keys = slice_flags(real, frame.kv_offset, frame.n_keys)
        keys = keys & slice_flags(~free, frame.kv_offset, frame.n_keys)
        if bos is not None:
            keys = keys & slice_flags(bos, frame.kv_offset, frame.n_keys)
        others = replace(frame, rows=rows, keys=keys)
        return self._find_differing_heads(mask, spec, others) is None

    def _check_assumed(self, group: LayerGroup, spec: MaskSpec, rows: BoolArray) -> MaskCase | None:
        """Return where paraphrases see each other; nothing is assumed about other rows."""
        if group.step.kv_before >= len(rows):
            return None  # nothing is assumed about generated rows
        inside = call_frame(group.step, group.call).select(rows, group.step.q_len, fill=False)
        differing = self._find_differing_heads(group.mask, spec, inside)
        if differing is None:
            return None
        case = self._make_case(group, differing, spec)
        leaked = case.found.leaked_by_pair
        across = {pair: n for pair, n in leaked.items() if pair[0] != pair[1]}
        case.found.leaked_by_pair, case.found.lost = across, 0
        expected = "the isolation of the declared segments"
        return replace(case, assumed=True, expected=expected) if across else None

    def _check_causality(self, group: LayerGroup) -> MaskCase | None:
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
        differing = self._find_differing_heads(mask, None, call_frame(step, call))
        if differing is None:
            return None
        case = self._make_case(group, differing, mask_presets.causal())
        case.found.lost = 0
        case = replace(case, expected="a causal mask", pieces=0, segments=0)
        is_certain = mask.kind == NO_MASK or group.adds_bools
        if is_certain or not mask_findings.is_blockwise(case.found, differing.frame):
            return case
        is_open = case.pattern == mask_findings.OPEN
        severity = Severity.WARNING if is_open else Severity.NOTE
        return replace(case, pattern=mask_findings.OTHER, severity=severity)

    def _check_padding(self, group: LayerGroup, real: BoolArray) -> MaskCase | None:
        frame = call_frame(group.step, group.call)
        rows = slice_flags(real, frame.q_offset, group.step.q_len)
        padding = replace(frame, rows=rows, keys=~slice_flags(real, frame.kv_offset, frame.n_keys))
        closed = MaskSpec("no padding", (0,), (0,), (1 << 30,))
        differing = self._find_differing_heads(group.mask, closed, padding)
        if differing is None:
            return None
        return replace(self._make_case(group, differing, closed), id="mask.padding")

    def _find_differing_heads(
        self, mask: MaskRecord, spec: MaskSpec | None, frame: CellFrame
    ) -> _DifferingHeads | None:
        """Return the heads whose cells differ from a spec, or None.

        Without a spec, a head differs if any of its rows sees the future.
        """
        if mask.cells is None:
            return None
        n_rows = max(mask.q_len, 1)
        cells = broadcast_rows(mask.cells, n_rows)
        key = (mask.fingerprint, spec, frame.q_offset, frame.kv_offset, frame.n_keys, frame.window)
        is_cached = n_rows > 1 and frame.rows is None and self._unpadded is None
        if is_cached and key in self._matching:
            return None
        if self._unpadded is not None and frame.rows is None:
            frame = frame.select(self._unpadded, n_rows)
        frames = [replace(frame, cells=each) for each in cells]
        if mask.uniform_rows is not None:  # averaged rows are not compared
            compared = ~np.broadcast_to(mask.uniform_rows[: len(cells)], (len(cells), n_rows))
            compared = compared if frame.rows is None else compared & frame.rows
            frames = [replace(f, rows=rows) for f, rows in zip(frames, compared, strict=True)]
        heads = [n for n, each in enumerate(frames) if _head_differs(each, spec)]
        if heads:
            return _DifferingHeads(tuple(heads), frames[heads[0]])
        if is_cached:
            self._matching.add(key)
        return None

    def _make_case(self, group: LayerGroup, differing: _DifferingHeads, spec: MaskSpec) -> MaskCase:
        heads, frame = differing
        found = mask_findings.find_difference(frame, spec, self.context.segments)
        pattern, amount = mask_findings.classify_pattern(frame, spec, found)
        earlier = None
        if pattern in (mask_findings.MOVED, mask_findings.OTHER) and group.step.q_len > 1:
            others = (pair for pair in self._earlier_specs if pair[1] != spec)
            earlier = next((n for n, other in others if _matches(frame, other)), None)
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
        found, layers, step = case.found, case.group.layers, case.group.step
        sides = [side for side, n in (("leaks", found.leaked), ("loses", found.lost)) if n]
        places = [(step.branch, layers, side) for side in sides]
        known = [self._reported[place] for place in places if place in self._reported]
        finding_id = known[0] if known else case.finding_id
        if known and len(known) < len(places):
            found.leaked, finding_id = 0, "mask.lost"
        for place in places:
            self._reported.setdefault(place, finding_id)
        return self.finding(
            step,
            finding_id,
            case.describe(finding_id) + self._describe_raised(finding_id),
            severity=case.severity or _case_severity(case, finding_id),
            layers=layers,
            head=case.heads[0] if len(case.heads) < case.group.n_heads else None,
            positions=found.leaking_rows if found.leaked else found.losing_rows,
            evidence=_case_evidence(case),
            series=_layers_series(layers),
        )

    def _describe_raised(self, finding_id: str) -> str:
        """Return that the forward before this generation raised, if a mask is missing since."""
        is_missing = finding_id in ("mask.not-applied", "mask.none")
        generation = self.context.generation.generation
        if not is_missing or self._raised is None or self._raised[0] != generation - 1:
            return ""
        what = printable(self._raised[1]).rstrip(".")
        return (
            f" The forward before it (generation {generation - 1}) raised {what}; the program "
            "caught the exception and went on without what had raised it."
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
                if not self._differing_cells(known[0], group).any():
                    known.append(group)
                    break
            else:
                classes.append([group])
        return [
            self._odd_layers_finding(step, _join_groups(norm), _join_groups(odd), is_scheme)
            for classes in kinds.values()
            for norm in [max(classes, key=_norm_rank)]
            for is_scheme in [_is_scheme_of_windows(classes)]
            for odd in classes
            if odd is not norm
        ]

    def _differing_cells(self, a: LayerGroup, b: LayerGroup) -> BoolArray:
        """Return where masks differ, bool (heads, rows, keys), except in padded or averaged rows.

        Masks of shapes that cannot be compared count as equal.
        """
        if a.cells.shape[1:] != b.cells.shape[1:] or len({1, a.n_heads, b.n_heads}) > 2:
            return np.zeros((1, 1, 1), np.bool_)
        rows = np.ones((1, a.cells.shape[1]), np.bool_)
        if self._unpadded is not None:
            rows &= slice_flags(self._unpadded, a.step.kv_before, rows.shape[1])
        for mask in (a.mask, b.mask):
            if mask.uniform_rows is not None:
                rows = rows & ~mask.uniform_rows
        differing: BoolArray = (a.cells ^ b.cells) & rows[..., None]
        return differing

    def _odd_layers_finding(
        self, step: StepRecord, norm: LayerGroup, odd: LayerGroup, is_scheme: bool
    ) -> Finding:
        cells, layers = self._differing_cells(norm, odd), odd.layers
        head, row, key = (int(n) for n in np.argwhere(cells)[0])
        opens = bool(odd.cells[min(head, odd.n_heads - 1), row, key])
        q_idx, kv_idx = step.kv_before + row, max(step.kv_after - odd.call.kv_len, 0) + key
        n_cells, others = int(np.count_nonzero(cells.any(axis=0))), norm.describe_layers()
        differ = "differs, " if n_cells == 1 else "differ, first: "
        sentence = (
            f"{odd.describe_where()} ran {odd.describe_run()}, and {others} ran "
            f"{norm.describe_run()}: {plural(n_cells, 'cell')} {differ}"
            f"{self.context.format_position(q_idx)} {'sees' if opens else 'does not see'} "
            f"{self.context.format_position(kv_idx)}, unlike in {others}."
        )
        # The path rule reports a fallback, and several layers are likely a kind by design.
        is_kind = len(layers) > 1 and len(layers) >= _MIN_KIND_SHARE * odd.n_layers
        is_kind = is_kind or is_scheme or _have_windows(norm, odd)
        masks = {"mask": odd.mask.fingerprint, "others": norm.mask.fingerprint}
        paths = {"path": odd.call.path, "path_of_others": norm.call.path}
        facts = {**masks, "cells": n_cells, "layers": list(layers), **paths}
        facts["suppressed_exception"] = odd.call.suppressed_exception
        severity = Severity.NOTE if odd.is_fallback or is_kind else None
        id_, series, at = "mask.layers-differ", _layers_series(layers), (q_idx, kv_idx)
        return self.finding(
            step, id_, sentence, layers, facts, severity=severity, positions=at, series=series
        )


def _is_unknown(group: LayerGroup) -> bool:
    """Whether a function of the program ran without a mask, which may mask by itself."""
    return group.call.path == OWN_FUNCTION and group.mask.kind.startswith(NO_MASK)


def _have_windows(one: LayerGroup, other: LayerGroup) -> bool:
    """Whether one mask_mod gave two groups of layers sliding windows of different lengths."""
    same = one.call.path == other.call.path and one.mask.mask_mod == other.mask.mask_mod
    return same and one.mask.mask_mod is not None and all(map(_is_window, (one, other)))


def _is_scheme_of_windows(classes: Sequence[Sequence[LayerGroup]]) -> bool:
    """Whether layers have at least three sliding windows, and no length is that of most layers."""
    sizes = [sum(len(one.layers) for one in those) for those in classes]
    is_mixed = len(classes) >= MIN_WINDOWS and 2 * max(sizes) <= sum(sizes)
    return is_mixed and all(_is_window(those[0]) for those in classes)


def _is_window(group: LayerGroup) -> bool:
    """Whether each row sees its newest keys, all rows as many, or all keys before it."""
    cells, step = group.cells, group.step
    first = max(step.kv_after - group.call.kv_len, 0)
    back = (step.kv_before + np.arange(cells.shape[1]))[:, None] - first - np.arange(cells.shape[2])
    length = int(back[cells.any(axis=0)].max(initial=-1)) + 1
    return bool((cells == ((back >= 0) & (back < length))).all())


def _head_differs(frame: CellFrame, spec: MaskSpec | None) -> bool:
    if spec is None:
        return mask_findings.has_future_keys(frame)
    is_whole_row = len(frame.cells) == 1 and frame.rows is None
    if is_whole_row and mask_findings.row_matches_spec(frame, spec):
        return False
    return not _matches(frame, spec)


def _matches(frame: CellFrame, spec: MaskSpec) -> bool:
    return not mask_findings.count_wrong_cells(frame, spec, limit=1)


def _layers_series(layers: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, layers))}"


MIN_WINDOWS = 3  # of different lengths, which layers have by design
_MIN_KIND_SHARE = 0.2  # this share of the layers (two or more) may be a kind by design


def _join_groups(groups: Sequence[LayerGroup]) -> LayerGroup:
    """Return the first group with the layers of all."""
    layers = sorted(layer for group in groups for layer in group.layers)
    return replace(groups[0], layers=tuple(layers))


def _norm_rank(groups: Sequence[LayerGroup]) -> tuple[int, bool, int]:
    """Return a sort key for the norm: most layers, then no fallback, then the first layer."""
    layers = _join_groups(groups).layers
    return len(layers), not any(group.is_fallback for group in groups), -layers[0]


def call_frame(step: StepRecord, call: CallRecord) -> CellFrame:
    """Return the frame of a call. A sliding cache has dropped the keys before `kv_offset`."""
    kv_offset = max(step.kv_after - call.kv_len, 0)
    return CellFrame(step.kv_before, kv_offset, min(call.kv_len, step.kv_after), call.window)


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
    if a.mask.kind != b.mask.kind or (a.mask.cells is None and a.mask.kind != NO_MASK):
        return False
    names = ("path", "window", "kv_len", "suppressed_exception")
    if any(getattr(a.call, name) != getattr(b.call, name) for name in names):
        return False
    pairs = ((a.mask.cells, b.mask.cells), (a.mask.uniform_rows, b.mask.uniform_rows))
    # The array of None is equal only to itself.
    return all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)


def count_pads(context: RuleContext) -> int:
    """Return how many padding tokens a prompt begins with, by its first segment or their ids."""
    n_declared, n, pad = _declared_pads(context), 0, context.pad_id
    if n_declared or pad is None:
        return n_declared
    while (token := context.token(n)) is not None and token.token_id == pad:
        n += 1
    # A single one does not count: some models begin every text with the pad token.
    return n if 1 < n < context.n_prompt else 0


def _declared_pads(context: RuleContext) -> int:
    first = context.segments[0] if context.segments else None
    return first.stop if first is not None and first.label == "padding" else 0


def _non_bos_flags(context: RuleContext) -> BoolArray | None:
    """Return which prompt positions are not the BOS at its beginning, None without a BOS."""
    start, bos = _declared_pads(context), declared_tokenizer(context.generation.declared).bos
    token, segment = context.token(start), context.segment_at(start)
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
    if finding_id == "mask.none" and _may_mask_by_itself(case.group):
        return Severity.NOTE
    is_row_0 = finding_id == "mask.lost" and case.group.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != mask_findings.WINDOW and found.last_keys == [0]:
        return Severity.NOTE  # a decode row masked as row 0, which `decode.no-offset` reports
    return Severity.ERROR


def _may_mask_by_itself(group: LayerGroup) -> bool:
    """Whether an attention without a mask closes cells in a way that no record holds.

    Its output is then not that of all keys, or it has a score_mod, which may give -inf.
    """
    if any(event.kind == SCORE_MOD_EVENT for event in group.step.events):
        return True
    return recorded_check(group.call).is_failed


def _case_evidence(case: MaskCase) -> dict[str, Any]:
    found, mask, call = case.found, case.group.mask, case.group.call
    counts = ("leaked", "lost", "future", "first_leaked", "first_across", "first_lost")
    facts: dict[str, Any] = {"mask": mask.fingerprint, "kind": mask.kind, "mask_mod": mask.mask_mod}
    facts |= {"path": call.path, "backend": call.backend, "meant": case.expected}
    facts |= {"open": found.n_open, "meant_open": found.n_expected}
    facts |= {name: getattr(found, name) for name in counts}
    facts |= {"pattern": case.pattern, "heads": list(case.heads)}
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
    needs = (imported.MASKS,)
    findings = finding_kinds("mask.window-lost")

    def on_step(self, step: StepRecord) -> Findings:
        """Return a finding for each window with rows that see the first key outside of it."""
        wide: dict[int, tuple[list[int], list[CallRecord]]] = {}
        checked: dict[tuple[Any, ...], list[int]] = {}
        for call in step.calls:
            window = call.window
            if window is None or call.causal is False or step.kv_after <= window:
                continue
            if call.path == OWN_FUNCTION and recorded_check(call).is_failed:
                continue  # the function masks in its own way, which the record does not hold
            key = (call.mask, window, call.kv_len, call.q_len)
            if key not in checked:
                checked[key] = self._rows_beyond_window(step, call, window)
            if checked[key]:
                wide.setdefault(window, (checked[key], []))[1].append(call)
        for window, (rows, calls) in wide.items():
            layers, id_ = layers_of(calls), "mask.window-lost"
            sentence = (
                f"The sliding window of {format_step_layers(layers, step)} holds "
                f"{plural(window, 'key')}, but in step {step.step} {plural(len(rows), 'row')} "
                f"{'sees' if len(rows) == 1 else 'see'} keys beyond it; first: "
                f"{self.context.format_position(rows[0])} sees "
                f"{self.context.format_position(rows[0] - window)}."
            )
            facts = {"window": window, "rows": len(rows), "path": calls[0].path}
            yield self.finding(step, id_, sentence, layers, facts, positions=rows, series=id_)

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
        positions: list[int] = (frame.q_offset + rows[is_open]).tolist()
        return positions
