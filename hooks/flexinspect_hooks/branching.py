"""The part of a capture session that knows branches: which one, and which step, a forward is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from flexinspect.control.messages import Place
from flexinspect.records import BranchRecord, GenerationRecord
from flexinspect.rules.base import RuleBook
from flexinspect_hooks.breakhooks import ModelBreaks
from flexinspect_hooks.clock import StepClock, StepContext
from flexinspect_hooks.recorder import Recorder


class Branching:
    """What an engine says to its session when it goes back, or elsewhere."""

    recorder: Recorder
    place: Place
    _book: RuleBook
    _clock: StepClock
    _step: StepContext | None
    _breaks: ModelBreaks | None
    _is_muted = False

    def begin_branch(self, record: BranchRecord, beginning: GenerationRecord) -> None:
        """Start a branch; `beginning` is the generation as it is there: its mask, its tokens.

        Say with `stand` which branch and step a forward belongs to.
        """
        self.recorder.begin_branch(record, beginning, self._book.anew(record.branch))

    def stand(self, branch: int, step: int) -> None:
        """Say which step of the generation the next forward is."""
        self._clock.branch, self._clock.next_step = branch, step
        self.place = Place(self._clock.generation, branch, step - 1)

    def move_step(self, branch: int) -> None:
        """Say that the step that is open belongs to another branch."""
        step = self._step
        if step is None or step.branch == branch:
            return
        if self._breaks is not None:
            self._breaks.move_step(step, branch)
        step.branch = branch

    def drop_step(self, branch: int) -> None:
        """Let go of the step that is open: `branch` holds it in the trace already.

        Breakpoints are judged on it once more, as whoever went back wants to stop there.
        """
        step, breaks, trace = self._step, self._breaks, self.recorder.path
        if step is not None and breaks is not None and breaks.is_at_work and trace is not None:
            self.recorder.put(partial(breaks.judge_again, trace, step, branch))
        self._abandon()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """While entered, forwards are nobody's steps: nothing is captured."""
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    def _abandon(self) -> None:
        raise NotImplementedError
