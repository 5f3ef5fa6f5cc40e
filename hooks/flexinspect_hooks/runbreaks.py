"""The breakpoints of a run that `flexinspect run` has started, and how one ends it.

Nothing here loads torch before the run has done so itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from flexinspect.breaks import BreakpointStore
from flexinspect.errors import FlexInspectError
from flexinspect.job import Job, ScriptJob
from flexinspect_hooks.control.running import CaptureControl

if TYPE_CHECKING:
    from flexinspect_hooks.breaking import BreakpointEvaluator
    from flexinspect_hooks.recorder import Recorder

if TYPE_CHECKING:
    from flexinspect_hooks.stoppers import EndRunAction

STOPPED_EXIT_CODE = 3
"""Exit code of a run that a breakpoint ended."""


class StoppedAtBreakpointError(FlexInspectError):
    """A breakpoint ended the run, because nobody was there to continue it."""

    exit_code = STOPPED_EXIT_CODE


class RunBreakpoints:
    """The book of a run, which its control serves, and what a hit does.

    `say` tells whoever started the run that it pauses. Raises `ExpressionError`.
    """

    def __init__(
        self, job: Job | ScriptJob, control: CaptureControl, notify: Callable[[str], None]
    ) -> None:
        self.store = BreakpointStore(finding_ids=_loaded_finding_ids)
        for text in job.breakpoints:
            self.store.add(text, source="--break")
        control.targets.breakpoints = self.store
        self._control, self._notify = control, notify
        is_debugged = job.debugger.is_requested or "pydevd" in sys.modules
        self._should_pause = job.on_break == "wait" or is_debugged
        self._takes_commands = job.control
        self._end_action: EndRunAction | None = None

    def begin(self, recorder: Recorder) -> BreakpointEvaluator:
        """Begin to judge; torch is loaded, and whether commands are taken is known."""
        from flexinspect_hooks.breaking import BreakpointEvaluator
        from flexinspect_hooks.stoppers import EndRunAction, PauseAction

        gate = self._control.barrier
        stopper = PauseAction(gate, self._notify, recorder.put)
        if self._should_pause and self._can_be_continued():
            return BreakpointEvaluator(self.store, stopper, recorder.put)
        self._end_action = EndRunAction(gate, stopper, recorder.put)
        return BreakpointEvaluator(self.store, self._end_action, recorder.put)

    def stop_error(self) -> StoppedAtBreakpointError | None:
        """Return why the run was ended, None if no breakpoint has done it."""
        if self._end_action is None or not self._end_action.hits:
            return None
        reasons = "; ".join(hit.reason for hit in self._end_action.hits)
        numbers = ", ".join(str(hit.id) for hit in self._end_action.hits)
        return StoppedAtBreakpointError(
            f"Stopped at breakpoint {numbers}, {reasons}.", hint=self._hint()
        )

    def _can_be_continued(self) -> bool:
        return self._takes_commands and not self._control.note

    def _hint(self) -> str:
        if self._should_pause:
            return "It could not pause there: no commands are taken, so nobody could continue it."
        if not self._takes_commands:
            return "With --no-control nobody could continue it; [log] only records the hit."
        return (
            "To pause there instead, run it on a terminal or add --wait; "
            "[log] after the condition only records it."
        )


def _loaded_finding_ids() -> Collection[str]:
    """Return the ids of all findings, none before torch is there: rules load numpy, and a program
    of the user's must be the first to do so. What came by a flag was checked before.
    """
    if "torch" not in sys.modules:
        return ()
    from flexinspect.rules.catalogue import load_rules

    return load_rules().finding_kinds.keys()
