"""Rows that are taken for what they are not: prompt rows for generated ones, and the other way.

Whoever masks segments apart lets generated rows see all of them. Where the spans are counted wrong,
a row at the end of a segment counts as generated and sees the others; where the generated rows are
forgotten, they see what their neighbours see, and the segments are never fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from flexinspect.core.text import Positions, limit_positions, plural, printable
from flexinspect.core.text import format_layers as layer_words
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import DeclaredMask, RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_views import (
    StepMaskView,
    is_sliding_window,
    paraphrase_segments,
    segment_labels,
    spec_sees_segment,
    step_mask_views,
)

PROMPT_ROW_GENERATED = "decode.prompt-row-generated"
GENERATED_ROW_ISOLATED = "decode.generated-row-isolated"

_ROLE_QUERY = (
    "SELECT c.step, c.layer, c.kv_len, m.kind, m.rule, m.rule_source, s.label, s.start, s.stop "
    "FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask "
    "JOIN segments s ON s.generation = c.generation AND s.branch = c.branch "
    "AND s.kind IN ('paraphrase', 'generated') "
    "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
    "AND c.layer = {layer} ORDER BY c.call, s.segment"
)


class RowRolesRule(Rule):
    """Compares rows at the end of segments, and generated ones, with what their role lets them see.

    Needs two paraphrases at least, and a mask declared or none at all (several segments are then
    taken to be meant apart, which is no more than a warning). Each mask of a prompt is looked at
    once; a generated row that sees all keys costs one look.
    """

    name: ClassVar[str] = "roles"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        PROMPT_ROW_GENERATED: FindingKind(
            Severity.ERROR,
            "a prompt row at the end of a segment sees other segments, as generated rows do",
            "The row carries the other segments into its own, and what is generated reads it as "
            "part of that: the segments are not apart.",
            "In the mask panel the row is open over the other segments while its neighbours above "
            "are closed; the segment borders drawn beside it are one or more tokens off.",
            "Count the spans on the ids that are fed, special tokens included (a missing BOS "
            "shifts all of them by one), and begin the generated rows at the prompt's length.",
            _ROLE_QUERY,
        ),
        GENERATED_ROW_ISOLATED: FindingKind(
            Severity.ERROR,
            "generated rows do not see segments that they are to fuse",
            "What those segments say cannot reach the answer, however well their own rows are "
            "computed.",
            "In the mask panel of this step the newest row is closed over the segments named.",
            "Give positions from the prompt's length on a role of their own in the rule, one that "
            "sees every segment.",
            _ROLE_QUERY,
        ),
    }

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._checked: set[str] = set()
        self._n_seen: dict[int, int] = {}
        """By layer: of how many keys the newest row saw last."""
        self._cue: dict[int, frozenset[int]] = {}
        """By layer: starts of the paraphrases that the last row of the prompt sees, if a cue."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing seen."""
        super().on_generation_start(context)
        self._reset()
        self._paraphrases = paraphrase_segments(context.segments)

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return which rows of a step are taken for others."""
        intent = self.context.declared_mask
        if intent is None or len(self._paraphrases) < 2:
            return ()
        views, _ = step_mask_views(step, self.context)
        found: list[Finding] = []
        if step.kv_before == 0 and step.q_len >= self.context.n_prompt:
            found += self._check_prompt_rows(step, views, intent)
        if step.kv_after > self.context.n_prompt:
            found += self._check_generated_row(step, views, intent)
        elif step.kv_before == 0:
            self._record_last_row(views)
        return found

    # -- prompt rows that see too much -----------------------------------------------------------

    def _check_prompt_rows(
        self, step: StepRecord, views: Sequence[StepMaskView], declared: DeclaredMask
    ) -> list[Finding]:
        """Return a finding for each segment with such rows, of the layers that agree on them."""
        layers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for view in views:
            if view.fingerprint in self._checked:
                continue
            self._checked.add(view.fingerprint)
            for number in range(1, len(self._paraphrases)):
                rows = self._find_open_rows(view, number, declared)
                if len(rows):
                    layers.setdefault((number, tuple(rows.tolist())), []).extend(view.layers)
        return [
            self._prompt_row_finding(step, number, np.array(rows), tuple(sorted(which)), declared)
            for (number, rows), which in layers.items()
        ]

    def _find_open_rows(self, view: StepMaskView, number: int, declared: DeclaredMask) -> Positions:
        """Return the last rows of a segment that see all of those before it, unlike the others."""
        own, others = self._paraphrases[number], self._paraphrases[:number]
        if any(spec_sees_segment(declared.spec, own.stop - 1, other) for other in others):
            return np.zeros(0, np.intp)
        blocks = [view.block(own, other) for other in others]
        sees_all = np.logical_and.reduce([block.all(axis=1) for block in blocks])
        if not sees_all[-1:].any():
            return np.zeros(0, np.intp)
        sees_none = ~np.logical_or.reduce([block.any(axis=1) for block in blocks])
        first = len(sees_all) - int(np.argmin(sees_all[::-1])) if not sees_all.all() else 0
        if not first or not sees_none[:first].all():
            return np.zeros(0, np.intp)  # not the end of a segment alone: another kind of leak
        return own.start + np.arange(first, len(sees_all))

    def _prompt_row_finding(
        self,
        step: StepRecord,
        number: int,
        rows: Positions,
        layers: tuple[int, ...],
        declared: DeclaredMask,
    ) -> Finding:
        own, others = self._paraphrases[number], self._paraphrases[:number]
        n_layers = len({call.layer for call in step.calls})
        one = len(rows) == 1
        last = "the last row" if one else f"the last {len(rows)} rows"
        seen = sum(len(other) for other in others)
        n_apart = len(own) - len(rows)
        rest = "row of its segment sees none" if n_apart == 1 else "rows of its segment see none"
        sentence = (
            f"{_capitalize(self.context.format_position(int(rows[0])))}, {last} of {printable(own.label)}, "
            f"{'is' if one else 'are'} masked as if generated in {layer_words(layers, n_layers)}: "
            f"{'it sees' if one else 'they see'} {plural(seen, 'key')} of "
            f"{_join_labels(segment_labels(others))}, of which the other {n_apart} {rest}{_format_assumption(declared)}."
        )
        return Finding(
            id=PROMPT_ROW_GENERATED,
            severity=Severity.WARNING if declared.assumed else Severity.ERROR,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=layers[0],
            positions=limit_positions(rows),
            evidence={
                "segment": own.label,
                "rows": len(rows),
                "rows_apart": n_apart,
                "keys_seen": seen,
                "segments_seen": segment_labels(others),
                "assumed": declared.assumed,
            },
            layers=layers if len(layers) > 1 else (),
            series=f"{own.start} {rows[0]} {layers}",
        )

    # -- generated rows that see too little ------------------------------------------------------

    def _record_last_row(self, views: Sequence[StepMaskView]) -> None:
        """Remember what the last row of the prompt sees."""
        segment = self.context.segment_at(self.context.n_prompt - 1)
        is_cue = segment is not None and segment.kind is SegmentKind.CUE
        for view in views:
            n_seen = int(np.count_nonzero(view.newest_row))
            self._n_seen.update(dict.fromkeys(view.layers, n_seen))
            if is_cue:
                seen = frozenset(s.start for s in self._paraphrases if view.sees(s))
                self._cue.update(dict.fromkeys(view.layers, seen))

    def _check_generated_row(
        self, step: StepRecord, views: Sequence[StepMaskView], declared: DeclaredMask
    ) -> list[Finding]:
        missed: dict[tuple[int, ...], list[StepMaskView]] = {}
        for view in views:
            newest = view.newest_row
            if newest[: view.newest_key + 1].all() and not view.first_key_pos:
                continue  # all that a healthy step costs
            missing = self._missed_paraphrases(view, declared)
            if missing:
                missed.setdefault(missing, []).append(view)
        return [
            self._isolated_finding(step, [s for s in self._paraphrases if s.start in starts], found)
            for starts, found in missed.items()
        ]

    def _missed_paraphrases(self, view: StepMaskView, declared: DeclaredMask) -> tuple[int, ...]:
        """Return the paraphrases (their starts) that the row is to see and does not.

        None where the row does not see itself (its mask is another row's then), where the cue does
        not see them either (they are unused), and where a window has moved past them.
        """
        keys, layer = view.visible_positions(), view.layers[0]
        before, now = self._n_seen.get(layer, 0), len(keys)
        self._n_seen.update(dict.fromkeys(view.layers, now))
        if (
            not now
            or keys[-1] != view.newest_pos
            or view.first_key_pos
            or is_sliding_window(keys, view.newest_pos, before)
        ):
            return ()
        cue = self._cue.get(layer)
        return tuple(
            segment.start
            for segment in self._paraphrases
            if not view.sees(segment)
            and (cue is None or segment.start in cue)
            and spec_sees_segment(declared.spec, view.newest_pos, segment)
        )

    def _isolated_finding(
        self, step: StepRecord, missed: Sequence[Segment], views: Sequence[StepMaskView]
    ) -> Finding:
        intent = self.context.declared_mask
        assert intent is not None
        layers = tuple(sorted(layer for view in views for layer in view.layers))
        n_layers = len({call.layer for call in step.calls})
        keys, last = views[0].visible_positions(), views[0].newest_pos
        names = _join_labels(segment_labels(missed))
        cue = ", though the last row of the cue does" if self._cue else ""
        sentence = (
            f"Generated rows do not see {names} in {layer_words(layers, n_layers)}: in step "
            f"{step.step} {self.context.format_position(last)} sees {len(keys)} of "
            f"{plural(last + 1, 'key')}, {self._format_segments(keys)}{cue}{_format_assumption(intent)}."
        )
        return Finding(
            id=GENERATED_ROW_ISOLATED,
            severity=self._severity(missed, intent),
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=layers[0],
            positions=(last,),
            evidence={
                "missed": segment_labels(missed),
                "keys_missed": sum(len(segment) for segment in missed),
                "seen": len(keys),
                "keys": last + 1,
                "assumed": intent.assumed,
            },
            layers=layers if len(layers) > 1 else (),
            series=f"{[segment.start for segment in missed]} {layers}",
        )

    def _format_segments(self, keys: Positions) -> str:
        """Return `of the cue and generated`: where the keys lie that a row does see."""
        inside = self.context.format_rows(keys).partition(" of ")[2]
        return f"of {inside}" if inside else "all of them elsewhere"

    def _severity(self, missed: Sequence[Segment], declared: DeclaredMask) -> Severity:
        """Return how bad it is; a packed prompt may be meant to go on with its last document."""
        if not declared.assumed:
            return Severity.ERROR
        goes_on = not self._cue and list(missed) == self._paraphrases[:-1]
        return Severity.NOTE if goes_on else Severity.WARNING


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _join_labels(labels: Sequence[str]) -> str:
    """Return `paraphrase 1`, `paraphrase 1 and 1 other` or the like."""
    names = [printable(label) for label in labels]
    if len(names) > 2:
        return f"{names[0]} and {len(names) - 1} other segments"
    return " and ".join(names)


def _format_assumption(declared: DeclaredMask) -> str:
    said = "; no mask was declared, so the segments are taken to be meant apart until then"
    return said if declared.assumed else ""
