"""Follow a trace while another process writes it: what is new since the last poll."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from flexinspect.records.step import TokenRecord
from flexinspect.trace.query_results import EventRow, GenerationRow, StepRow
from flexinspect.trace.reader import TraceReader


class NewGeneration(Struct, frozen=True):
    """A generation started."""

    generation: GenerationRow


class NewStep(Struct, frozen=True):
    """A step was recorded, with the tokens that it chose."""

    step: StepRow
    tokens: list[TokenRecord]


class FinishedGeneration(Struct, frozen=True):
    """A generation ended."""

    generation: GenerationRow


class TraceUpdates(Struct):
    """What one poll found: events, and changes of generations in order."""

    events: list[EventRow] = field(default_factory=list)
    changes: list[NewGeneration | NewStep | FinishedGeneration] = field(default_factory=list)


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

    def poll(self) -> TraceUpdates:
        """Return what is new; cheap when nothing is."""
        if not self._is_first_poll and not self.reader.changed():
            return TraceUpdates()
        self._is_first_poll = False
        updates = TraceUpdates()
        with self.reader.snapshot():
            updates.events = self.reader.events(self._last_event)
            if updates.events:
                self._last_event = updates.events[-1].id
            while self._read_generation(updates):
                pass
        return updates

    def _read_generation(self, updates: TraceUpdates) -> bool:
        """Read the current generation; True when it has ended and there may be a next one."""
        rows = self.reader.generations()
        if len(rows) <= self._generation:
            return False
        row = rows[self._generation]
        if not self._is_announced:
            updates.changes.append(NewGeneration(row))
            self._is_announced = True
        steps = self.reader.steps(self._generation, start=self._next_step)
        for step in steps:
            tokens = self.reader.step_tokens(self._generation, step.step)
            updates.changes.append(NewStep(step, tokens))
            self._next_step = step.step + 1
        if row.state == "recording":
            return False
        updates.changes.append(FinishedGeneration(row))
        self._generation, self._next_step, self._is_announced = self._generation + 1, 0, False
        return True
