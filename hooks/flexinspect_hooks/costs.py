"""What recording took, as the runs themselves say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinspect_hooks.recorder import Recorder


def capture_cost(sessions: Sequence[CaptureSession], recorder: Recorder) -> dict[str, float | int]:
    """Return what sessions that share a recorder took, as `CaptureSession.cost` says it."""
    capture_s = sum(session.capture_s for session in sessions)
    total_s = sum(session.total_s for session in sessions)
    counts = any(session.cores_are_taken() for session in sessions)
    # Whatever else a thread stands still for, the writer takes no more of its time than it runs.
    waited_s = min(sum(session.waited_s for session in sessions), recorder.writer_s)
    written_s = recorder.writer_s if counts else max(waited_s, 0.0)
    # Of a short run the writer does most when the model is over, and takes nothing of its time.
    rest_s = max(total_s - capture_s, 0.0)
    without_s = rest_s - min(written_s, rest_s / 2)
    return {
        "capture_s": round(capture_s, 6),
        "writer_s": round(recorder.writer_s, 6),
        "waited_s": round(max(waited_s, 0.0), 6),
        "total_s": round(total_s, 6),
        "ratio": round((capture_s + written_s) / without_s, 5) if without_s else 0.0,
        "steps": recorder.n_steps,
    }
