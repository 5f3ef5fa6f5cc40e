"""Looks for stopping criteria of the program that end, or do not end, rows because of other rows.

During a call of `generate` only what each criterion gave is kept. After it, copies of a criterion
run on the same ids, and on a batch in which other rows have the ids of the row in question: a row
was ended for another one if the criterion is not done with it then, is done with the other one, and
is done with the row as soon as that other one has its own ids. A criterion that ended a row after
its first token runs on the prompt alone as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.generate_calls.processor_trials import kept_state, name_and_place
from flexinspect_hooks.generate_calls.state_between_calls import ObjectStart
from flexinspect_hooks.generate_calls.state_copies import attributes_of, copy_of, differing
from flexinspect_hooks.python_internals.patching import patch

_MAX_ROWS, _MAX_SECONDS = 8, 0.4

_active = threading.local()
_lock = threading.Lock()
_patches: list[Callable[[], None]] = []
_users: list[object] = []


class _TooSlowError(Exception):
    """The trials would take too long."""


class StoppingCalls:
    """What the criteria of one call of `generate` gave; `starts` has those of the program by id."""

    def __init__(self, starts: Mapping[int, ObjectStart]) -> None:
        self._starts = starts
        self._list: Any = None
        self._results: dict[int, list[Any]] = {}
        self._n_calls = self._first_length = 0
        self.ids: Tensor | None = None
        """The ids of the last call."""
        self._scores: Any = None
        self._is_regular = True

    @property
    def n_prompt(self) -> int:
        """The number of ids before the first step."""
        return self._first_length - 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what lists of criteria give in this thread."""
        before, _active.calls = getattr(_active, "calls", None), self
        _install(self)
        try:
            yield
        finally:
            _remove(self)
            _active.calls = before

    def call(self, run: Callable[..., Any], listed: Any, ids: Any, scores: Any, kw: Any) -> Any:
        """Call a list of criteria, and keep what each gives."""
        self._list = self._list if self._list is not None else listed
        self._first_length = self._first_length or int(ids.shape[1])
        is_next = ids.shape[1] == self._first_length + self._n_calls
        if listed is not self._list or not is_next or kw:
            self._is_regular = False
        if not self._is_regular:
            return run(listed, ids, scores, **kw)
        self._n_calls, self.ids, self._scores = self._n_calls + 1, ids, scores
        return run(_Kept(listed, self._results), ids, scores)

    def trials(self) -> Iterator[_Trials]:
        """Yield the calls of each criterion of the program that can be called again."""
        ids = self.ids
        if not self._is_regular or ids is None:
            return
        given = {}
        for key, results in self._results.items():
            rows = _as_rows(results, len(ids))
            if rows is None or len(rows) != self._n_calls:
                return
            given[key] = rows
        for key, start in self._starts.items():
            if key in given and start.is_code_unchanged():
                others = [rows for other, rows in given.items() if other != key]
                yield _Trials(start, ids, self._scores, given[key], others)


class _Kept(list[Any]):
    """A list of criteria that keep what they give."""

    def __init__(self, criteria: Any, results: dict[int, list[Any]]) -> None:
        super().__init__(_keep_results(one, results.setdefault(id(one), [])) for one in criteria)


