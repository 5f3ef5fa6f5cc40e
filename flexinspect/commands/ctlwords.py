"""Answers of a running capture in words."""

from __future__ import annotations

from typing import Any

from flexinspect.control.messages import (
    BreakpointInfo,
    Breakpoints,
    CommandResponse,
    RewindState,
    StatusResponse,
)


def response_lines(answer: Any) -> list[str]:
    """Return an answer as lines to print."""
    if isinstance(answer, StatusResponse):
        return _status_lines(answer)
    if isinstance(answer, CommandResponse):
        return [answer.message] if answer.cost is None else _cost_lines(answer)
    if isinstance(answer, BreakpointInfo):
        return [_breakpoint_line(answer)]
    found = answer.breakpoints if isinstance(answer, Breakpoints) else answer
    return [_breakpoint_line(one) for one in found] or ["no breakpoints"]


def _status_lines(status: StatusResponse) -> list[str]:
    reason = f" ({status.reason})" if status.reason else ""
    found = [
        f"{status.description}{reason}",
        f"{status.kind}  {status.title}, process {status.pid}",
        f"stands  {status.place.describe_after()}",
        f"level  {status.level}, layers {status.layers}",
    ]
    if status.n_breakpoints:
        found.append(f"breakpoints  {status.n_breakpoints}")
    if status.last_rewind is not None:
        found.append(_rewind_line(status.last_rewind))
    return [*found, f"trace  {status.trace}"]


def _rewind_line(order: RewindState) -> str:
    said = f": {order.message}" if order.message else ""
    took = f" in {order.seconds * 1e3:.0f} ms" if order.seconds is not None else ""
    return f"{order.kind} {order.number}  {order.state}{took}{said}"


def _cost_lines(answer: CommandResponse) -> list[str]:
    assert answer.cost is not None
    dear = " (dear)" if answer.cost.is_expensive else ""
    cost = f"cost: {answer.cost.sentence}{dear}"
    return [cost] if answer.rewind_number is None else [answer.message, cost]


def _breakpoint_line(one: BreakpointInfo) -> str:
    marks = [
        "" if one.is_enabled else "off",
        f"from hit {one.hits} on" if one.hits > 1 else "",
        "once" if one.once else "",
        "log only" if one.log_only else "",
        f"{one.n_hits} hit{'' if one.n_hits == 1 else 's'}" if one.n_hits else "",
        one.note,
    ]
    said = "; ".join(mark for mark in marks if mark)
    return f"{one.id:>3}  {one.text}" + (f"  [{said}]" if said else "")
