"""The time near the end of a forward in which the writer thread slows the model down least."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.capture.hook import CaptureContext
from flexinspect_hooks.capture.recorder import Recorder

_MOST_LATE = 3
"""Writes in a row that may end after the operation, before the window stays closed."""

_CLOSED_FOR = 256
"""Forwards after which a window that stayed closed is tried again."""

QUIET_EVERY = 16
"""At every sixteenth forward the window stays closed: `WriterSlowdown` compares the others with
these."""


class WriteWindow:
    """Wakes the writer thread at the beginning of a model's longest operation.

    That is the product with the output embeddings, on a CPU: two fifths of the weights that a
    decode step of the benchmarks' Llama reads are theirs, and a fifth for Llama 3.2 1B. It does not
    hold the GIL, which each smaller operation takes again; so a thread that works meanwhile, on a
    core of its own, hardly slows the model down. Each step is written during the next one then, and
    mostly not with others, which takes more CPU (see `recorder.LINGER_S`).

    Where writing takes longer than the operation, that is a loss: the window stays closed for
    `_CLOSED_FOR` forwards, and steps are written several at once.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_open = False
        self._n_forwards = self._n_late = self._n_closed = 0

    def install(self, head: nn.Module, context: CaptureContext) -> Callable[[], None]:
        """Open the window whenever this module is called in a step; returns what removes the hook.

        The session does not depend on the hook: a program may replace the module.
        """
        watched, is_compiling = id(head), torch.compiler.is_compiling

        # A function, because a copy of the module would copy a bound method, and its object.
        def before(module: nn.Module, args: Any) -> None:
            if is_compiling() or not context.is_open or id(module) != watched:
                return
            if args and isinstance(args[0], Tensor) and args[0].is_cpu:
                started = perf_counter()
                self.open()
                context.layers_s += perf_counter() - started

        handle = head.register_forward_pre_hook(before)
        return lambda: handle.remove()

    def open(self) -> None:
        """Let the writer work, if it has slept up to here: the operation begins."""
        recorder = self._recorder
        self._n_forwards += 1
        if self._n_closed:
            self._n_closed -= 1
            return
        is_due = recorder.has_core and recorder.is_asleep and recorder.is_behind
        if is_due and self._n_forwards % QUIET_EVERY:
            self._is_open = True
            recorder.wake()

    def close(self) -> bool:
        """Return whether the writer worked in the window and is done: the operation has ended."""
        if not self._is_open:
            return False
        self._is_open = False
        is_late = self._recorder.is_behind
        self._n_late = self._n_late + 1 if is_late else 0
        if self._n_late >= _MOST_LATE:
            self._n_late, self._n_closed = 0, _CLOSED_FOR
        return not is_late
