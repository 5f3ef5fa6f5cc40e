"""Level and stored layers of all sessions of a run, for commands that change them.

This module is imported before the program of the user, so it does not import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

from flexinspect.core.errors import UsageError
from flexinspect.records.job import parse_layers
from flexinspect.records.step import LEVELS

if TYPE_CHECKING:
    from flexinspect_hooks.sessions.capture_session import CaptureSession

_MAX_LAYERS = 1 << 20


class SessionLevels:
    """Level and stored layers of all attached sessions, including those attached later."""

    def __init__(self, level: str, layers: str | None = None) -> None:
        self.level, self.layers = level, layers or "all"
        self._has_layer_choice = False
        self._sessions: weakref.WeakSet[CaptureSession] = weakref.WeakSet()
        # Sessions are attached in their models' threads; requests come in the server's thread.
        self._lock = Lock()

    def attach(self, session: CaptureSession) -> None:
        """Attach a session, and apply earlier requests to it."""
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

        Raises `UsageError` for an invalid list of layers, or layers that no attached model has.
        """
        with self._lock:
            known = [
                layer for session in self._sessions for layer in session.context.layer_of.values()
            ]
            parse_layers(layers, max(known, default=_MAX_LAYERS - 1) + 1)
            self.layers, self._has_layer_choice = layers, True
            for session in self._sessions:
                self._apply_layers(session)

    def _apply_layers(self, session: CaptureSession) -> None:
        session.switch(layers=chosen_layers(self.layers, session.context.layer_of.values()))


def chosen_layers(layers: str | None, known: Iterable[int]) -> tuple[int, ...]:
    """Return those of a model's `known` layers that `layers` names, in the form of `--layers`."""
    wanted = parse_layers(layers, _MAX_LAYERS)
    return tuple(layer for layer in sorted(set(known)) if wanted is None or layer in wanted)
