"""Actions at a hit: pause the run, end it, call a function of the user, or stop in a debugger.

`RunBreakpoints` selects the action of a run that `flexinspect run` started. This module does not
load torch before the run does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from flexinspect.breakpoints.store import BreakpointHit, BreakpointStore
from flexinspect.core.errors import ControlError, FlexInspectError, UsageError
from flexinspect.core.text import print_message
from flexinspect.records.job import Job, ScriptJob
from flexinspect.records.step import EventRecord
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator, hit_event
from flexinspect_hooks.control.server import CaptureControl
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.debugger.frames import frame_to_stop_in

if TYPE_CHECKING:
    from flexinspect_hooks.capture.recorder import Recorder

STOPPED_EXIT_CODE = 3
"""Exit code of a run that a breakpoint ended."""


class StoppedAtBreakpointError(FlexInspectError):
    """A breakpoint ended the run, because no client could continue it."""

    exit_code = STOPPED_EXIT_CODE


class RunBreakpoints:
    """The breakpoints of a run, which its control server offers to clients.

    `notify` prints that the run pauses. Raises `ExpressionError` for an invalid breakpoint.
    """

    def __init__(
        self, job: Job | ScriptJob, control: CaptureControl, notify: Callable[[str], None]
    ) -> None:
        self.store = BreakpointStore(finding_ids=_loaded_finding_ids)
        for text in job.breakpoints:
            self.store.add(text)
        control.targets.breakpoints = self.store
        self._control, self._notify = control, notify
        is_debugged = job.debugger.is_requested or "pydevd" in sys.modules
        self._should_pause = job.on_break == "wait" or is_debugged
        self._takes_commands = job.control
        self._action: PauseAction | None = None

    def begin(self, recorder: Recorder) -> BreakpointEvaluator:
        """Return the evaluator of the breakpoints, once torch and the control server are up."""
        can_pause = self._should_pause and self._takes_commands and not self._control.note
        make_action = PauseAction if can_pause else EndRunAction
        self._action = make_action(self._control.barrier, self._notify, recorder.put)
        return BreakpointEvaluator(self.store, self._action, recorder.put)

    def stop_error(self) -> StoppedAtBreakpointError | None:
        """Return the error of a run that a breakpoint ended, otherwise None."""
        hits = self._action.hits if isinstance(self._action, EndRunAction) else ()
        if not hits:
            return None
        if self._should_pause:
            hint = "It could not pause there, because control is not available to continue it."
        elif not self._takes_commands:
            hint = "With --no-control a paused run cannot be continued; [log] only records the hit."
        else:
            hint = (
                "To pause there instead, run it on a terminal or add --wait; "
                "[log] after the condition only records the hit."
            )
        reasons = "; ".join(hit.reason for hit in hits)
        numbers = ", ".join(str(hit.id) for hit in hits)
        return StoppedAtBreakpointError(f"Stopped at breakpoint {numbers}, {reasons}.", hint=hint)


def _loaded_finding_ids() -> Collection[str]:
    """Return all finding ids, none before torch is loaded.

    Rules load numpy, and the user's program must be the first to do so. Conditions in flags were
    checked before.
    """
    if "torch" not in sys.modules:
        return ()
    from flexinspect.rules.engine import load_rules

    return load_rules().finding_kinds


OnBreakOption = Callable[[BreakpointHit], None] | Literal["pdb"] | None
HitCallback = Callable[[BreakpointHit, FrameType], None]


def hit_callback(on_break: OnBreakOption) -> HitCallback:
    """Return the function to call at a hit. Raises `UsageError` for an invalid `on_break`."""
    if on_break is None:
        return _stop_in_pdb if sys.stdin is not None and sys.stdin.isatty() else _print_hit
    if on_break == "pdb":
        return _stop_in_pdb
    if not callable(on_break):
        raise UsageError('on_break must be a function that takes a BreakpointHit, or "pdb".')
    return lambda hit, frame: on_break(hit)


def _print_hit(hit: BreakpointHit, frame: FrameType) -> None:
    print_message(hit.sentence())


def _stop_in_pdb(hit: BreakpointHit, frame: FrameType) -> None:
    """Open pdb in the user's frame at once; `quit` acts as Ctrl-C."""
    import pdb  # here: it imports `code` and others, which a file of the user may shadow

    from flexinspect_hooks.debugger.pdb_terminal import prompt_in

    _print_hit(hit, frame)
    prompt_in(pdb.Pdb(), frame_to_stop_in(frame))


