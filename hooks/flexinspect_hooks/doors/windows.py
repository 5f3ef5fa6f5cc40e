"""The two profiler switches: `torch.profiler` over windows of steps, for as long as one is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

from flexinspect_hooks.doors.base import log
from flexinspect_hooks.doors.profiling import (
    PROFILE_FOLDER,
    activities,
    operator_costs,
    trace_exporter,
)
from flexinspect_hooks.doors.switches import SwitchBoard

PROFILER_SWITCH = "enable_autograd_profiler"
TENSORBOARD_SWITCH = "enable_tensorboard_profiler"
N_LOGGED_OPERATORS = 5
PAUSE_FACTOR = 5
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
        folder: str | Path = PROFILE_FOLDER,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._board, self._window_steps, self._folder = board, steps, folder
        self._profiler: Any = None
        self._clock, self._paused_until = clock, 0.0
        self._n_profiled = 0
        self._exports = False

    def on_step(self, step: int) -> None:
        """End a window that is full, or that nobody wants any more; begin one that is wanted."""
        wanted = [
            switch
            for switch in (PROFILER_SWITCH, TENSORBOARD_SWITCH)
            if self._board.is_active(switch, step)
        ]
        if self._profiler is not None:
            self._n_profiled += 1
            if self._n_profiled >= self._window_steps or not wanted:
                self.close()
        if not wanted:
            self._paused_until = 0.0
        elif self._profiler is None and self._clock() >= self._paused_until:
            self._board.run_guarded(wanted[0], lambda: self._begin(TENSORBOARD_SWITCH in wanted))

    def close(self) -> None:
        """End the window that is open, and say what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            switch, began = TENSORBOARD_SWITCH if self._exports else PROFILER_SWITCH, self._clock()
            self._board.run_guarded(switch, lambda: self._end(profiler))
            ended = self._clock()
            self._paused_until = ended + PAUSE_FACTOR * (ended - began)

    def _begin(self, exports: bool) -> None:
        ready = trace_exporter(self._folder) if exports else None
        profiler = profile(
            activities=activities(),
            on_trace_ready=ready,
            record_shapes=exports,
            profile_memory=exports,
        )
        profiler.start()
        self._profiler, self._n_profiled, self._exports = profiler, 0, exports

    def _end(self, profiler: Any) -> None:
        profiler.stop()
        costs = operator_costs(profiler)
        top = ", ".join(f"{cost.name} {cost.share:.0%}" for cost in costs[:N_LOGGED_OPERATORS])
        where = f", exported to {self._folder}" if self._exports else ""
        log.debug(
            "%s",
            f"Profiler - {self._n_profiled} steps: {top}{where}",
            extra={"facts": {"steps": self._n_profiled, "operators": costs}},
        )
