"""Follow a trace while another process writes it: what is new since the last poll."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from flexinspect.records.step import TokenRecord
from flexinspect.trace.query_results import EventRow, GenerationRow, StepRow
from flexinspect.trace.reader import TraceReader


class GenerationChange(Struct, frozen=True):
    """A generation started or ended."""

    generation: GenerationRow
    has_ended: bool


class NewStep(Struct, frozen=True):
    """A step was recorded, with the tokens that it chose."""

    step: StepRow
    tokens: list[TokenRecord]


TraceUpdate = EventRow | GenerationChange | NewStep


class TraceFollower:
    """Polls a growing trace and returns each event, step and generation once, in order."""

    def __init__(self, path: Path) -> None:
        self.reader = TraceReader(path)
        self._last_event = 0
        self._generation = 0
        self._next_step = 0
        self._is_announced = False
        self._is_first_poll = True

    def close(self) -> None:
        """Close the trace."""
        self.reader.close()

    def poll(self) -> list[TraceUpdate]:
        """Return what is new, events first; cheap when nothing is."""
        if not self._is_first_poll and not self.reader.changed():
            return []
        self._is_first_poll = False
        with self.reader.snapshot():
            updates: list[TraceUpdate] = []
            for row in self.reader.events(self._last_event):
                updates.append(row)
                self._last_event = row.id
            while self._read_generation(updates):
                pass
        return updates

    def _read_generation(self, updates: list[TraceUpdate]) -> bool:
        """Read the current generation; True when it has ended and there may be a next one."""
        rows = self.reader.generations()
        if len(rows) <= self._generation:
            return False
        row = rows[self._generation]
        if not self._is_announced:
            updates.append(GenerationChange(row, has_ended=False))
            self._is_announced = True
        for step in self.reader.steps(self._generation, start=self._next_step):
            updates.append(NewStep(step, self.reader.step_tokens(self._generation, step.step)))
            self._next_step = step.step + 1
        if row.state == "recording":
            return False
        updates.append(GenerationChange(row, has_ended=True))
        self._generation, self._next_step, self._is_announced = self._generation + 1, 0, False
        return True
