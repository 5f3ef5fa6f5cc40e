"""Whose text a cache holds: fed twice, of another prompt, gone between steps, or not used."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from flexinspect.findings import Finding, Severity
from flexinspect.records import EventRecord, LogitsRecord, StepRecord
from flexinspect.rules.cachekinds import (
    CACHE_OFF,
    CACHED_PROMPT,
    DUPLICATED,
    LOST,
    NOT_USED,
    SHARED,
)
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted

_REMEMBERED = 16
"""Generations whose tokens are known when a later one goes on with a cache."""

_ALIKE = 8
"""Tokens that must be the same before a text counts as fed again: templates share a few."""


class _Last(NamedTuple):
    """What is remembered of a step, without what is large."""

    generation: int
    kv_after: int
    is_alone: bool
    """Whether it was a single token without a cached key, as the first step of a generation."""
    is_single: bool
    """Whether it fed a single token."""
    position_id: int | None
    logits: LogitsRecord | None

    @property
    def best(self) -> int | None:
        """The best candidate that it gave for the next token."""
        best = self.logits.candidates if self.logits is not None else ()
        return best[0].token_id if best else None

    def expects(self, token_id: int) -> bool:
        """Say whether a token is one of the candidates that it gave for the next."""
        best = self.logits.candidates if self.logits is not None else ()
        return any(candidate.token_id == token_id for candidate in best)


class CacheTexts:
    """Follows what was fed, from one generation of a model to the next."""

    def __init__(self) -> None:
        self._contents: deque[list[int]] = deque(maxlen=_REMEMBERED)
        """Token ids of the last generations, as far as they may be in a cache."""
        self._last: _Last | None = None
        """The last step of all."""
        self._chain = self._behind = 0
        self._is_lost_told = False

    def begin(self, scene: Scene) -> None:
        """Begin a generation; what earlier ones left in a cache stays known."""
        self.scene = scene
        self._whole: list[tuple[int, int]] = []
        """Step and rows of forwards that fed the whole sequence."""
        self._masks: frozenset[str | None] = frozenset()
        self._asked: list[int] | None = None
        self._is_off = False
        self._length = 0

    def hear(self, event: EventRecord) -> None:
        """Take the tokens that the caller of `generate` says are in the cache already."""
        if event.kind == CACHED_PROMPT:
            self._asked = list(event.data["prompt"])

    def look(self, step: StepRecord) -> list[Finding]:
        """Return what is wrong with the text of a step on this cache, or without one."""
        found: list[Finding] = []
        if step.step == 0:
            self._is_off = any(event.kind == CACHE_OFF for event in step.events)
            found = self._first(step)
        elif step.q_len > 1:
            found = self._several(step)
        elif step.step == 1:
            found = self._last_token_again(step)
        if step.kv_before:
            self._chain = 0
        is_alone = step.q_len == 1 and not step.kv_before
        last_id = _last_id(step)
        place = (step.generation, step.kv_after, is_alone, step.q_len == 1)
        self._last = _Last(*place, last_id, step.logits)
        self._length = step.kv_after
        return found

    def end(self) -> Sequence[Finding]:
        """Return what was computed again and again without a cache; keep what was fed."""
        self._contents.append(self._ids(0, self._length))
        return self._not_used()

    def _ids(self, start: int, stop: int) -> list[int]:
        """Return the known token ids of these positions, up to the first that is not known."""
        out = []
        for pos in range(start, stop):
            token = self.scene.token(pos)
            if token is None:
                break
            out.append(token.token_id)
        return out

    def _first(self, step: StepRecord) -> list[Finding]:
        """Judge the first step of a generation by what the steps before it left."""
        if step.kv_before:
            return self._on_a_filled_cache(step)
        return self._without_the_last_cache(step)

    def _on_a_filled_cache(self, step: StepRecord) -> list[Finding]:
        """Compare what the caller says the cache holds with what earlier generations left in it.

        Nothing says which cache it is; so it is enough if one of them fits.
        """
        n, asked = step.kv_before, self._asked
        if asked is None:
            return self._cut(step)
        known = [ids[:n] for ids in self._contents if len(ids) >= n]
        if len(asked) != n or not known or asked in known:
            return []
        held = max(known, key=lambda ids: _alike(ids, asked))
        wrong = [pos for pos, (a, b) in enumerate(zip(held, asked, strict=True)) if a != b]
        sentence = (
            f"The cache holds {n} keys of another text: {len(wrong)} of the {n} tokens that the "
            f"prompt begins with are not those it was filled with, from position {wrong[0]} on "
            f"(token {asked[wrong[0]]}, and the cache has {held[wrong[0]]})"
        )
        return [self._of_tokens(step, SHARED, Severity.ERROR, sentence, wrong, len(wrong))]

    def _cut(self, step: StepRecord) -> list[Finding]:
        """Say when the text goes on with the next token while keys of it are gone.

        Drafts and turns are cut, too, but not by more than half with the next token after that.
        Of less it is sure where the last step fed one row, and its best token comes now. A cache
        that forgets one key for each that comes does so on purpose.
        """
        last, token = self._last, self.scene.token(step.kv_before)
        if last is None or token is None or step.q_len != 1 or self._is_lost_told:
            return []
        ended, fed_id = last.position_id, _last_id(step)
        goes_on = ended is not None and fed_id == ended + 1
        gone = last.kv_after - step.kv_before
        is_much = 2 * step.kv_before < last.kv_after
        is_next = is_much and (goes_on or last.expects(token.token_id))
        if not is_next and not (gone > 1 and last.is_single and last.best == token.token_id):
            return []
        self._is_lost_told = True
        sentence = (
            f"The cache lost keys between steps: it held {last.kv_after} and holds "
            f"{step.kv_before}, and the text goes on with the next token "
            f"({self.scene.position(step.kv_before)})"
        )
        places = (step.kv_before,)
        return [self._of_tokens(step, LOST, Severity.WARNING, sentence, places, gone)]

    def _last_token_again(self, step: StepRecord) -> list[Finding]:
        """Say when the first decode step feeds the prompt's last token, which nobody chose."""
        last, pos = self._last, step.kv_before
        again, fed = self.scene.token(pos - 1), self.scene.token(pos)
        if last is None or not pos or again is None or fed is None:
            return []
        if fed.token_id != again.token_id or last.logits is None or last.expects(fed.token_id):
            return []
        sentence = (
            f"The last token of the prompt was fed twice: step {step.step} begins with "
            f"{self.scene.position(pos)}, the token before it, and it is none of the "
            f"{len(last.logits.candidates)} best candidates of step {step.step - 1}"
        )
        return [self._of_tokens(step, DUPLICATED, Severity.WARNING, sentence, (pos,), 1)]

    def _several(self, step: StepRecord) -> list[Finding]:
        """Judge rows that were given on a filled cache: another part, or the same once more."""
        if not step.kv_before:
            if step.q_len == self._length + 1:
                self._whole = self._whole or [(step.step - 1, self._length)]
                self._whole.append((step.step, step.q_len))
                self._masks = frozenset(call.mask for call in step.calls)
            return []
        given = [t.token_id for t in step.tokens if step.kv_before <= t.pos < step.kv_after]
        return self._again(step, given, self._ids(0, step.kv_before))

    def _again(self, step: StepRecord, fed: Sequence[int], held: Sequence[int]) -> list[Finding]:
        """Say whether rows repeat the text that is in the cache, from its beginning on."""
        alike, shorter = _alike(held, fed), min(len(held), len(fed))
        if shorter < 4 or alike < shorter:
            return self._begins_anew(step, fed, alike)
        place = self.scene.position(step.kv_before)
        what = (
            f"all {alike} tokens that the cache holds are fed again"
            if alike == len(held)
            else f"the {alike} tokens fed are those that the cache begins with"
        )
        sentence = (
            f"The prompt was fed twice: in step {step.step} {what}, so that the cache grows from "
            f"{step.kv_before} to {step.kv_after} keys ({place} is position 0 once more)"
        )
        sure = alike == len(held)
        severity = Severity.ERROR if sure else Severity.WARNING
        places = range(step.kv_before, step.kv_before + alike)
        return [self._of_tokens(step, DUPLICATED, severity, sentence, places, alike)]

    def _begins_anew(self, step: StepRecord, fed: Sequence[int], alike: int) -> list[Finding]:
        if alike < _ALIKE or 2 * alike < len(fed):
            return []
        sentence = (
            f"Step {step.step} feeds another text on a cache that still holds "
            f"{step.kv_before} keys: the first {alike} of its {len(fed)} tokens are those that the "
            f"cache begins with, then it goes another way "
            f"({self.scene.position(step.kv_before + alike)})"
        )
        places = range(step.kv_before, step.kv_before + len(fed))
        return [self._of_tokens(step, SHARED, Severity.WARNING, sentence, places, alike)]

    def _of_tokens(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        places: Sequence[int],
        alike: int,
    ) -> Finding:
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=f"{sentence}.",
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            positions=tuple(places[:32]),
            evidence={"cached": step.kv_before, "rows": step.q_len, "tokens": alike},
        )

    def _without_the_last_cache(self, step: StepRecord) -> list[Finding]:
        """Say when single tokens are fed that go on with the last step, and its cache does not.

        They do when their position is the next one, or when two in a row are among the best
        candidates of the step before them.
        """
        last, token = self._last, self.scene.token(0)
        if last is None or step.q_len != 1 or token is None or not _has_keys(step):
            self._chain = 0
            return []
        self._behind = last.kv_after + (self._behind if last.is_alone else 0)
        self._chain = self._chain + 1 if last.expects(token.token_id) else 0
        ended, fed_id = last.position_id, _last_id(step)
        goes_on = fed_id is not None and ended is not None and fed_id == ended + 1 > 1
        if self._is_lost_told or not (goes_on or self._chain >= 2):
            return []
        self._is_lost_told = True
        why = (
            f"its position id {fed_id} goes on from {ended}"
            if goes_on
            else f"{self._chain} tokens in a row are candidates of the step before"
        )
        sentence = (
            f"The cache is lost between steps: a single token ({self.scene.position(0)}) is fed "
            f"without any cached key, though {why}; it sees itself and nothing of the "
            f"{counted(self._behind, 'token')} before it"
        )
        return [
            Finding(
                id=LOST,
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

    def _not_used(self) -> Sequence[Finding]:
        """Say what a cache would have saved, where the whole sequence was fed at each step."""
        steps, self._whole = self._whole, []
        if len(steps) < 3 or not self._is_causal():
            return ()
        rows, (_, first), (last_step, last) = sum(n for _, n in steps), steps[0], steps[-1]
        needed = first + len(steps) - 1
        lengths = ", ".join(str(n) for _, n in steps[:3])
        sentence = (
            f"No cache is in use: q length grows {lengths}{', ...' if len(steps) > 3 else ''} to "
            f"{last}; {len(steps)} steps computed {rows} query rows, and {needed} are needed with "
            f"a cache{' (use_cache=False was given)' if self._is_off else ''}"
        )
        return [
            Finding(
                id=NOT_USED,
                severity=Severity.NOTE if self._is_off else Severity.WARNING,
                sentence=f"{sentence}.",
                generation=self.scene.generation.generation,
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
            mask = self.scene.mask(fingerprint)
            if mask is not None and mask.cells is not None and mask.q_len == mask.kv_len:
                sees_newest = mask.cells[:, :-1, -1]
                if sees_newest.any():
                    return False
        return True


def _alike(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many of the first ids are the same."""
    n = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        n += 1
    return n


def _has_keys(step: StepRecord) -> bool:
    """Say whether a model has keys at all: one of recurrent layers alone keeps a state."""
    return bool(step.calls) or (step.inputs is not None and bool(step.inputs.cached_after))


def _last_id(step: StepRecord) -> int | None:
    """Return the last position id that a step was fed."""
    if step.inputs is None or not step.inputs.positions:
        return None
    first, n = step.inputs.positions[-1]
    return first + n - 1
