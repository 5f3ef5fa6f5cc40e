"""What the header says of a capture that does not answer."""

from __future__ import annotations

from flexinspect.panels.base import TracePlace
from flexinspect.tui.status_lines import header_parts
from flexinspect.tui.trace_session import CaptureStatus, RunStatus

SILENT = CaptureStatus(is_unresponsive=True)


def texts(status: RunStatus) -> list[str]:
    parts = header_parts(status, TracePlace(), None, following=True, capture_status=SILENT)
    return [text for text, _, _ in parts]


def test_a_process_that_still_loads_is_not_called_busy() -> None:
    assert "busy, no reply" not in texts(RunStatus("recording", phase="importing torch"))


def test_a_process_that_generates_and_does_not_answer_is_called_busy() -> None:
    assert "busy, no reply" in texts(RunStatus("recording", generations=1, last_step=3))
