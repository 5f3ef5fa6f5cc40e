"""Which generation and which step a forward is, from the ids and the cache length it was fed.

Nothing else is known of the user's loop, so every rule here is about what was fed: a forward on an
empty cache begins a generation unless it repeats the whole sequence with one token more, and a
forward whose cache is as long as the sequence so far goes on with it, unless that very cache is
known to be another generation's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from flexinspect_hooks.capture.step_clock import StepContext, StepEvent
from flexinspect_hooks.observers.input_rows import InputRows

SEVERAL_ROWS = "several-rows"
UNKNOWN_CACHE = "unknown-cache"
OTHER_CACHE = "other-cache"


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """What one forward was fed: `n_rows` rows, after `cached` keys that are in the cache already.

    `ids` gives the row's token ids, None when there were none (embeddings). It is asked for
    forwards on an empty cache alone: for others it may have to wait for the device.
    """

    n_rows: int
    cached: int
    ids: Callable[[], Sequence[int] | None]
    owner: int | None = None
    """The generation that filled the cache, None when that is not known."""


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where a forward belongs.

    It brings `n_new` tokens at the positions from `pos` on, the last rows that were fed. With
    `chosen` there is one, and it is what the step before chose; otherwise they were given. `note`
    is SEVERAL_ROWS or UNKNOWN_CACHE when there is something that cannot be told apart, and
    OTHER_CACHE for one that goes on with a generation, `owner`, after another has begun.
    """

    generation: int
    step: int
    begins_generation: bool
    pos: int
    n_new: int
    is_chosen: bool = False
    note: str = ""
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class _TrackerState:
    """`length` keys will be in the cache; `whole` is the row while every forward fed all of it."""

    generation: int = -1
    step: int = -1
    length: int = 0
    whole: tuple[int, ...] | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _GenerateCall:
    n_prompt: int
    followed: bool


class StepTracker:
    """Follows one model's forwards, in order.

    `numbers` gives each generation its number; models that are recorded together share it.
    """

    def __init__(self, generation_numbers: Iterator[int] | None = None) -> None:
        self._numbers = count() if generation_numbers is None else generation_numbers
        self._state = self._before = _TrackerState()
        self._call: _GenerateCall | None = None

    @property
    def length(self) -> int:
        """Tokens of the open generation that were fed so far."""
        return self._state.length

    def begin_generate(self, n_prompt: int, *, followed: bool = True) -> None:
        """Say that a call of `generate` begins: what it feeds is one generation.

        Rows below `n_prompt` are its prompt, however many forwards feed them. Without `followed`
        (beams, assistants) its forwards are counted and no token is taken for chosen.
        """
        self.end()
        self._call = _GenerateCall(n_prompt, followed)

    def end(self) -> None:
        """End the open generation: the next forward begins one."""
        self._call = None
        self._state = self._before = replace(self._state, is_open=False)

    def undo(self) -> None:
        """Forget the last forward, which never returned; it may be tried again."""
        self._state = self._before

    def locate(self, forward: ForwardInput) -> StepPlace:
        """Return where a forward belongs; the next one is placed after it."""
        state = self._state
        whole = None if forward.cached else _row_ids(forward)
        place = self._next_step(forward, whole) if state.is_open else None
        if place is None:
            place = self._first_step(forward)
        goes_whole = place.begins_generation or state.whole is not None
        self._before = state
        self._state = _TrackerState(
            place.generation,
            place.step,
            forward.cached + forward.n_rows,
            whole if goes_whole else None,
            True,
        )
        return place

    def _first_step(self, forward: ForwardInput) -> StepPlace:
        owner = forward.owner if forward.cached and self._has_other_owner(forward) else None
        note = "" if not forward.cached else UNKNOWN_CACHE if owner is None else OTHER_CACHE
        number = next(self._numbers)
        return StepPlace(number, 0, True, forward.cached, forward.n_rows, note=note, owner=owner)

    def _has_other_owner(self, forward: ForwardInput) -> bool:
        """Say whether the cache was filled by a generation before the last one."""
        return forward.owner is not None and forward.owner != self._state.generation

    def _next_step(self, forward: ForwardInput, whole: tuple[int, ...] | None) -> StepPlace | None:
        """Return the place in the open generation, None for a forward that does not continue it."""
        state, call = self._state, self._call
        here = (state.generation, state.step + 1, False)
        if call is not None and not call.followed:
            return StepPlace(*here, forward.cached + forward.n_rows, 0)
        if not forward.cached:
            known = state.whole
            if whole is None or known is None or whole[:-1] != known:
                return None
            return StepPlace(*here, len(known), 1, is_chosen=True)
        if forward.cached != state.length or self._has_other_owner(forward):
            return None
        is_prompt = call is not None and forward.cached < call.n_prompt
        if forward.n_rows == 1 and not is_prompt:
            return StepPlace(*here, forward.cached, 1, is_chosen=True)
        return StepPlace(*here, forward.cached, forward.n_rows, note=SEVERAL_ROWS)


def _row_ids(forward: ForwardInput) -> tuple[int, ...] | None:
    ids = forward.ids()
    return None if ids is None else tuple(ids)


MAX_CACHES = 256
"""Caches that are remembered; the one met longest ago is forgotten first."""


class CacheOwners:
    """Remembers, by identity, the last generation that fed each cache. Keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def owner_of(self, cache: Any) -> int | None:
        """Return the generation that fed this very cache last, None for one not met before."""
        found = self._known.get(id(cache))
        return found[1] if found is not None and found[0]() is cache else None

    def set_owner(self, cache: Any, generation: int) -> None:
        """Say that a forward of this generation fed a cache; what is no object of its own is not
        remembered."""
        if cache is None or isinstance(cache, tuple):
            return
        self._known.pop(id(cache), None)
        with suppress(TypeError):  # a class with slots may allow no such reference
            self._known[id(cache)] = (weakref.ref(cache), generation)
        if len(self._known) > MAX_CACHES:
            del self._known[next(iter(self._known))]


_EVENT_TEXTS = {
    SEVERAL_ROWS: "{n} rows were fed onto {cached} cached keys: a prompt in chunks, a further "
    "turn, or proposals of an assistant. They are recorded as given; which of them the model "
    "chose is not followed.",
    UNKNOWN_CACHE: "The cache holds {cached} keys, which is not where the generation before stood: "
    "a new generation begins, and what its first {cached} tokens are is not known.",
    OTHER_CACHE: "The cache is that of generation {owner}, and another one came between: what goes "
    "on here is recorded as a new generation, which begins after {cached} keys.",
}


def input_events(step: StepContext, place: StepPlace, rows: InputRows) -> list[StepEvent]:
    """Return what is to be said of where a forward belongs, and of what it was fed."""
    found: list[StepEvent] = []
    if place.note:
        text = _EVENT_TEXTS[place.note].format(
            n=step.q_len, cached=step.kv_before, owner=place.owner
        )
        found.append((place.note, text))
    if not place.begins_generation:
        return found
    if rows.batch > 1:
        text = f"{rows.batch} sequences are fed at once; what is recorded is row 0 of the batch."
        found.append(("batch", text))
    if rows.ids is None:
        found.append(("no-ids", "No token ids were fed, so there are no tokens to show."))
    return found
