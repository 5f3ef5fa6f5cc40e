"""Looks for logits processors of the program that judge rows of a batch by another row.

In the first steps of a call of `generate` a processor is called again on copies: on each row alone,
and on the batch with the ids of one row in the place of another. A row depends on another one if it
gets other scores alone, and the same scores as alone once the other row has its ids. It depends on
the scores of others if it keeps other tokens alone, and the same ones as alone once all rows have
its scores. Of a processor with a state that can be copied, a copy is called. Random ones, slow
ones, and those that may print or write are called once only, as always.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.generate_calls.code_state import UnknownStateError, code_state_of, state_of
from flexinspect_hooks.generate_calls.penalty_signs import PenaltySign
from flexinspect_hooks.generate_calls.state_between_calls import KeptProcessor
from flexinspect_hooks.generate_calls.state_copies import copy_of
from flexinspect_hooks.python_internals.patching import patch

MAX_STEPS = 4
"""Calls of a processor that are looked at."""
MAX_SECONDS = 0.02
"""A processor that takes longer is not called again."""
_MAX_ROWS = 8

_active = threading.local()
_lock = threading.Lock()
_patches: list[Callable[[], None]] = []
_originals: list[Callable[..., Tensor]] = []
"""The call of a list of processors that was replaced."""
_users: list[object] = []


def own_processors(given: Any) -> list[Any]:
    """Return the processors among those given to `generate` that are not of transformers."""
    if not isinstance(given, list | tuple):
        return []
    return [one for one in given if not _module_of(one).startswith("transformers.")]


def _module_of(processor: Any) -> str:
    owner = processor if hasattr(processor, "__code__") else type(processor)
    return str(getattr(owner, "__module__", ""))


def name_and_place(called: Any) -> tuple[str, str]:
    """Return the name of a function, or of the class of an instance, and file and line of it."""
    is_function = hasattr(called, "__code__")
    named = called if is_function else type(called)
    code = (called if is_function else type(called).__call__).__code__
    name = getattr(named, "__qualname__", type(called).__name__)
    return str(name), f"{code.co_filename}:{code.co_firstlineno}"


def _named(processor: Any) -> dict[str, Any]:
    name, place = name_and_place(processor)
    return {"processor": name, "place": place}


class ProcessorRows:
    """Checks the processors of one call of `generate`; `found` has a dictionary for each fault.

    `wrong_signs` has one for each that scales scores whatever their sign. `kept` looks at those
    that begin the call with what an earlier one left.
    """

    def __init__(
        self, processors: Sequence[Any], kept: Mapping[int, KeptProcessor] | None = None
    ) -> None:
        self._left = {id(one): MAX_STEPS for one in processors}
        self._signs = {id(one): PenaltySign(MAX_STEPS) for one in processors}
        self._processors = {id(one): one for one in processors}
        self._kept = kept or {}
        self.found: dict[int, dict[str, Any]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at the processors' calls in this thread."""
        before, _active.check = getattr(_active, "check", None), self
        _install(self)
        try:
            yield
        finally:
            _remove(self)
            _active.check = before

    def is_open(self) -> bool:
        """Whether any processor is still looked at."""
        kept = any(one.is_open for one in self._kept.values())
        return kept or any(self._left.values()) or any(o.is_open for o in self._signs.values())

    @property
    def wrong_signs(self) -> list[dict[str, Any]]:
        """The facts about processors that scale scores whatever their sign."""
        found = {key: one.found for key, one in self._signs.items() if one.found is not None}
        return [_named(self._processors[key]) | facts for key, facts in found.items()]

    def call(
        self, processor: Any, run: Callable[..., Tensor], ids: Tensor, scores: Tensor
    ) -> Tensor:
        """Call a processor of a list, and look at it."""
        sign = self._signs.get(id(processor))
        if sign is None or not sign.is_open:
            return self._call_kept(processor, run, ids, scores)
        given = scores.clone()
        result = self._call_kept(processor, run, ids, scores)
        with suppress(Exception), torch.no_grad():  # scores of another kind are not compared
            sign.compare(ids, given, result)
        return result

    def _call_kept(
        self, processor: Any, run: Callable[..., Tensor], ids: Tensor, scores: Tensor
    ) -> Tensor:
        kept = self._kept.get(id(processor))
        if kept is None or not kept.is_open:
            return self._call(processor, run, ids, scores)
        given = ids.clone(), scores.clone()
        started = time.perf_counter()
        result = self._call(processor, run, ids, scores)
        if time.perf_counter() - started > MAX_SECONDS:
            kept.is_open = False
        else:
            with kept_state(), torch.no_grad():
                kept.compare(*given, result)
        return result

    def _call(
        self, processor: Any, run: Callable[..., Tensor], ids: Tensor, scores: Tensor
    ) -> Tensor:
        """Call a processor, and look at its rows."""
        left = self._left.get(id(processor), 0)
        if not left or scores.dim() != 2 or len(scores) < 2 or len(ids) != len(scores):
            return run(ids, scores)
        self._left[id(processor)] = 0  # unless nothing speaks against another look
        try:
            before, kept = state_of(processor), _copy_of(processor)
            shared = code_state_of(processor)
        except UnknownStateError:
            return run(ids, scores)
        given = ids.clone(), scores.clone()
        started = time.perf_counter()
        result = run(ids, scores)
        is_slow = time.perf_counter() - started > MAX_SECONDS
        try:
            if is_slow or not torch.equal(ids, given[0]):
                return result
            has_changed = state_of(processor) != before
            if has_changed and (kept is None or code_state_of(processor) != shared):
                return result
            before = state_of(processor)
            with kept_state(), torch.no_grad():
                trial = partial(_run_copy, kept) if has_changed else run
                rows = _TriedRows(trial, *given, result)
                is_sure = rows.is_repeatable()
                found = rows.find() if is_sure else None
            if is_sure and state_of(processor) == before:
                self._left[id(processor)] = left - 1
                if found is not None:
                    self._keep(processor, *found, step=MAX_STEPS - left)
        except Exception:  # a processor may need the whole batch
            self._left[id(processor)] = 0
        return result

    def _keep(
        self,
        processor: Any,
        source: int | None,
        rows: list[int],
        kept: tuple[int, int] | None,
        *,
        step: int,
    ) -> None:
        facts = _named(processor) | {"source": source, "rows": rows, "step": step}
        facts |= {} if kept is None else {"kept": kept[0], "kept_alone": kept[1]}
        known = self.found.setdefault(id(processor), facts)
        if known["source"] == source:
            known["rows"] = sorted({*known["rows"], *rows})


