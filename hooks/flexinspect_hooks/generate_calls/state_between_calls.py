"""Logits processors and stopping criteria that begin a call of `generate` with what an earlier
one left.

At the start of each call the state of an object is copied. Attributes that calls of `generate`
changed, and the program did not set in between, were carried over: the object also runs with those
as they were at the start of the first call, as a copy beside the program's own. What it gives then
tells whether the earlier call matters to this one.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.generate_calls.code_state import (
    UnknownStateError,
    code_state_of,
    names_of,
)
from flexinspect_hooks.generate_calls.state_copies import (
    attributes_of,
    copy_of,
    differing,
    remove_attribute,
    set_attribute,
)

_MAX_CALLS = 256
"""Calls of a processor that are compared in one call of `generate`."""
_MAX_LOOKS = 2
"""Calls of `generate` in which an object with other state is looked at."""
_CLOCKS = frozenset(
    ("time", "time_ns", "perf_counter", "monotonic", "process_time", "now", "datetime")
)
_RANDOM = frozenset(
    ("manual_seed", "seed", "Generator", "default_rng", "Random", "rand", "randn", "multinomial")
)
_COLLECTIONS = (dict, list, set, frozenset, deque)
_MAX_TEXT = 60


class ObjectStart:
    """An object at the start of a call of `generate`.

    `anew` is a copy with what earlier calls left taken away, None if they left nothing; `carried`
    names the attributes, with what they were first and are now.
    """

    def __init__(self, called: Any) -> None:
        self.called = called
        self.code = code_state_of(called)
        self.now = copy_of(called)
        self.anew: Any = None
        self.carried: list[dict[str, Any]] = []
        self.n_calls = 1
        self.has_managed = False  # whether the program set other attributes between calls
        self.is_memory = False  # whether all that was carried are collections that grew

    def is_code_unchanged(self) -> bool:
        """Whether nothing that a copy shares with the object changed since the start."""
        try:
            return bool(code_state_of(self.called) == self.code)
        except UnknownStateError:
            return False

    def facts(self, kind: str, name: str, place: str) -> dict[str, Any]:
        """Return what a finding tells of the object."""
        is_random = bool(names_of(self.called) & _RANDOM)
        return {
            "kind": kind,
            "name": name,
            "place": place,
            "carried": self.carried,
            "call": self.n_calls,
            "is_meant": self.has_managed or self.is_memory or is_random,
            "is_memory": self.is_memory,
        }


class _Earlier:
    def __init__(self, start: ObjectStart, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.first = start.now
        self.n_calls = self.n_looks = 0
        self.end: Any = None
        self.managed: set[str] = set()
        self.text: list[list[int]] = []  # what the last call generated, by batch row


class KeptStates:
    """The objects that calls of `generate` of one model had, and how they left them."""

    def __init__(self) -> None:
        self._earlier: dict[tuple[int, int], _Earlier] = {}

    def begin(self, called: Any) -> ObjectStart | None:
        """Return the state of an object before a call; None if it cannot be known."""
        try:
            start = ObjectStart(called)
            earlier = self._of(called)
            if earlier is not None and earlier.end is not None:
                self._compare(start, earlier)
        except Exception:  # of attributes that raise when they are read
            return None
        return start

    def _of(self, called: Any) -> _Earlier | None:
        key, owner = _key(called)
        found = self._earlier.get(key)
        return found if found is not None and found.owner() is owner else None

    def _compare(self, start: ObjectStart, earlier: _Earlier) -> None:
        start.n_calls = earlier.n_calls + 1
        first, now = attributes_of(earlier.first), attributes_of(start.now)
        set_between = differing(attributes_of(earlier.end), now)
        earlier.managed.update(set_between)
        names = [name for name in differing(first, now) if name not in earlier.managed]
        uses_clock = bool(names_of(start.called) & _CLOCKS)
        if not names or uses_clock or earlier.n_looks >= _MAX_LOOKS:
            return
        earlier.n_looks += 1
        start.has_managed = bool(earlier.managed)
        start.anew, values = copy_of(start.now), attributes_of(copy_of(earlier.first))
        for name in names:
            if name in values:
                set_attribute(start.anew, name, values[name])
            else:
                remove_attribute(start.anew, name)
        start.is_memory = all(_has_grown(first.get(name), now.get(name)) for name in names)
        start.carried = [
            {"name": name, "first": _text(first, name), "now": _text(now, name)} for name in names
        ]

    def forget(self, called: Any) -> None:
        """Look at an object no more."""
        earlier = self._of(called)
        if earlier is not None:
            earlier.n_looks = _MAX_LOOKS

    def end(self, start: ObjectStart, ids: Tensor | None, n_prompt: int) -> None:
        """Keep how a call of `generate` left an object."""
        key, owner = _key(start.called)
        try:
            if not start.is_code_unchanged():
                self._earlier.pop(key, None)
                return
            end = copy_of(start.called)
            earlier = self._of(start.called)
            if earlier is None:
                earlier = self._earlier[key] = _Earlier(start, owner)
        except Exception:  # it cannot be copied any more, or has no weak references
            self._earlier.pop(key, None)
            return
        earlier.end, earlier.n_calls = end, earlier.n_calls + 1
        earlier.text = ids[:, n_prompt:].tolist() if ids is not None else []

    def is_continued(self, called: Any, prompts: Tensor) -> bool:
        """Whether the prompts contain what the call before generated, as those of a chat do."""
        earlier = self._of(called)
        if earlier is None:
            return False
        rows = prompts.tolist()
        return any(_contains(row, text) for text in earlier.text if text for row in rows)


class KeptProcessor:
    """A processor that begins with what an earlier call left, beside a copy that does not."""

    def __init__(self, start: ObjectStart) -> None:
        self.start = start
        self._copy, self._anew, self._n_calls = copy_of(start.now), start.anew, 0
        self.is_open = True
        self.prompts: Tensor | None = None
        self.found: dict[str, Any] | None = None
        """The step, and the scores that differ, if any do."""

    def compare(self, ids: Tensor, scores: Tensor, result: Tensor) -> None:
        """Run the copies on what the processor was given, and compare the scores."""
        step, self._n_calls = self._n_calls, self._n_calls + 1
        if self.prompts is None:
            self.prompts = ids
        try:
            repeated = self._copy(ids.clone(), scores.clone())
            anew = self._anew(ids.clone(), scores.clone())
            # A copy that does not give the same scores says nothing about the object.
            self.is_open = self._n_calls < _MAX_CALLS and torch.equal(repeated, result)
            if self.is_open and not torch.equal(anew, result):
                self.is_open = False
                self.found = {"step": step, **_differing_scores(result, anew)}
        except Exception:
            self.is_open = False


def _differing_scores(kept: Tensor, anew: Tensor) -> dict[str, Any]:
    differs = kept != anew
    row = int(differs.any(1).nonzero()[0])
    ids = differs[row].nonzero().flatten()
    best = [int(one[row].argmax()) for one in (kept, anew)]
    return {
        "row": row,
        "n_scores": len(ids),
        "vocabulary": kept.shape[1],
        "ids": ids[:4].tolist(),
        "kept": [f"{float(value):.4g}" for value in kept[row, ids[:4]]],
        "anew": [f"{float(value):.4g}" for value in anew[row, ids[:4]]],
        "best": best,
    }


def _key(called: Any) -> tuple[tuple[int, int], Any]:
    if isinstance(called, MethodType):
        return (id(called.__self__), id(called.__func__)), called.__self__
    return (id(called), 0), called


def _has_grown(first: Any, now: Any) -> bool:
    """Whether a collection has more than it had, and may be meant as a memory."""
    if not isinstance(now, _COLLECTIONS):
        return False
    return first is None or (isinstance(first, _COLLECTIONS) and len(now) > len(first))


def _text(state: dict[str, Any], name: str) -> str:
    if name not in state:
        return "not there"
    value = state[name]
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= 16 else f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _contains(row: Sequence[int], part: Sequence[int]) -> bool:
    size = array("q").itemsize
    text, wanted = array("q", row).tobytes(), array("q", part).tobytes()
    at = text.find(wanted)
    while at % size and at >= 0:
        at = text.find(wanted, at + 1)
    return at >= 0
