"""Answers of a running capture in words."""

from __future__ import annotations

from typing import Any

from flexinspect.control.messages import Answer, BreakpointInfo, Breakpoints, OrderState, Status


def lines(answer: Any) -> list[str]:
    """Return an answer as lines to print."""
    if isinstance(answer, Status):
        return _status(answer)
    if isinstance(answer, Answer):
        return [answer.said] if answer.cost is None else _with_cost(answer)
    if isinstance(answer, BreakpointInfo):
        return [_breakpoint(answer)]
    found = answer.breakpoints if isinstance(answer, Breakpoints) else answer
    return [_breakpoint(one) for one in found] or ["no breakpoints"]


def _status(status: Status) -> list[str]:
    reason = f" ({status.reason})" if status.reason else ""
    found = [
        f"{status.says}{reason}",
        f"{status.kind}  {status.title}, process {status.pid}",
        f"stands  {status.place.after()}",
        f"level  {status.level}, layers {status.layers}",
    ]
    if status.n_breakpoints:
        found.append(f"breakpoints  {status.n_breakpoints}")
    if status.order is not None:
        found.append(_order(status.order))
    return [*found, f"trace  {status.trace}"]


def _order(order: OrderState) -> str:
    said = f": {order.said}" if order.said else ""
    took = f" in {order.seconds * 1e3:.0f} ms" if order.seconds is not None else ""
    return f"{order.kind} {order.number}  {order.state}{took}{said}"


def _with_cost(answer: Answer) -> list[str]:
    assert answer.cost is not None
    dear = " (dear)" if answer.cost.is_dear else ""
    cost = f"cost: {answer.cost.sentence}{dear}"
    return [cost] if answer.order is None else [answer.said, cost]


def _breakpoint(one: BreakpointInfo) -> str:
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
