"""The header: a capture that does not answer, and what capture costs."""

from __future__ import annotations

from typing import Any

from flexinspect.panels.base import TracePlace
from flexinspect.trace.query_results import StepRow
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


def cost_of(step: StepRow | None = None, **run: Any) -> list[str]:
    parts = header_parts(RunStatus("recording", run=run), TracePlace(), step, following=True)
    return [text for text, _, _ in parts if "overhead" in text]


def step_of(wall_ms: float, capture_ms: float) -> StepRow:
    """Return a step that took so long, of it for its capture."""
    fields = dict.fromkeys(StepRow.__struct_fields__)
    times = {"phase": "decode", "wall_ms": wall_ms, "capture_ms": capture_ms}
    return StepRow(**(fields | times))  # type: ignore[arg-type]


def test_the_cost_is_a_percentage_during_and_after_the_run() -> None:
    assert cost_of(step_of(53.0, 3.0)) == ["overhead 6 %"]
    assert cost_of(step_of(53.0, 3.0), cost={"ratio": 0.084}) == ["overhead 8 %"]
    assert cost_of(step_of(53.0, float("nan"))) == cost_of() == []
