"""The two profiler switches: `torch.profiler` over windows of steps, for as long as one is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

from flexinspect_hooks.doors.base import log
from flexinspect_hooks.doors.profiling import FOLDER, activities, exporter, operator_costs
from flexinspect_hooks.doors.switches import SwitchBoard

TABLE = "enable_autograd_profiler"
EXPORT = "enable_tensorboard_profiler"
OPERATORS_SAID = 5
REST = 5
"""A window is followed by a rest of so many times what it took to end it and to read it."""


class ProfilerWindows:
    """Profiles from step to step; each window of steps ends in a line of the log or an export.

    torch takes long to read what it recorded (0.1 ms for each operator called), so that a rest of
    five times that lies between two windows; the first begins at once. `clock` gives seconds.
    `boundary` is called once per step, in the thread that trains.
    """

    def __init__(
        self,
        board: SwitchBoard,
        *,
        steps: int,
        folder: str | Path = FOLDER,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._board, self._steps, self._folder = board, steps, folder
        self._profiler: Any = None
        self._clock, self._rests_until = clock, 0.0
        self._seen = 0
        self._exports = False

    def boundary(self, step: int) -> None:
        """End a window that is full, or that nobody wants any more; begin one that is wanted."""
        wanted = [switch for switch in (TABLE, EXPORT) if self._board.acts(switch, step)]
        if self._profiler is not None:
            self._seen += 1
            if self._seen >= self._steps or not wanted:
                self.close()
        if not wanted:
            self._rests_until = 0.0
        elif self._profiler is None and self._clock() >= self._rests_until:
            self._board.guarded(wanted[0], lambda: self._begin(EXPORT in wanted))

    def close(self) -> None:
        """End the window that is open, and say what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            switch, began = EXPORT if self._exports else TABLE, self._clock()
            self._board.guarded(switch, lambda: self._end(profiler))
            ended = self._clock()
            self._rests_until = ended + REST * (ended - began)

    def _begin(self, exports: bool) -> None:
        ready = exporter(self._folder) if exports else None
        profiler = profile(
            activities=activities(),
            on_trace_ready=ready,
            record_shapes=exports,
            profile_memory=exports,
        )
        profiler.start()
        self._profiler, self._seen, self._exports = profiler, 0, exports

    def _end(self, profiler: Any) -> None:
        profiler.stop()
        costs = operator_costs(profiler)
        top = ", ".join(f"{cost.name} {cost.share:.0%}" for cost in costs[:OPERATORS_SAID])
        where = f", exported to {self._folder}" if self._exports else ""
        log.debug(
            "%s",
            f"Profiler - {self._seen} steps: {top}{where}",
            extra={"facts": {"steps": self._seen, "operators": costs}},
        )
