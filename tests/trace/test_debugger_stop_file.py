"""The file of a debugger stop: written next to the trace, ignored when its process has died."""

from __future__ import annotations

import os
import time
from pathlib import Path

from flexinspect.trace.file.side_files import (
    DebuggerStop,
    read_stop,
    remove_stop,
    stop_path,
    write_stop,
)
from flexinspect.tui.trace_session import CaptureClient, TraceSession


def held(**changes: object) -> DebuggerStop:
    facts = {"debugger": "debugpy", "file": "/x/my_mask.py", "line": 3, "function": "rule"}
    return DebuggerStop(pid=os.getpid(), since=time.time() - 5, **{**facts, **changes})  # type: ignore[arg-type]


def test_the_sentence_without_time_does_not_change_during_a_stop(tmp_path: Path) -> None:
    stop = held(reason="step == 3")
    assert stop.sentence_without_time() == "held by debugpy in rule (my_mask.py:3): step == 3"
    assert stop.sentence(stop.since + 40) == (
        "held by debugpy in rule (my_mask.py:3) for 40 s: step == 3"
    )


def test_the_interface_shows_a_stop_until_it_ends(tmp_path: Path) -> None:
    trace = tmp_path / "run.flextrace"
    session = TraceSession()
    session.path = trace
    remote = CaptureClient(session)
    write_stop(trace, held())
    assert remote.poll().debugger_stop == "The model is held by debugpy in rule (my_mask.py:3)."
    remove_stop(trace)
    assert remote.poll().debugger_stop == ""


def test_a_stop_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    trace = tmp_path / "run.flextrace"
    stop = held()
    write_stop(trace, DebuggerStop(2**22 + 1, "debugpy", "x.py", 1, "f", stop.since))
    assert read_stop(trace) is None
    assert not stop_path(trace).exists()
