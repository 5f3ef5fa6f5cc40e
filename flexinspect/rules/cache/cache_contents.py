"""Checks which text a cache holds: repeated, of another prompt, lost between steps, or not used.

`CacheTextTracker` follows the input tokens and the cached lengths. `check_slots` reads the stream
`attention.slots`, which capture writes only if empty or stale slots take part in the softmax. Its
numbers are counted or summed from the keys and weights of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import capitalize, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, LogitsRecord, StepRecord
from flexinspect.rules.context import RuleContext, format_step_layers, step_array
from flexinspect.rules.engine import Rule

CACHE_LOST = "cache.lost"
CACHE_NOT_USED = "cache.not-used"
CACHE_DUPLICATED = "cache.duplicated"
CACHE_SHARED = "cache.shared"
EMPTY_SLOTS = "cache.empty-slots"
STALE_SLOTS = "cache.stale-slots"

NO_CACHE_EVENT = "cache-disabled"
"""Event of a generation with use_cache=False."""
CACHED_PROMPT_EVENT = "cached-prompt"
"""Event with the prompt tokens that a caller of `generate` assumes to be cached."""

_MAX_GENERATIONS = 16
"""Earlier generations whose tokens are compared with a filled cache."""

_MIN_COMMON_PREFIX = 8
"""Equal tokens from which a text counts as repeated; templates have a few in common."""

SLOT_STREAM = "attention.slots"
OPEN_COLUMN, EMPTY_COLUMN, EMPTY_WEIGHT_COLUMN, STALE_COLUMN, STALE_WEIGHT_COLUMN = range(5)
"""Columns of `attention.slots` (calls, 5): open keys; empty (all-zero) keys and their weight; stale
keys beyond the filled length and their weight. Weights are means over heads."""

SlotTable = npt.NDArray[np.float32]


class _LastStep(NamedTuple):
    """The facts of the last step that the next one is compared with."""

    generation: int
    kv_after: int
    is_uncached_token: bool
    """Whether its input was a single token without any cached key."""
    is_single_token: bool
    position_id: int | None
    logits: LogitsRecord | None

    @property
    def best_token_id(self) -> int | None:
        """The most probable next token."""
        best = self.logits.candidates if self.logits is not None else ()
        return best[0].token_id if best else None

    def has_candidate(self, token_id: int) -> bool:
        """Whether a token is among the recorded candidates for the next one."""
        best = self.logits.candidates if self.logits is not None else ()
        return any(candidate.token_id == token_id for candidate in best)


class CacheTextTracker:
    """Follows the input tokens of a model from one generation to the next, for a rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._cached_texts: deque[list[int]] = deque(maxlen=_MAX_GENERATIONS)
        """Token ids of the last generations, which may be in a cache."""
        self._last_step: _LastStep | None = None
        """The last step of any generation."""
        self._n_continued = self._n_tokens_before = 0
        self._is_loss_reported = False

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; the texts of earlier ones are kept."""
        self.context = context
        self._full_forwards: list[tuple[int, int]] = []
        """Step and rows of forwards over the whole sequence."""
        self._masks: frozenset[str | None] = frozenset()
        self._declared_ids: list[int] | None = None
        self._is_cache_off = False
        self._length = 0

    def on_event(self, event: EventRecord) -> None:
        """Store the tokens that the caller of `generate` assumes to be cached."""
        if event.kind == CACHED_PROMPT_EVENT:
            self._declared_ids = list(event.data["prompt"])

    def on_step(self, step: StepRecord) -> list[Finding]:
        """Compare the input of a step with the content of the cache."""
        found: Finding | None = None
        if step.step == 0:
            self._is_cache_off = any(event.kind == NO_CACHE_EVENT for event in step.events)
            check = self._check_filled_cache if step.kv_before else self._check_lost_cache
            found = check(step)
        elif step.q_len > 1:
            found = self._check_rows(step)
        elif step.step == 1:
            found = self._check_repeated_token(step)
        if step.kv_before:
            self._n_continued = 0
        self._last_step = _LastStep(
            generation=step.generation,
            kv_after=step.kv_after,
            is_uncached_token=step.q_len == 1 and not step.kv_before,
            is_single_token=step.q_len == 1,
            position_id=_last_position_id(step),
            logits=step.logits,
        )
        self._length = step.kv_after
        return [] if found is None else [found]

    def on_generation_end(self) -> Sequence[Finding]:
        """Keep the text of the generation, and report that no cache was used."""
        self._cached_texts.append(self._token_ids(0, self._length))
        return self._unused_finding()

    def _token_ids(self, start: int, stop: int) -> list[int]:
        """The token ids of these positions, up to the first unknown one."""
        out = []
        for pos in range(start, stop):
            token = self.context.token(pos)
            if token is None:
                break
            out.append(token.token_id)
        return out

    def _check_filled_cache(self, step: StepRecord) -> Finding | None:
        """Compare the prompt that the caller assumes to be cached with the texts of earlier runs.

        The trace does not say which cache it is, so one matching text is enough.
        """
        n, declared = step.kv_before, self._declared_ids
        if declared is None:
            return self._check_cut(step)
        known = [ids[:n] for ids in self._cached_texts if len(ids) >= n]
        if len(declared) != n or not known or declared in known:
            return None
        cached = max(known, key=lambda ids: _common_prefix_len(ids, declared))
        wrong = [pos for pos, (a, b) in enumerate(zip(cached, declared, strict=True)) if a != b]
        sentence = (
            f"The cache holds {n} keys of another text: {len(wrong)} of the first {n} tokens of "
            f"the prompt differ from the cached ones, from position {wrong[0]} on (token "
            f"{declared[wrong[0]]}, cached {cached[wrong[0]]})"
        )
        return self._token_finding(step, CACHE_SHARED, Severity.ERROR, sentence, wrong, len(wrong))

    def _check_cut(self, step: StepRecord) -> Finding | None:
        """Report that the text continues with its next token although keys were removed.

        Rejected drafts and chat turns are cropped too, but not by more than half before the next
        token. A smaller loss is certain only if the last step had one row and its best token
        follows. A cache that drops one key for each new one does so by design.
        """
        last, token = self._last_step, self.context.token(step.kv_before)
        if last is None or token is None or step.q_len != 1 or self._is_loss_reported:
            return None
        last_id, position_id = last.position_id, _last_position_id(step)
        continues = last_id is not None and position_id == last_id + 1
        n_lost = last.kv_after - step.kv_before
        is_large = 2 * step.kv_before < last.kv_after
        is_next = is_large and (continues or last.has_candidate(token.token_id))
        if not is_next and not (
            n_lost > 1 and last.is_single_token and last.best_token_id == token.token_id
        ):
            return None
        self._is_loss_reported = True
        sentence = (
            f"The cache lost keys between steps: it held {last.kv_after} and now holds "
            f"{step.kv_before}, but the text continues with the next token "
            f"({self.context.format_position(step.kv_before)})"
        )
        positions = (step.kv_before,)
        return self._token_finding(step, CACHE_LOST, Severity.WARNING, sentence, positions, n_lost)

    def _check_repeated_token(self, step: StepRecord) -> Finding | None:
        """Report that the first decode step repeats the last prompt token, which was not chosen."""
        last, pos = self._last_step, step.kv_before
        previous, token = self.context.token(pos - 1), self.context.token(pos)
        if last is None or not pos or previous is None or token is None:
            return None
        if (
            token.token_id != previous.token_id
            or last.logits is None
            or last.has_candidate(token.token_id)
        ):
            return None
        sentence = (
            f"The last token of the prompt is in the input twice: step {step.step} begins with "
            f"{self.context.format_position(pos)}, the same token as before, which is not among "
            f"the {len(last.logits.candidates)} best candidates of step {step.step - 1}"
        )
        return self._token_finding(step, CACHE_DUPLICATED, Severity.WARNING, sentence, (pos,), 1)

    def _check_rows(self, step: StepRecord) -> Finding | None:
        """Check several rows on a filled cache: the next part of a text, or a repetition."""
        if not step.kv_before:
            if step.q_len == self._length + 1:
                self._full_forwards = self._full_forwards or [(step.step - 1, self._length)]
                self._full_forwards.append((step.step, step.q_len))
                self._masks = frozenset(call.mask for call in step.calls)
            return None
        new_ids = [t.token_id for t in step.tokens if step.kv_before <= t.pos < step.kv_after]
        return self._check_repeated_rows(step, new_ids, self._token_ids(0, step.kv_before))

    def _check_repeated_rows(
        self, step: StepRecord, new_ids: Sequence[int], cached_ids: Sequence[int]
    ) -> Finding | None:
        """Report rows that repeat the cached text from its beginning."""
        n_same = _common_prefix_len(cached_ids, new_ids)
        shorter = min(len(cached_ids), len(new_ids))
        if shorter < 4 or n_same < shorter:
            return self._check_restarted_text(step, new_ids, n_same)
        first = self.context.format_position(step.kv_before)
        is_whole = n_same == len(cached_ids)
        sentence = (
            f"The prompt is in the cache twice: step {step.step} repeats "
            f"{'all' if is_whole else 'the first'} {n_same} cached tokens, so the cache grows from "
            f"{step.kv_before} to {step.kv_after} keys ({first} repeats position 0)"
        )
        severity = Severity.ERROR if is_whole else Severity.WARNING
        positions = range(step.kv_before, step.kv_before + n_same)
        return self._token_finding(step, CACHE_DUPLICATED, severity, sentence, positions, n_same)

    def _check_restarted_text(
        self, step: StepRecord, new_ids: Sequence[int], n_common: int
    ) -> Finding | None:
        if n_common < _MIN_COMMON_PREFIX or 2 * n_common < len(new_ids):
            return None
        sentence = (
            f"Step {step.step} starts another text on a cache that still holds {step.kv_before} "
            f"keys: its first {n_common} of {len(new_ids)} tokens are the first cached ones, then "
            f"it differs ({self.context.format_position(step.kv_before + n_common)})"
        )
        positions = range(step.kv_before, step.kv_before + len(new_ids))
        return self._token_finding(
            step, CACHE_SHARED, Severity.WARNING, sentence, positions, n_common
        )

    def _token_finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        positions: Sequence[int],
        n_tokens: int,
    ) -> Finding:
        return self._rule.finding(
            step,
            finding_id,
            f"{sentence}.",
            severity=severity,
            positions=positions,
            evidence={"cached": step.kv_before, "rows": step.q_len, "tokens": n_tokens},
        )

    def _check_lost_cache(self, step: StepRecord) -> Finding | None:
        """Report single tokens that continue the last step without its cache.

        They continue it if their position id is the next one, or if two in a row are among the best
        candidates of the step before them.
        """
        last, token = self._last_step, self.context.token(0)
        if last is None or step.q_len != 1 or token is None or not _has_keys(step):
            self._n_continued = 0
            return None
        self._n_tokens_before = last.kv_after + (
            self._n_tokens_before if last.is_uncached_token else 0
        )
        self._n_continued = self._n_continued + 1 if last.has_candidate(token.token_id) else 0
        last_id, position_id = last.position_id, _last_position_id(step)
        continues = (
            position_id is not None and last_id is not None and position_id == last_id + 1 > 1
        )
        if self._is_loss_reported or not (continues or self._n_continued >= 2):
            return None
        self._is_loss_reported = True
        why = (
            f"its position id {position_id} follows {last_id}"
            if continues
            else f"{self._n_continued} tokens in a row are candidates of the step before"
        )
        sentence = (
            f"The cache is lost between steps: a single token ({self.context.format_position(0)}) "
            f"has no cached keys, although {why}; it attends only to itself, and not to the "
            f"{plural(self._n_tokens_before, 'token')} before it"
        )
        return self._rule.finding(
            step,
            CACHE_LOST,
            f"{sentence}.",
            positions=(0,),
            evidence={
                "keys": 1,
                "position_id": position_id,
                "last_generation": last.generation,
                "last_kv": last.kv_after,
            },
        )

    def _unused_finding(self) -> Sequence[Finding]:
        """Report what a cache would have saved, if each step recomputed the whole sequence."""
        steps, self._full_forwards = self._full_forwards, []
        if len(steps) < 3 or not self._is_causal():
            return ()
        rows, (_, first), (last_step, last) = sum(n for _, n in steps), steps[0], steps[-1]
        needed = first + len(steps) - 1
        lengths = ", ".join(str(n) for _, n in steps[:3])
        sentence = (
            f"No cache is used: q length grows {lengths}{', ...' if len(steps) > 3 else ''} to "
            f"{last}; {len(steps)} steps computed {rows} query rows, where {needed} are enough "
            f"with a cache{' (use_cache=False was passed)' if self._is_cache_off else ''}"
        )
        finding = self._rule.finding(
            None,
            CACHE_NOT_USED,
            f"{sentence}.",
            severity=Severity.NOTE if self._is_cache_off else None,
            evidence={
                "steps": len(steps),
                "rows": rows,
                "needed": needed,
                "first": first,
                "last": last,
            },
        )
        return [replace(finding, step=steps[1][0], last_step=last_step, times=len(steps) - 1)]

    def _is_causal(self) -> bool:
        """Whether new tokens leave earlier rows unchanged; otherwise no cache can be used.

        Masks that were not recorded count as causal.
        """
        for fingerprint in self._masks:
            mask = self.context.mask(fingerprint)
            if mask is not None and mask.cells is not None and mask.q_len == mask.kv_len:
                sees_newest = mask.cells[:, :-1, -1]
                if sees_newest.any():
                    return False
        return True


def _common_prefix_len(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    n = 0
    for one, other in zip(ids, other_ids, strict=False):
        if one != other:
            break
        n += 1
    return n


def _has_keys(step: StepRecord) -> bool:
    """Whether a model has keys; one with only recurrent layers keeps a state instead."""
    return bool(step.calls) or (step.inputs is not None and bool(step.inputs.cached_after))


def _last_position_id(step: StepRecord) -> int | None:
    """The position id of the last row of a step."""
    if step.inputs is None or not step.inputs.positions:
        return None
    first, n = step.inputs.positions[-1]
    return first + n - 1


def check_slots(rule: Rule, step: StepRecord) -> Iterator[Finding]:
    """At most one finding about empty and one about stale slots of a step."""
    slots = step_array(step, SLOT_STREAM)
    if slots is None:
        return
    is_known = step.inputs is not None and bool(step.inputs.cached_after)
    for finding_id, column in ((EMPTY_SLOTS, EMPTY_COLUMN), (STALE_SLOTS, STALE_COLUMN)):
        rows = np.flatnonzero(slots[:, column] > 0)
        # The filled length is unknown for keys that a program stores itself.
        if len(rows) and (is_known or finding_id == EMPTY_SLOTS):
            yield _slot_finding(rule, step, slots, finding_id, column, rows)


def _slot_finding(
    rule: Rule,
    step: StepRecord,
    slots: SlotTable,
    finding_id: str,
    column: int,
    rows: npt.NDArray[np.intp],
) -> Finding:
    layers = {step.calls[row].layer for row in rows}
    weights = slots[:, column + 1]
    worst = int(rows[weights[rows].argmax()])
    n_open, n_bad = int(slots[worst, OPEN_COLUMN]), int(slots[worst, column])
    weight = float(weights[worst])
    kind = "empty slots" if finding_id == EMPTY_SLOTS else "slots with keys of an earlier text"
    where, what, most = "", "call", ""
    if not rule.context.is_standalone:
        where = f"{capitalize(format_step_layers(layers, step))}, step {step.step}: "
        what = "step"
        most = f" (layer {step.calls[worst].layer})" if len(rows) > 1 else ""
    sentence = (
        f"{where}{plural(n_open, 'key')} open, {n_open - n_bad} filled: {_format_percent(weight)} "
        f"of the attention of this {what} is on {kind}{most}."
    )
    return rule.finding(
        step,
        finding_id,
        sentence,
        layers=layers,
        evidence={
            "allowed": n_open,
            "filled": n_open - n_bad,
            "slots": n_bad,
            "weight": round(weight, 4),
            "weights": {step.calls[row].layer: round(float(weights[row]), 4) for row in rows},
        },
        series=finding_id,
    )


def _format_percent(weight: float) -> str:
    return f"{weight:.0%}".replace("%", " %") if weight >= 0.01 else "less than 1 %"
