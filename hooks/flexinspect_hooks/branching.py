"""The part of a capture session that knows branches: which one, and which step, a forward is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from flexinspect.control.messages import StepRef
from flexinspect.records import BranchRecord, GenerationRecord
from flexinspect.rules.base import RuleRunner
from flexinspect_hooks.breakhooks import ModelBreakpoints
from flexinspect_hooks.clock import StepClock, StepContext
from flexinspect_hooks.recorder import Recorder


class BranchingSession:
    """What an engine says to its session when it goes back, or elsewhere."""

    recorder: Recorder
    place: StepRef
    _rule_runner: RuleRunner
    _clock: StepClock
    _step: StepContext | None
    _breaks: ModelBreakpoints | None
    _is_paused = False

    def begin_branch(self, record: BranchRecord, generation: GenerationRecord) -> None:
        """Start a branch; `beginning` is the generation as it is there: its mask, its tokens.

        Say with `stand` which branch and step a forward belongs to.
        """
        self.recorder.begin_branch(record, generation, self._rule_runner.for_branch(record.branch))

    def set_next_step(self, branch: int, step: int) -> None:
        """Say which step of the generation the next forward is."""
        self._clock.branch, self._clock.next_step = branch, step
        self.place = StepRef(self._clock.generation, branch, step - 1)

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
        if step is not None and breaks is not None and breaks.is_active and trace is not None:
            self.recorder.put(partial(breaks.evaluate_again, trace, step, branch))
        self._abandon()

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """While entered, forwards are nobody's steps: nothing is captured."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _abandon(self) -> None:
        raise NotImplementedError
