"""The rules for the rows of decode steps: the mask of another row, and of another role.

The mask of a decode row may be that of row 0 (the offset is missing), of the row before, or of the
row that was newest when the mask was built. It is compared with the last row of the prompt in the
same layer: if no row of the prompt sees itself, that is by design. If the spans of segments are
counted wrong, a prompt row is masked as a generated row. If the mask ignores the generated rows,
they do not see the segments that they should fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from flexinspect.core.text import (
    Positions,
    capitalize,
    format_numbers,
    is_or_are,
    plural,
    printable,
)
from flexinspect.masks.mask_presets import Segments
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind, declared_tokenizer
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import (
    abbreviate_labels,
    format_step_layers,
    read_unpadded,
    step_array,
)
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView


class _FaultyRow(NamedTuple):
    """A newest row that does not see expected keys: its layers, its heads, and the keys it sees.

    `keys` are indices of keys, `expected` is how many it should see; `heads` is empty if all heads
    are affected.
    """

    step: StepRecord
    view: StepMaskView
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    keys: Positions
    expected: int

    @property
    def last_key_pos(self) -> int:
        """Position of the last key that it sees."""
        return self.view.first_key_pos + int(self.keys[-1])

    @property
    def series(self) -> str:
        """The series of the finding: the same layers and heads."""
        return f"{self.layers} {self.heads}"

    @property
    def seen_keys(self) -> str:
        """How many of its keys it sees, as `1 of 12 keys`."""
        return f"{len(self.keys)} of {plural(self.view.newest_key + 1, 'key')}"

    @property
    def where(self) -> str:
        """The layers, and the heads if not all are affected."""
        where = f" in {format_step_layers(self.layers, self.step)}"
        if not self.heads:
            return where
        if len(self.heads) == 1:
            return f"{where}, head {self.heads[0]}"
        return f"{where}, {len(self.heads)} of {len(self.view.cells)} heads"


class DecodingRule(Rule):
    """Checks the newest row of every step after the first, in every layer.

    It needs cells, which are recorded from level advanced on. A correct row sees itself and the
    token before it, so two cells per mask are read. In a causal model every row sees itself, except
    padding and rows that see no key at all, which `mask.empty-row` reports.
    """

    name = "decoding"
    needs = (imported.MASKS,)
    streams = ("inputs.mask", "inputs.seen")
    handles_standalone_calls = True
    findings = finding_kinds("decode.no-offset", "decode.self-unseen", "decode.stale-row")

    def reset(self) -> None:
        self._prompt_views: dict[int, StepMaskView] = {}
        """By layer, the last two rows of the prompt; empty if capture began with a filled cache."""
        self._last_views: dict[int, tuple[StepRecord, list[StepMaskView]]] = {}  # by branch
        self._undecided: dict[tuple[int, str], tuple[_FaultyRow, Finding]] = {}
        """Rows that may be stale: the next step shows whether the visible keys stay or move on."""
        self._real: npt.NDArray[np.bool_] | None = None  # the keys that a row of the prompt sees
        self._has_unseen_rows = False
        self._is_stale: dict[tuple[int, str], bool] = {}
        """Whether the next step showed that they are; both by branch and series."""

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for newest rows that do not see expected keys."""
        views, _ = mask_views.step_mask_views(step, self.context)
        if self.context.is_standalone:
            for view in views:
                yield from self._check_standalone_call(step, view)
            return
        if step.step or step.kv_before:
            yield from self._check_batch_rows(step)
            for view in views:
                row, own_key = view.cells[:, -1], view.newest_key
                # These two look-ups are the whole cost of a step without findings.
                if not row[:, own_key].all():
                    yield from self._check_self_unseen(step, view)
                elif own_key and step.q_len == 1 and not row[:, own_key - 1].any():
                    yield from self._check_generated_unseen(step, view)
        else:
            for view in views:
                last = replace(view, cells=view.cells[:, -2:].copy())
                self._prompt_views.update(dict.fromkeys(view.layers, last))
            real = step_array(step, "inputs.seen")
            self._real = step_array(step, "inputs.mask") if real is None else real
            yield from self._check_strict_rows(step, views)
        for key, (newest, finding) in tuple(self._undecided.items()):
            if key[0] == step.branch and newest.step.step < step.step:  # it did not recur
                del self._undecided[key]
                self._is_stale[key] = False
                yield finding
        self._last_views[step.branch] = step, views

    def on_generation_end(self) -> list[Finding]:
        """Return the findings that no later step decided."""
        return [finding for _, finding in self._undecided.values()]

    def _check_batch_rows(self, step: StepRecord) -> Findings:
        """Find batch rows whose newest token does not see itself, while row 0 does; once."""
        if self._has_unseen_rows or step.inputs is None or step.inputs.batch < 2:
            return
        seen, own = step_array(step, "inputs.seen"), step.kv_before
        if seen is None or step.q_len != 1 or seen.shape[1] <= own or not seen[0, own]:
            return
        rows = np.flatnonzero(~seen[:, own] & seen.any(axis=1))
        if not len(rows):
            return
        self._has_unseen_rows, row = True, int(rows[0])
        keys = np.flatnonzero(seen[row])
        sentence = (
            f"The newest token of batch {format_numbers('row', rows.tolist())} does not see itself "
            f"in step {step.step}, as that of row 0 does: the mask closes column {own} and opens "
            f"{plural(len(keys), 'column')} up to {keys[-1]} in row {row}"
        )
        real = self._real
        if real is not None and len(real) == len(seen):
            padding = int((seen[row, : real.shape[1]] & ~real[row]).sum())
            sentence += f", {padding} of them padding" * (padding > 0)
        evidence = {"rows": rows.tolist(), "column": own, "keys": len(keys)}
        yield self.finding(
            step, "decode.self-unseen", f"{sentence}.", evidence=evidence, series="batch rows"
        )

    def _check_standalone_call(self, step: StepRecord, view: StepMaskView) -> Findings:
        """Return a finding if a call has a causal mask aligned to the upper left corner."""
        # For a call of one row that sees only key 0 of several, this is a warning. For more rows it
        # may be intended, so it is a note.
        n_rows, n_keys = view.cells.shape[1:]
        is_small = n_rows < n_keys >= 3 and not view.cells[:, -1, n_rows:].any()
        if not is_small or (view.cells != np.tri(n_rows, n_keys, dtype=np.bool_)).any():
            return
        rows, keys = f"The {n_rows} rows of this call see 1 to {n_rows}", "ones"
        if n_rows == 1:
            rows, keys = "The only row of this call sees 1", "one"
        sentence = (
            f"{rows} of {n_keys} keys, the first {keys}: the mask counts its rows from 0, but "
            f"{n_keys - n_rows} keys come before them (with that offset the last row would see "
            f"{n_keys})."
        )
        id_, positions = "decode.no-offset", (view.newest_pos,)
        severity = Severity.WARNING if n_rows == 1 else Severity.NOTE
        facts = {"keys": n_keys, "seen": n_rows, "expected": n_keys, "mask": view.fingerprint}
        yield self.finding(
            step, id_, sentence, view.layers[:1], facts, severity=severity, positions=positions
        )

    def _check_strict_rows(self, step: StepRecord, views: list[StepMaskView]) -> Findings:
        """Return a finding for prompt rows that do not see themselves, in the layers with most."""
        strict: dict[tuple[int, ...], list[StepMaskView]] = {}
        for view in views:
            strict.setdefault(self._self_blind_rows(view, step), []).append(view)
        positions = max(strict, key=len, default=())
        if not positions or self._is_declared_closed(positions[0], positions[0]):
            return
        layers = {layer for view in strict[positions] for layer in view.layers}
        cells, rows = strict[positions][0].cells, np.array(positions)
        first, where = self.context.format_first_position(rows), format_step_layers(layers, step)
        verb, they = "do not see themselves", "they see"
        if len(rows) == 1:
            verb, they = "does not see itself", "it sees"
        sentence = (
            f"{self.context.format_rows(rows)} {verb} in {where}, although {they} earlier keys and "
            f"the other rows see themselves; {first}."
        )
        severity = Severity.WARNING
        if len(rows) + 1 >= cells.shape[1]:
            sentence = (
                f"No row of the prompt sees itself in {where}, although rows see earlier keys "
                f"({first}): the mask_mod uses `<` instead of `<=`, or an offset that is one too "
                "small."
            )
            # The first row would see nothing otherwise, so it may be meant if only it sees itself.
            severity = Severity.NOTE if cells[:, 0, 0].any() else Severity.WARNING
        id_ = "decode.self-unseen"
        yield self.finding(
            step, id_, sentence, layers, severity=severity, positions=positions, series="strict"
        )

    def _check_self_unseen(self, step: StepRecord, view: StepMaskView) -> Findings:
        """Return why a row does not see itself, unless rows of the prompt do not either."""
        row, pos = view.cells[:, -1], view.newest_pos
        heads = np.flatnonzero(~row[:, view.newest_key])
        layers = self._unlike_prompt(view, heads, 0)
        keys = np.flatnonzero(row[heads[0], : view.newest_key])
        # `mask.empty-row` reports rows that see nothing at all.
        if not layers or not len(keys) or self._is_declared_closed(pos, pos):
            return
        some_heads = tuple(heads.tolist()) if len(heads) < len(row) else ()
        expected = self._count_expected_keys(view, layers[0])
        newest = _FaultyRow(step, view, layers, some_heads, keys, expected)
        if step.kv_before and keys[-1] < step.q_len:
            yield self._no_offset_finding(newest)
        elif self._prompt_views:
            yield from self._check_lagging_row(newest)

    def _unlike_prompt(self, view: StepMaskView, heads: Positions, back: int) -> tuple[int, ...]:
        """Return the layers where the last prompt row saw the key `back` before its own."""
        layers = []
        for layer in view.layers:
            prompt, seen = self._prompt_views.get(layer), np.ones(1, np.bool_)
            if prompt is not None:
                seen = prompt.cells[:, -1, max(prompt.newest_key - back, 0)]
            if seen[0] if len(seen) == 1 else seen[heads[heads < len(seen)]].any():
                layers.append(layer)
        return tuple(layers)

    def _is_declared_closed(self, pos: int, key: int) -> bool:
        spec = self.context.declared_spec
        return spec is not None and not spec.dense(1, pos + 1, q_offset=pos)[0, key]

    def _no_offset_finding(self, newest: _FaultyRow) -> Finding:
        step, seen = newest.step, self._last_newest_row(newest)
        before = "" if seen is None else f" (in step {seen[0]} it was {seen[1]} of {seen[2]})"
        sentence = (
            f"The mask counts the rows of step {step.step} from 0, not from {step.kv_before}: "
            f"row {step.q_len - 1} of {step.q_len} "
            f"({self.context.format_position(newest.view.newest_pos)}) sees {newest.seen_keys}"
            f"{newest.where}; {newest.expected} expected{before}."
        )
        severity = None if self._prompt_views else Severity.WARNING
        return self._row_finding("decode.no-offset", newest, sentence, severity)

    def _check_lagging_row(self, newest: _FaultyRow) -> Findings:
        """Return findings for a row that sees keys only up to one before its own."""
        # If the last visible key moves on with the next step, the row does not see itself; if it
        # stays, the mask is stale.
        key, first = (newest.step.branch, newest.series), newest
        if key in self._undecided:
            first, finding = self._undecided.pop(key)
            has_stayed = first.last_key_pos == newest.last_key_pos
            self._is_stale[key] = has_stayed and first.view.newest_pos < newest.view.newest_pos
            if not self._is_stale[key]:
                yield finding
        if key not in self._is_stale:
            self._undecided[key] = newest, self._self_unseen_finding(newest)
        elif self._is_stale[key]:
            yield self._stale_finding(newest, first)
        else:
            yield self._self_unseen_finding(newest)

    def _self_unseen_finding(self, newest: _FaultyRow) -> Finding:
        sentence = (
            f"The newest row of step {newest.step.step} "
            f"({self.context.format_position(newest.view.newest_pos)}) does not see itself"
            f"{newest.where}: it sees {newest.seen_keys}, up to "
            f"{self.context.format_position(newest.last_key_pos)}; {newest.expected} expected, "
            "because rows of the prompt see themselves."
        )
        return self._row_finding("decode.self-unseen", newest, sentence)

    def _stale_finding(self, newest: _FaultyRow, first: _FaultyRow) -> Finding:
        sentence = (
            f"From step {first.step.step} on, the newest row sees only keys up to "
            f"{self.context.format_position(newest.last_key_pos)}{newest.where}, while the cache "
            f"grows: in step {newest.step.step} it sees {newest.seen_keys}, but not itself; "
            f"{newest.expected} expected."
        )
        return self._row_finding("decode.stale-row", newest._replace(step=first.step), sentence)

    def _check_generated_unseen(self, step: StepRecord, view: StepMaskView) -> Findings:
        """Return a finding for a row that sees the prompt and itself, but no token in between."""
        n_prompt, keys = self.context.n_prompt - view.first_key_pos, np.flatnonzero(view.newest_row)
        generated = np.count_nonzero((keys >= n_prompt) & (keys < view.newest_key))
        if not 0 < n_prompt < view.newest_key or generated or not (keys < n_prompt).any():
            return
        layers = self._unlike_prompt(view, np.arange(len(view.cells)), 1)
        is_declared = self._is_declared_closed(view.newest_pos, view.newest_pos - 1)
        if not layers or not self._prompt_views or is_declared:
            return
        expected = self._count_expected_keys(view, layers[0])
        newest = _FaultyRow(step, view, layers, (), keys, expected)
        sentence = (
            f"The newest row of step {step.step} ({self.context.format_position(view.newest_pos)}) "
            "sees the prompt and itself, but not the "
            f"{plural(view.newest_key - n_prompt, 'token')} generated before it{newest.where}: "
            f"{newest.seen_keys}; {expected} expected."
        )
        severity = Severity.WARNING if self.context.declared_spec is None else None
        yield self._row_finding("decode.stale-row", newest, sentence, severity)

    def _row_finding(
        self, finding_id: str, newest: _FaultyRow, sentence: str, severity: Severity | None = None
    ) -> Finding:
        view, heads = newest.view, newest.heads
        step_before, seen_before, _ = self._last_newest_row(newest) or (None, None, None)
        facts: dict[str, Any] = {"keys": view.newest_key + 1, "seen": len(newest.keys)}
        facts |= {"expected": newest.expected, "last_key_seen": newest.last_key_pos}
        facts |= {"seen_before": seen_before, "step_before": step_before}
        facts |= {"heads": list(heads) or "all", "mask": view.fingerprint}
        return self.finding(
            newest.step,
            finding_id,
            sentence,
            newest.layers,
            facts,
            severity=severity,
            head=heads[0] if len(heads) == 1 else None,
            positions=(view.newest_pos,),
            series=newest.series,
        )

    def _last_newest_row(self, newest: _FaultyRow) -> tuple[int, int, int] | None:
        """Return the previous step, how many keys its newest row saw, and of how many."""
        step, views = self._last_views.get(newest.step.branch, (newest.step, []))
        for view in views:
            if newest.layers[0] in view.layers:
                return step.step, int(np.count_nonzero(view.newest_row)), view.newest_key + 1
        return None

    def _count_expected_keys(self, view: StepMaskView, layer: int) -> int:
        """Return how many keys a row should see, by the declared mask or the last prompt row."""
        spec, prompt = self.context.declared_spec, self._prompt_views.get(layer)
        if spec is not None:
            row = spec.dense(1, view.newest_pos + 1, q_offset=view.newest_pos)[0]
            return int(np.count_nonzero(row[view.first_key_pos :]))
        if prompt is None:
            return view.newest_key + 1
        keys, n_before = prompt.visible_positions(), int(prompt.cells[:, 0].any(axis=0).sum())
        is_sliding = mask_views.is_sliding_window(keys, prompt.newest_pos, n_before)
        grown = 0 if is_sliding else view.newest_key - prompt.newest_key
        return min(len(keys) + grown, view.newest_key + 1)

    def _self_blind_rows(self, view: StepMaskView, step: StepRecord) -> tuple[int, ...]:
        """Return the positions of rows of a whole sequence that see keys, but not their own."""
        n = view.cells.shape[1]
        if n < 3 or view.newest_key + 1 != n or view.cells.shape[2] < n:
            return ()
        row = np.arange(n)
        sees_itself = view.cells[:, row, row].any(axis=0)
        if sees_itself.all():
            return ()
        blind = ~sees_itself & view.cells.any(axis=(0, 2))
        if blind.any():
            real = read_unpadded(step)
            if real is None:
                pad = declared_tokenizer(self.context.generation.declared).pad
                tokens = [self.context.token(pos) for pos in range(step.kv_after)]
                real = np.array([token is None or token.token_id != pad for token in tokens])
            blind &= real if len(real) == n else True
        if blind.sum() + 1 >= n and not view.cells[:, row[1:], row[:-1]].any(axis=0).all():
            return ()  # not off by one: this layer sees only some keys
        return tuple(int(pos) for pos in np.flatnonzero(blind) + view.first_key_pos)