def _keep_results(criterion: Any, results: list[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = criterion(*args, **kwargs)
        results.append(_copied(result))
        return result

    return call


def _copied(result: Any) -> Any:
    # A criterion may return a tensor that it changes in the next step.
    return result.clone() if isinstance(result, Tensor) else result


def _as_rows(results: list[Any], n_rows: int) -> Tensor | None:
    """Return results as [calls, rows] on the CPU, None if they have another shape."""
    rows = [one if isinstance(one, Tensor) else torch.tensor(one, device="cpu") for one in results]
    if any(one.dim() > 1 or (one.dim() == 1 and len(one) != n_rows) for one in rows):
        return None
    devices = {one.device for one in rows}
    if len(devices) > 1:
        rows = [one.cpu() for one in rows]
    return torch.stack([one.bool().expand(n_rows) for one in rows]).cpu() if rows else None


class _Trials:
    """The calls of one criterion, on copies of what it was given."""

    def __init__(
        self, start: ObjectStart, ids: Tensor, scores: Any, done: Tensor, others: list[Tensor]
    ) -> None:
        self.start, self._ids, self._scores, self._done = start, ids, scores, done
        self._n_calls, n_rows = done.shape
        self._first_length = ids.shape[1] - self._n_calls + 1
        self._others = torch.zeros_like(done)
        for one in others:
            self._others |= one
        # Rows that no criterion had ended before a call.
        ended = (done | self._others).cumsum(0) > 0
        before = torch.zeros_like(done[:1])
        self._active = ~torch.cat([before, ended[:-1]])
        self._rows = sorted({*range(min(n_rows, _MAX_ROWS)), n_rows - 1})
        self._stateless = not differing(attributes_of(start.now), attributes_of(start.called))
        self._stop_at = time.perf_counter() + _MAX_SECONDS
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def find(self) -> list[dict[str, Any]]:
        """Return rows that were ended or kept for another row, with the sources."""
        name, place = name_and_place(self.start.called)
        facts = {"criterion": name, "place": place, "n_rows": self._done.shape[1]}
        try:
            with kept_state(), torch.no_grad():
                ended = self._find(is_end=True)
                found = [ended] if ended else []
                if not ended and (kept := self._find(is_end=False)):
                    found = [kept]
                is_sure = bool(found) and self.start.is_code_unchanged()
        except Exception:  # a criterion may need the batch as it is
            return []
        return [facts | one for one in found] if is_sure else []

    def find_prompt_stop(self) -> dict[str, Any] | None:
        """Return the rows that ended after their first token for what their prompts have.

        None if there are none, or if the criterion ends any text: then that is meant.
        """
        ended = (self._done[0] & ~self._others[0]).nonzero().flatten().tolist()
        n_prompt = self._first_length - 1
        if not ended or n_prompt < 2:
            return None
        newest = self._ids[:, n_prompt : n_prompt + 1]
        try:
            with kept_state(), torch.no_grad():
                holds = self._holds(self._ids[:, :n_prompt])
                rows = [row for row in ended if holds[row]]
                if not rows or not self._is_repeatable(0):
                    return None
                by_length = bool(self._holds(newest.repeat(1, n_prompt))[rows].all())
                if by_length and bool(self._holds(newest)[rows].any()):
                    return None
        except Exception:  # a criterion may need scores, or the batch as it is
            return None
        if not self.start.is_code_unchanged():
            return None
        name, place = name_and_place(self.start.called)
        facts = {"criterion": name, "place": place, "rows": rows, "n_prompt": n_prompt}
        return facts | {"n_rows": len(self._ids), "counts_length": by_length}

    def _holds(self, ids: Tensor) -> Tensor:
        """Return what a copy of the criterion gives for other ids (rows, n)."""
        scores = self._scores[:1] if isinstance(self._scores, tuple) else self._scores
        rows = _as_rows([copy_of(self.start.now)(ids.clone(), scores)], len(ids))
        if rows is None:
            raise _TooSlowError
        return rows[0]

    def _find(self, *, is_end: bool) -> dict[str, Any] | None:
        """Return what a row's end (or its missing end) owes to another row."""
        if self._done.shape[1] < 2:
            return None
        uniform = bool((self._done == self._done[:, :1]).all())
        if not is_end and not uniform:  # such a criterion tells rows apart
            return None
        found: dict[str, Any] | None = None
        for row in self._rows:
            for step in self._candidates(row, is_end=is_end):
                sources = self._sources(row, step, is_end=is_end)
                if sources is None:
                    continue
                prompts = self._ids[:, : self._first_length - 1]
                is_same = all(torch.equal(prompts[row], prompts[one]) for one in sources)
                if found is None:
                    found = {"rows": [], "source": sources[0], "sources": sources, "step": step}
                    found |= {"is_end": is_end, "same_prompt": is_same}
                found["rows"].append(row)
                found["same_prompt"] &= is_same
                break
        return found

    def _candidates(self, row: int, *, is_end: bool) -> list[int]:
        done, active = self._done[:, row], self._active[:, row] & ~self._others[:, row]
        if is_end:
            return (active & done).nonzero().flatten()[:1].tolist()
        steps = (active & ~done).nonzero().flatten().tolist()
        if not steps or not self._is_repeatable(steps[-1]):
            return []
        return [s for s in steps if self._with(row, s)[row]][:1]

    def _is_repeatable(self, step: int) -> bool:
        again = self._run(self._ids, step)
        return torch.equal(again, self._done[step])

    def _sources(self, row: int, step: int, *, is_end: bool) -> list[int] | None:
        """Return the rows for which a row was ended (kept) in a step, None if there are none."""
        if not self._is_repeatable(step) or bool(self._with(row, step)[row]) is is_end:
            return None
        others = [s for s in self._rows if s != row]
        sources = [
            s
            for s in others
            if bool(self._with(s, step)[s]) is is_end
            and bool(self._with(row, step, keep=s)[row]) is is_end
        ]
        # Once more, in case the criterion is not the same each time.
        self._kept.clear()
        is_sure = self._is_repeatable(step) and bool(self._with(row, step)[row]) is not is_end
        return sources if sources and is_sure else None

    def _with(self, row: int, step: int, keep: int | None = None) -> Tensor:
        """Return what the criterion gives if all other rows but `keep` have the ids of a row."""
        key = row, step, keep
        if key not in self._kept:
            ids = self._ids[row : row + 1].repeat(len(self._ids), 1)
            if keep is not None:
                ids[keep] = self._ids[keep]
            self._kept[key] = self._run(ids, step)
        return self._kept[key]

    def _run(self, ids: Tensor, step: int, called: Any = None) -> Tensor:
        """Return what a copy gives in a step: after the calls before it, if it has a state."""
        return self._run_all(ids, step, called)[-1]

    def _run_all(self, ids: Tensor, step: int, called: Any = None) -> Tensor:
        called = copy_of(self.start.now) if called is None else called
        results = []
        for one in range(step if self._stateless else 0, step + 1):
            if time.perf_counter() > self._stop_at:
                raise _TooSlowError
            scores = self._scores
            if isinstance(scores, tuple):
                scores = scores[: one + 1]
            results.append(_copied(called(ids[:, : self._first_length + one].clone(), scores)))
        rows = _as_rows(results, len(ids))
        if rows is None:
            raise _TooSlowError
        return rows

    def find_kept(self) -> dict[str, Any] | None:
        """Return where the criterion, begun anew, ends other rows; None if it does not."""
        if self.start.anew is None:
            return None
        last = self._n_calls - 1
        self._stateless = False
        try:
            with kept_state(), torch.no_grad():
                if not torch.equal(self._run_all(self._ids, last), self._done):
                    return None
                anew = self._run_all(self._ids, last, copy_of(self.start.anew))
        except Exception:
            return None
        differs = (anew != self._done) & self._active & ~self._others
        places = differs.nonzero()
        if not len(places) or not self.start.is_code_unchanged():
            return None
        step, row = places[0].tolist()
        ends = anew[:, row].nonzero().flatten()
        ends_at = int(ends[0]) if len(ends) else None
        return {"step": step, "row": row, "is_end": bool(self._done[step, row]), "anew_at": ends_at}


def _install(user: object) -> None:
    """Let lists of criteria be called through the check of this thread."""
    from transformers import StoppingCriteriaList

    with _lock:
        _users.append(user)
        if len(_users) > 1:
            return
        original = StoppingCriteriaList.__call__

        def call(self: Any, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            calls: StoppingCalls | None = getattr(_active, "calls", None)
            if calls is None or isinstance(self, _Kept):
                return original(self, input_ids, scores, **kwargs)
            return calls.call(original, self, input_ids, scores, kwargs)

        _patches.append(patch(StoppingCriteriaList, "__call__", call))


def _remove(user: object) -> None:
    with _lock:
        _users.remove(user)
        if not _users:
            _patches.pop()()
