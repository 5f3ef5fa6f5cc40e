"""Which debuggers are alive: what the control server's training routes answer from.

They are held weakly. Of each kind the newest living one answers; a clearing and a level that are
asked for from outside go to all of them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from flexinspect_hooks.control.parts import AnomalyCounts, register_counter, unregister_counter
from flexinspect_hooks.control.parts import DebuggerKind as Kind

if TYPE_CHECKING:
    from flexinspect_hooks.doors.base import BaseDebugger

_debuggers: dict[Kind, list[weakref.ref[Any]]] = {}


class NewestDebugger:
    """What the control server asks of a kind of debugger."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def counts(self) -> AnomalyCounts:
        """Return the counts of the newest living debugger, zeros without one."""
        debugger = newest_debugger(self._kind)
        return AnomalyCounts() if debugger is None else debugger.counts()

    def clear(self) -> None:
        """Clear every living debugger of the kind."""
        for debugger in _live_debuggers(self._kind):
            debugger.clear_debug_history()

    def set_level(self, level: str) -> None:
        """Set the level of every living debugger of the kind. Raises `UsageError`: unknown."""
        for debugger in _live_debuggers(self._kind):
            debugger.level = level


_newest_by_kind: dict[Kind, NewestDebugger] = {
    "training": NewestDebugger("training"),
    "diffusion": NewestDebugger("diffusion"),
    "general": NewestDebugger("general"),
}


def register_debugger(debugger: BaseDebugger) -> None:
    """Let a debugger answer for its kind, until a newer one does or it is gone."""
    kind = debugger.kind
    _debuggers[kind] = [weakref.ref(each) for each in (*_live_debuggers(kind), debugger)]
    weakref.finalize(debugger, _on_collected, kind)
    register_counter(kind, _newest_by_kind[kind])


def newest_debugger(kind: Kind) -> BaseDebugger | None:
    """Return the newest living debugger of a kind."""
    found = _live_debuggers(kind)
    return found[-1] if found else None


def _live_debuggers(kind: Kind) -> list[BaseDebugger]:
    return [debugger for each in _debuggers.get(kind, []) if (debugger := each()) is not None]


def _on_collected(kind: Kind) -> None:
    if not _live_debuggers(kind):
        unregister_counter(kind, _newest_by_kind[kind])
