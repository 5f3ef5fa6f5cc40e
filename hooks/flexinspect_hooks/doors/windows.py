"""The two profiler switches: `torch.profiler` over windows of steps, for as long as one is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import profile

from flexinspect_hooks.doors.base import log
from flexinspect_hooks.doors.profiling import FOLDER, activities, exporter, operator_costs
from flexinspect_hooks.doors.switches import SwitchBoard

TABLE = "enable_autograd_profiler"
EXPORT = "enable_tensorboard_profiler"
OPERATORS_SAID = 5
REST = 9
"""After each window so many times its length is left alone, as a profiled step takes far longer."""


class ProfilerWindows:
    """Profiles from step to step; each window of steps ends in a line of the log or an export.

    Between two windows is a rest of nine times their length; the first begins at once.
    `boundary` is called once per step, in the thread that trains.
    """

    def __init__(self, board: SwitchBoard, *, steps: int, folder: str | Path = FOLDER) -> None:
        self._board, self._steps, self._folder = board, steps, folder
        self._profiler: Any = None
        self._seen = self._rests = 0
        self._exports = False

    def boundary(self, step: int) -> None:
        """End a window that is full, or that nobody wants any more; begin one that is wanted."""
        wanted = [switch for switch in (TABLE, EXPORT) if self._board.acts(switch, step)]
        if self._profiler is not None:
            self._seen += 1
            if self._seen >= self._steps or not wanted:
                self.close()
        if not wanted:
            self._rests = 0
        elif self._profiler is None and self._rests:
            self._rests -= 1
        elif self._profiler is None:
            self._board.guarded(wanted[0], lambda: self._begin(EXPORT in wanted))

    def close(self) -> None:
        """End the window that is open, and say what it saw."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._rests = REST * self._steps
            switch = EXPORT if self._exports else TABLE
            self._board.guarded(switch, lambda: self._end(profiler))

    def _begin(self, exports: bool) -> None:
        ready = exporter(self._folder) if exports else None
        profiler = profile(
            activities=activities(),
            on_trace_ready=ready,
            record_shapes=True,
            profile_memory=True,
            with_flops=True,
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
