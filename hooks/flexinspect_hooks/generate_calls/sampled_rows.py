"""Observes calls of `torch.multinomial` that follow a forward of the model.

`generate`, loops of the program and `torch.distributions.Categorical` call it. When the generation
ends, the probabilities are compared with the logits, see `sampling_errors`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.generate_calls.sampling_errors import (
    MIN_ROWS,
    MIN_TOKENS,
    SampledRow,
    explain_samples,
)
from flexinspect_hooks.python_internals.patching import patch

MAX_ROWS = 8
"""Steps of a generation that are looked at."""


class SampledRows:
    """The samples of the open generation of one model."""

    def __init__(self) -> None:
        self._rows: list[SampledRow] = []
        self._newest: tuple[int, Tensor, int] | None = None

    def on_forward(self, step: int, logits: Tensor | None) -> None:
        """A forward has returned these newest logits (vocabulary,)."""
        is_read = logits is not None and logits.is_cpu and len(self._rows) < MAX_ROWS
        self._newest = None
        if is_read and logits is not None:
            self._newest = step, logits, threading.get_ident()

    def on_sample(self, probabilities: Any, drawn: Any) -> None:
        """`torch.multinomial` has `drawn` from `probabilities`."""
        newest, self._newest = self._newest, None
        if newest is None or newest[2] != threading.get_ident():
            return
        if not (isinstance(probabilities, Tensor) and isinstance(drawn, Tensor) and drawn.numel()):
            return
        row = probabilities if probabilities.dim() == 1 else probabilities[0]
        if not row.is_cpu or not MIN_TOKENS <= len(row) <= len(newest[1]):
            return
        step, logits, _ = newest
        index = int(drawn.reshape(-1)[0])
        found = SampledRow(step, logits.detach().clone(), row.detach().clone(), index)
        self._rows.append(found)

    def on_token(self, step: int, read: Callable[[], Tensor]) -> None:
        """The token that `step` chose is known; `read` returns its id (1,)."""
        for row in self._rows[-1:]:
            if row.step == step and row.token is None:
                row.token = int(read()[0])

    def take(self, text: Sequence[int]) -> dict[str, Any] | None:
        """Return what is wrong with the samples since the last call, as the data of an event.

        `text` are the tokens of the prompt, which a penalty may move.
        """
        rows, self._rows, self._newest = self._rows, [], None
        if len(rows) < MIN_ROWS:
            return None
        known = {*text, *(one.token for one in rows if one.token is not None)}
        try:
            with torch.no_grad():
                return explain_samples(rows, known, text)
        except (RuntimeError, ValueError, IndexError):
            return None  # values that are no probabilities


_observers: list[SampledRows] = []
_restores: list[Callable[[], None]] = []


def observe_samples(rows: SampledRows) -> Callable[[], None]:
    """Let `rows` know of all samples until the returned function is called."""
    if not _observers:
        _restores.extend(patch(owner, "multinomial", _observed(owner)) for owner in _OWNERS)
    _observers.append(rows)

    def remove() -> None:
        _observers[:] = [one for one in _observers if one is not rows]
        while _restores and not _observers:
            _restores.pop()()

    return remove


_OWNERS = (torch, Tensor)


def _observed(owner: Any) -> Callable[..., Any]:
    original = owner.multinomial

    def multinomial(*args: Any, **kwargs: Any) -> Any:
        drawn = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for rows in tuple(_observers):
                with suppress(Exception):  # the tensors may be of any kind
                    rows.on_sample(args[0] if args else kwargs.get("input"), drawn)
        return drawn

    return functools.wraps(original)(multinomial)