_DEBUGGER_MODULES = ("pydevd", "flexinspect_hooks.debugger.pdb_terminal")
"""Modules that are loaded if a debugger may be present."""


class PauseAction:
    """Pauses the model before its next step, or stops in an attached debugger.

    The debugger stops inside the forward where possible. `notify` prints that the run pauses;
    `record_event` records a stop in the debugger.
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
        """Let the step barrier wait at each boundary until the previous step is evaluated.

        Called from any thread, when breakpoints become enabled or disabled.
        """
        self._barrier.wait_for_evaluation(on)

    def can_stop_in_forward(self) -> bool:
        """Return whether a debugger is attached."""
        debugger = _debugger_stops()
        return debugger is not None and bool(debugger.can_stop())

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop in the debugger, in the user's frame, or pause if it has detached.

        Called in the model's thread; `frame` is where the hit was detected.
        """
        debugger = _debugger_stops()
        facts = {**hit.event_data(), "step": hit.step}
        if debugger is None or not debugger.stop_in(frame, hit.sentence(), facts):
            self._pause([hit])

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Pause at the next boundary, for all hits of this step. From the writer thread."""
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
            f"Paused at {reason}. Continue with: flexinspect ctl continue --pid {os.getpid()} "
            "(Ctrl-C ends the run)"
        )
        facts = hits[0].event_data()
        if all(hit.step is None for hit in hits):
            # Hit at the end of a generation, which no boundary may follow: record the hit now, and
            # pause if there is a boundary.
            self._record_hits(hits)
            notify = partial(self._notify, sentence)
            self._barrier.pause_at_breakpoint(reason, facts, "paused", notify)
        else:
            self._barrier.pause_at_breakpoint(reason, facts)
            self._notify(sentence)

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """Stop in the debugger for hits of earlier steps, which the barrier has waited for.

        Called in the model's thread before a step begins, and after the last one.
        """
        while self._undelivered:
            self.stop_in_forward(self._undelivered.popleft(), frame)


class EndRunAction(PauseAction):
    """Ends the run, because no client could continue it; `hits` is the reason.

    Once a client has sent a command, the run pauses instead: the client can also continue it. With
    a debugger it stops there; the run itself ends only between two steps.
    """

    hits: tuple[BreakpointHit, ...] = ()

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Record the hits, and end or pause the run at the next boundary."""
        if self._barrier.has_received_command or self.can_stop_in_forward():
            super().stop(hits)
        elif not self.hits:
            self.hits = tuple(hits)
            self._record_hits(hits)
            with suppress(ControlError):  # the run is over already
                self._barrier.stop()


class CallbackAction:
    """Calls a function of the user inside the forward, or before the next step.

    Exceptions of the function are raised before the next step, in the caller of the model, as they
    must not pass through a forward.
    """

    def __init__(self, callback: HitCallback) -> None:
        self._callback = callback
        self._undelivered: deque[BreakpointHit] = deque()
        self._error: BaseException | None = None
        self._is_armed = False

    def arm(self, on: bool) -> None:
        """Evaluate each step before the next one begins. Called from any thread."""
        self._is_armed = on

    def can_stop_in_forward(self) -> bool:
        """Return True: the function is called where the hit was detected."""
        return True

    def stop_in_forward(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Call the function now."""
        try:
            self._callback(hit, frame)
        except Exception as error:
            self._error = error

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Queue the hits of a step, to call the function before the next step."""
        self._undelivered.extend(hits)

    def deliver_hits(self, drain: Callable[[], None], frame: FrameType) -> None:
        """Call the function for hits of earlier steps, after the evaluation of all of them."""
        if self._is_armed:
            drain()
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._undelivered:
            self._callback(self._undelivered.popleft(), frame)


def _debugger_stops() -> Any:
    """Return the module that stops in a debugger, or None, without import, if there is none."""
    if not any(name in sys.modules for name in _DEBUGGER_MODULES):
        return None
    return importlib.import_module("flexinspect_hooks.debugger.pdb_terminal")
