"""Whose text a cache holds: fed twice, of another prompt, gone between steps, or not used.

What is told rests on the stream `attention.slots`, which capture writes only where such slots have
a part in the softmax: each number in it is counted or summed from the keys and weights of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_layers, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, LogitsRecord, StepRecord
from flexinspect.rules.cache.cache_findings import (
    CACHE_DUPLICATED,
    CACHE_KINDS,
    CACHE_LOST,
    CACHE_NOT_USED,
    CACHE_SHARED,
    CACHED_PROMPT_EVENT,
    EMPTY_SLOTS,
    NO_CACHE_EVENT,
    STALE_SLOTS,
)
from flexinspect.rules.context import RuleContext

_MAX_GENERATIONS = 16
"""Generations whose tokens are known when a later one goes on with a cache."""

_MIN_COMMON_PREFIX = 8
"""Tokens that must be the same before a text counts as fed again: templates share a few."""


class _LastStep(NamedTuple):
    """What is remembered of a step, without what is large."""

    generation: int
    kv_after: int
    is_uncached_token: bool
    """Whether it was a single token without a cached key, as the first step of a generation."""
    is_single_token: bool
    """Whether it fed a single token."""
    position_id: int | None
    logits: LogitsRecord | None

    @property
    def best_token_id(self) -> int | None:
        """The best candidate that it gave for the next token."""
        best = self.logits.candidates if self.logits is not None else ()
        return best[0].token_id if best else None

    def has_candidate(self, token_id: int) -> bool:
        """Say whether a token is one of the candidates that it gave for the next."""
        best = self.logits.candidates if self.logits is not None else ()
        return any(candidate.token_id == token_id for candidate in best)


class CacheTextTracker:
    """Follows what was fed, from one generation of a model to the next."""

    def __init__(self) -> None:
        self._cached_texts: deque[list[int]] = deque(maxlen=_MAX_GENERATIONS)
        """Token ids of the last generations, as far as they may be in a cache."""
        self._last_step: _LastStep | None = None
        """The last step of all."""
        self._n_continued = self._n_tokens_before = 0
        self._is_loss_reported = False

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; what earlier ones left in a cache stays known."""
        self.context = context
        self._full_forwards: list[tuple[int, int]] = []
        """Step and rows of forwards that fed the whole sequence."""
        self._masks: frozenset[str | None] = frozenset()
        self._declared_ids: list[int] | None = None
        self._is_cache_off = False
        self._length = 0

    def on_event(self, event: EventRecord) -> None:
        """Take the tokens that the caller of `generate` says are in the cache already."""
        if event.kind == CACHED_PROMPT_EVENT:
            self._declared_ids = list(event.data["prompt"])

    def on_step(self, step: StepRecord) -> list[Finding]:
        """Return what is wrong with the text of a step on this cache, or without one."""
        found: list[Finding] = []
        if step.step == 0:
            self._is_cache_off = any(event.kind == NO_CACHE_EVENT for event in step.events)
            found = self._check_first_step(step)
        elif step.q_len > 1:
            found = self._check_rows(step)
        elif step.step == 1:
            found = self._check_repeated_token(step)
        if step.kv_before:
            self._n_continued = 0
        is_alone = step.q_len == 1 and not step.kv_before
        last_id = _last_position_id(step)
        place = (step.generation, step.kv_after, is_alone, step.q_len == 1)
        self._last_step = _LastStep(*place, last_id, step.logits)
        self._length = step.kv_after
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what was computed again and again without a cache; keep what was fed."""
        self._cached_texts.append(self._token_ids(0, self._length))
        return self._unused_finding()

    def _token_ids(self, start: int, stop: int) -> list[int]:
        """Return the known token ids of these positions, up to the first that is not known."""
        out = []
        for pos in range(start, stop):
            token = self.context.token(pos)
            if token is None:
                break
            out.append(token.token_id)
        return out

    def _check_first_step(self, step: StepRecord) -> list[Finding]:
        """Judge the first step of a generation by what the steps before it left."""
        if step.kv_before:
            return self._check_filled_cache(step)
        return self._check_lost_cache(step)

    def _check_filled_cache(self, step: StepRecord) -> list[Finding]:
        """Compare what the caller says the cache holds with what earlier generations left in it.

        Nothing says which cache it is; so it is enough if one of them fits.
        """
        n, asked = step.kv_before, self._declared_ids
        if asked is None:
            return self._check_cut(step)
        known = [ids[:n] for ids in self._cached_texts if len(ids) >= n]
        if len(asked) != n or not known or asked in known:
            return []
        held = max(known, key=lambda ids: _common_prefix_len(ids, asked))
        wrong = [pos for pos, (a, b) in enumerate(zip(held, asked, strict=True)) if a != b]
        sentence = (
            f"The cache holds {n} keys of another text: {len(wrong)} of the {n} tokens that the "
            f"prompt begins with are not those it was filled with, from position {wrong[0]} on "
            f"(token {asked[wrong[0]]}, and the cache has {held[wrong[0]]})"
        )
        return [
            self._token_finding(step, CACHE_SHARED, Severity.ERROR, sentence, wrong, len(wrong))
        ]

    def _check_cut(self, step: StepRecord) -> list[Finding]:
        """Say when the text goes on with the next token while keys of it are gone.

        Drafts and turns are cut, too, but not by more than half with the next token after that.
        Of less it is sure where the last step fed one row, and its best token comes now. A cache
        that forgets one key for each that comes does so on purpose.
        """
        last, token = self._last_step, self.context.token(step.kv_before)
        if last is None or token is None or step.q_len != 1 or self._is_loss_reported:
            return []
        ended, fed_id = last.position_id, _last_position_id(step)
        goes_on = ended is not None and fed_id == ended + 1
        gone = last.kv_after - step.kv_before
        is_much = 2 * step.kv_before < last.kv_after
        is_next = is_much and (goes_on or last.has_candidate(token.token_id))
        if not is_next and not (
            gone > 1 and last.is_single_token and last.best_token_id == token.token_id
        ):
            return []
        self._is_loss_reported = True
        sentence = (
            f"The cache lost keys between steps: it held {last.kv_after} and holds "
            f"{step.kv_before}, and the text goes on with the next token "
            f"({self.context.format_position(step.kv_before)})"
        )
        places = (step.kv_before,)
        return [self._token_finding(step, CACHE_LOST, Severity.WARNING, sentence, places, gone)]

    def _check_repeated_token(self, step: StepRecord) -> list[Finding]:
        """Say when the first decode step feeds the prompt's last token, which nobody chose."""
        last, pos = self._last_step, step.kv_before
        again, fed = self.context.token(pos - 1), self.context.token(pos)
        if last is None or not pos or again is None or fed is None:
            return []
        if (
            fed.token_id != again.token_id
            or last.logits is None
            or last.has_candidate(fed.token_id)
        ):
            return []
        sentence = (
            f"The last token of the prompt was fed twice: step {step.step} begins with "
            f"{self.context.format_position(pos)}, the token before it, and it is none of the "
            f"{len(last.logits.candidates)} best candidates of step {step.step - 1}"
        )
        return [self._token_finding(step, CACHE_DUPLICATED, Severity.WARNING, sentence, (pos,), 1)]

    def _check_rows(self, step: StepRecord) -> list[Finding]:
        """Judge rows that were given on a filled cache: another part, or the same once more."""
        if not step.kv_before:
            if step.q_len == self._length + 1:
                self._full_forwards = self._full_forwards or [(step.step - 1, self._length)]
                self._full_forwards.append((step.step, step.q_len))
                self._masks = frozenset(call.mask for call in step.calls)
            return []
        given = [t.token_id for t in step.tokens if step.kv_before <= t.pos < step.kv_after]
        return self._check_repeated_rows(step, given, self._token_ids(0, step.kv_before))

    def _check_repeated_rows(
        self, step: StepRecord, new_ids: Sequence[int], cached_ids: Sequence[int]
    ) -> list[Finding]:
        """Say whether rows repeat the text that is in the cache, from its beginning on."""
        alike, shorter = _common_prefix_len(cached_ids, new_ids), min(len(cached_ids), len(new_ids))
        if shorter < 4 or alike < shorter:
            return self._check_restarted_text(step, new_ids, alike)
        place = self.context.format_position(step.kv_before)
        what = (
            f"all {alike} tokens that the cache holds are fed again"
            if alike == len(cached_ids)
            else f"the {alike} tokens fed are those that the cache begins with"
        )
        sentence = (
            f"The prompt was fed twice: in step {step.step} {what}, so that the cache grows from "
            f"{step.kv_before} to {step.kv_after} keys ({place} is position 0 once more)"
        )
        sure = alike == len(cached_ids)
        severity = Severity.ERROR if sure else Severity.WARNING
        places = range(step.kv_before, step.kv_before + alike)
        return [self._token_finding(step, CACHE_DUPLICATED, severity, sentence, places, alike)]

    def _check_restarted_text(
        self, step: StepRecord, new_ids: Sequence[int], n_common: int
    ) -> list[Finding]:
        if n_common < _MIN_COMMON_PREFIX or 2 * n_common < len(new_ids):
            return []
        sentence = (
            f"Step {step.step} feeds another text on a cache that still holds "
            f"{step.kv_before} keys: the first {n_common} of its {len(new_ids)} tokens are those that the "
            f"cache begins with, then it goes another way "
            f"({self.context.format_position(step.kv_before + n_common)})"
        )
        places = range(step.kv_before, step.kv_before + len(new_ids))
        return [
            self._token_finding(step, CACHE_SHARED, Severity.WARNING, sentence, places, n_common)
        ]

    def _token_finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        places: Sequence[int],
        n_tokens: int,
    ) -> Finding:
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=f"{sentence}.",
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            positions=tuple(places[:32]),
            evidence={"cached": step.kv_before, "rows": step.q_len, "tokens": n_tokens},
        )

    def _check_lost_cache(self, step: StepRecord) -> list[Finding]:
        """Say when single tokens are fed that go on with the last step, and its cache does not.

        They do when their position is the next one, or when two in a row are among the best
        candidates of the step before them.
        """
        last, token = self._last_step, self.context.token(0)
        if last is None or step.q_len != 1 or token is None or not _has_keys(step):
            self._n_continued = 0
            return []
        self._n_tokens_before = last.kv_after + (
            self._n_tokens_before if last.is_uncached_token else 0
        )
        self._n_continued = self._n_continued + 1 if last.has_candidate(token.token_id) else 0
        ended, fed_id = last.position_id, _last_position_id(step)
        goes_on = fed_id is not None and ended is not None and fed_id == ended + 1 > 1
        if self._is_loss_reported or not (goes_on or self._n_continued >= 2):
            return []
        self._is_loss_reported = True
        why = (
            f"its position id {fed_id} goes on from {ended}"
            if goes_on
            else f"{self._n_continued} tokens in a row are candidates of the step before"
        )
        sentence = (
            f"The cache is lost between steps: a single token ({self.context.format_position(0)}) is fed "
            f"without any cached key, though {why}; it sees itself and nothing of the "
            f"{plural(self._n_tokens_before, 'token')} before it"
        )
        return [
            Finding(
                id=CACHE_LOST,
                severity=Severity.ERROR,
                sentence=f"{sentence}.",
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                positions=(0,),
                evidence={
                    "keys": 1,
                    "position_id": fed_id,
                    "last_generation": last.generation,
                    "last_kv": last.kv_after,
                },
            )
        ]

    def _unused_finding(self) -> Sequence[Finding]:
        """Say what a cache would have saved, where the whole sequence was fed at each step."""
        steps, self._full_forwards = self._full_forwards, []
        if len(steps) < 3 or not self._is_causal():
            return ()
        rows, (_, first), (last_step, last) = sum(n for _, n in steps), steps[0], steps[-1]
        needed = first + len(steps) - 1
        lengths = ", ".join(str(n) for _, n in steps[:3])
        sentence = (
            f"No cache is in use: q length grows {lengths}{', ...' if len(steps) > 3 else ''} to "
            f"{last}; {len(steps)} steps computed {rows} query rows, and {needed} are needed with "
            f"a cache{' (use_cache=False was given)' if self._is_cache_off else ''}"
        )
        return [
            Finding(
                id=CACHE_NOT_USED,
                severity=Severity.NOTE if self._is_cache_off else Severity.WARNING,
                sentence=f"{sentence}.",
                generation=self.context.generation.generation,
                step=steps[1][0],
                evidence={
                    "steps": len(steps),
                    "rows": rows,
                    "needed": needed,
                    "first": first,
                    "last": last,
                },
                last_step=last_step,
                times=len(steps) - 1,
            )
        ]

    def _is_causal(self) -> bool:
        """Say whether earlier rows stay what they are when a token comes: else no cache can help.

        What is not recorded counts as causal.
        """
        for fingerprint in self._masks:
            mask = self.context.mask(fingerprint)
            if mask is not None and mask.cells is not None and mask.q_len == mask.kv_len:
                sees_newest = mask.cells[:, :-1, -1]
                if sees_newest.any():
                    return False
        return True


