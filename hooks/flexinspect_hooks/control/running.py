"""The control of one capture: its step barrier, its levels and its control server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flexinspect.control.discovery import ServeOptions
from flexinspect.control.messages import StepRef
from flexinspect.core.errors import ControlError
from flexinspect.records.step import EventRecord
from flexinspect_hooks.control.control_protocols import (
    ControlTargets,
    FindingCounter,
    Levels,
    register_counter,
    unregister_counter,
)
from flexinspect_hooks.control.handlers import CaptureInfo
from flexinspect_hooks.control.server import ControlServer
from flexinspect_hooks.control.step_barrier import StepBarrier

if TYPE_CHECKING:
    from flexinspect_hooks.capture.recorder import Recorder


class CaptureControl:
    """The step barrier of a capture, and the server that controls it if `is_served`.

    `note` is the reason why there is no server although one was requested. `report` receives that
    reason, or the URL if the capture is served over TCP; it may be called from any thread. Raises
    `UsageError` when the address of `serving` is in use.
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
        """The URL over TCP, empty if it is not served over TCP."""
        return self._server.address.url if self._server is not None else ""

    def start(self) -> None:
        """Start the server."""
        register_counter("general", self._finding_counter)
        if self._server is not None:
            try:
                self._server.start(self._on_server_failure)
            except ControlError as error:
                self.note = error.sentence()
        if self.note:
            self._report(f"This run cannot be controlled: {self.note}")
        elif self.url:
            self._report(f"control server at {self.url}")

    def _on_server_failure(self, error: Exception) -> None:
        self.note = f"{type(error).__name__}: {error}"
        self._report(f"This run cannot be controlled: {self.note}")

    def attach_recorder(self, recorder: Recorder) -> None:
        """Record commands as events of the trace, and let pauses wait for its writer."""

        def record(kind: str, text: str, place: StepRef, facts: Mapping[str, Any]) -> None:
            has_step = place.step >= 0
            generation, step = (place.generation, place.step) if has_step else (None, None)
            data = {"branch": place.branch, **facts} if place.branch else facts
            recorder.put(EventRecord(kind, text, time.time(), generation, step, data))

        self.barrier.record_event, self.barrier.drain = record, recorder.drain

    def close(self) -> None:
        """Mark the run as finished, and close the server."""
        self.barrier.finish()
        unregister_counter("general", self._finding_counter)
        if self._server is not None:
            self._server.close()

    def close_in_child(self) -> None:
        """Close the sockets in a forked child; the capture belongs to its parent."""
        if self._server is not None:
            self._server.close_in_child()
