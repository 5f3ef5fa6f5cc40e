"""Assigns forwards to generations and steps, from their token ids and cache lengths.

Nothing else is known about the user's loop. A forward on an empty cache begins a generation, unless
it repeats the whole sequence with one more token. A forward whose cache is as long as the sequence
so far continues the generation, unless that cache is known to belong to another generation. So does
one token on the generation's own cache of which the program removed keys (StreamingLLM, H2O, SnapKV
and others do): in a call of `generate`, or if its position id lies beyond the keys that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

from msgspec import Struct
from msgspec.structs import replace

from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.inputs_hook import InputRows
from flexinspect_hooks.step_writer.step_draft import StepEvent

SEVERAL_ROWS = "chunked-input"
UNKNOWN_CACHE = "unknown-cache"
OTHER_CACHE = "cache-switched"
KEYS_REMOVED = "keys-removed"
OWN_CACHE = "own-cache"


_EVENT_TEXTS = {
    SEVERAL_ROWS: "The forward received {n} rows after {cached} cached keys: a prompt in chunks, a "
    "further turn, or proposals of an assistant. They are recorded as input; whether the model "
    "chose some of them is not known.",
    UNKNOWN_CACHE: "The cache holds {cached} keys, which is not the length of the generation "
    "before: a new generation begins, and its first {cached} tokens are not known.",
    OTHER_CACHE: "The cache belongs to generation {owner}, and another generation ran meanwhile: "
    "the continuation is recorded as a new generation, which begins after {cached} keys.",
    KEYS_REMOVED: "The cache holds {cached} keys for {pos} tokens: keys of earlier tokens were "
    "removed. The forward continues the generation.",
    OWN_CACHE: "The forward received one row without a cache, with the position id that follows "
    "the {pos} tokens before: the program keeps keys and values by itself. The forward continues "
    "the generation.",
}


ReadIds = Callable[[], Sequence[int] | None]
ReadPosition = Callable[[], int | None]


class StepPlace(Struct, frozen=True):
    """The generation and step of a forward.

    Its last `n_new` input rows are new tokens, at the positions from `pos` on. With `is_chosen`
    there is one new token, and the step before chose it; otherwise they are input. `note` is
    SEVERAL_ROWS or UNKNOWN_CACHE for an ambiguous input, OTHER_CACHE for a forward that continues
    generation `owner` after another one has begun, and KEYS_REMOVED for the first token after keys
    were removed from the cache.
    """

    generation: int
    step: int
    begins_generation: bool
    pos: int
    n_new: int
    is_chosen: bool = False
    note: str = ""
    owner: int | None = None
    has_own_cache: bool = False
    """Whether a cache of the program, which is not passed to the model, holds the tokens before."""

    def input_events(self, step: StepContext, rows: InputRows) -> list[StepEvent]:
        """Return the events about the place and the input of a forward."""
        events: list[StepEvent] = []
        if self.note:
            facts = {"n": step.q_len, "cached": step.kv_before, "owner": self.owner}
            facts["pos"] = self.pos
            events.append((self.note, _EVENT_TEXTS[self.note].format(**facts)))
        if not self.begins_generation:
            return events
        if rows.batch > 1:
            text = f"The batch has {rows.batch} sequences; only row 0 of the batch is recorded."
            events.append(("batched-input", text))
        if not rows.has_ids:
            text = "The forward received no token ids, so there are no tokens to show."
            events.append(("no-input-ids", text))
        return events


class _TrackerState(Struct, frozen=True):
    """The open generation: the tokens so far, and the sequence if passed whole.

    The cache holds `n_removed` keys fewer than there are tokens. With `has_own_cache` the program
    keeps keys and values by itself.
    """

    generation: int = -1
    step: int = -1
    length: int = 0
    whole: tuple[int, ...] | None = None
    is_open: bool = False
    n_removed: int = 0
    has_own_cache: bool = False


class StepTracker:
    """Follows one model's forwards, in order; models that are recorded together share numbers."""

    def __init__(self, generation_numbers: Iterator[int] | None = None) -> None:
        self._numbers = count() if generation_numbers is None else generation_numbers
        self._state = self._before = _TrackerState()
        self._n_prompt, self._is_followed = 0, True  # of the open call of `generate`

    @property
    def length(self) -> int:
        """The number of tokens of the open generation that forwards received so far."""
        return self._state.length

    def begin_generate(self, n_prompt: int, *, followed: bool = True) -> None:
        """Begin a call of `generate`: its forwards are one generation.

        Rows below `n_prompt` are its prompt, even if several forwards process them. Without
        `followed` (beams, assistants) its forwards are counted, and no token counts as chosen.
        """
        self.end()
        self._n_prompt, self._is_followed = n_prompt, followed

    def end(self) -> None:
        """End the open generation: the next forward begins one."""
        self._n_prompt, self._is_followed = 0, True
        self._state = self._before = replace(self._state, is_open=False)

    def undo(self) -> None:
        """Undo the last `locate`, because the forward did not return; it may be tried again."""
        self._state = self._before

    def locate(
        self,
        n_rows: int,
        cached: int,
        ids: ReadIds,
        owner: int | None = None,
        position: ReadPosition = lambda: None,
        may_keep_keys: Callable[[], bool] = lambda: False,
    ) -> StepPlace:
        """Return the place of a forward of `n_rows` rows; the next one is placed after it.

        `cached` keys are in its cache already, which generation `owner` filled (None if not known).
        `ids` returns the row's token ids, None for embeddings. It is called only for forwards on an
        empty cache: for others it may have to wait for the device. `position` returns the position
        id of the newest row, None if the program passed none; it is called only where keys were
        removed from the cache, once for each generation, and for rows without a cache if the
        program's own attention `may_keep_keys` by itself.
        """
        state = self._state
        row = None if cached else ids()
        whole = None if row is None else tuple(row)
        is_other = owner is not None and owner != state.generation
        place = None
        if state.is_open:
            place = self._next_step(n_rows, cached, whole, is_other)
            if place is None and n_rows == 1 and owner == state.generation:
                place = self._after_removal(cached, position)
            if place is None and not cached and not is_other and may_keep_keys():
                place = self._on_own_cache(n_rows, position)
        if place is None:
            note = (OTHER_CACHE if is_other else UNKNOWN_CACHE) if cached else ""
            owner = owner if note == OTHER_CACHE else None
            place = StepPlace(next(self._numbers), 0, True, cached, n_rows, note=note, owner=owner)
        is_whole = place.begins_generation or state.whole is not None
        self._before = state
        known, length = whole if is_whole else None, cached + n_rows
        n_removed = 0
        if place.has_own_cache:
            length = place.pos + n_rows
        elif not place.begins_generation and place.n_new == n_rows and place.pos > cached > 0:
            length, n_removed = place.pos + n_rows, place.pos - cached
        self._state = _TrackerState(
            *(place.generation, place.step, length, known),
            is_open=True,
            n_removed=n_removed,
            has_own_cache=place.has_own_cache,
        )
        return place

    def _next_step(
        self, n_rows: int, cached: int, whole: tuple[int, ...] | None, is_other: bool
    ) -> StepPlace | None:
        """Return the place in the open generation, None for a forward that does not continue it."""
        state = self._state
        step = partial(StepPlace, state.generation, state.step + 1, False)
        if not self._is_followed:
            return step(pos=cached + n_rows, n_new=0)
        if not cached:
            known = state.whole
            if whole is None or known is None or whole[:-1] != known:
                return None
            return step(pos=len(known), n_new=1, is_chosen=True)
        if cached != state.length - state.n_removed or is_other:
            return None
        pos = state.length
        if n_rows == 1 and pos >= self._n_prompt:
            return step(pos=pos, n_new=1, is_chosen=True)
        return step(pos=pos, n_new=n_rows, note=SEVERAL_ROWS)

    def _on_own_cache(self, n_rows: int, position: ReadPosition) -> StepPlace | None:
        """Return the place of rows without a cache whose position ids continue the text."""
        state = self._state
        if state.length < 2 or position() != state.length + n_rows - 1:
            return None
        is_chosen = n_rows == 1 and state.length >= self._n_prompt
        note = SEVERAL_ROWS if n_rows > 1 else "" if state.has_own_cache else OWN_CACHE
        return StepPlace(
            *(state.generation, state.step + 1, False, state.length, n_rows),
            is_chosen=is_chosen,
            note=note,
            has_own_cache=True,
        )

    def _after_removal(self, cached: int, position: ReadPosition) -> StepPlace | None:
        """Return the place of one token on the generation's own cache, whose length is another one.

        It is None if the program went back in the sequence, or if that cannot be told.
        """
        state = self._state
        if not 0 < cached < state.length or state.length < self._n_prompt:
            return None
        is_known = state.n_removed > 0
        if not is_known and not self._n_prompt and (position() or 0) <= cached:
            return None
        note = "" if is_known else KEYS_REMOVED
        pos, step = state.length, state.step + 1
        return StepPlace(state.generation, step, False, pos, 1, is_chosen=True, note=note)


class CacheOwners:
    """Remembers, by identity, the last generation that used each cache. Keeps no cache alive."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._newest: tuple[Callable[[], Any], int] = (lambda: None, -1)  # a weak reference

    def owner_of(self, cache: Any) -> int | None:
        """Return the generation that used this cache last, None for an unknown cache."""
        if cache is not None and self._newest[0]() is cache:
            return self._newest[1]
        with suppress(TypeError):  # as below
            return self._known.get(cache)
        return None

    def set_owner(self, cache: Any, generation: int) -> None:
        """Set the generation that used a cache last."""
        # Tuples, None, and a class with slots do not support weak references, and are ignored.
        if cache is None or (self._newest[0]() is cache and self._newest[1] == generation):
            return
        with suppress(TypeError):
            self._known[cache] = generation
            self._newest = ref(cache), generation