class _TriedRows:
    """The rows of one call of a processor, on copies of what it was given."""

    def __init__(
        self, run: Callable[..., Tensor], ids: Tensor, scores: Tensor, result: Tensor
    ) -> None:
        self._run, self._ids, self._scores, self._result = run, ids, scores, result
        last = len(ids) - 1
        self._rows = sorted({*range(min(len(ids), _MAX_ROWS)), last})

    def _call(self, ids: Tensor, scores: Tensor) -> Tensor:
        return self._run(ids.clone(), scores.clone())

    def is_repeatable(self) -> bool:
        """Whether another call on the same batch gives the same scores."""
        return torch.equal(self._call(self._ids, self._scores), self._result)

    def find(self) -> tuple[int | None, list[int], tuple[int, int] | None] | None:
        """Return a row, and the others that are judged by its ids; None if there are none.

        Without a row the others are judged by scores: then also how many tokens the first of them
        keeps, and how many it keeps alone.
        """
        own = {r: self._call(self._ids[r : r + 1], self._scores[r : r + 1])[0] for r in self._rows}
        wrong = [r for r in self._rows if not torch.equal(own[r], self._result[r])]
        for source in (0, self._rows[-1]):
            if not wrong or source in wrong:
                continue
            rows = [r for r in wrong if self._is_judged_by(source, r, own[r])]
            if rows:
                return source, rows, None
        rows = [r for r in wrong if self._is_judged_by_scores(r, own[r])]
        if not rows:
            return None
        both = self._result[rows[0]], own[rows[0]]
        return None, rows, (_n_finite(both[0]), _n_finite(both[1]))

    def _is_judged_by_scores(self, row: int, own: Tensor) -> bool:
        """Whether other tokens of a row are dropped than alone, unless all rows are like it."""
        ran = self._result[row]
        kept, alone = ran.isfinite(), own.isfinite()
        if torch.equal(kept, alone) or not torch.equal(ran[kept & alone], own[kept & alone]):
            return False
        # The ids stay, so that a rule about the ids of all rows is none about scores.
        same = self._call(self._ids, self._scores[row].expand(len(self._ids), -1))
        return torch.equal(same[row], own)

    def _is_judged_by(self, source: int, row: int, own: Tensor) -> bool:
        """Whether a row is right once `source` has its ids, and `source` ignores that row."""
        with_own = self._call(self._with(source, row), self._scores)
        if not torch.equal(with_own[row], own):
            return False
        reverse = self._call(self._with(row, source), self._scores)
        return torch.equal(reverse[source], self._result[source])

    def _with(self, row: int, other: int) -> Tensor:
        """Return the ids with those of another row in the place of a row's."""
        ids = self._ids.clone()
        ids[row] = self._ids[other]
        return ids


def _n_finite(scores: Tensor) -> int:
    return int(scores.isfinite().sum())


def _copy_of(processor: Any) -> Any:
    """Return a copy of a processor, None if it holds what cannot be copied."""
    with suppress(Exception):  # of attributes that raise when they are read
        return copy_of(processor)
    return None


def _run_copy(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Call a copy of a copy, which stays as it is."""
    from transformers import LogitsProcessorList

    result: Tensor = _originals[0](LogitsProcessorList([copy_of(processor)]), ids, scores)
    return result


@contextmanager
def kept_state() -> Iterator[None]:
    """Leave all random numbers as they are, and stop at no breakpoint."""
    numpy: Any = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(), breakpoints_disabled():
            yield
    finally:
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _install(user: object) -> None:
    """Let lists of processors call each of them through the check of this thread."""
    from transformers import LogitsProcessorList

    with _lock:
        _users.append(user)
        if len(_users) > 1:
            return
        original = LogitsProcessorList.__call__
        _originals[:] = [original]

        def call(self: Any, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            check: ProcessorRows | None = getattr(_active, "check", None)
            if check is None or kwargs or not check.is_open():
                return original(self, input_ids, scores, **kwargs)
            for one in self:
                alone = LogitsProcessorList([one])
                scores = check.call(
                    one, lambda i, s, alone=alone: original(alone, i, s), input_ids, scores
                )
            return scores

        _patches.append(patch(LogitsProcessorList, "__call__", call))


def _remove(user: object) -> None:
    with _lock:
        _users.remove(user)
        if not _users:
            _patches.pop()()
