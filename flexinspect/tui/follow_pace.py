"""How often a run is looked at while it is recorded: soon, but with a small share of a core."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 0.05
"""The shortest pause: a run of a few steps a second is shown without delay."""
AT_LATEST_S = 0.5
SHARE = 0.1
"""Share of a core that showing new steps may take; a fast run has many of them per frame."""


class FollowPace:
    """Chooses the pause before the next look from the CPU time since the last one.

    `cpu_clock` returns the CPU seconds of the process, in which the model does not run.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self._before = cpu_clock()

    def pause_s(self) -> float:
        """Return the seconds until the next look."""
        now = self._cpu_clock()
        spent, self._before = now - self._before, now
        return min(max(spent / SHARE, EVERY_S), AT_LATEST_S)
