"""Which debuggers are alive: what the control server's training routes answer from.

They are held weakly. Of each kind the newest living one answers; a clearing and a level that are
asked for from outside go to all of them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from flexinspect_hooks.control.parts import Counts, provide, withdraw
from flexinspect_hooks.control.parts import Debugger as Kind

if TYPE_CHECKING:
    from flexinspect_hooks.doors.base import Debugger

_living: dict[Kind, list[weakref.ref[Any]]] = {}


class NewestOf:
    """What the control server asks of a kind of debugger."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def counts(self) -> Counts:
        """Return the counts of the newest living debugger, zeros without one."""
        debugger = newest(self._kind)
        return Counts() if debugger is None else debugger.counts()

    def clear(self) -> None:
        """Clear every living debugger of the kind."""
        for debugger in _alive(self._kind):
            debugger.clear_debug_history()

    def set_level(self, level: str) -> None:
        """Set the level of every living debugger of the kind. Raises `UsageError`: unknown."""
        for debugger in _alive(self._kind):
            debugger.level = level


_asked: dict[Kind, NewestOf] = {
    "training": NewestOf("training"),
    "diffusion": NewestOf("diffusion"),
    "general": NewestOf("general"),
}


def register(debugger: Debugger) -> None:
    """Let a debugger answer for its kind, until a newer one does or it is gone."""
    kind = debugger.kind
    _living[kind] = [weakref.ref(each) for each in (*_alive(kind), debugger)]
    weakref.finalize(debugger, _gone, kind)
    provide(kind, _asked[kind])


def newest(kind: Kind) -> Debugger | None:
    """Return the newest living debugger of a kind."""
    found = _alive(kind)
    return found[-1] if found else None


def _alive(kind: Kind) -> list[Debugger]:
    return [debugger for each in _living.get(kind, []) if (debugger := each()) is not None]


def _gone(kind: Kind) -> None:
    if not _alive(kind):
        withdraw(kind, _asked[kind])