class RowRolesRule(Rule):
    """Checks which segments the last rows of a segment and the generated rows see.

    It needs at least two paraphrases. Without a declared mask they are assumed to be isolated, and
    findings are at most warnings; under a custom mask function the rule is silent. Each mask of a
    prompt is checked once; a generated row that sees all keys costs one look-up.
    """

    name = "row_roles"
    needs = (imported.MASKS,)
    findings = finding_kinds("decode.prompt-row-generated", "decode.generated-row-isolated")

    def reset(self) -> None:
        declared, self._assumption = self.context.declared_mask, ""
        if declared is not None and declared.assumed:
            assumed = "so the segments are assumed to be isolated in the prompt"
            self._assumption = f"; no mask was declared, {assumed}"
        segments = () if declared is None else self.context.segments
        self._paraphrases = mask_views.paraphrase_segments(segments)
        self._checked: set[str] = set()
        self._n_seen: dict[int, int] = {}  # by layer, keys that the last newest row saw
        self._cue: dict[int, frozenset[int]] = {}
        """By layer: starts of the paraphrases that the last prompt row sees, if it is a cue."""

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for rows of a step that are masked for another role."""
        if len(self._paraphrases) < 2:
            return
        views, _ = mask_views.step_mask_views(step, self.context)
        if step.kv_before == 0 and step.q_len >= self.context.n_prompt:
            yield from self._check_prompt_rows(step, views)
        if step.kv_after > self.context.n_prompt:
            yield from self._check_generated(step, views)
        elif step.kv_before == 0:
            last = self.context.segment_at(self.context.n_prompt - 1)
            for view in views:
                n_seen = int(np.count_nonzero(view.newest_row))
                self._n_seen.update(dict.fromkeys(view.layers, n_seen))
                if last is not None and last.kind is SegmentKind.CUE:
                    seen = frozenset(s.start for s in self._paraphrases if view.sees(s))
                    self._cue.update(dict.fromkeys(view.layers, seen))

    def _check_prompt_rows(self, step: StepRecord, views: list[StepMaskView]) -> Findings:
        """Return a finding for each segment and group of layers with the same open rows."""
        layers: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for view in views:
            if view.fingerprint in self._checked:
                continue
            self._checked.add(view.fingerprint)
            for number in range(1, len(self._paraphrases)):
                rows = self._find_open_rows(view, number)
                if rows:
                    layers.setdefault((number, tuple(rows)), []).extend(view.layers)
        for (number, open_rows), group in layers.items():
            yield self._prompt_row_finding(step, number, open_rows, tuple(sorted(group)))

    def _find_open_rows(self, view: StepMaskView, number: int) -> range:
        """Return the last rows of a segment if only they see all paraphrases before it."""
        own, others = self._paraphrases[number], self._paraphrases[:number]
        if any(self._is_declared_open(own.stop - 1, other) for other in others):
            return range(0)
        blocks = [view.block(own, other) for other in others]
        sees_all = np.logical_and.reduce([block.all(axis=1) for block in blocks])
        sees_any = np.logical_or.reduce([block.any(axis=1) for block in blocks])
        first = len(sees_all) - int(np.argmin([*sees_all[::-1], False]))
        if not first or sees_any[:first].any():
            return range(0)  # other rows see them too: another kind of leak
        return range(own.start + first, own.start + len(sees_all))

    def _prompt_row_finding(
        self, step: StepRecord, number: int, rows: Sequence[int], layers: tuple[int, ...]
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
            f"{n_isolated} {rest} none{self._assumption}."
        )
        facts: dict[str, Any] = {"segment": own.label, "rows": len(rows), "rows_apart": n_isolated}
        facts |= {"keys_seen": seen, "segments_seen": labels, "assumed": self._assumption != ""}
        id_, series = "decode.prompt-row-generated", f"{own.start} {rows[0]} {layers}"
        severity = Severity.WARNING if self._assumption else None
        return self.finding(
            step, id_, sentence, layers, facts, severity=severity, positions=rows, series=series
        )

    def _check_generated(self, step: StepRecord, views: list[StepMaskView]) -> Findings:
        missed: dict[tuple[Segment, ...], list[StepMaskView]] = {}
        for view in views:
            if view.newest_row[: view.newest_key + 1].all() and not view.first_key_pos:
                continue  # the whole cost of a step without findings
            missing = self._missed_paraphrases(view)
            if missing:
                missed.setdefault(missing, []).append(view)
        for segments, group in missed.items():
            yield self._isolated_finding(step, segments, group)

    def _missed_paraphrases(self, view: StepMaskView) -> tuple[Segment, ...]:
        """Return the paraphrases that the row should see and does not."""
        # They do not count if the row does not see itself (then it has the mask of another row), if
        # the cue does not see them either (they are unused), or if a window has moved past them.
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
            and self._is_declared_open(view.newest_pos, segment)
        )

    def _is_declared_open(self, pos: int, segment: Segment) -> bool:
        declared = self.context.declared_mask
        return declared is not None and mask_views.spec_sees_segment(declared.spec, pos, segment)

    def _isolated_finding(
        self, step: StepRecord, missed: Segments, views: Sequence[StepMaskView]
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
            f"{f'of {inside}' if inside else 'all of them elsewhere'}{cue}{self._assumption}."
        )
        severity = Severity.WARNING if self._assumption else Severity.ERROR
        if self._assumption and not self._cue and list(missed) == self._paraphrases[:-1]:
            severity = Severity.NOTE  # a packed prompt may continue its last document on purpose
        facts = {"missed": labels, "keys_missed": sum(map(len, missed)), "seen": len(keys)}
        facts |= {"keys": last + 1, "assumed": self._assumption != ""}
        id_, series = "decode.generated-row-isolated", f"{[s.start for s in missed]} {layers}"
        return self.finding(
            step, id_, sentence, layers, facts, severity=severity, positions=(last,), series=series
        )
