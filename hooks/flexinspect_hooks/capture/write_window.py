"""The time near the end of a forward in which the writer thread costs the model nothing."""

from __future__ import annotations

from flexinspect_hooks.capture.recorder import Recorder

_MOST_LATE = 3
"""Writes in a row that may end after the operation, before the window stays closed."""

_CLOSED_FOR = 256
"""Forwards after which a window that stayed closed is tried again."""


class WriteWindow:
    """Wakes the writer thread at the beginning of a model's longest operation.

    That is the product with the output embeddings, on a CPU: two fifths of a decode step of the
    Llama of the benchmarks, a fifth of one of Llama 3.2 1B. It does not hold the GIL, which each
    smaller operation takes again; so a thread that works meanwhile, on a core of its own, does not
    slow the model down. Each step is written during the next one then, and not with others, which
    takes about three times the CPU (see `recorder.LINGER_S`).

    Where writing takes longer than the operation, that is a loss: the window stays closed for
    `_CLOSED_FOR` forwards, and steps are written several at once.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_open = False
        self._n_late = self._n_closed = 0

    def open(self) -> None:
        """Let the writer work: the operation begins."""
        if self._n_closed:
            self._n_closed -= 1
        elif self._recorder.has_core and self._recorder.is_behind:
            self._is_open = True
            self._recorder.wake()

    def close(self) -> bool:
        """Return whether the writer worked and is done: the operation has ended."""
        if not self._is_open:
            return False
        self._is_open = False
        is_late = self._recorder.is_behind
        self._n_late = self._n_late + 1 if is_late else 0
        if self._n_late >= _MOST_LATE:
            self._n_late, self._n_closed = 0, _CLOSED_FOR
        return not is_late
