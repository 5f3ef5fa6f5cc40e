"""The rule for decode rows with the mask of another row, and for rows that do not see themselves.

The mask of a decode row is built separately from the mask of the prompt, so it can be wrong on its
own: it may be that of row 0 (the offset is missing), of the row before, or of the row that was
newest when the mask was built. The executed mask of the row is compared with that of the last row
of the prompt in the same layer: if no row of the prompt sees itself, that is by design.

In a causal model every row sees itself, except padding and rows that see no key at all, which
`mask.empty-row` reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexinspect.core.text import Positions, plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers, read_unpadded
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.mask_views import StepMaskView, is_sliding_window, step_mask_views


@dataclass(frozen=True, slots=True)
class _PromptRow:
    """What the last row of the prompt saw in a layer.

    `itself` and `row_before` say whether it saw its own key and the one before, bool (heads,) or
    (1,). It saw `n_seen` of `n_keys` keys. `is_sliding` says whether it saw a sliding window.
    """

    itself: BoolArray
    row_before: BoolArray
    n_seen: int
    n_keys: int
    is_sliding: bool


@dataclass(frozen=True, slots=True)
class _FaultyRow:
    """A newest row that does not see expected keys: its layers, its heads, and the keys it sees.

    `keys` are indices of keys; `heads` is empty if all heads are affected.
    """

    step: StepRecord
    view: StepMaskView
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    keys: Positions

    @property
    def last_key_pos(self) -> int:
        """Position of the last key that it sees."""
        return self.view.first_key_pos + int(self.keys[-1])

    @property
    def series(self) -> str:
        """The series of the finding: the same layers and heads."""
        return f"{self.layers} {self.heads}"

    @property
    def count(self) -> str:
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
    token before it, so two cells per mask are read.
    """

    name = "decoding"
    streams = ("inputs.mask",)
    handles_standalone_calls = True
    findings = finding_kinds("decode.no-offset", "decode.self-unseen", "decode.stale-row")

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the rows of the last generation."""
        super().on_generation_start(context)
        self._prompt_rows: dict[int, _PromptRow] = {}
        """By layer; empty if capture started with a filled cache."""
        self._last_views: dict[int, tuple[StepRecord, list[StepMaskView]]] = {}
        """The last step of each branch, with its views."""
        self._undecided: dict[tuple[int, str], tuple[_FaultyRow, Finding]] = {}
        """Rows that may be stale: the next step shows whether the visible keys stay or move on."""
        self._is_stale: dict[tuple[int, str], bool] = {}
        """Whether the next step showed that they are; both by branch and series."""

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return findings for newest rows that do not see expected keys."""
        views, _ = step_mask_views(step, self.context)
        if self.context.is_standalone:
            for view in views:
                yield from self._check_standalone_call(step, view)
            return
        if step.step or step.kv_before:
            for view in views:
                row, own_key = view.cells[:, -1], view.newest_key
                # These two look-ups are the whole cost of a step without findings.
                if not row[:, own_key].all():
                    yield from self._check_self_unseen(step, view)
                elif own_key and step.q_len == 1 and not row[:, own_key - 1].any():
                    yield from self._check_generated_unseen(step, view)
        else:
            self._record_prompt_rows(views)
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

    def _check_standalone_call(self, step: StepRecord, view: StepMaskView) -> Iterator[Finding]:
        """Return a finding if a call has a causal mask aligned to the upper left corner.

        For a call of one row that sees only key 0 of several, this is a warning. For more rows it
        may be intended, so it is a note.
        """
        n_rows, n_keys = view.cells.shape[1:]
        if n_rows >= n_keys or n_keys < 3 or view.cells[:, -1, n_rows:].any():
            return
        if not (view.cells == np.tri(n_rows, n_keys, dtype=np.bool_)).all():
            return
        rows, keys = f"The {n_rows} rows of this call see 1 to {n_rows}", "ones"
        if n_rows == 1:
            rows, keys = "The only row of this call sees 1", "one"
        sentence = (
            f"{rows} of {n_keys} keys, the first {keys}: the mask counts its rows from 0, but "
            f"{n_keys - n_rows} keys come before them (with that offset the last row would see "
            f"{n_keys})."
        )
        expected = {"keys": n_keys, "seen": n_rows, "expected": n_keys}
        yield self.finding(
            step,
            "decode.no-offset",
            sentence,
            severity=Severity.WARNING if n_rows == 1 else Severity.NOTE,
            layers=view.layers[:1],
            positions=(view.newest_pos,),
            evidence={**expected, "mask": view.fingerprint},
        )

    def _record_prompt_rows(self, views: Sequence[StepMaskView]) -> None:
        for view in views:
            row, own_key, keys = view.cells[:, -1], view.newest_key, view.visible_positions()
            n_before = np.count_nonzero(view.cells[:, max(-2, -view.cells.shape[1])].any(axis=0))
            prompt_row = _PromptRow(
                itself=row[:, own_key],
                row_before=row[:, max(own_key - 1, 0)],
                n_seen=len(keys),
                n_keys=own_key + 1,
                is_sliding=is_sliding_window(keys, view.newest_pos, int(n_before)),
            )
            self._prompt_rows.update(dict.fromkeys(view.layers, prompt_row))

    def _check_strict_rows(
        self, step: StepRecord, views: Sequence[StepMaskView]
    ) -> Iterator[Finding]:
        """Return a finding for prompt rows that do not see themselves, in the layers with most."""
        strict: dict[tuple[int, ...], list[StepMaskView]] = {}
        for view in views:
            strict.setdefault(_find_self_blind_rows(view, self.context, step), []).append(view)
        positions = max(strict, key=len, default=())
        if not positions or self._is_declared_closed(positions[0], positions[0]):
            return
        layers = {layer for view in strict[positions] for layer in view.layers}
        cells, one = strict[positions][0].cells, len(positions) == 1
        rows, where = np.array(positions), format_step_layers(layers, step)
        first = self.context.format_first_position(rows)
        is_whole = len(rows) + 1 >= cells.shape[1]
        verb = "does not see itself" if one else "do not see themselves"
        sentence = (
            f"No row of the prompt sees itself in {where}, although rows see earlier keys "
            f"({first}): the mask_mod uses `<` instead of `<=`, or an offset that is one too small."
            if is_whole
            else f"{self.context.format_rows(rows)} {verb} in {where}, although "
            f"{'it sees' if one else 'they see'} earlier keys and the other rows see themselves; "
            f"{first}."
        )
        # If only the first row sees itself, which would see nothing otherwise, it may be meant.
        may_be_meant = is_whole and bool(cells[:, 0, 0].any())
        yield self.finding(
            step,
            "decode.self-unseen",
            sentence,
            severity=Severity.NOTE if may_be_meant else Severity.WARNING,
            layers=layers,
            positions=positions,
            series="strict",
        )

    def _check_self_unseen(self, step: StepRecord, view: StepMaskView) -> Iterator[Finding]:
        """Return why a row does not see itself, unless rows of the prompt do not either."""
        row = view.cells[:, -1]
        heads = np.flatnonzero(~row[:, view.newest_key])
        layers = self._layers_unlike_prompt(view, heads, "itself")
        keys = np.flatnonzero(row[heads[0], : view.newest_key])
        # `mask.empty-row` reports rows that see nothing at all.
        if (
            not layers
            or not len(keys)
            or self._is_declared_closed(view.newest_pos, view.newest_pos)
        ):
            return
        some_heads = tuple(heads.tolist()) if len(heads) < len(row) else ()
        newest = _FaultyRow(step, view, layers, some_heads, keys)
        if step.kv_before and keys[-1] < step.q_len:
            yield self._no_offset_finding(newest)
        elif self._prompt_rows:
            yield from self._check_lagging_row(newest)

    def _layers_unlike_prompt(
        self, view: StepMaskView, heads: Positions, field: str
    ) -> tuple[int, ...]:
        """Return the layers in which the last row of the prompt saw what this one does not."""
        layers = []
        for layer in view.layers:
            seen = getattr(self._prompt_rows.get(layer), field, np.ones(1, np.bool_))
            if seen[0] if len(seen) == 1 else seen[heads[heads < len(seen)]].any():
                layers.append(layer)
        return tuple(layers)

    def _is_declared_closed(self, pos: int, key: int) -> bool:
        """Return whether the declared mask closes a cell."""
        spec = self.context.declared_spec
        return spec is not None and not spec.dense(1, pos + 1, q_offset=pos)[0, key]

    def _no_offset_finding(self, newest: _FaultyRow) -> Finding:
        step, seen = newest.step, self._last_newest_row(newest)
        before = "" if seen is None else f" (in step {seen[0]} it was {seen[1]} of {seen[2]})"
        sentence = (
            f"Row {step.q_len - 1} of {step.q_len} in step {step.step} "
            f"({self.context.format_position(newest.view.newest_pos)}) sees {newest.count}"
            f"{newest.where}; {self._count_expected_keys(newest)} expected{before}: the mask "
            f"counts the rows of this step from 0, not from {step.kv_before}."
        )
        severity = None if self._prompt_rows else Severity.WARNING
        return self._row_finding("decode.no-offset", newest, sentence, severity)

    def _check_lagging_row(self, newest: _FaultyRow) -> Iterator[Finding]:
        """Return findings for a row that sees keys only up to one before its own.

        If the last visible key moves on with the next step, the row does not see itself; if it
        stays, the mask is stale.
        """
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
            f"{newest.where}: it sees {newest.count}, up to "
            f"{self.context.format_position(newest.last_key_pos)}; "
            f"{self._count_expected_keys(newest)} expected, because rows of the prompt see "
            "themselves."
        )
        return self._row_finding("decode.self-unseen", newest, sentence)

    def _stale_finding(self, newest: _FaultyRow, first: _FaultyRow) -> Finding:
        sentence = (
            f"From step {first.step.step} on, the newest row sees only keys up to "
            f"{self.context.format_position(newest.last_key_pos)}{newest.where}, while the cache "
            f"grows: in step {newest.step.step} it sees {newest.count}, but not itself; "
            f"{self._count_expected_keys(newest)} expected."
        )
        return self._row_finding("decode.stale-row", newest, sentence, step=first.step)

    def _check_generated_unseen(self, step: StepRecord, view: StepMaskView) -> Iterator[Finding]:
        """Return a finding for a row that sees the prompt and itself, but no token in between."""
        n_prompt, keys = self.context.n_prompt - view.first_key_pos, np.flatnonzero(view.newest_row)
        generated = np.count_nonzero((keys >= n_prompt) & (keys < view.newest_key))
        if not 0 < n_prompt < view.newest_key or generated or not (keys < n_prompt).any():
            return
        layers = self._layers_unlike_prompt(view, np.arange(len(view.cells)), "row_before")
        is_declared = self._is_declared_closed(view.newest_pos, view.newest_pos - 1)
        if not layers or not self._prompt_rows or is_declared:
            return
        newest = _FaultyRow(step, view, layers, (), keys)
        sentence = (
            f"The newest row of step {step.step} ({self.context.format_position(view.newest_pos)}) "
            "sees the prompt and itself, but not the "
            f"{plural(view.newest_key - n_prompt, 'token')} generated before it{newest.where}: "
            f"{newest.count}; {self._count_expected_keys(newest)} expected."
        )
        severity = Severity.WARNING if self.context.declared_spec is None else None
        yield self._row_finding("decode.stale-row", newest, sentence, severity)

    def _row_finding(
        self,
        finding_id: str,
        newest: _FaultyRow,
        sentence: str,
        severity: Severity | None = None,
        *,
        step: StepRecord | None = None,
    ) -> Finding:
        seen = self._last_newest_row(newest)
        return self.finding(
            step or newest.step,
            finding_id,
            sentence,
            severity=severity,
            layers=newest.layers,
            head=newest.heads[0] if len(newest.heads) == 1 else None,
            positions=(newest.view.newest_pos,),
            evidence={
                "keys": newest.view.newest_key + 1,
                "seen": len(newest.keys),
                "expected": self._count_expected_keys(newest),
                "last_key_seen": newest.last_key_pos,
                "seen_before": None if seen is None else seen[1],
                "step_before": None if seen is None else seen[0],
                "heads": list(newest.heads) or "all",
                "mask": newest.view.fingerprint,
            },
            series=newest.series,
        )

    def _last_newest_row(self, newest: _FaultyRow) -> tuple[int, int, int] | None:
        """Return the previous step, how many keys its newest row saw, and of how many."""
        last = self._last_views.get(newest.step.branch)
        if last is None:
            return None
        step, views = last
        for view in views:
            if newest.layers[0] in view.layers:
                return step.step, int(np.count_nonzero(view.newest_row)), view.newest_key + 1
        return None

    def _count_expected_keys(self, newest: _FaultyRow) -> int:
        """Return how many keys the row should see, by the declared mask or the last prompt row."""
        spec, view = self.context.declared_spec, newest.view
        if spec is not None:
            row = spec.dense(1, view.newest_pos + 1, q_offset=view.newest_pos)[0]
            return int(np.count_nonzero(row[view.first_key_pos :]))
        prompt = self._prompt_rows.get(newest.layers[0])
        if prompt is None:
            return view.newest_key + 1
        grown = 0 if prompt.is_sliding else view.newest_key + 1 - prompt.n_keys
        return min(prompt.n_seen + grown, view.newest_key + 1)


def _find_self_blind_rows(
    view: StepMaskView, context: RuleContext, step: StepRecord
) -> tuple[int, ...]:
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
            pad = declared_tokenizer(context.generation.declared).pad
            tokens = [context.token(pos) for pos in range(step.kv_after)]
            real = np.array([token is None or token.token_id != pad for token in tokens])
        blind &= real if len(real) == n else True
    if blind.sum() + 1 >= n and not view.cells[:, row[1:], row[:-1]].any(axis=0).all():
        return ()  # not off by one: this layer sees only some keys
    return tuple(int(pos) for pos in np.flatnonzero(blind) + view.first_key_pos)
