"""The control of one capture: its gate, its levels, and the server in front of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flexinspect.control.discovery import ServeOptions
from flexinspect.control.messages import StepRef
from flexinspect.core.errors import ControlError
from flexinspect.records.step import EventRecord
from flexinspect_hooks.control.handlers import CaptureInfo
from flexinspect_hooks.control.server import ControlServer
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.control.targets import (
    ControlTargets,
    FindingCounter,
    Levels,
    register_counter,
    unregister_counter,
)

if TYPE_CHECKING:
    from flexinspect_hooks.capture.recorder import Recorder


class CaptureControl:
    """What a capture that can be controlled holds from its first check to its closed trace.

    Without `is_served` there is a gate, and nobody who could command it. `note` says why there is
    no server although one was wanted; `tell` is told that, or where it is served over TCP, from any
    thread. Raises `UsageError` when the address of `serving` is taken.
    """

    def __init__(
        self,
        info: CaptureInfo,
        levels: Levels,
        *,
        is_served: bool,
        serving: ServeOptions | None,
        report: Callable[[str], None],
    ) -> None:
        self._report = report
        self.barrier = StepBarrier()
        self.targets = ControlTargets(self.barrier, levels)
        self.note = ""
        self._server: ControlServer | None = None
        self._finding_counter = FindingCounter(info.trace)
        if is_served:
            try:
                self._server = ControlServer(self.targets, info, serving)
            except ControlError as error:
                self.note = error.sentence()

    @property
    def url(self) -> str:
        """Where it is served over TCP, empty when it is not."""
        return self._server.address.url if self._server is not None else ""

    def start(self) -> None:
        """Begin to answer."""
        register_counter("general", self._finding_counter)
        if self._server is not None:
            try:
                self._server.start(self._on_server_failure)
            except ControlError as error:
                self.note = error.sentence()
        if self.note:
            self._report(f"No commands are taken: {self.note}")
        elif self.url:
            self._report(f"commands are taken at {self.url}")

    def _on_server_failure(self, error: Exception) -> None:
        self.note = f"{type(error).__name__}: {error}"
        self._report(f"No commands are taken: {self.note}")

    def attach_recorder(self, recorder: Recorder) -> None:
        """Let what is commanded be told in the trace, and pauses wait for its steps."""

        def tell(kind: str, text: str, place: StepRef, facts: Mapping[str, Any]) -> None:
            begun = place.step >= 0
            generation, step = (place.generation, place.step) if begun else (None, None)
            data = {"branch": place.branch, **facts} if place.branch else facts
            recorder.put(EventRecord(kind, text, time.time(), generation, step, data))

        self.barrier.record_event, self.barrier.drain = tell, recorder.drain

    def close(self) -> None:
        """Say that the run is over, and stop answering."""
        self.barrier.finish()
        unregister_counter("general", self._finding_counter)
        if self._server is not None:
            self._server.close()

    def close_in_child(self) -> None:
        """Let go of everything: this is a forked child."""
        if self._server is not None:
            self._server.close_in_child()
