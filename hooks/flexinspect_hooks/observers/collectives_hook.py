"""Records when a rank of a distributed run enters and leaves collective calls."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.collective_log import (
    CollectiveLog,
    collective_arrays,
    observe_collectives,
)
from flexinspect_hooks.capture.hook import CaptureContext, Hook, Remove
from flexinspect_hooks.capture.rank_facts import current_rank
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values


class CollectivesHook(Hook):
    """Adds the calls since the last step to each step; does nothing in a process that is alone."""

    name = "collectives"

    def __init__(self) -> None:
        self._log = CollectiveLog()
        self._is_alone = False

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Observe the calls of this process."""
        self._is_alone = current_rank() is None
        if self._is_alone:
            return ()
        observing = ExitStack()
        observing.enter_context(observe_collectives(self._log))
        return (observing.close,)

    def begin(self, context: CaptureContext) -> None:
        """Forget calls before the generation, such as those that load a model."""
        self._log.take()

    def reduce(self, step: StepContext, buffer: StepBuffer) -> Any:
        """Take the calls of the step."""
        return () if self._is_alone else self._log.take()

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        """Add the calls as arrays."""
        draft.arrays += collective_arrays(kept)
