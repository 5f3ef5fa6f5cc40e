"""The rule for keys and segments that no row reads: columns of the executed mask that stay closed.

A key of the prompt that no other row reads has no effect, and a segment that neither the cue nor
any generated row sees cannot influence the output. A later row may still read them, so both are
reported when the generation is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flexinspect.core.text import Positions, capitalize, is_or_are, join_labels, plural, printable
from flexinspect.masks.mask_presets import BoolArray, Segments
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import DeclaredMask, read_unpadded, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.empty_rows import count_readers
from flexinspect.rules.masks.mask_views import NON_PROMPT_LABELS, StepMaskView

MIN_ATTENTION_SHARE = 1e-4  # a segment gets a note if no newest row gives it more attention

_READ_KINDS = (SegmentKind.PARAPHRASE, SegmentKind.SHARED)


class UnreadKeysRule(Rule):
    """Tracks which keys and segments are read, and reports at the end those that never were.

    It needs cells, which are recorded from level advanced on, and is silent for a generation with
    an unrecorded mask.
    """

    name = "unread_keys"
    needs = (imported.MASKS,)
    streams = ("inputs.mask", "attention.mass")
    findings = finding_kinds("mask.orphan-key", "segments.unused")

    def reset(self) -> None:
        self._has_unknown_mask = False  # whether a mask is not known, so any key may have been read
        self._unread: Positions = np.zeros(0, np.intp)  # positions that no other row has read
        self._length = 0
        self._layers: set[int] = set()
        self._unseen_segments: list[Segment] = []  # no cue and no generated row saw them
        self._n_readers = 0  # number of views of a cue or a generated row so far
        self._n_seen: dict[int, int] = {}  # by layer, keys that the last newest row saw
        self._is_sliding = False  # whether windows may have moved past the unseen segments
        self._shares: dict[int, float] = {}  # by index of a segment, the largest share of attention
        self._visible_segments: set[int] = set()  # to generated rows with recorded attention
        for number, segment in enumerate(self.context.segments[:-1]):
            if segment.kind in _READ_KINDS and segment.label not in NON_PROMPT_LABELS:
                self._unseen_segments.append(segment)
                self._shares[number] = 0.0

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Record which keys and segments the rows of a step read."""
        if self._has_unknown_mask or not step.calls:
            return ()
        views, all_known = mask_views.step_mask_views(step, self.context)
        if not all_known:
            self._has_unknown_mask = True
            return ()
        self._length = max(self._length, step.kv_after)
        if step.step == 0 and step.kv_before == 0:
            self._layers = {layer for view in views for layer in view.layers}
            self._unread = self._find_unread_keys(step, views)
        elif len(self._unread):
            for view in views:
                self._unread = self._unread[~_read_by_others(view, self._unread, step.kv_before)]
        if self._unseen_segments:
            self._drop_seen_segments(step, views)
        if self._shares and step.kv_after > self.context.n_prompt:
            self._drop_attended_segments(step, views)
        return ()

    def on_generation_end(self) -> Findings:
        """Return findings for keys and segments that were never read."""
        if self._has_unknown_mask or not self._layers:
            return
        meant = np.array([self._should_be_read(pos) for pos in self._unread.tolist()], np.bool_)
        for keep, is_meant in ((meant, True), (~meant, False)):
            if keep.any() and (is_meant or self.context.declared_mask is None):
                yield self._orphan_finding(self._unread[keep], is_meant)
        # The last segment of a single forward may not be a cue.
        is_single = self.context.declared_spec is None and self._length <= self.context.n_prompt
        if self._n_readers and not self._is_sliding and not is_single:
            yield from self._check_unused_segments()

    def _find_unread_keys(self, step: StepRecord, views: Sequence[StepMaskView]) -> Positions:
        """Return the keys that no other prompt row reads; the last one has no later row."""
        n = min(self.context.n_prompt or step.kv_after, step.kv_after)
        unread = np.arange(max(n - 1, 0))
        for view in views:
            unread = unread[~_read_by_others(view, unread, 0)]
        unread = unread[~self._is_padding(step, unread)]
        if len(unread):  # `mask.empty-row` reports rows that see no key in any layer
            rows = [view.cells[:, np.minimum(unread, view.cells.shape[1] - 1)] for view in views]
            unread = unread[np.logical_or.reduce([row.any(axis=(0, 2)) for row in rows])]
        if self.context.declared_mask is None and len(unread):
            follows = [_follows_earlier_keys(view, unread) for view in views]
            unread = unread[np.logical_or.reduce(follows)]
        return unread

    def _is_padding(self, step: StepRecord, positions: Positions) -> BoolArray:
        is_padding, received = np.zeros(self._length, np.bool_), read_unpadded(step)
        if received is not None:
            is_padding = ~mask_views.slice_flags(received, 0, self._length)
        for segment in self.context.segments:
            if segment.label in NON_PROMPT_LABELS:
                is_padding[segment.start : segment.stop] = True
        return is_padding[positions]

    def _should_be_read(self, pos: int) -> bool:
        """Return whether the declared mask lets a later row read a key."""
        # With an assumed mask, only later rows of the same segment and generated rows count.
        declared, segment = self.context.declared_mask, self.context.segment_at(pos)
        if declared is None or segment is None:
            return False
        if not declared.assumed:
            return mask_views.spec_reads_key(declared.spec, pos, self._length)
        if segment.kind not in (*_READ_KINDS, SegmentKind.CUE):
            return False
        return pos + 1 < segment.stop or self._length > self.context.n_prompt

    def _orphan_finding(self, keys: Positions, is_meant: bool) -> Finding:
        """Return the finding: a note under a declared mask, whose cells `mask.lost` reports."""
        declared, n_layers = self.context.declared_mask, len(self._layers)
        is_warning = is_meant and declared is not None and declared.assumed
        severity = Severity.WARNING if is_warning else Severity.NOTE
        subject = self.context.format_rows(keys).replace("row", "key", 1)
        sentence = (
            f"{subject} ({self.context.format_first_position(keys)}) {is_or_are(len(keys))} read "
            f"by no other row, in any of the {plural(n_layers, 'layer')} or any step: no later "
            f"token depends on {'it' if len(keys) == 1 else 'them'}."
        )
        id_ = "mask.orphan-key"
        facts = {"keys": len(keys), "rows": self._length, "layers": n_layers}
        return self.finding(None, id_, sentence, severity=severity, positions=keys, evidence=facts)

    def _drop_seen_segments(self, step: StepRecord, views: Sequence[StepMaskView]) -> None:
        """Remove the segments that a row of the cue or a generated row sees."""
        is_generated, are_windows, seen = step.kv_after > self.context.n_prompt, [], set[Segment]()
        cues = [s for s in self.context.segments if s.kind is SegmentKind.CUE]
        for view in views:
            keys = view.visible_positions()
            n_second_last = int(view.cells[:, -2:-1].any(axis=0).sum())
            before = self._n_seen.get(view.layers[0], n_second_last)
            is_window = mask_views.is_sliding_window(keys, view.newest_pos, before)
            are_windows.append(is_window or view.first_key_pos > 0)
            self._n_seen.update(dict.fromkeys(view.layers, len(keys)))
            if is_generated and len(keys) and int(keys[-1]) == view.newest_pos:
                self._n_readers += 1
                seen.update(filter(view.sees, self._unseen_segments))
            for cue in cues:
                if step.kv_before == 0 and cue.stop <= step.kv_after:
                    self._n_readers += 1
                    seen.update(s for s in self._unseen_segments if view.block(cue, s).any())
        self._unseen_segments = [s for s in self._unseen_segments if s not in seen]
        self._is_sliding |= all(are_windows)

    def _drop_attended_segments(self, step: StepRecord, views: Sequence[StepMaskView]) -> None:
        """Remove the segments that get more than `MIN_ATTENTION_SHARE` of the newest row."""
        if not all(view.cells[:, -1, view.newest_key].any() for view in views):
            return  # a row that does not see itself has the mask of another one
        attention = step_array(step, "attention.mass")
        if attention is None:
            return
        shares = attention.max(axis=(0, 1))
        self._shares = {
            number: max(share, float(shares[number]))
            for number, share in self._shares.items()
            if number < len(shares) and not shares[number] > MIN_ATTENTION_SHARE
        }
        for number in self._shares:
            if any(view.sees(self.context.segments[number]) for view in views):
                self._visible_segments.add(number)

    def _check_unused_segments(self) -> Findings:
        """Return findings for segments never seen, and for those that got no attention."""
        declared = self.context.declared_mask
        unseen = [s for s in self._unseen_segments if self._should_be_seen(s, declared)]
        if unseen:
            assumption = ""
            if declared is not None and declared.assumed:
                assumption = "; no mask was declared, so the output is assumed to use all segments"
            sentence = (
                f"{_format_labels(unseen)} ({self.context.format_position(unseen[0].start)} to "
                f"{self.context.format_position(unseen[-1].stop - 1)}) {is_or_are(len(unseen))} "
                f"seen by no row of the cue and by no generated row, in any layer or "
                f"head{assumption}."
            )
            severity = Severity.NOTE if declared is None else Severity.WARNING
            keys = [pos for s in unseen for pos in range(s.start, s.stop)]
            yield self._unused_finding(unseen, 0.0, sentence, severity=severity, positions=keys)
        numbers = self._shares.keys() & self._visible_segments
        weak = [self.context.segments[n] for n in sorted(numbers)]
        if weak:
            most = max(self._shares[n] for n in numbers)
            sentence = (
                f"{_format_labels(weak)} {is_or_are(len(weak))} visible to generated rows, but "
                f"{'gets' if len(weak) == 1 else 'get'} at most {most:.1g} of their attention in "
                "any layer and head."
            )
            starts, note = [segment.start for segment in weak], Severity.NOTE
            yield self._unused_finding(weak, most, sentence, severity=note, positions=starts)

    def _unused_finding(
        self, segments: Segments, share: float, sentence: str, **options: Any
    ) -> Finding:
        labels, n_keys = [segment.label for segment in segments], sum(map(len, segments))
        evidence = {"segments": labels, "keys": n_keys, "largest_share": share}
        evidence["layers"] = len(self._layers)
        return self.finding(None, "segments.unused", sentence, evidence=evidence, **options)

    def _should_be_seen(self, segment: Segment, declared: DeclaredMask | None) -> bool:
        """Return whether the declared mask, if there is one, shows a segment to the newest row."""
        # False for paraphrases without a cue: `decode.generated-row-isolated` reports those.
        if declared is None:
            return True
        if segment.kind is SegmentKind.SHARED:
            is_known = not declared.assumed
        else:
            is_known = any(s.kind is SegmentKind.CUE for s in self.context.segments)
        return is_known and mask_views.spec_sees_segment(declared.spec, self._length - 1, segment)


