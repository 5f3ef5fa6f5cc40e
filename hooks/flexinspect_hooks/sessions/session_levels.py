"""How much a capture records: its level, and the layers whose activations it stores."""

from __future__ import annotations

from collections.abc import Iterable

from flexinspect.core.errors import UsageError
from flexinspect.records.job import parse_layers
from flexinspect.records.step import LEVELS

_MAX_LAYERS = 1 << 20


class SessionLevels:
    """Level and stored layers of all attached sessions, which read them when a step opens."""

    def __init__(self, level: str, layers: str | None = None) -> None:
        self.level, self.layers = level, layers or "all"
        self.request: tuple[str, str | None] = (level, None)
        """The level, and the layers that a command requested; a new tuple for each command."""
        self._known_layers: frozenset[int] = frozenset()

    def add_layers(self, layers: Iterable[int]) -> None:
        """Let `set_layers` accept the layers of a session's model too."""
        self._known_layers |= frozenset(layers)

    def set_level(self, level: str) -> None:
        """Record at another level from the next step on. Raises `UsageError` for an unknown one."""
        if level not in LEVELS:
            raise UsageError(f"There is no level {level}; there are {', '.join(LEVELS)}.")
        self.level, self.request = level, (level, self.request[1])

    def set_layers(self, layers: str) -> None:
        """Store other layers from the next step on.

        Raises `UsageError` for an invalid list of layers, or layers that no attached model has.
        """
        parse_layers(layers, max(self._known_layers, default=_MAX_LAYERS - 1) + 1)
        self.layers, self.request = layers, (self.level, layers)


def chosen_layers(layers: str | None, known: Iterable[int]) -> tuple[int, ...]:
    """Return those of a model's `known` layers that `layers` names, in the form of `--layers`."""
    wanted = parse_layers(layers, _MAX_LAYERS)
    return tuple(layer for layer in sorted(set(known)) if wanted is None or layer in wanted)
