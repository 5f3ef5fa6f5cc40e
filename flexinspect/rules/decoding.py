"""Newest rows of a step that do not see what a row at their place should, such as themselves.

A decode step has one row whose mask is made apart from that of the prompt, so it goes wrong apart:
the row takes itself for row 0 (the offset is missing), for the row before it, or for the row that
was newest when the mask was made. What counts is what the kernel executed, compared with what the
last row of the prompt saw in the same layer: a mask in which no row sees itself is a design.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray
from flexinspect.records import StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.loosedecoding import NO_OFFSET, of_loose_call
from flexinspect.rules.scene import Scene
from flexinspect.rules.strictrows import strict_rows
from flexinspect.rules.views import View, slides, views_of
from flexinspect.rules.words import Positions, counted
from flexinspect.rules.words import layers as layer_words

SELF_UNSEEN = "decode.self-unseen"
STALE_ROW = "decode.stale-row"

_ROWS = (
    "SELECT c.step, c.layer, c.q_len, c.kv_len, m.kind, m.q_len AS mask_q, m.kv_len AS mask_kv, "
    "m.rule, m.rule_source FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask "
    "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
    "AND c.layer = {layer} ORDER BY c.call"
)


@dataclass(frozen=True, slots=True)
class _Sees:
    """What the last row of the first step saw in a layer, bool (1 or heads) each.

    `n_seen` of `n_keys` keys in all; `slides` tells that it saw as many as the row before it did.
    """

    itself: BoolArray
    row_before: BoolArray
    n_seen: int
    n_keys: int
    slides: bool


@dataclass(frozen=True, slots=True)
class _Newest:
    """A newest row that misses something: in which layers and heads, and what it sees there."""

    step: StepRecord
    view: View
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    keys: Positions

    @property
    def top(self) -> int:
        """Position of the last key it sees."""
        return self.view.first + int(self.keys[-1])

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
    loose: ClassVar[bool] = True
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
            _ROWS,
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
            _ROWS,
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
            _ROWS,
        ),
    }

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._prompt: dict[int, _Sees] = {}
        """By layer; empty when watching began on a filled cache."""
        self._before: dict[int, tuple[StepRecord, list[View]]] = {}
        self._held: dict[tuple[int, str], tuple[_Newest, Finding]] = {}
        """What may turn out to be stale: whether the row stays or moves on, the next step tells."""
        self._settled: dict[tuple[int, str], str] = {}

    def begin(self, scene: Scene) -> None:
        """Begin with no step seen."""
        super().begin(scene)
        self._forget()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what the newest row of a step does not see."""
        if self.scene.is_loose:
            return of_loose_call(step, self.scene)
        views, _ = views_of(step, self.scene)
        found: list[Finding] = []
        if step.step or step.kv_before:
            for view in views:
                found += self._judge(step, view)
        else:
            self._learn(views)
            found += self._strict(step, views)
        if self._held:
            found += self._let_go(step)
        self._before[step.branch] = step, views
        return found

    def end(self) -> Sequence[Finding]:
        """Return what no later step could settle."""
        return [finding for _, finding in self._held.values()]

    def _learn(self, views: Sequence[View]) -> None:
        for view in views:
            row, at = view.cells[:, -1], view.at
            keys = view.positions()
            n_before = np.count_nonzero(view.cells[:, max(-2, -view.cells.shape[1])].any(axis=0))
            is_window = slides(keys, view.last, int(n_before))
            sees = _Sees(row[:, at], row[:, max(at - 1, 0)], len(keys), at + 1, is_window)
            self._prompt.update(dict.fromkeys(view.layers, sees))

    def _strict(self, step: StepRecord, views: Sequence[View]) -> list[Finding]:
        told = strict_rows(self.scene, step, views)
        if told is None or self._is_meant(told.last, told.last):
            return []
        about: dict[str, Any] = {"layers": told.layers, "positions": told.positions}
        severity = Severity.WARNING
        said = self.finding(
            step, SELF_UNSEEN, told.sentence, severity=severity, series="strict", **about
        )
        return [said]

    def _judge(self, step: StepRecord, view: View) -> list[Finding]:
        row, at = view.cells[:, -1], view.at
        # These two look-ups are what a healthy step costs.
        if not row[:, at].all():
            return self._behind(step, view)
        if at and step.q_len == 1 and not row[:, at - 1].any():
            return self._without_the_generated(step, view)
        return []

    def _behind(self, step: StepRecord, view: View) -> list[Finding]:
        """Say why a row does not see itself, unless rows of the prompt do not either."""
        row = view.cells[:, -1]
        heads = np.flatnonzero(~row[:, view.at])
        layers = self._unlike_the_prompt(view, heads, "itself")
        keys = np.flatnonzero(row[heads[0], : view.at])
        if not layers or not len(keys) or self._is_meant(view.last, view.last):
            return []  # a row that sees nothing at all is for the rule of empty rows
        some = tuple(heads.tolist()) if len(heads) < len(row) else ()
        newest = _Newest(step, view, layers, some, keys)
        if step.kv_before and keys[-1] < step.q_len:
            return [self._no_offset(newest)]
        if not self._prompt:
            return []
        return self._lagging(newest)

    def _unlike_the_prompt(self, view: View, heads: Positions, what: str) -> tuple[int, ...]:
        """Return the layers in which the last row of the prompt saw what this one does not."""
        return tuple(
            layer
            for layer in view.layers
            if layer not in self._prompt or _in_any(getattr(self._prompt[layer], what), heads)
        )

    def _is_meant(self, pos: int, key: int) -> bool:
        """Say whether the declared mask itself closes a cell."""
        intent = self.scene.intent
        if intent is None or intent.assumed:
            return False
        return not intent.rule.dense(1, pos + 1, q_offset=pos)[0, key]

    def _no_offset(self, newest: _Newest) -> Finding:
        step, n_seen = newest.step, len(newest.keys)
        sentence = (
            f"Row {step.q_len - 1} of {step.q_len} in step {step.step} "
            f"({self.scene.position(newest.view.last)}) sees {n_seen} of "
            f"{counted(newest.view.at + 1, 'key')}{self._where(newest)}; "
            f"{self._expected(newest)} expected{self._row_before(newest)}: the mask counts the "
            f"rows of this step from 0, not from {step.kv_before}."
        )
        severity = Severity.ERROR if self._prompt else Severity.WARNING
        return self._finding(NO_OFFSET, severity, newest, sentence)

    def _lagging(self, newest: _Newest) -> list[Finding]:
        """Say that a row lags: by as many keys as before, or by one more (a mask not renewed)."""
        key = newest.step.branch, newest.series
        if self._settled.get(key) == STALE_ROW:
            return [self._stale(newest, newest)]
        if key in self._settled:
            return [self._self_unseen(newest)]
        if key not in self._held:
            self._held[key] = newest, self._self_unseen(newest)
            return []
        first, finding = self._held.pop(key)
        is_stale = first.top == newest.top and first.view.last < newest.view.last
        self._settled[key] = STALE_ROW if is_stale else SELF_UNSEEN
        return [self._stale(newest, first)] if is_stale else [finding, self._self_unseen(newest)]

    def _let_go(self, step: StepRecord) -> list[Finding]:
        """Return what was held in an earlier step of the branch, and was not met again."""
        out = []
        for key, (newest, finding) in tuple(self._held.items()):
            if key[0] == step.branch and newest.step.step < step.step:
                del self._held[key]
                self._settled[key] = SELF_UNSEEN
                out.append(finding)
        return out

    def _self_unseen(self, newest: _Newest) -> Finding:
        sentence = (
            f"The newest row of step {newest.step.step} "
            f"({self.scene.position(newest.view.last)}) does not see itself"
            f"{self._where(newest)}: it sees {len(newest.keys)} of "
            f"{counted(newest.view.at + 1, 'key')}, up to {self.scene.position(newest.top)}; "
            f"{self._expected(newest)} expected, as rows of the prompt see themselves."
        )
        return self._finding(SELF_UNSEEN, Severity.ERROR, newest, sentence)

    def _stale(self, newest: _Newest, first: _Newest) -> Finding:
        sentence = (
            f"From step {first.step.step} on the newest row sees the keys up to "
            f"{self.scene.position(newest.top)} alone{self._where(newest)}, while the cache grows: "
            f"in step {newest.step.step} it sees {len(newest.keys)} of "
            f"{counted(newest.view.at + 1, 'key')}, and not itself; {self._expected(newest)} "
            "expected."
        )
        return self._finding(STALE_ROW, Severity.ERROR, newest, sentence, first.step.step)

    def _without_the_generated(self, step: StepRecord, view: View) -> list[Finding]:
        """Say that a row sees the prompt and itself, but nothing that was generated before it."""
        row, n_prompt = view.cells[:, -1], self.scene.n_prompt - view.first
        heads = np.arange(len(row))
        keys = np.flatnonzero(view.newest)
        generated = np.count_nonzero((keys >= n_prompt) & (keys < view.at))
        if not 0 < n_prompt < view.at or generated or not (keys < n_prompt).any():
            return []
        layers = self._unlike_the_prompt(view, heads, "row_before")
        if not layers or not self._prompt or self._is_meant(view.last, view.last - 1):
            return []
        newest = _Newest(step, view, layers, (), keys)
        n = view.at - n_prompt
        sentence = (
            f"The newest row of step {step.step} ({self.scene.position(view.last)}) sees the "
            f"prompt and itself, and none of {counted(n, 'token')} generated before it"
            f"{self._where(newest)}: {len(keys)} of {counted(view.at + 1, 'key')}; "
            f"{self._expected(newest)} expected."
        )
        intent = self.scene.intent
        is_said = intent is not None and not intent.assumed
        severity = Severity.ERROR if is_said else Severity.WARNING
        return [self._finding(STALE_ROW, severity, newest, sentence)]

    def _finding(
        self,
        finding_id: str,
        severity: Severity,
        newest: _Newest,
        sentence: str,
        step: int | None = None,
    ) -> Finding:
        seen = self._seen_before(newest)
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=sentence,
            generation=newest.step.generation,
            branch=newest.step.branch,
            step=newest.step.step if step is None else step,
            layer=newest.layers[0],
            head=newest.heads[0] if len(newest.heads) == 1 else None,
            positions=(newest.view.last,),
            evidence={
                "keys": newest.view.at + 1,
                "seen": len(newest.keys),
                "expected": self._expected(newest),
                "last_key_seen": newest.top,
                "seen_before": None if seen is None else seen[1],
                "step_before": None if seen is None else seen[0],
                "heads": list(newest.heads) or "all",
                "mask": newest.view.fingerprint,
            },
            layers=newest.layers if len(newest.layers) > 1 else (),
            series=newest.series,
        )

    def _where(self, newest: _Newest) -> str:
        n_layers = len({call.layer for call in newest.step.calls})
        where = f" in {layer_words(newest.layers, n_layers)}"
        if not newest.heads:
            return where
        n_heads = len(newest.view.cells)
        one = len(newest.heads) == 1
        heads = f"head {newest.heads[0]}" if one else f"{len(newest.heads)} of {n_heads} heads"
        return f"{where}, {heads}"

    def _seen_before(self, newest: _Newest) -> tuple[int, int, int] | None:
        """Return the step before, and of how many keys its newest row saw how many there."""
        before = self._before.get(newest.step.branch)
        for view in before[1] if before is not None else ():
            if before is not None and newest.layers[0] in view.layers:
                return before[0].step, int(np.count_nonzero(view.newest)), view.at + 1
        return None

    def _row_before(self, newest: _Newest) -> str:
        seen = self._seen_before(newest)
        return "" if seen is None else f" (in step {seen[0]} it was {seen[1]} of {seen[2]})"

    def _expected(self, newest: _Newest) -> int:
        """Return how many keys are meant: by the mask declared, else by the prompt's last row."""
        intent, view = self.scene.intent, newest.view
        if intent is not None and not intent.assumed:
            row = intent.rule.dense(1, view.last + 1, q_offset=view.last)[0, view.first :]
            return int(np.count_nonzero(row))
        prompt = self._prompt.get(newest.layers[0])
        if prompt is None:
            return view.at + 1
        grown = 0 if prompt.slides else view.at + 1 - prompt.n_keys
        return min(prompt.n_seen + grown, view.at + 1)


RULE: type[Rule] = DecodingRule


def _in_any(sees: BoolArray, heads: Positions) -> bool:
    """Say whether any of the heads saw it; one for all stands for each of them."""
    return bool(sees[0] if len(sees) == 1 else sees[heads[heads < len(sees)]].any())
