"""Observes how a program chooses a token after a forward of the model.

`torch.multinomial` draws it, also for `generate` and `torch.distributions.Categorical`; `argmax`,
`max` and `topk` take the best. When the generation ends, what they were given is compared with the
logits, see `sampling_errors` and `choice_scores`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.generate_calls.choice_scores import describe_scores
from flexinspect_hooks.generate_calls.sampling_errors import (
    MIN_ROWS,
    MIN_TOKENS,
    SampledRow,
    explain_samples,
)
from flexinspect_hooks.python_internals.default_device import cpu_by_default
from flexinspect_hooks.python_internals.patching import patch

MAX_ROWS = 8
"""Steps of a generation that are looked at."""
_MAX_CANDIDATES = 4
"""Choices after one forward of which copies are made."""


class NewestLogits(Struct, frozen=True):
    """The logits (vocabulary,) of a step whose token is not chosen yet, and the forward's thread.

    The scores of `generate` are those of its processors, which are looked at elsewhere.
    """

    step: int
    logits: Tensor
    thread: int
    is_generate: bool


class _CopiedChoice(Struct, frozen=True):
    """Copies of what a token may have been chosen from in a step, where the program has it.

    The logits (vocabulary,), the values (n,) and the index (1,) of the chosen one among them. They
    are read when the generation is over: a GPU is not waited for.
    """

    step: int
    logits: Tensor
    values: Tensor
    index: Tensor
    draws: bool

    def read(self) -> SampledRow | None:
        """Return it as a row on the CPU, None for scores that are the logits themselves."""
        logits, values = self.logits.cpu(), self.values.cpu()
        if not self.draws and torch.equal(values.to(logits.dtype), logits):
            return None
        return SampledRow(self.step, logits, values, int(self.index[0]), draws=self.draws)


class SampledRows:
    """The choices of the open generation of one model."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[_CopiedChoice], Tensor]] = []
        """The choices of each step, with the token (1,) that was chosen."""
        self._candidates: list[_CopiedChoice] = []
        self._newest: NewestLogits | None = None
        self._has_generate = False

    def on_forward(self, step: int, logits: Tensor | None, *, is_generate: bool = False) -> None:
        """A forward has returned these newest logits (vocabulary,)."""
        self._newest, self._candidates = None, []
        if logits is not None and len(self._steps) < MAX_ROWS:
            self._newest = NewestLogits(step, logits, threading.get_ident(), is_generate)
            self._has_generate |= is_generate

    def on_choice(self, values: Any, chosen: Any, *, draws: bool) -> None:
        """A token was drawn from probabilities, or is the one with the highest score."""
        newest = self._newest
        if newest is None or (newest.is_generate and not draws):
            return
        if newest.thread != threading.get_ident() or not isinstance(values, Tensor):
            return
        row = values if values.dim() == 1 else values[0].reshape(-1, values.shape[-1])[-1]
        logits, size = newest.logits, len(row)
        is_whole = size == len(logits)
        if not MIN_TOKENS <= size <= len(logits) or not (draws or is_whole):
            return
        is_here = row.is_cpu and logits.is_cpu
        if is_here and not draws and torch.equal(row.to(logits.dtype), logits):
            return  # most greedy loops: this is faster than the copies
        if len(self._candidates) < _MAX_CANDIDATES:
            parts = (logits, row, chosen.reshape(-1)[:1])
            logits, values, place = (one.detach().clone() for one in parts)
            self._candidates.append(_CopiedChoice(newest.step, logits, values, place, draws))

    def on_token(self, step: int, read: Callable[[], Tensor]) -> None:
        """The token that `step` chose is known; `read` returns its id (1,)."""
        candidates, self._candidates, self._newest = self._candidates, [], None
        if not candidates or candidates[0].step != step:
            return
        self._steps.append((candidates, read()[:1].detach().clone()))

    @cpu_by_default()
    def take(self, text: Sequence[int]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return what is wrong with the choices since the last call, and how scores are made.

        Both are the data of an event, or None. `text` are the tokens of the prompt, which a
        penalty may move.
        """
        rows = [row for choices, token in self._steps for row in _taken(choices, int(token[0]))]
        if self._candidates and self._candidates[0].draws:
            rows += filter(None, [self._candidates[0].read()])
        is_generate, self._has_generate = self._has_generate, False
        self._steps, self._candidates, self._newest = [], [], None
        n_drawn = sum(row.draws for row in rows)
        draws = n_drawn * 2 >= len(rows)
        rows = [row.in_order_of_tokens() for row in rows if row.draws == draws]
        if len(rows) < MIN_ROWS:
            return None, None
        known = {*text, *(one.token for one in rows if one.token is not None)}
        with suppress(RuntimeError, ValueError, IndexError), torch.no_grad():
            wrong = explain_samples(rows, known, text)
            if wrong is not None or is_generate:
                return wrong, None
            made = describe_scores(rows, text)
            if made is None or "error" not in made:
                return None, made
            return {"pattern": made.pop("error"), **made}, None
        return None, None  # values that are no probabilities


def _taken(choices: Sequence[_CopiedChoice], token: int) -> list[SampledRow]:
    """Return the row that a token was chosen from: the first of draws, else the last that fits."""
    rows = [row for one in choices if (row := one.read()) is not None]
    drawn = [row for row in rows if row.draws]
    best = [row for row in rows if row.index == token]
    return [replace(row, token=token) for row in drawn[:1] or best[-1:]]


_observers: list[SampledRows] = []
_restores: list[Callable[[], None]] = []


def observe_samples(rows: SampledRows) -> Callable[[], None]:
    """Let `rows` know of all choices until the returned function is called."""
    if not _observers:
        places = [(owner, name) for owner in _OWNERS for name in _FUNCTIONS]
        _restores.extend(patch(owner, name, _observed(owner, name)) for owner, name in places)
    _observers.append(rows)

    def remove() -> None:
        _observers[:] = [one for one in _observers if one is not rows]
        while _restores and not _observers:
            _restores.pop()()

    return remove


_FUNCTIONS = ("multinomial", "argmax", "max", "topk")
_OWNERS = (torch, Tensor)


def _observed(owner: Any, name: str) -> Callable[..., Any]:
    original, draws = getattr(owner, name), name == "multinomial"
    has_index = name in ("multinomial", "argmax")

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for rows in tuple(_observers):
                with suppress(Exception):  # the arguments may be of any kind
                    values = args[0] if args else kwargs["input"]
                    index = chosen if has_index else chosen.indices
                    rows.on_choice(values, index, draws=draws)
        return chosen

    return functools.wraps(original)(choose)
