"""Newest rows of a step that do not see what a row at their place should, such as themselves.

A decode step has one row whose mask is made apart from that of the prompt, so it goes wrong apart:
the row takes itself for row 0 (the offset is missing), for the row before it, or for the row that
was newest when the mask was made. What counts is what the kernel executed, compared with what the
last row of the prompt saw in the same layer: a mask in which no row sees itself is a design.

Every row of a causal model sees itself, but for padding and for rows that see nothing at all, which
are told of elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import Positions, plural
from flexinspect.core.text import format_layers as in_layers
from flexinspect.core.text import format_layers as layer_words
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_views import StepMaskView, is_sliding_window, step_mask_views

NO_OFFSET = "decode.no-offset"


def check_standalone_call(step: StepRecord, context: RuleContext) -> list[Finding]:
    """Say so when all rows of a call outside of a model are masked from the upper left.

    A call of a single row that opens key 0 of several has no other reading; of more rows it may be
    meant, so that is a note.
    """
    found = []
    for view in step_mask_views(step, context)[0]:
        n_rows, n_keys = view.cells.shape[1:]
        cells = view.cells
        if n_rows >= n_keys or n_keys < 3 or cells[:, -1, n_rows:].any():
            continue
        if not (cells == np.tri(n_rows, n_keys, dtype=np.bool_)).all():
            continue
        one = n_rows == 1
        rows = "The one row of this call sees" if one else f"The {n_rows} rows of this call see"
        keys = "1" if one else f"1 to {n_rows}"
        sentence = (
            f"{rows} {keys} of {n_keys} keys, the first one{'' if one else 's'}: a mask over keys "
            f"of a cache counts its rows from 0, while {n_keys - n_rows} keys come before them "
            f"(with that offset the last row sees {n_keys})."
        )
        found.append(
            Finding(
                id=NO_OFFSET,
                severity=Severity.WARNING if one else Severity.NOTE,
                sentence=sentence,
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                layer=view.layers[0],
                positions=(view.newest_pos,),
                evidence={
                    "keys": n_keys,
                    "seen": n_rows,
                    "expected": n_keys,
                    "mask": view.fingerprint,
                },
            )
        )
    return found


SELF_UNSEEN = "decode.self-unseen"
STALE_ROW = "decode.stale-row"

_DECODE_QUERY = (
    "SELECT c.step, c.layer, c.q_len, c.kv_len, m.kind, m.q_len AS mask_q, m.kv_len AS mask_kv, "
    "m.rule, m.rule_source FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask "
    "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
    "AND c.layer = {layer} ORDER BY c.call"
)


@dataclass(frozen=True, slots=True)
class _PromptRow:
    """What the last row of the first step saw in a layer, bool (1 or heads) each.

    `n_seen` of `n_keys` keys in all; `slides` tells that it saw as many as the row before it did.
    """

    itself: BoolArray
    row_before: BoolArray
    n_seen: int
    n_keys: int
    is_sliding: bool


@dataclass(frozen=True, slots=True)
class _FaultyRow:
    """A newest row that misses something: in which layers and heads, and what it sees there."""

    step: StepRecord
    view: StepMaskView
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    keys: Positions

    @property
    def last_key_pos(self) -> int:
        """Position of the last key it sees."""
        return self.view.first_key_pos + int(self.keys[-1])

    @property
    def series(self) -> str:
        """What tells this trouble from others of the generation."""
        return f"{self.layers} {self.heads}"


class DecodingRule(Rule):
    """Looks at the newest row of every step after the first, in every layer.

    From level advanced on, as cells are recorded there. A healthy row sees itself and the token
    before it: two cells per mask are read.
    """

    name: ClassVar[str] = "decoding"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        NO_OFFSET: FindingKind(
            Severity.ERROR,
            "a decode row is masked as if it were row 0 of the sequence",
            "The new token sees the first key alone (or the first few), so everything after the "
            "first token is made without the prompt and without itself.",
            "Compare the newest rows of this step and of the one before it in the mask panel; the "
            "number of open cells falls from all to one.",
            "Add the cache length to the row index: build the rule with "
            "kv_idx <= q_idx + offset, offset = kv_len - q_len, held in a tensor.",
            _DECODE_QUERY,
        ),
        SELF_UNSEEN: FindingKind(
            Severity.ERROR,
            "the newest row does not see its own key, while rows of the prompt do",
            "The token that was fed last is left out of the choice of the next one: each answer "
            "lags one token behind its own text.",
            "In the mask panel of this step the last cell of the row is closed; in the prefill the "
            "diagonal is open.",
            "The offset of the decode row is one too small: it is kv_len - q_len after the cache "
            "was updated, not before.",
            _DECODE_QUERY,
        ),
        STALE_ROW: FindingKind(
            Severity.ERROR,
            "the newest row sees the keys of an earlier step, though the cache has grown",
            "Tokens generated since then cannot be seen, so the model goes on without knowing what "
            "it has said.",
            "Step through the decode steps in the mask panel: the row stays as it was while keys "
            "are added on the right.",
            "Build the mask, or update the length that its rule captured, in each step after the "
            "cache has grown.",
            _DECODE_QUERY,
        ),
    }

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._prompt_rows: dict[int, _PromptRow] = {}
        """By layer; empty when watching began on a filled cache."""
        self._last_views: dict[int, tuple[StepRecord, list[StepMaskView]]] = {}
        self._undecided: dict[tuple[int, str], tuple[_FaultyRow, Finding]] = {}
        """What may turn out to be stale: whether the row stays or moves on, the next step tells."""
        self._decided: dict[tuple[int, str], str] = {}

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no step seen."""
        super().on_generation_start(context)
        self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what the newest row of a step does not see."""
        if self.context.is_standalone:
            return check_standalone_call(step, self.context)
        views, _ = step_mask_views(step, self.context)
        found: list[Finding] = []
        if step.step or step.kv_before:
            for view in views:
                found += self._check_view(step, view)
        else:
            self._record_prompt_rows(views)
            found += self._check_strict_rows(step, views)
        if self._undecided:
            found += self._release_undecided(step)
        self._last_views[step.branch] = step, views
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what no later step could settle."""
        return [finding for _, finding in self._undecided.values()]

    def _record_prompt_rows(self, views: Sequence[StepMaskView]) -> None:
        for view in views:
            row, at = view.cells[:, -1], view.newest_key
            keys = view.visible_positions()
            n_before = np.count_nonzero(view.cells[:, max(-2, -view.cells.shape[1])].any(axis=0))
            is_window = is_sliding_window(keys, view.newest_pos, int(n_before))
            sees = _PromptRow(row[:, at], row[:, max(at - 1, 0)], len(keys), at + 1, is_window)
            self._prompt_rows.update(dict.fromkeys(view.layers, sees))

    def _check_strict_rows(self, step: StepRecord, views: Sequence[StepMaskView]) -> list[Finding]:
        told = find_strict_rows(
            self.context, step, views, partial(_unpadded_rows, self.context, step)
        )
        if told is None or self._is_declared_closed(told.positions[0], told.positions[0]):
            return []
        about: dict[str, Any] = {"layers": told.layers, "positions": told.positions}
        severity = Severity.NOTE if told.may_be_meant else Severity.WARNING
        said = self.finding(
            step, SELF_UNSEEN, told.sentence, severity=severity, series="strict", **about
        )
        return [said]

    def _check_view(self, step: StepRecord, view: StepMaskView) -> list[Finding]:
        row, at = view.cells[:, -1], view.newest_key
        # These two look-ups are what a healthy step costs.
        if not row[:, at].all():
            return self._check_self_unseen(step, view)
        if at and step.q_len == 1 and not row[:, at - 1].any():
            return self._check_generated_unseen(step, view)
        return []

    def _check_self_unseen(self, step: StepRecord, view: StepMaskView) -> list[Finding]:
        """Say why a row does not see itself, unless rows of the prompt do not either."""
        row = view.cells[:, -1]
        heads = np.flatnonzero(~row[:, view.newest_key])
        layers = self._layers_unlike_prompt(view, heads, "itself")
        keys = np.flatnonzero(row[heads[0], : view.newest_key])
        if (
            not layers
            or not len(keys)
            or self._is_declared_closed(view.newest_pos, view.newest_pos)
        ):
            return []  # a row that sees nothing at all is for the rule of empty rows
        some = tuple(heads.tolist()) if len(heads) < len(row) else ()
        newest = _FaultyRow(step, view, layers, some, keys)
        if step.kv_before and keys[-1] < step.q_len:
            return [self._no_offset_finding(newest)]
        if not self._prompt_rows:
            return []
        return self._check_lagging_row(newest)

    def _layers_unlike_prompt(
        self, view: StepMaskView, heads: Positions, field: str
    ) -> tuple[int, ...]:
        """Return the layers in which the last row of the prompt saw what this one does not."""
        return tuple(
            layer
            for layer in view.layers
            if layer not in self._prompt_rows
            or _any_head_sees(getattr(self._prompt_rows[layer], field), heads)
        )

    def _is_declared_closed(self, pos: int, key: int) -> bool:
        """Say whether the declared mask itself closes a cell."""
        intent = self.context.declared_mask
        if intent is None or intent.assumed:
            return False
        return not intent.spec.dense(1, pos + 1, q_offset=pos)[0, key]

    def _no_offset_finding(self, newest: _FaultyRow) -> Finding:
        step, n_seen = newest.step, len(newest.keys)
        sentence = (
            f"Row {step.q_len - 1} of {step.q_len} in step {step.step} "
            f"({self.context.format_position(newest.view.newest_pos)}) sees {n_seen} of "
            f"{plural(newest.view.newest_key + 1, 'key')}{self._format_where(newest)}; "
            f"{self._count_expected_keys(newest)} expected{self._format_last_row(newest)}: the mask counts the "
            f"rows of this step from 0, not from {step.kv_before}."
        )
        severity = Severity.ERROR if self._prompt_rows else Severity.WARNING
        return self._finding(NO_OFFSET, severity, newest, sentence)

    def _check_lagging_row(self, newest: _FaultyRow) -> list[Finding]:
        """Say that a row lags: by as many keys as before, or by one more (a mask not renewed)."""
        key = newest.step.branch, newest.series
        if self._decided.get(key) == STALE_ROW:
            return [self._stale_finding(newest, newest)]
        if key in self._decided:
            return [self._self_unseen_finding(newest)]
        if key not in self._undecided:
            self._undecided[key] = newest, self._self_unseen_finding(newest)
            return []
        first, finding = self._undecided.pop(key)
        is_stale = (
            first.last_key_pos == newest.last_key_pos
            and first.view.newest_pos < newest.view.newest_pos
        )
        self._decided[key] = STALE_ROW if is_stale else SELF_UNSEEN
        return (
            [self._stale_finding(newest, first)]
            if is_stale
            else [finding, self._self_unseen_finding(newest)]
        )

    def _release_undecided(self, step: StepRecord) -> list[Finding]:
        """Return what was held in an earlier step of the branch, and was not met again."""
        out = []
        for key, (newest, finding) in tuple(self._undecided.items()):
            if key[0] == step.branch and newest.step.step < step.step:
                del self._undecided[key]
                self._decided[key] = SELF_UNSEEN
                out.append(finding)
        return out

    def _self_unseen_finding(self, newest: _FaultyRow) -> Finding:
        sentence = (
            f"The newest row of step {newest.step.step} "
            f"({self.context.format_position(newest.view.newest_pos)}) does not see itself"
            f"{self._format_where(newest)}: it sees {len(newest.keys)} of "
            f"{plural(newest.view.newest_key + 1, 'key')}, up to {self.context.format_position(newest.last_key_pos)}; "
            f"{self._count_expected_keys(newest)} expected, as rows of the prompt see themselves."
        )
        return self._finding(SELF_UNSEEN, Severity.ERROR, newest, sentence)

    def _stale_finding(self, newest: _FaultyRow, first: _FaultyRow) -> Finding:
        sentence = (
            f"From step {first.step.step} on the newest row sees the keys up to "
            f"{self.context.format_position(newest.last_key_pos)} alone{self._format_where(newest)}, while the cache grows: "
            f"in step {newest.step.step} it sees {len(newest.keys)} of "
            f"{plural(newest.view.newest_key + 1, 'key')}, and not itself; {self._count_expected_keys(newest)} "
            "expected."
        )
        return self._finding(STALE_ROW, Severity.ERROR, newest, sentence, first.step.step)

    def _check_generated_unseen(self, step: StepRecord, view: StepMaskView) -> list[Finding]:
        """Say that a row sees the prompt and itself, but nothing that was generated before it."""
        row, n_prompt = view.cells[:, -1], self.context.n_prompt - view.first_key_pos
        heads = np.arange(len(row))
        keys = np.flatnonzero(view.newest_row)
        generated = np.count_nonzero((keys >= n_prompt) & (keys < view.newest_key))
        if not 0 < n_prompt < view.newest_key or generated or not (keys < n_prompt).any():
            return []
        layers = self._layers_unlike_prompt(view, heads, "row_before")
        if (
            not layers
            or not self._prompt_rows
            or self._is_declared_closed(view.newest_pos, view.newest_pos - 1)
        ):
            return []
        newest = _FaultyRow(step, view, layers, (), keys)
        n = view.newest_key - n_prompt
        sentence = (
            f"The newest row of step {step.step} ({self.context.format_position(view.newest_pos)}) sees the "
            f"prompt and itself, and none of {plural(n, 'token')} generated before it"
            f"{self._format_where(newest)}: {len(keys)} of {plural(view.newest_key + 1, 'key')}; "
            f"{self._count_expected_keys(newest)} expected."
        )
        intent = self.context.declared_mask
        is_said = intent is not None and not intent.assumed
        severity = Severity.ERROR if is_said else Severity.WARNING
        return [self._finding(STALE_ROW, severity, newest, sentence)]

    def _finding(
        self,
        finding_id: str,
        severity: Severity,
        newest: _FaultyRow,
        sentence: str,
        step: int | None = None,
    ) -> Finding:
        seen = self._last_newest_row(newest)
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=sentence,
            generation=newest.step.generation,
            branch=newest.step.branch,
            step=newest.step.step if step is None else step,
            layer=newest.layers[0],
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
            layers=newest.layers if len(newest.layers) > 1 else (),
            series=newest.series,
        )

    def _format_where(self, newest: _FaultyRow) -> str:
        n_layers = len({call.layer for call in newest.step.calls})
        where = f" in {layer_words(newest.layers, n_layers)}"
        if not newest.heads:
            return where
        n_heads = len(newest.view.cells)
        one = len(newest.heads) == 1
        heads = f"head {newest.heads[0]}" if one else f"{len(newest.heads)} of {n_heads} heads"
        return f"{where}, {heads}"

    def _last_newest_row(self, newest: _FaultyRow) -> tuple[int, int, int] | None:
        """Return the step before, and of how many keys its newest row saw how many there."""
        before = self._last_views.get(newest.step.branch)
        for view in before[1] if before is not None else ():
            if before is not None and newest.layers[0] in view.layers:
                return before[0].step, int(np.count_nonzero(view.newest_row)), view.newest_key + 1
        return None

    def _format_last_row(self, newest: _FaultyRow) -> str:
        seen = self._last_newest_row(newest)
        return "" if seen is None else f" (in step {seen[0]} it was {seen[1]} of {seen[2]})"

    def _count_expected_keys(self, newest: _FaultyRow) -> int:
        """Return how many keys are meant: by the mask declared, else by the prompt's last row."""
        intent, view = self.context.declared_mask, newest.view
        if intent is not None and not intent.assumed:
            row = intent.spec.dense(1, view.newest_pos + 1, q_offset=view.newest_pos)[
                0, view.first_key_pos :
            ]
            return int(np.count_nonzero(row))
        prompt = self._prompt_rows.get(newest.layers[0])
        if prompt is None:
            return view.newest_key + 1
        grown = 0 if prompt.is_sliding else view.newest_key + 1 - prompt.n_keys
        return min(prompt.n_seen + grown, view.newest_key + 1)


