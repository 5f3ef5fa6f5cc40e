"""Which generation and which step a forward is, from the ids and the cache length it was fed.

Nothing else is known of the user's loop, so every rule here is about what was fed: a forward on an
empty cache begins a generation unless it repeats the whole sequence with one token more, and a
forward whose cache is as long as the sequence so far goes on with it, unless that very cache is
known to be another generation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

SEVERAL_ROWS = "several-rows"
UNKNOWN_CACHE = "unknown-cache"
OTHER_CACHE = "other-cache"


@dataclass(frozen=True, slots=True)
class Fed:
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
class Place:
    """Where a forward belongs.

    It brings `n_new` tokens at the positions from `pos` on, the last rows that were fed. With
    `chosen` there is one, and it is what the step before chose; otherwise they were given. `note`
    is SEVERAL_ROWS or UNKNOWN_CACHE when there is something that cannot be told apart, and
    OTHER_CACHE for one that goes on with a generation, `owner`, after another has begun.
    """

    generation: int
    step: int
    begins: bool
    pos: int
    n_new: int
    chosen: bool = False
    note: str = ""
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """`length` keys will be in the cache; `whole` is the row while every forward fed all of it."""

    generation: int = -1
    step: int = -1
    length: int = 0
    whole: tuple[int, ...] | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    n_prompt: int
    followed: bool


class Sequences:
    """Follows one model's forwards, in order.

    `numbers` gives each generation its number; models that are recorded together share it.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = count() if numbers is None else numbers
        self._state = self._before = _State()
        self._call: _Call | None = None

    @property
    def length(self) -> int:
        """Tokens of the open generation that were fed so far."""
        return self._state.length

    def begin_call(self, n_prompt: int, *, followed: bool = True) -> None:
        """Say that a call of `generate` begins: what it feeds is one generation.

        Rows below `n_prompt` are its prompt, however many forwards feed them. Without `followed`
        (beams, assistants) its forwards are counted and no token is taken for chosen.
        """
        self.end()
        self._call = _Call(n_prompt, followed)

    def end(self) -> None:
        """End the open generation: the next forward begins one."""
        self._call = None
        self._state = self._before = replace(self._state, is_open=False)

    def undo(self) -> None:
        """Forget the last forward, which never returned; it may be tried again."""
        self._state = self._before

    def place(self, fed: Fed) -> Place:
        """Return where a forward belongs; the next one is placed after it."""
        state = self._state
        whole = None if fed.cached else _row(fed)
        place = self._going_on(fed, whole) if state.is_open else None
        if place is None:
            place = self._beginning(fed)
        goes_whole = place.begins or state.whole is not None
        self._before = state
        self._state = _State(
            place.generation,
            place.step,
            fed.cached + fed.n_rows,
            whole if goes_whole else None,
            True,
        )
        return place

    def _beginning(self, fed: Fed) -> Place:
        owner = fed.owner if fed.cached and self._is_anothers(fed) else None
        note = "" if not fed.cached else UNKNOWN_CACHE if owner is None else OTHER_CACHE
        number = next(self._numbers)
        return Place(number, 0, True, fed.cached, fed.n_rows, note=note, owner=owner)

    def _is_anothers(self, fed: Fed) -> bool:
        """Say whether the cache was filled by a generation before the last one."""
        return fed.owner is not None and fed.owner != self._state.generation

    def _going_on(self, fed: Fed, whole: tuple[int, ...] | None) -> Place | None:
        """Return the place in the open generation, None for a forward that does not continue it."""
        state, call = self._state, self._call
        here = (state.generation, state.step + 1, False)
        if call is not None and not call.followed:
            return Place(*here, fed.cached + fed.n_rows, 0)
        if not fed.cached:
            known = state.whole
            if whole is None or known is None or whole[:-1] != known:
                return None
            return Place(*here, len(known), 1, chosen=True)
        if fed.cached != state.length or self._is_anothers(fed):
            return None
        is_prompt = call is not None and fed.cached < call.n_prompt
        if fed.n_rows == 1 and not is_prompt:
            return Place(*here, fed.cached, 1, chosen=True)
        return Place(*here, fed.cached, fed.n_rows, note=SEVERAL_ROWS)


def _row(fed: Fed) -> tuple[int, ...] | None:
    ids = fed.ids()
    return None if ids is None else tuple(ids)
