"""The end of a trace whose process was taken down: what it was doing, as an event and a finding."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexinspect.capture import Capture
from flexinspect.findings import Finding
from flexinspect.records import EventRecord
from flexinspect.rules.base import RuleBook
from flexinspect.rules.failures import CRASHED, NOT_RETURNED, FailuresRule
from flexinspect.rules.words import counted
from flexinspect.trace.crumb import LastCall, take_crumb
from flexinspect.trace.settle import settle

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
_KILLED = "SIGKILL"


def settle_dead(path: Path, process: Capture, code: int) -> bool:
    """End the trace of a process that ended with `code` and could not end it itself.

    A signal that tells of a crash makes an event and a finding, with the kernel call that was
    entered last; one of ours does not. Returns whether the trace could be ended.
    """
    call, name, reason = take_crumb(path), _signal(code), process.how_it_ended(code)
    is_crash = name in _CRASHES or (name == _KILLED and not process.was_killed)

    def explain(
        generation: int | None, step: int | None
    ) -> tuple[EventRecord, Sequence[Finding]] | None:
        if not is_crash:
            return None
        event = _event(call, reason, name, (generation, step))
        return event, RuleBook([FailuresRule()]).hear(event)[0]

    return settle(path, reason, process.pid, explain)


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return ""


def _event(
    call: LastCall | None, reason: str, name: str, last: tuple[int | None, int | None]
) -> EventRecord:
    """Return what happened, at the call's place, or at the last whole step."""
    ended, at = reason.rstrip("."), time.time()
    if call is None:
        whole = "no step was whole yet"
        if last[1] is not None:
            whole = f"the last whole step is step {last[1]} of generation {last[0]}"
        return EventRecord(CRASHED, f"{ended}; {whole}.", at, *last, {"signal": name})
    generation = last[0] if call.generation is None else call.generation
    facts = {"signal": name, **asdict(call)}
    if call.entered:
        text = f"{ended}: it had entered {_words(call)}, which did not return."
        return EventRecord(NOT_RETURNED, text, at, generation, call.step, facts)
    text = f"{ended}, after {_words(call)} had returned: what compiled code breaks may show later."
    return EventRecord(CRASHED, text, at, generation, call.step, facts)


def _words(call: LastCall) -> str:
    where = (
        f"in layer {call.layer}, step {call.step}"
        if call.step is not None
        else "outside of a model"
    )
    return f"{call.what} {where} ({counted(call.q_len, 'row')}, {counted(call.kv_len, 'key')})"
