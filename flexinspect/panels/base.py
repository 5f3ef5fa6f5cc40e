"""What a panel is: a view of one place of a trace, without a terminal of its own.

A panel is a plug-in of the group `flexinspect.panels`: the entry point names a class made without
arguments. It holds no state. What the user sees of it is decided by a `Request` (the place, the
panel's own options, the size), loaded by `load` in a worker thread, and drawn by `paint` in the
interface's. `describe` says the same in words. So one panel serves the interface, `flexinspect
show`, exported pictures and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from textual.strip import Strip

from flexinspect.core.errors import TraceError
from flexinspect.drawing.theme import Theme
from flexinspect.panels.source import Source


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Where in a trace the user is. `step` 0 is the prefill; `head` counts query heads.

    `pos` is a token that was chosen by itself (a match of a search in the prompt); None stands for
    the token that the step chose.
    """

    generation: int = 0
    branch: int = 0
    step: int = 0
    layer: int = 0
    head: int = 0
    pos: int | None = None


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a panel that has none."""


O_co = TypeVar("O_co")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Request(Generic[O_co]):
    """What is to be shown: the place, the panel's options, the size in cells."""

    place: TracePlace
    options: O_co
    width: int = 100
    height: int = 30


@dataclass(frozen=True, slots=True)
class Picture:
    """What a panel draws: at most `height` strips of `width` cells.

    `note` stands in the lower border of the panel: which mask, which gate, which zoom. `alarm`
    is set where something is wrong and the note must be seen.
    """

    strips: list[Strip]
    note: str = ""
    alarm: bool = False


@dataclass(frozen=True, slots=True)
class Navigate:
    """An answer to an action or a click: the whole interface goes to another place."""

    generation: int | None = None
    branch: int | None = None
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    pos: int | None = None
    panel: str | None = None


@dataclass(frozen=True, slots=True)
class Help:
    """Three sentences: what a panel shows, how it is read, what to look for."""

    shows: str
    read: str
    look_for: str

    def lines(self) -> tuple[str, str, str]:
        """Return the three lines."""
        return self.shows, self.read, self.look_for


class Panel(Generic[D, O_co]):
    """Base of all panels; a subclass gives the class attributes, `load`, `describe`, `paint`.

    `load` may raise `TraceError`; `Missing` says in a sentence why there is nothing to show.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    help: ClassVar[Help]
    depends_on_size: ClassVar[bool] = False
    """Whether what is loaded depends on the size, so that it is loaded again on a resize."""
    needs_tokens: ClassVar[bool] = False
    """Whether it has nothing to show of a training run, which generates no tokens."""
    actions: ClassVar[tuple[str, ...]] = ()
    """The actions (see `flexinspect.core.keys`) that `act` answers."""

    def options(self) -> O_co:
        """Return the options that the panel starts with."""
        raise NotImplementedError

    def load(self, source: Source, request: Request[O_co]) -> D:
        """Return what is to be drawn. Runs in a worker thread."""
        raise NotImplementedError

    def describe(self, data: D) -> list[str]:
        """Return the same in lines of plain, printable text."""
        raise NotImplementedError

    def paint(self, data: D, request: Request[O_co], theme: Theme) -> Picture:
        """Return the picture; pure, and quick: only what is on screen."""
        raise NotImplementedError

    def on_action(self, action: str, data: D, request: Request[O_co]) -> O_co | Navigate | None:
        """Return new options or a place to go to, None for an action that changes nothing."""
        return None

    def on_mouse(
        self, x: int, y: int, data: D, request: Request[O_co], *, click: bool
    ) -> O_co | Navigate | None:
        """Answer the mouse at a cell of the picture, as `act` does."""
        return None


@dataclass
class Missing(Exception):
    """Nothing to show here, and why: "Level basic stores no attention; record with ..."."""

    reason: str
    hint: str = field(default="")

    def lines(self) -> list[str]:
        """Return the reason and what to do."""
        return [self.reason, *([self.hint] if self.hint else [])]


def is_training_trace(source: Source) -> bool:
    """Tell whether the trace was made by watching a training run; False while it cannot be read."""
    try:
        return bool(source.reader.run().get("watch_training"))
    except TraceError:
        return False


def training_facts(source: Source, generation: int) -> Mapping[str, Any] | None:
    """Return what a training run says of itself, None for a generation that is none."""
    try:
        about = source.reader.generation(generation).declared.get("training")
    except TraceError:
        return None
    return about if isinstance(about, dict) else None


def check_panel_applies(panel: Panel[Any, Any], source: Source, place: TracePlace) -> None:
    """Raise `Missing`, in a sentence, for a panel of tokens and a generation without any."""
    if panel.needs_tokens and training_facts(source, place.generation) is not None:
        raise Missing(
            f"{panel.title} is about generated tokens, and this is a training run.",
            "Look at Training, Gradient strip, Findings, Memory or Layers instead.",
        )


def require_training_facts(source: Source, place: TracePlace) -> Mapping[str, Any]:
    """Return what the training run says of itself. Raises `Missing` where there is none."""
    about = training_facts(source, place.generation)
    if about is None:
        raise Missing(
            "This generation is no training run.",
            "Record one with flexinspect.watch_training(model, optimizer).",
        )
    return about


def format_placement(about: Mapping[str, Any]) -> str:
    """Return on which devices the weights of a training run are, and what share on each."""
    placement = about.get("placement")
    named = placement if isinstance(placement, Mapping) else {}
    sizes = {name: n for name, n in named.items() if is_count(n)}
    whole = sum(sizes.values())
    if len(sizes) < 2 or not whole:
        return "".join(map(str, sizes))
    return ", ".join(f"{name} ({n / whole:.0%})" for name, n in sizes.items())


def is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0
