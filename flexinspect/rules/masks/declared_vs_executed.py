"""The mask that ran against the one that was meant: per layer, head and step.

What is judged is `MaskRecord.cells`, what the kernel honoured; what was received says why it is so.
Where no mask was declared, segments that were named stand for one (their leaks are warnings), and
a layer that calls itself causal for causality. Layers that ran the same mask share a finding, and
what comes back at later steps is counted, not told again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import MAX_LISTED_POSITIONS, format_layers, plural
from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import SegmentKind, declared_tokenizer
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
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
    LAYERS_DIFFER,
    MASK_KINDS,
    MASK_LOST,
    MASK_PADDING,
    NO_MASK,
    LayerGroup,
    MaskCase,
    case_finding_id,
    case_sentence,
    count_pieces,
    describe_run,
    describe_where,
    padding_sentence,
)

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
            found += find_differing_layers(self.context, step, groups, self._unpadded)
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
        if frame.window and not mask_difference.count_wrong_cells(cells, spec, whole, limit=1):
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
        blockwise = not is_sure and mask_difference.is_blockwise(case.difference, *first)
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
        found = mask_difference.find_difference(cells, spec, frame, self._parts)
        pattern, amount = mask_difference.classify_pattern(cells, spec, frame, found)
        earlier = None
        if pattern in (MOVED, OTHER) and step.q_len > 1:
            rules = [one for one in self._earlier_specs if one[1] != spec]
            same = (
                n
                for n, r in rules
                if not mask_difference.count_wrong_cells(cells, r, frame, limit=1)
            )
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
        return mask_difference.has_future_keys(cells, frame)
    if len(cells) == 1 and frame.rows is None:
        return not mask_difference.row_matches_spec(cells[0], spec, frame) and bool(
            mask_difference.count_wrong_cells(cells, spec, frame, limit=1)
        )
    return mask_difference.count_wrong_cells(cells, spec, frame, limit=1) > 0


_MIN_KIND_SHARE = 0.2
"""From this share of the layers on (and two of them), the odd ones may be a kind of layer."""


def find_differing_layers(
    context: RuleContext, step: StepRecord, groups: Sequence[LayerGroup], real: BoolArray | None
) -> list[Finding]:
    """Return which layers ran another mask than most layers of their kind.

    Layers with another window, or that hold another number of keys, are another kind.
    """
    kinds: dict[tuple[int | None, int], list[LayerGroup]] = {}
    for group in groups:
        if group.mask.cells is not None:
            kinds.setdefault((group.call.window, group.call.kv_len), []).append(group)
    found = []
    for some in kinds.values():
        found += _find_differing_in_kind(context, step, some, real) if len(some) > 1 else []
    return found


def _find_differing_in_kind(
    context: RuleContext, step: StepRecord, groups: Sequence[LayerGroup], real: BoolArray | None
) -> list[Finding]:
    classes: list[list[LayerGroup]] = []
    for group in groups:
        for known in classes:
            if not _differing_cells(known[0].mask, group.mask, step, real).any():
                known.append(group)
                break
        else:
            classes.append([group])
    if len(classes) < 2:
        return []
    norm = max(classes, key=_norm_rank)
    return [
        _layers_differ_finding(context, step, norm, odd, real) for odd in classes if odd is not norm
    ]


def _norm_rank(groups: Sequence[LayerGroup]) -> tuple[int, bool, int]:
    """Return what makes some layers the norm: their number, then that nothing failed in them."""
    n_layers = sum(len(group.layers) for group in groups)
    first = min(group.layers[0] for group in groups)
    return n_layers, not any(group.is_fallback for group in groups), -first


def _differing_cells(
    a: MaskRecord, b: MaskRecord, step: StepRecord, real: BoolArray | None
) -> BoolArray:
    """Return the cells (heads, rows, keys) in which two masks differ, in rows that count."""
    assert a.cells is not None
    assert b.cells is not None
    if a.cells.shape[1:] != b.cells.shape[1:]:
        return np.zeros((1, 1, 1), np.bool_)
    n_heads = max(len(a.cells), len(b.cells))
    if not {len(a.cells), len(b.cells)} <= {1, n_heads}:
        return np.zeros((1, 1, 1), np.bool_)
    rows = np.ones((1, a.cells.shape[1]), np.bool_)
    if real is not None:
        some = real[step.kv_before : step.kv_before + rows.shape[1]]
        rows[:, : len(some)] &= some
    for mask in (a, b):
        if mask.averaged is not None:
            rows = rows & ~mask.averaged
    differing: BoolArray = (a.cells ^ b.cells) & rows[..., None]
    return differing


def _layers_differ_finding(
    context: RuleContext,
    step: StepRecord,
    norm: Sequence[LayerGroup],
    odd: Sequence[LayerGroup],
    real: BoolArray | None,
) -> Finding:
    which = tuple(sorted(layer for group in odd for layer in group.layers))
    others = tuple(sorted(layer for group in norm for layer in group.layers))
    one, n_layers = odd[0], odd[0].n_layers
    cells = _differing_cells(norm[0].mask, one.mask, step, real)
    head, row, key = (int(n) for n in np.argwhere(cells)[0])
    assert one.mask.cells is not None
    opens = bool(one.mask.cells[min(head, len(one.mask.cells) - 1), row, key])
    q_idx = step.kv_before + row
    kv_idx = max(step.kv_after - one.call.kv_len, 0) + key
    n_cells = int(np.count_nonzero(cells.any(axis=0)))
    sees = f"{context.format_position(q_idx)} {'sees' if opens else 'does not see'} {context.format_position(kv_idx)}"
    words = describe_where(LayerGroup(one.mask, one.call, which, n_layers))
    sentence = (
        f"{words} ran {describe_run(one)}, and {format_layers(others, n_layers)} ran {describe_run(norm[0])}: "
        f"{plural(n_cells, 'cell')} {'differs' if n_cells == 1 else 'differ'}, "
        f"{'' if n_cells == 1 else 'first: '}{sees} there only."
    )
    if not opens:
        sentence = sentence.replace(" there only.", ", as in the others.")
    return Finding(
        id=LAYERS_DIFFER,
        severity=_layers_differ_severity(one, which, n_layers),
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        positions=(q_idx, kv_idx),
        evidence={
            "mask": one.mask.fingerprint,
            "others": norm[0].mask.fingerprint,
            "cells": n_cells,
            "layers": list(which),
            "path": one.call.path,
            "path_of_others": norm[0].call.path,
            "swallowed": one.call.swallowed,
        },
        layers=which if len(which) > 1 else (),
        series="layers " + ", ".join(map(str, which)),
    )


def _layers_differ_severity(odd: LayerGroup, which: Sequence[int], n_layers: int) -> Severity:
    """A fallback is told of by its path; layers of two kinds may be how the model is."""
    is_kind = len(which) > 1 and len(which) >= _MIN_KIND_SHARE * n_layers
    return Severity.NOTE if odd.is_fallback or is_kind else Severity.WARNING


def call_frame(step: StepRecord, call: CallRecord) -> CellFrame:
    """Return where the cells of a call lie. A sliding cache has dropped the keys before them."""
    kv_offset = max(step.kv_after - call.kv_len, 0)
    return CellFrame(step.kv_before, kv_offset, min(call.kv_len, step.kv_after), call.window)


def add_group(groups: list[LayerGroup], new: LayerGroup) -> None:
    """Add a group, or its layers to one that executed the same.

    Layers that build a mask each have a mask each, however much these are one.
    """
    for number, known in enumerate(groups):
        if _ran_same_mask(known, new):
            both = tuple(sorted({*known.layers, *new.layers}))
            groups[number] = replace(known, layers=both)
            return
    groups.append(new)


def merge_cases(cases: Sequence[MaskCase]) -> list[MaskCase]:
    """Return cases with those made one that are the same trouble in layers of two kinds."""
    found: dict[tuple[object, ...], MaskCase] = {}
    for case in cases:
        group = case.group
        received = (group.mask.kind, group.call.path, group.call.swallowed)
        key = (case_finding_id(case), case.assumed, case.pattern, case.heads, *received)
        known = found.setdefault(key, case)
        if known is case:
            continue
        counts = [one.difference.leaked + one.difference.lost for one in (known, case)]
        more = known if counts[0] >= counts[1] else case
        layers = tuple(sorted({*known.group.layers, *group.layers}))
        varies = known.varies or counts[0] != counts[1]
        found[key] = replace(more, group=replace(more.group, layers=layers), varies=varies)
    return list(found.values())


def _ran_same_mask(a: LayerGroup, b: LayerGroup) -> bool:
    one, other = a.call, b.call
    if (one.path, one.window, one.kv_len) != (other.path, other.window, other.kv_len):
        return False
    if a.mask.kind != b.mask.kind or one.swallowed != other.swallowed:
        return False
    if a.mask.cells is None or b.mask.cells is None:
        return a.mask.cells is b.mask.cells and a.mask.kind == NO_MASK
    same = np.array_equal(a.mask.cells, b.mask.cells)
    before, after = a.mask.averaged, b.mask.averaged
    if before is None or after is None:
        return same and before is after
    return same and np.array_equal(before, after)


def add_usual_paths(groups: list[LayerGroup]) -> list[LayerGroup]:
    """Return groups that know the path of most other layers, where it is not theirs."""
    paths = Counter[str]()
    for group in groups:
        paths[group.call.path] += len(group.layers)
    flex = [path for path in paths if path.startswith("flex")]
    most = max(paths, key=lambda path: (paths[path], path in flex))
    if len(paths) == 1:
        return groups
    return [replace(g, usual_path=most if g.call.path != most else "") for g in groups]


def slice_flags(flags: BoolArray, start: int, n: int, *, fill: bool = True) -> BoolArray:
    """Return the flags of n positions, `beyond` for those after the prompt."""
    some = flags[start : start + n]
    if len(some) == n:
        return some
    return np.concatenate((some, np.full(n - len(some), fill)))


def unpadded_flags(context: RuleContext) -> BoolArray | None:
    """Return which positions of the prompt are no padding, None where none is."""
    first = context.segments[0] if context.segments else None
    is_said = first is not None and first.label == "padding"
    n_pads = first.stop if first is not None and is_said else count_pads_by_id(context)
    return np.arange(context.n_prompt) >= n_pads if n_pads else None


def count_pads_by_id(context: RuleContext) -> int:
    """Return how many padding tokens a prompt begins with, as their ids say.

    A single one may be what a model begins every text with.
    """
    words = declared_tokenizer(context.generation.declared)
    if words.pad is None or words.pad in (words.bos, *words.eos):
        return 0
    n = 0
    while (token := context.token(n)) is not None and token.token_id == words.pad:
        n += 1
    return n if 1 < n < context.n_prompt else 0


def non_bos_flags(context: RuleContext) -> BoolArray | None:
    """Return which positions of the prompt are not the BOS at its beginning, None without one."""
    first = context.segments[0] if context.segments else None
    at = first.stop if first is not None and first.label == "padding" else 0
    token, bos = context.token(at), declared_tokenizer(context.generation.declared).bos
    segment = context.segment_at(at)
    is_named = segment is not None and segment.kind is SegmentKind.BOS
    if not is_named and (token is None or bos is None or token.token_id != bos):
        return None
    others: BoolArray = np.arange(max(context.n_prompt, at + 1)) != at
    return others


def segment_parts(context: RuleContext) -> SegmentParts:
    """Return the segments; paraphrases are to be apart."""
    segments = context.segments
    starts = np.array([segment.start for segment in segments] or [0])
    apart = [segment.kind is SegmentKind.PARAPHRASE for segment in segments] or [False]
    return SegmentParts(starts, np.array(apart))


def paraphrase_flags(context: RuleContext) -> BoolArray:
    """Return which positions of the prompt belong to paraphrases."""
    flags = np.zeros(context.n_prompt, np.bool_)
    for segment in context.segments:
        if segment.kind is SegmentKind.PARAPHRASE:
            flags[segment.start : segment.stop] = True
    return flags


def case_severity(case: MaskCase, finding_id: str) -> Severity:
    """Return how bad a difference is; where no mask was declared, a warning at most."""
    found = case.difference
    if case.assumed:
        return Severity.WARNING
    is_row_0 = finding_id == MASK_LOST and case.step.q_len == 1 and found.n_open == 1
    if is_row_0 and case.pattern != WINDOW and found.last_keys == [0]:
        return Severity.NOTE  # a row that takes itself for row 0: the decode rules say so
    return Severity.ERROR


def case_evidence(case: MaskCase) -> dict[str, Any]:
    """Return the numbers of a difference."""
    found, mask, call = case.difference, case.group.mask, case.group.call
    facts: dict[str, Any] = {
        "mask": mask.fingerprint,
        "kind": mask.kind,
        "rule": mask.rule,
        "path": call.path,
        "backend": call.backend,
        "meant": case.expected,
        "open": found.n_open,
        "meant_open": found.n_meant,
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
        "swallowed": call.swallowed,
    }
    if case.segments > 1:
        extra |= {"pieces": case.pieces, "segments": case.segments}
    return facts | {name: fact for name, fact in extra.items() if fact is not None}