def _common_prefix_len(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Return how many of the first ids are the same."""
    n = 0
    for one, other in zip(ids, other_ids, strict=False):
        if one != other:
            break
        n += 1
    return n


def _has_keys(step: StepRecord) -> bool:
    """Say whether a model has keys at all: one of recurrent layers alone keeps a state."""
    return bool(step.calls) or (step.inputs is not None and bool(step.inputs.cached_after))


def _last_position_id(step: StepRecord) -> int | None:
    """Return the last position id that a step was fed."""
    if step.inputs is None or not step.inputs.positions:
        return None
    first, n = step.inputs.positions[-1]
    return first + n - 1


SLOT_STREAM = "attention.slots"
OPEN_COLUMN, EMPTY_COLUMN, EMPTY_WEIGHT_COLUMN, STALE_COLUMN, STALE_WEIGHT_COLUMN = range(5)
"""Columns: open keys; all-zero ones and their weight; others beyond the filled length and theirs.

Weights are means over heads.
"""

SlotTable = npt.NDArray[np.float32]


def check_slots(context: RuleContext, step: StepRecord) -> list[Finding]:
    """Return at most one finding about empty and one about stale slots of a step."""
    slots = next((one.array for one in step.arrays if one.stream == SLOT_STREAM), None)
    if slots is None:
        return []
    found = []
    is_known = step.inputs is not None and bool(step.inputs.cached_after)
    for finding_id, column in ((EMPTY_SLOTS, EMPTY_COLUMN), (STALE_SLOTS, STALE_COLUMN)):
        rows = np.flatnonzero(slots[:, column] > 0)
        # Of keys that a program keeps by itself nobody knows how many are filled.
        if len(rows) and (is_known or finding_id == EMPTY_SLOTS):
            found.append(_slot_finding(context, step, slots, finding_id, column, rows))
    return found


def _slot_finding(
    context: RuleContext,
    step: StepRecord,
    slots: SlotTable,
    finding_id: str,
    column: int,
    rows: npt.NDArray[np.intp],
) -> Finding:
    which = sorted({step.calls[row].layer for row in rows})
    worst = int(rows[slots[rows, column + 1].argmax()])
    n_open, n_bad = int(slots[worst, OPEN_COLUMN]), int(slots[worst, column])
    weight = float(slots[worst, column + 1])
    filled = n_open - n_bad
    told = "empty slots" if finding_id == EMPTY_SLOTS else "slots with keys of an earlier text"
    n_layers = len({call.layer for call in step.calls})
    where = (
        ""
        if context.is_standalone
        else f"{_capitalize_first(format_layers(which, n_layers))}, step {step.step}: "
    )
    most = "" if context.is_standalone or len(rows) == 1 else f" (layer {step.calls[worst].layer})"
    sentence = (
        f"{where}{plural(n_open, 'key')} allowed, {filled} filled: {_format_percent(weight)} of the "
        f"weight of {'this call' if context.is_standalone else 'this step'} sits on {told}{most}."
    )
    return Finding(
        id=finding_id,
        severity=CACHE_KINDS[finding_id].severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        layers=tuple(which) if len(which) > 1 else (),
        evidence={
            "allowed": n_open,
            "filled": filled,
            "slots": n_bad,
            "weight": round(weight, 4),
            "weights": {
                step.calls[row].layer: _round_weight(slots[row, column + 1]) for row in rows
            },
        },
        series=finding_id,
    )


def _format_percent(weight: float) -> str:
    return f"{weight:.0%}".replace("%", " %") if weight >= 0.01 else "less than 1 %"


def _round_weight(weight: Sequence[float] | np.float32) -> float:
    return round(float(np.asarray(weight)), 4)


def _capitalize_first(words: str) -> str:
    return words[0].upper() + words[1:]
