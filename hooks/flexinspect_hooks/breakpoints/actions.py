"""The breakpoints of a run that `flexinspect run` has started, and how one ends it.

Nothing here loads torch before the run has done so itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from flexinspect.breakpoints import BreakpointStore
from flexinspect.breakpoints.store import BreakpointHit
from flexinspect.core.errors import ControlError, FlexInspectError, UsageError
from flexinspect.records.job import Job, ScriptJob
from flexinspect.records.step import EventRecord
from flexinspect_hooks.breakpoints.observations import hit_event
from flexinspect_hooks.control.running import CaptureControl
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.debugger.frames import frame_to_stop_in

if TYPE_CHECKING:
    from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
    from flexinspect_hooks.capture.recorder import Recorder

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
        from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator

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
    from flexinspect.rules.engine import load_rules

    return load_rules().finding_kinds.keys()


OnBreakOption = Callable[[BreakpointHit], None] | Literal["pdb"] | None
HitCallback = Callable[[BreakpointHit, FrameType], None]


def hit_callback(on_break: OnBreakOption) -> HitCallback:
    """Return what is called at a hit. Raises `UsageError` for what is neither of these."""
    if on_break is None:
        return _stop_in_pdb if _has_terminal() else _print_hit
    if on_break == "pdb":
        return _stop_in_pdb
    if not callable(on_break):
        raise UsageError('on_break is a function that takes a BreakpointHit, or "pdb".')
    return lambda hit, frame: on_break(hit)


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def print_notice(sentence: str) -> None:
    """Say something to the user."""
    print(f"flexinspect: {sentence}", file=sys.stderr)


def _print_hit(hit: BreakpointHit, frame: FrameType) -> None:
    print_notice(hit.sentence())


def _stop_in_pdb(hit: BreakpointHit, frame: FrameType) -> None:
    """Open Python's debugger in the user's own frame, at once; `quit` is like Ctrl-C.

    `Pdb.set_trace` would stop at whatever runs next, which is ours.
    """
    import pdb  # here: it takes `code` and others by names that a user's own file may have

    _print_hit(hit, frame)
    where, debugger = frame_to_stop_in(frame), pdb.Pdb()
    debugger.reset()
    above: FrameType | None = where
    while above is not None:
        above.f_trace = debugger.trace_dispatch
        debugger.botframe, above = above, above.f_back
    debugger.interaction(where, None)
    if debugger.quitting:
        raise KeyboardInterrupt
    if debugger.stopframe is not debugger.botframe or debugger.breaks:
        sys.settrace(debugger.trace_dispatch)


_DEBUGGER_MODULES = ("pydevd", "flexinspect_hooks.debugger.pdb_terminal")
"""Modules that are loaded where a debugger may be."""


class PauseAction:
    """Pauses the model before its next step, or stops the debugger, where one is attached.

    That one is stopped inside the forward where possible. `say` tells whoever started the run that
    it pauses at the gate; `event` records a stop of the debugger.
    """

    def __init__(
        self,
        barrier: StepBarrier,
        notify: Callable[[str], None],
        record_event: Callable[[EventRecord], None],
    ) -> None:
        self._barrier, self._notify, self._record_event = barrier, notify, record_event
        self._undelivered: deque[BreakpointHit] = deque()

    def arm(self, on: bool) -> None:
        """Let the gate wait at each boundary until the step before it is judged."""
        self._barrier.wait_for_evaluation(on)

    def can_stop_in_forward(self) -> bool:
        """Say whether a debugger is there and attached."""
        stopping = _debugger_stops()
        return stopping is not None and bool(stopping.can_stop())

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop the debugger in the user's own frame; without one any more, at the gate."""
        stopping = _debugger_stops()
        facts = {**hit.event_data(), "step": hit.step}
        if stopping is None or not stopping.stop_in(frame, hit.sentence(), facts):
            self._pause([hit])

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Pause at the next boundary, for all that was met in this step."""
        if not self.can_stop_in_forward():
            self._pause(hits)
            return
        self._undelivered.extend(hits)
        self._record_hits(hits)

    def _record_hits(self, hits: Sequence[BreakpointHit]) -> None:
        for hit in hits:
            self._record_event(hit_event(hit))

    def _pause(self, hits: Sequence[BreakpointHit]) -> None:
        reason = "; ".join(f"breakpoint {hit.id}, {hit.reason}" for hit in hits)
        sentence = (
            f"Paused at {reason}. Go on with: flexinspect ctl continue --pid {os.getpid()} "
            "(Ctrl-C ends the run)"
        )
        if all(hit.step is None for hit in hits):
            # Met at the end of a generation, and there may be no boundary after it: the hit is told
            # now, and the pause where there is one.
            self._record_hits(hits)
            facts = hits[0].event_data()
            self._barrier.pause_at_breakpoint(
                reason, facts, "paused", lambda: self._notify(sentence)
            )
            return
        self._barrier.pause_at_breakpoint(reason, hits[0].event_data())
        self._notify(sentence)

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """Stop the debugger for what the steps before have met; the gate has settled them."""
        while self._undelivered:
            self.stop_in_forward(self._undelivered.popleft(), frame)


class EndRunAction:
    """Ends the run, because nobody is there who could continue it. `hits` says why.

    Once somebody has commanded the run, it pauses: whoever did can continue it too.
    """

    def __init__(
        self,
        barrier: StepBarrier,
        pause_action: PauseAction,
        record_event: Callable[[EventRecord], None],
    ) -> None:
        self._barrier, self._pause_action, self._record_event = barrier, pause_action, record_event
        self.hits: tuple[BreakpointHit, ...] = ()

    def arm(self, on: bool) -> None:
        """Let the gate wait at each boundary until the step before it is judged."""
        self._barrier.wait_for_evaluation(on)

    def can_stop_in_forward(self) -> bool:
        """Say whether a debugger has come to it; the run ends between two steps only."""
        return self._pause_action.can_stop_in_forward()

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop the debugger."""
        self._pause_action.stop_in_forward(hit, frame)

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Record the hits, and have the gate end the run, or pause it."""
        if self._barrier.has_received_command or self.can_stop_in_forward():
            self._pause_action.stop(hits)
        elif not self.hits:
            self.hits = tuple(hits)
            for hit in hits:
                self._record_event(hit_event(hit))
            with suppress(ControlError):  # the run is over already
                self._barrier.stop()

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """Stop the debugger for what the steps before have met."""
        self._pause_action.deliver_hits(drain, frame)


class CallbackAction:
    """Calls a function of the user's: inside the forward, or before the next step.

    What the function raises goes to whoever called the model, but not through a forward: it is
    raised before the next step.
    """

    def __init__(self, callback: Callable[[BreakpointHit, FrameType], None]) -> None:
        self._callback = callback
        self._undelivered: deque[BreakpointHit] = deque()
        self._error: BaseException | None = None
        self._is_armed = False

    def arm(self, on: bool) -> None:
        """Have steps judged before the next one begins."""
        self._is_armed = on

    def can_stop_in_forward(self) -> bool:
        """It is called in the frame where the hit was noticed."""
        return True

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Call the function at once."""
        try:
            self._callback(hit, frame)
        except Exception as error:
            self._error = error

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Have the function called before the next step."""
        self._undelivered.extend(hits)

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """Call the function for what the steps before have met."""
        if self._is_armed:
            drain()
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._undelivered:
            self._callback(self._undelivered.popleft(), frame)


def _debugger_stops() -> Any:
    """Return the module that stops debuggers, None where there is none: then nothing is loaded."""
    if not any(name in sys.modules for name in _DEBUGGER_MODULES):
        return None
    return importlib.import_module("flexinspect_hooks.debugger.pdb_terminal")
