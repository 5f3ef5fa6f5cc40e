"""Following a trace while another process writes it: what is new since the last look."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flexinspect.records.step import TokenRecord
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import EventRow, GenerationRow, StepRow


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """A generation began."""

    generation: GenerationRow


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step is in the trace, with the tokens it chose."""

    step: StepRow
    tokens: list[TokenRecord]


@dataclass(frozen=True, slots=True)
class FinishedGeneration:
    """A generation ended."""

    generation: GenerationRow


@dataclass(slots=True)
class TraceUpdates:
    """What a look found: events, and what happened to generations in its order."""

    events: list[EventRow] = field(default_factory=list)
    changes: list[NewGeneration | NewStep | FinishedGeneration] = field(default_factory=list)


class TraceFollower:
    """Looks at a growing trace and hands out each thing once, in order."""

    def __init__(self, path: Path) -> None:
        self._reader = TraceReader(path)
        self._last_event = 0
        self._generation = 0
        self._next_step = 0
        self._is_announced = False
        self._is_first_poll = True

    @property
    def reader(self) -> TraceReader:
        """The reader underneath, for anything that is not news."""
        return self._reader

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    def poll(self) -> TraceUpdates:
        """Return what is new; cheap when nothing is."""
        if not self._is_first_poll and not self._reader.changed():
            return TraceUpdates()
        self._is_first_poll = False
        news = TraceUpdates()
        with self._reader.snapshot():
            news.events = self._reader.events(self._last_event)
            if news.events:
                self._last_event = news.events[-1].id
            while self._read_generation(news):
                pass
        return news

    def _read_generation(self, news: TraceUpdates) -> bool:
        """Take in the current generation; True when it has ended and the next may be there."""
        rows = self._reader.generations()
        if len(rows) <= self._generation:
            return False
        row = rows[self._generation]
        if not self._is_announced:
            news.changes.append(NewGeneration(row))
            self._is_announced = True
        steps = self._reader.steps(self._generation, start=self._next_step)
        for step in steps:
            tokens = self._reader.step_tokens(self._generation, step.step)
            news.changes.append(NewStep(step, tokens))
            self._next_step = step.step + 1
        if row.state == "recording":
            return False
        news.changes.append(FinishedGeneration(row))
        self._generation, self._next_step, self._is_announced = self._generation + 1, 0, False
        return True
