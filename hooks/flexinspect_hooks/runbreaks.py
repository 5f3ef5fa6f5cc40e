"""The breakpoints of a run that `flexinspect run` has started, and how one ends it.

Nothing here loads torch before the run has done so itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from flexinspect.breaks import BreakpointBook
from flexinspect.errors import FlexInspectError
from flexinspect.job import Job, ScriptJob
from flexinspect_hooks.control.running import Running

if TYPE_CHECKING:
    from flexinspect_hooks.breaking import Breaking
    from flexinspect_hooks.recorder import Recorder
    from flexinspect_hooks.stoppers import EndingStopper

STOPPED = 3
"""Exit code of a run that a breakpoint ended."""


class StoppedError(FlexInspectError):
    """A breakpoint ended the run, because nobody was there to continue it."""

    exit_code = STOPPED


class RunBreaks:
    """The book of a run, which its control serves, and what a hit does.

    `say` tells whoever started the run that it pauses. Raises `ExpressionError`.
    """

    def __init__(self, job: Job | ScriptJob, running: Running, say: Callable[[str], None]) -> None:
        self.book = BreakpointBook(finding_ids=_known_findings)
        for text in job.breakpoints:
            self.book.add(text, source="--break")
        running.parts.breakpoints = self.book
        self._running, self._say = running, say
        is_debugged = job.debugger.is_asked_for or "pydevd" in sys.modules
        self._waits = job.on_break == "wait" or is_debugged
        self._is_served = job.control
        self._ending: EndingStopper | None = None

    def begin(self, recorder: Recorder) -> Breaking:
        """Begin to judge; torch is loaded, and whether commands are taken is known."""
        from flexinspect_hooks.breaking import Breaking
        from flexinspect_hooks.stoppers import EndingStopper, GateStopper

        gate = self._running.gate
        stopper = GateStopper(gate, self._say, recorder.put)
        if self._waits and self._can_go_on():
            return Breaking(self.book, stopper, recorder.put)
        self._ending = EndingStopper(gate, stopper, recorder.put)
        return Breaking(self.book, self._ending, recorder.put)

    def stopped(self) -> StoppedError | None:
        """Return why the run was ended, None if no breakpoint has done it."""
        if self._ending is None or not self._ending.hits:
            return None
        reasons = "; ".join(hit.reason for hit in self._ending.hits)
        numbers = ", ".join(str(hit.id) for hit in self._ending.hits)
        return StoppedError(f"Stopped at breakpoint {numbers}, {reasons}.", hint=self._hint())

    def _can_go_on(self) -> bool:
        return self._is_served and not self._running.note

    def _hint(self) -> str:
        if self._waits:
            return "It could not pause there: no commands are taken, so nobody could continue it."
        if not self._is_served:
            return "With --no-control nobody could continue it; [log] only records the hit."
        return (
            "To pause there instead, run it on a terminal or add --wait; "
            "[log] after the condition only records it."
        )


def _known_findings() -> Collection[str]:
    """Return the ids of all findings, none before torch is there: rules load numpy, and a program
    of the user's must be the first to do so. What came by a flag was checked before.
    """
    if "torch" not in sys.modules:
        return ()
    from flexinspect.rules.catalogue import catalogue

    return catalogue().kinds.keys()
