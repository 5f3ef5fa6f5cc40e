"""How much longer a model's steps take while the writer thread works."""

from __future__ import annotations

from msgspec import Struct

_MIN_QUIET, _MIN_BUSY = 8, 2
_OUTLIER = 2.0
"""Quiet steps that take this many times their mean are no measure: the machine did something."""
_PAUSE = 4.0
"""Busy steps that take this many times the mean of quiet ones are no measure: the program paused,
as between two turns of a chat, and the writer had time to work."""


class WriterSlowdown(Struct):
    """Compares decode steps during which the writer thread worked with those in which it waited.

    Both threads need the interpreter, so the model waits, and it switches more often: no clock of a
    thread shows that. The writer works several times a second, so most steps of a fast model run
    without it; of those with a `WriteWindow`, one of sixteen. Those of a slow model hardly do; then
    `seconds` is None.
    """

    n_quiet: int = 0
    quiet_s: float = 0.0
    n_busy: int = 0
    busy_s: float = 0.0

    def add(self, step_s: float, *, is_busy: bool) -> None:
        """Add a decode step of `step_s` seconds."""
        if is_busy:
            n, sum_s = (self.n_quiet, self.quiet_s) if self.n_quiet else (self.n_busy, self.busy_s)
            if not n or step_s * n < _PAUSE * sum_s:
                self.n_busy += 1
                self.busy_s += step_s
        elif self.n_quiet < _MIN_QUIET or step_s * self.n_quiet < _OUTLIER * self.quiet_s:
            self.n_quiet += 1
            self.quiet_s += step_s

    @property
    def seconds(self) -> float | None:
        """How much longer the busy steps took in all; None if too few of either kind are known."""
        if self.n_quiet < _MIN_QUIET or self.n_busy < _MIN_BUSY:
            return None
        return max(self.busy_s - self.n_busy * self.quiet_s / self.n_quiet, 0.0)
