"""The level and layers of all sessions of a process, changed together while they run."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import TYPE_CHECKING

from flexinspect.errors import UsageError
from flexinspect.job import parse_layers
from flexinspect.records import LEVELS

if TYPE_CHECKING:
    from flexinspect_hooks.session import CaptureSession

_MAX_LAYERS = 1 << 20


class SessionLevels:
    """`Levels` of every session that is attached, now or later."""

    def __init__(self, level: str, layers: str | None = None) -> None:
        self.level, self.layers = level, layers or "all"
        self._has_layer_choice = False
        self._sessions: weakref.WeakSet[CaptureSession] = weakref.WeakSet()
        # Sessions come in their models' threads, and what is asked for in the server's.
        self._lock = Lock()

    def attach(self, session: CaptureSession) -> None:
        """Let a session follow; one that comes late takes what was asked for before."""
        with self._lock:
            self._sessions.add(session)
            session.switch(level=self.level)
            if self._has_layer_choice:
                self._apply_layers(session)

    def set_level(self, level: str) -> None:
        """Record at another level from the next step on. Raises `UsageError` for an unknown one."""
        if level not in LEVELS:
            raise UsageError(f"There is no level {level}; there are {', '.join(LEVELS)}.")
        with self._lock:
            self.level = level
            for session in self._sessions:
                session.switch(level=level)

    def set_layers(self, layers: str) -> None:
        """Store other layers from the next step on.

        Raises `UsageError` for what is no list of layers, or layers that no model here has.
        """
        with self._lock:
            known = [layer for one in self._sessions for layer in one.context.layer_of.values()]
            parse_layers(layers, max(known, default=_MAX_LAYERS - 1) + 1)
            self.layers, self._has_layer_choice = layers, True
            for session in self._sessions:
                self._apply_layers(session)

    def _apply_layers(self, session: CaptureSession) -> None:
        known = sorted(set(session.context.layer_of.values()))
        asked = parse_layers(self.layers, _MAX_LAYERS)
        session.switch(layers=[layer for layer in known if asked is None or layer in asked])
