"""What a hit of a breakpoint does: pause at the gate, end the run, or call somebody."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from flexinspect.breaks.hits import BreakpointHit
from flexinspect.errors import ControlError
from flexinspect.records import EventRecord
from flexinspect_hooks.breaking import HIT_EVENT
from flexinspect_hooks.control.gate import Gate

_DEBUGGERS = ("pydevd", "flexinspect_hooks.debugging.terminal")
"""Modules that are loaded where a debugger may be."""


class GateStopper:
    """Pauses the model before its next step; inside a forward, where a debugger is attached.

    `say` tells whoever started the run that it pauses.
    """

    def __init__(self, gate: Gate, say: Callable[[str], None] = lambda _: None) -> None:
        self._gate, self._say = gate, say

    def arm(self, on: bool) -> None:
        """Let the gate wait at each boundary until the step before it is judged."""
        self._gate.judge(on)

    def can_stop_inside(self) -> bool:
        """Say whether a debugger is there and attached."""
        stopping = _stopping()
        return stopping is not None and bool(stopping.can_stop())

    def stop_inside(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Stop the debugger in the user's own frame; without one any more, at the gate."""
        stopping = _stopping()
        facts = {**hit.as_facts(), "step": hit.step}
        if stopping is None or not stopping.stop_in(frame, hit.sentence(), facts):
            self.stop([hit])

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Pause at the next boundary, for all that was met in this step."""
        reason = "; ".join(f"breakpoint {hit.id}, {hit.reason}" for hit in hits)
        self._gate.stop_at(reason, hits[0].as_facts())
        self._say(
            f"Paused at {reason}. Go on with: flexinspect ctl continue --pid {os.getpid()} "
            "(Ctrl-C ends the run)"
        )

    def pass_on(self, settle: Callable[[], None], frame: FrameType) -> None:
        """Nothing: the gate does it."""


class EndingStopper:
    """Ends the run, because nobody is there who could continue it. `hits` says why.

    Once somebody has commanded the run, it pauses: whoever did can continue it too.
    """

    def __init__(self, gate: Gate, event: Callable[[EventRecord], None]) -> None:
        self._gate, self._event = gate, event
        self.hits: tuple[BreakpointHit, ...] = ()

    def arm(self, on: bool) -> None:
        """Let the gate wait at each boundary until the step before it is judged."""
        self._gate.judge(on)

    def can_stop_inside(self) -> bool:
        """It ends the run between two steps, so that the step is in the trace."""
        return False

    def stop_inside(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Not asked for."""
        self.stop([hit])

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Record the hits, and have the gate end the run, or pause it."""
        if self._gate.is_commanded:
            GateStopper(self._gate).stop(hits)
        elif not self.hits:
            self.hits = tuple(hits)
            for hit in hits:
                place = (hit.generation, hit.step)
                said = (HIT_EVENT, hit.sentence(), time.time(), *place, hit.as_facts())
                self._event(EventRecord(*said))
            with suppress(ControlError):  # the run is over already
                self._gate.stop()

    def pass_on(self, settle: Callable[[], None], frame: FrameType) -> None:
        """Nothing: the gate does it."""


class CallingStopper:
    """Calls a function of the user's: inside the forward, or before the next step.

    What the function raises goes to whoever called the model, but not through a forward: it is
    raised before the next step.
    """

    def __init__(self, call: Callable[[BreakpointHit, FrameType], None]) -> None:
        self._call = call
        self._waiting: deque[BreakpointHit] = deque()
        self._error: BaseException | None = None
        self._is_armed = False

    def arm(self, on: bool) -> None:
        """Have steps judged before the next one begins."""
        self._is_armed = on

    def can_stop_inside(self) -> bool:
        """It is called in the frame where the hit was noticed."""
        return True

    def stop_inside(self, hit: BreakpointHit, frame: FrameType) -> None:
        """Call the function at once."""
        try:
            self._call(hit, frame)
        except Exception as error:
            self._error = error

    def stop(self, hits: Sequence[BreakpointHit]) -> None:
        """Have the function called before the next step."""
        self._waiting.extend(hits)

    def pass_on(self, settle: Callable[[], None], frame: FrameType) -> None:
        """Call the function for what the steps before have met."""
        if self._is_armed:
            settle()
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._waiting:
            self._call(self._waiting.popleft(), frame)


def _stopping() -> Any:
    """Return the module that stops debuggers, None where there is none: then nothing is loaded."""
    if not any(name in sys.modules for name in _DEBUGGERS):
        return None
    return importlib.import_module("flexinspect_hooks.debugging.stopping")
