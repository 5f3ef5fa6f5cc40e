"""The rule for prompt rows that are masked as generated rows, and the reverse.

A mask that isolates segments lets generated rows see all of them. If the spans are counted wrong, a
row at the end of a segment is masked as generated and sees the other segments. If the mask forgets
the generated rows, they do not see the segments that they should fuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flexinspect.core.text import capitalize, is_or_are, plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import (
    DeclaredMask,
    RuleContext,
    abbreviate_labels,
    format_step_layers,
)
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView, spec_sees_segment


class RowRolesRule(Rule):
    """Checks which segments the last rows of a segment and the generated rows see.

    It needs at least two paraphrases. Without a declared mask they are assumed to be isolated, and
    findings are at most warnings; under a custom mask function the rule is silent. Each mask of a
    prompt is checked once; a generated row that sees all keys costs one look-up.
    """

    name = "roles"
    findings = finding_kinds("decode.prompt-row-generated", "decode.generated-row-isolated")

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the rows of the last generation."""
        super().on_generation_start(context)
        self._paraphrases = mask_views.paraphrase_segments(context.segments)
        self._checked: set[str] = set()
        self._n_seen: dict[int, int] = {}
        """By layer: how many keys the newest row of the last step saw."""
        self._cue: dict[int, frozenset[int]] = {}
        """By layer: starts of the paraphrases that the last prompt row sees, if it is a cue."""

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return findings for rows of a step that are masked for another role."""
        declared = self.context.declared_mask
        if declared is None or len(self._paraphrases) < 2:
            return
        views, _ = mask_views.step_mask_views(step, self.context)
        if step.kv_before == 0 and step.q_len >= self.context.n_prompt:
            yield from self._check_prompt_rows(step, views, declared)
        if step.kv_after > self.context.n_prompt:
            yield from self._check_generated_row(step, views, declared)
        elif step.kv_before == 0:
            last = self.context.segment_at(self.context.n_prompt - 1)
            is_cue = last is not None and last.kind is SegmentKind.CUE
            for view in views:
                n_seen = int(np.count_nonzero(view.newest_row))
                self._n_seen.update(dict.fromkeys(view.layers, n_seen))
                if is_cue:
                    seen = frozenset(s.start for s in self._paraphrases if view.sees(s))
                    self._cue.update(dict.fromkeys(view.layers, seen))

    def _check_prompt_rows(
        self, step: StepRecord, views: Sequence[StepMaskView], declared: DeclaredMask
    ) -> Iterator[Finding]:
        """Return a finding for each segment and group of layers with the same open rows."""
        layers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for view in views:
            if view.fingerprint in self._checked:
                continue
            self._checked.add(view.fingerprint)
            for number in range(1, len(self._paraphrases)):
                rows = self._find_open_rows(view, number, declared)
                if rows:
                    layers.setdefault((number, tuple(rows)), []).extend(view.layers)
        for (number, open_rows), group in layers.items():
            yield self._prompt_row_finding(step, number, open_rows, tuple(sorted(group)), declared)

    def _find_open_rows(self, view: StepMaskView, number: int, declared: DeclaredMask) -> range:
        """Return the last rows of a segment if only they see all paraphrases before it."""
        own, others = self._paraphrases[number], self._paraphrases[:number]
        if any(spec_sees_segment(declared.spec, own.stop - 1, other) for other in others):
            return range(0)
        blocks = [view.block(own, other) for other in others]
        sees_all = np.logical_and.reduce([block.all(axis=1) for block in blocks])
        sees_any = np.logical_or.reduce([block.any(axis=1) for block in blocks])
        first = len(sees_all) - int(np.argmin([*sees_all[::-1], False]))
        if not first or sees_any[:first].any():
            return range(0)  # other rows see them too: another kind of leak
        return range(own.start + first, own.start + len(sees_all))

    def _prompt_row_finding(
        self,
        step: StepRecord,
        number: int,
        rows: Sequence[int],
        layers: tuple[int, ...],
        declared: DeclaredMask,
    ) -> Finding:
        own, others = self._paraphrases[number], self._paraphrases[:number]
        one, labels = len(rows) == 1, [segment.label for segment in others]
        last = "the last row" if one else f"the last {len(rows)} rows"
        seen, n_isolated = sum(map(len, others)), len(own) - len(rows)
        rest = "row of its segment sees" if n_isolated == 1 else "rows of its segment see"
        sentence = (
            f"{capitalize(self.context.format_position(rows[0]))}, {last} of "
            f"{printable(own.label)}, {is_or_are(len(rows))} masked as if generated in "
            f"{format_step_layers(layers, step)}: {'it sees' if one else 'they see'} "
            f"{plural(seen, 'key')} of {abbreviate_labels(labels)}, of which the other "
            f"{n_isolated} {rest} none{_format_assumption(declared)}."
        )
        return self.finding(
            step,
            "decode.prompt-row-generated",
            sentence,
            severity=Severity.WARNING if declared.assumed else None,
            layers=layers,
            positions=rows,
            evidence={
                "segment": own.label,
                "rows": len(rows),
                "rows_apart": n_isolated,
                "keys_seen": seen,
                "segments_seen": labels,
                "assumed": declared.assumed,
            },
            series=f"{own.start} {rows[0]} {layers}",
        )

    def _check_generated_row(
        self, step: StepRecord, views: Sequence[StepMaskView], declared: DeclaredMask
    ) -> Iterator[Finding]:
        missed: dict[tuple[Segment, ...], list[StepMaskView]] = {}
        for view in views:
            if view.newest_row[: view.newest_key + 1].all() and not view.first_key_pos:
                continue  # the whole cost of a step without findings
            missing = self._missed_paraphrases(view, declared)
            if missing:
                missed.setdefault(missing, []).append(view)
        for segments, group in missed.items():
            yield self._isolated_finding(step, segments, group, declared)

    def _missed_paraphrases(
        self, view: StepMaskView, declared: DeclaredMask
    ) -> tuple[Segment, ...]:
        """Return the paraphrases that the row should see and does not.

        They do not count if the row does not see itself (then it has the mask of another row), if
        the cue does not see them either (they are unused), or if a window has moved past them.
        """
        keys, layer = view.visible_positions(), view.layers[0]
        before = self._n_seen.get(layer, 0)
        self._n_seen.update(dict.fromkeys(view.layers, len(keys)))
        if not len(keys) or keys[-1] != view.newest_pos or view.first_key_pos:
            return ()
        if mask_views.is_sliding_window(keys, view.newest_pos, before):
            return ()
        cue = self._cue.get(layer)
        return tuple(
            segment
            for segment in self._paraphrases
            if not view.sees(segment)
            and (cue is None or segment.start in cue)
            and spec_sees_segment(declared.spec, view.newest_pos, segment)
        )

    def _isolated_finding(
        self,
        step: StepRecord,
        missed: Sequence[Segment],
        views: Sequence[StepMaskView],
        declared: DeclaredMask,
    ) -> Finding:
        layers = tuple(sorted(layer for view in views for layer in view.layers))
        keys, last = views[0].visible_positions(), views[0].newest_pos
        labels = [segment.label for segment in missed]
        cue = ", although the last row of the cue does" if self._cue else ""
        inside = self.context.format_rows(keys).partition(" of ")[2]
        sentence = (
            f"Generated rows do not see {abbreviate_labels(labels)} in "
            f"{format_step_layers(layers, step)}: in step {step.step} "
            f"{self.context.format_position(last)} sees {len(keys)} of {plural(last + 1, 'key')}, "
            f"{f'of {inside}' if inside else 'all of them elsewhere'}{cue}"
            f"{_format_assumption(declared)}."
        )
        severity = Severity.WARNING if declared.assumed else Severity.ERROR
        if declared.assumed and not self._cue and list(missed) == self._paraphrases[:-1]:
            severity = Severity.NOTE  # a packed prompt may continue its last document on purpose
        return self.finding(
            step,
            "decode.generated-row-isolated",
            sentence,
            severity=severity,
            layers=layers,
            positions=(last,),
            evidence={
                "missed": labels,
                "keys_missed": sum(map(len, missed)),
                "seen": len(keys),
                "keys": last + 1,
                "assumed": declared.assumed,
            },
            series=f"{[segment.start for segment in missed]} {layers}",
        )


def _format_assumption(declared: DeclaredMask) -> str:
    if not declared.assumed:
        return ""
    return "; no mask was declared, so the segments are assumed to be isolated in the prompt"
