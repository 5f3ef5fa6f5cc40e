"""Which debuggers are alive: what the control server's training routes answer from.

They are held weakly. Of each kind the newest living one answers; a level or a clearing that is
asked for from outside goes to all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinspect_hooks.doors.base import Debugger

_living: dict[str, list[weakref.ref[Any]]] = {}


def register(debugger: Debugger) -> None:
    """Let a debugger answer for its kind, until a newer one does or it is gone."""
    held = [each for each in _living.get(debugger.kind, []) if each() is not None]
    _living[debugger.kind] = [*held, weakref.ref(debugger)]


def newest(kind: str) -> Debugger | None:
    """Return the newest living debugger of a kind."""
    found = [debugger for each in _living.get(kind, []) if (debugger := each()) is not None]
    return found[-1] if found else None


def living() -> list[Debugger]:
    """Return all living debuggers, those of a kind together, the oldest first."""
    return [
        debugger
        for held in list(_living.values())
        for each in held
        if (debugger := each()) is not None
    ]