def _unpadded_rows(context: RuleContext, step: StepRecord) -> BoolArray:
    """Return which rows of a prompt are no padding: by the mask that was fed, else by their ids."""
    for one in step.arrays:
        if one.stream == "inputs.mask" and len(one.array):
            return np.asarray(one.array[0], np.bool_)
    pad = declared_tokenizer(context.generation.declared).pad
    tokens = [context.token(pos) for pos in range(step.kv_after)]
    return np.array([one is None or one.token_id != pad for one in tokens])


def _any_head_sees(sees: BoolArray, heads: Positions) -> bool:
    """Say whether any of the heads saw it; one for all stands for each of them."""
    return bool(sees[0] if len(sees) == 1 else sees[heads[heads < len(sees)]].any())


_MAX_STRICT_ROWS = 64


@dataclass(frozen=True, slots=True)
class StrictRows:
    """What to say of such rows, at `positions`.

    It `may_be_meant` when no row sees itself but the first, which would see nothing otherwise.
    """

    sentence: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    may_be_meant: bool


def find_strict_rows(
    context: RuleContext,
    step: StepRecord,
    views: Sequence[StepMaskView],
    find_unpadded: Callable[[], BoolArray],
) -> StrictRows | None:
    """Return what to say of the layers in which rows of a prompt do not see themselves.

    `find_real` finds out which rows are no padding; it is asked only where some are blind.
    """
    blind: dict[tuple[int, ...], list[StepMaskView]] = {}
    for view in views:
        rows = _find_self_blind_rows(view, find_unpadded)
        if rows:
            blind.setdefault(rows, []).append(view)
    if not blind:
        return None
    rows = max(blind, key=len)
    layers = tuple(sorted({layer for view in blind[rows] for layer in view.layers}))
    where = in_layers(layers, len({call.layer for call in step.calls}))
    view = blind[rows][0]
    is_whole = len(rows) + 1 >= view.cells.shape[1]
    first_sees = bool(view.cells[:, 0, 0].any())
    said = _strict_rows_sentence(context, rows, where, is_whole=is_whole)
    return StrictRows(said, layers, rows[:_MAX_STRICT_ROWS], is_whole and first_sees)