def _read_by_others(view: StepMaskView, positions: Positions, offset: int) -> BoolArray:
    """Return which keys any row but their own reads; row 0 of the step is at position `offset`."""
    # Nearly every key is read by the row after it, so that row is checked first.
    columns, cells = positions - view.first_key_pos, view.cells
    read: BoolArray = np.zeros(len(columns), np.bool_)
    inside = (columns >= 0) & (columns < cells.shape[2])
    if cells.shape[1] == 1:
        inside &= columns != view.newest_key
        read[inside] = cells[:, 0, columns[inside]].any(axis=0)
        return read
    next_rows = positions + 1 - offset
    inside &= (next_rows >= 0) & (next_rows < cells.shape[1])
    read[inside] = cells[:, next_rows[inside], columns[inside]].any(axis=0)
    rest = np.flatnonzero(~read)
    if len(rest):
        read[rest] = count_readers(cells, columns[rest], offset - view.first_key_pos)[0] > 0
    return read


def _follows_earlier_keys(view: StepMaskView, positions: Positions) -> BoolArray:
    """Return for which keys the next row sees earlier keys, so that no new block starts there."""
    last = view.cells.shape[1] - 1
    rows = ((pos, view.cells[:, min(pos + 1, last)]) for pos in positions.tolist())
    return np.array([row[:, :pos].any() for pos, row in rows], np.bool_)


def _format_labels(segments: Segments) -> str:
    return capitalize(join_labels([printable(segment.label) for segment in segments]))
