"""The capture behind a trace: found by its trace or its process, and talked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flexinspect.errors import ControlError
from flexinspect.feed import Feed
from flexinspect.heartbeat import held_now

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.messages import Status

LOOK_PATIENCE_S = 2.0
"""How long a look at the state may take; what answers later is held by something."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """How the capture stands: `status` is None when there is none, or when it `is_silent`.

    `held` says in a sentence where a debugger holds it, empty while none does.
    """

    status: Status | None = None
    is_silent: bool = False
    held: str = ""

    @property
    def state(self) -> str:
        """Its state, empty when nothing is known."""
        return self.status.state if self.status is not None else ""


class Remote:
    """Talks to the capture that writes a feed's trace. Every method may block: never in the loop.

    What it needs is imported with the first word: most traces are finished, and nobody talks.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._known: ControlClient | None = None

    def client(self) -> ControlClient:
        """Return the client of the capture. Raises `ControlError` when nothing runs any more."""
        if self._known is None:
            self._known = self._find()
        if self._known is None:
            raise self._why_none()
        return self._known

    def _why_none(self) -> ControlError:
        feed = self._feed
        if feed.process is None or feed.exit_code is not None:
            return ControlError(
                "No capture runs behind this trace, so there is no model to command.",
                hint="A run of the interface keeps its model until q; without it, add --hold.",
            )
        if feed.waiting:
            return ControlError(
                "The run takes no commands yet: it is still loading.",
                hint="A generation takes them once its process is up, a program once a model runs.",
            )
        return ControlError("This run takes no commands: it was begun with --no-control.")

    def ask(self, ask: Callable[[ControlClient], T]) -> T:
        """Ask the capture something. Raises `ControlError`; of one that has ended, saying so."""
        try:
            return ask(self.client())
        except ControlError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
                self._known = None
                self.client()
            raise

    def look(self) -> Standing:
        """Return how the capture stands, without ever raising."""
        from flexinspect.control.client import ControlClient

        held = self._held()
        try:
            client = self.client()
            quick = ControlClient(client.address, patience_s=LOOK_PATIENCE_S)
            return Standing(quick.status(), held=held)
        except ControlError as error:
            silent = isinstance(error.__cause__, TimeoutError)
            if not silent:
                self._known = None
            return Standing(is_silent=silent, held=held)

    def _held(self) -> str:
        held = held_now(self._feed.path) if self._feed.path is not None else None
        return f"The model is {held.timeless()}." if held is not None else ""

    def _find(self) -> ControlClient | None:
        from flexinspect.control.client import ControlClient
        from flexinspect.control.registry import running

        process, path = self._feed.process, self._feed.path
        pid = process.pid if process is not None else None
        for entry in running():
            if entry.pid == pid or (path is not None and entry.records(path)):
                return ControlClient(entry.address)
        return None
