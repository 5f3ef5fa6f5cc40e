"""What a recording lacks although the disk could have taken it: our own mistake, never silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexinspect.errors import TraceWriteError
from flexinspect.trace.writer import TraceWriter

if TYPE_CHECKING:  # its module loads torch, which is too late at the end of a program without it
    from flexinspect_hooks.recorder import Recorder

_HINT = "Please report this: what is in the trace is right, and it is not everything."


def lost_records(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return why a recording is not whole, None if it is or if the disk was what ended it."""
    if writer.failed:
        return None  # the trace says so itself, and the model was let go on
    if recorder.failure is not None:
        return TraceWriteError(recorder.failure.message, hint=_HINT)
    if recorder.refused:
        n, first = len(recorder.refused), recorder.refused[0]
        many = f"{n} records could not be stored, and of the first it is said: " if n > 1 else ""
        return TraceWriteError(f"The trace is not whole: {many}{first}", hint=_HINT)
    return None


def recording_error(recorder: Recorder, writer: TraceWriter) -> TraceWriteError | None:
    """Return what a user is to be told at the end: what was lost, or what ended the recording."""
    return lost_records(recorder, writer) or recorder.failure
