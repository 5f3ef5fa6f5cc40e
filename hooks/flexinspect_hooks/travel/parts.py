"""What a journey is given and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from flexinspect_hooks.generate import Choice
from flexinspect_hooks.travel.lines import Line


class Scribe(Protocol):
    """Writes down what a journey does; `flexinspect_hooks.travel.recording` has one for a trace."""

    def stand(self, branch: int, step: int) -> None:
        """The next forward is this step."""

    def muted(self) -> AbstractContextManager[None]:
        """While entered, forwards are nobody's steps."""

    def drop(self, line: Line) -> None:
        """The open step is in the trace already, as a step of `line`."""

    def chose(self, line: Line, choice: Choice) -> None:
        """The open step is over, and belongs to `line`."""

    def begin(self, line: Line) -> None:
        """A branch begins."""

    def end(self, line: Line, state: str, reason: str) -> None:
        """A branch, or the base, ended."""

    def tell(self, kind: str, text: str, line: Line, step: int, facts: Mapping[str, Any]) -> None:
        """Something happened behind a step of a line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends."""

    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    stops: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """What going to a step costs: rows that are fed again, in how many forwards, and how long.

    `n_bytes` is what the caches will hold together; `ms` is estimated from the recorded steps.
    """

    n_rows: int
    n_forwards: int
    n_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class Restored:
    """How a state was rebuilt. `why` tells of rows that came out differently: empty when exact."""

    price: Price
    wall_ms: float
    said: str
    why: tuple[str, ...] = ()
