"""What a journey is given and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from flexinspect_hooks.generate import Choice
from flexinspect_hooks.travel.lines import BranchState


class BranchRecorder(Protocol):
    """Writes down what a journey does; `flexinspect_hooks.travel.recording` has one for a trace."""

    def set_next_step(self, branch: int, step: int) -> None:
        """The next forward is this step."""

    def no_capture(self) -> AbstractContextManager[None]:
        """While entered, forwards are nobody's steps."""

    def drop_step(self, branch: BranchState) -> None:
        """The open step is in the trace already, as a step of `line`."""

    def on_token_chosen(self, branch: BranchState, choice: Choice) -> None:
        """The open step is over, and belongs to `line`."""

    def begin_branch(self, branch: BranchState) -> None:
        """A branch begins."""

    def end_branch(self, branch: BranchState, state: str, reason: str) -> None:
        """A branch, or the base, ended."""

    def record_event(
        self, kind: str, text: str, branch: BranchState, step: int, facts: Mapping[str, Any]
    ) -> None:
        """Something happened behind a step of a line."""


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a generation ends."""

    max_new_tokens: int
    eos_ids: Sequence[int] = ()
    should_stop: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """What going to a step costs: rows that are fed again, in how many forwards, and how long.

    `n_bytes` is what the caches will hold together; `ms` is estimated from the recorded steps.
    """

    n_rows: int
    n_forwards: int
    n_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """How a state was rebuilt. `why` tells of rows that came out differently: empty when exact."""

    cost: RestoreCost
    wall_ms: float
    message: str
    reasons: tuple[str, ...] = ()
