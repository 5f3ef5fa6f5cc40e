"""What a hit of a breakpoint does: pause at the gate, end the run, or call somebody."""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from flexinspect.breaks.hits import BreakpointHit
from flexinspect.errors import ControlError
from flexinspect.records import EventRecord
from flexinspect_hooks.breaking import hit_event
from flexinspect_hooks.control.gate import StepBarrier

_DEBUGGER_MODULES = ("pydevd", "flexinspect_hooks.debugging.terminal")
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
    return importlib.import_module("flexinspect_hooks.debugging.stopping")
