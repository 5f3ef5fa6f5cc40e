"""The end of a trace whose process was taken down: what it was doing, as an event and a finding."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexinspect.core.text import plural
from flexinspect.launch.child_process import Capture
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.attention.kernel_failures import (
    CRASHED_EVENT,
    NOT_RETURNED_EVENT,
    FailuresRule,
)
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.ownership import close_dead_trace
from flexinspect.trace.file.side_files import LastKernelCall, take_last_call

_CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
_KILL_SIGNAL = "SIGKILL"


def close_crashed_trace(path: Path, process: Capture, code: int) -> bool:
    """End the trace of a process that ended with `code` and could not end it itself.

    A signal that tells of a crash makes an event and a finding, with the kernel call that was
    entered last; one of ours does not. Returns whether the trace could be ended.
    """
    call, name, reason = take_last_call(path), _signal_name(code), process.describe_exit(code)
    is_crash = name in _CRASH_SIGNALS or (name == _KILL_SIGNAL and not process.was_killed)

    def explain(
        generation: int | None, step: int | None
    ) -> tuple[EventRecord, Sequence[Finding]] | None:
        if not is_crash:
            return None
        event = _crash_event(call, reason, name, (generation, step))
        return event, RuleRunner([FailuresRule()]).on_event(event)[0]

    return close_dead_trace(path, reason, process.pid, explain)


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return ""


def _crash_event(
    call: LastKernelCall | None, reason: str, name: str, last: tuple[int | None, int | None]
) -> EventRecord:
    """Return what happened, at the call's place, or at the last whole step."""
    ended, at = reason.rstrip("."), time.time()
    if call is None:
        whole = "no step was whole yet"
        if last[1] is not None:
            whole = f"the last whole step is step {last[1]} of generation {last[0]}"
        return EventRecord(CRASHED_EVENT, f"{ended}; {whole}.", at, *last, {"signal": name})
    generation = last[0] if call.generation is None else call.generation
    facts = {"signal": name, **asdict(call)}
    if call.entered:
        text = f"{ended}: it had entered {_describe_call(call)}, which did not return."
        return EventRecord(NOT_RETURNED_EVENT, text, at, generation, call.step, facts)
    text = (
        f"{ended}, after {_describe_call(call)} had returned: a fault of compiled code may show later."
    )
    return EventRecord(CRASHED_EVENT, text, at, generation, call.step, facts)


def _describe_call(call: LastKernelCall) -> str:
    where = (
        f"in layer {call.layer}, step {call.step}"
        if call.step is not None
        else "outside of a model"
    )
    return f"{call.what} {where} ({plural(call.q_len, 'row')}, {plural(call.kv_len, 'key')})"
