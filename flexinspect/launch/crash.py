"""Finish the trace of a crashed process, with an event and a finding about its last kernel call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict

from flexinspect.core.text import plural
from flexinspect.launch.child_process import Capture, signal_name
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.attention.kernel_failures import (
    CRASHED_EVENT,
    NOT_RETURNED_EVENT,
    FailuresRule,
)
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.location import close_dead_trace, delete_trace
from flexinspect.trace.file.side_files import LastKernelCall, take_last_call

_CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")


def finish_trace(process: Capture, code: int) -> Path | None:
    """Return the trace of a process that ended with `code`, finished; None if it left none."""
    state = process.state
    if not state.is_over and state.recording is not None and state.recording.exists():
        _close_crashed_trace(state.recording, process, code)
        state.path = state.recording
    elif state.is_over and state.path is None and state.recording is not None:
        delete_trace(state.recording)  # and the files that our reader may have created beside it
    return state.path if state.path is not None and state.path.exists() else None


def _close_crashed_trace(path: Path, process: Capture, code: int) -> None:
    """Finish the trace of a process that ended with `code` without finishing it.

    A signal of a crash, but not one that we sent, adds an event and a finding with the kernel call
    that was entered last.
    """
    call, name, reason = take_last_call(path), signal_name(code), process.describe_exit(code)
    is_crash = name in _CRASH_SIGNALS or (name == "SIGKILL" and not process.was_killed)

    def explain(
        generation: int | None, step: int | None
    ) -> tuple[EventRecord, Sequence[Finding]] | None:
        if not is_crash:
            return None
        event = _crash_event(call, reason, name, (generation, step))
        return event, RuleRunner([FailuresRule()]).on_record(event).findings

    close_dead_trace(path, reason, process.pid, explain)


def _crash_event(
    call: LastKernelCall | None, reason: str, name: str, last: tuple[int | None, int | None]
) -> EventRecord:
    """Return the event of a crash, at the last kernel call or else at the last complete step."""
    ended, at = reason.rstrip("."), time.time()
    if call is None:
        last_step = "no step was complete yet"
        if last[1] is not None:
            last_step = f"the last complete step is step {last[1]} of generation {last[0]}"
        return EventRecord(CRASHED_EVENT, f"{ended}; {last_step}.", at, *last, {"signal": name})
    generation = last[0] if call.generation is None else call.generation
    facts = {"signal": name, **asdict(call)}
    if call.is_running:
        text = f"{ended}: it had entered {_describe_call(call)}, which did not return."
        return EventRecord(NOT_RETURNED_EVENT, text, at, generation, call.step, facts)
    later = "what compiled code breaks may show later."
    text = f"{ended}, after {_describe_call(call)} had returned: {later}"
    return EventRecord(CRASHED_EVENT, text, at, generation, call.step, facts)


def _describe_call(call: LastKernelCall) -> str:
    is_in_model = call.step is not None
    where = f"in layer {call.layer}, step {call.step}" if is_in_model else "outside of a model"
    return f"{call.description} {where} ({plural(call.q_len, 'row')}, {plural(call.kv_len, 'key')})"