def _strict_rows_sentence(
    context: RuleContext, rows: tuple[int, ...], where: str, *, is_whole: bool
) -> str:
    first = rows[0]
    if is_whole:
        return (
            f"No row of the prompt sees itself in {where}, though rows see keys before theirs: "
            f"first {context.format_position(first)}, as if the rule took `<` for `<=`, or an offset that "
            "is one too small."
        )
    one = len(rows) == 1
    return (
        f"{context.format_rows(np.array(rows))} {'does not see itself' if one else 'do not see themselves'} "
        f"in {where}, and {'sees' if one else 'see'} keys before "
        f"{'it' if one else 'them'}, where the other rows see themselves; "
        f"{context.format_first_position(np.array(rows))}."
    )


def _find_self_blind_rows(
    view: StepMaskView, find_unpadded: Callable[[], BoolArray]
) -> tuple[int, ...]:
    """Return the positions of rows of a whole sequence that see keys, and never their own."""
    n = view.cells.shape[1]
    if n < 3 or view.newest_key + 1 != n or view.cells.shape[2] < n:
        return ()
    row = np.arange(n)
    own = view.cells[:, row, row].any(axis=0)
    if own.all():
        return ()
    blind = ~own & view.cells.any(axis=(0, 2))
    if blind.any():
        real = find_unpadded()
        blind &= real if len(real) == n else True
    if blind.sum() + 1 >= n and not view.cells[:, row[1:], row[:-1]].any(axis=0).all():
        return ()  # no off-by-one: a layer that looks at some keys alone
    return tuple(int(pos) for pos in np.flatnonzero(blind) + view.first_key_pos)
