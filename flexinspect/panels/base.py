"""The base class of panels: views of one place of a trace, independent of any terminal.

A panel is a plug-in of the group `flexinspect.panels`: the entry point names a class whose
constructor takes no arguments. A panel has no state. A `Request` (the place, the panel's options,
the size) decides what is shown, `load` reads it in a worker thread, `paint` draws it in the
interface's thread, and `describe` returns it as text. So one panel serves the interface,
`flexinspect show`, exported pictures and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from textual.strip import Strip

from flexinspect.core.errors import TraceError
from flexinspect.drawing.theme import Theme
from flexinspect.panels.panel_source import Source
from flexinspect.records.imported import imported_facts


class TracePlace(Struct, frozen=True):
    """Where in a trace the user is. `step` 0 is the prefill; `head` counts query heads.

    `pos` is the position of a token that was selected directly (for example a search result in the
    prompt); None means the token that the step chose.
    """

    generation: int = 0
    branch: int = 0
    step: int = 0
    layer: int = 0
    head: int = 0
    pos: int | None = None


class NoOptions(Struct, frozen=True):
    """Options of a panel without options."""


O_co = TypeVar("O_co")
D = TypeVar("D")


class Request(Struct, Generic[O_co], frozen=True):
    """What to show: the place, the panel's options, and the size in cells."""

    place: TracePlace
    options: O_co
    width: int = 100
    height: int = 30

    def with_next(self, name: str, choices: Sequence[Any], current: Any = None) -> O_co:
        """Return the options with the choice of option `name` that follows, cyclically.

        It follows `current`, by default the present value of the option. Without another choice
        the options stay the same.
        """
        if len(choices) < 2:
            return self.options
        if current is None:
            current = getattr(self.options, name)
        after = choices[(choices.index(current) + 1) % len(choices)]
        options: O_co = replace(self.options, **{name: after})  # type: ignore[type-var]
        return options


CURSOR_MOVES = {
    "cursor.up": (-1, 0),
    "cursor.down": (1, 0),
    "cursor.left": (0, -1),
    "cursor.right": (0, 1),
}
"""The actions that move a cursor: by how many lines down, and by how many columns across."""


class Navigate(Struct, frozen=True):
    """A response to an action or a click: moves the interface to another place; None: unchanged."""

    generation: int | None = None
    branch: int | None = None
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    pos: int | None = None
    panel: str | None = None


class Picture(Struct, frozen=True):
    """The picture of a panel: at most `height` strips of `width` cells.

    `note` is shown in the lower border of the panel: for example the mask, the check or the zoom.
    `alarm` highlights the note because something is wrong. `target` is the response to a click on
    cell (x, y): a place, new options, or None.
    """

    strips: list[Strip]
    note: str = ""
    alarm: bool = False
    target: Callable[[int, int], Any] = lambda x, y: None


class Help(NamedTuple):
    """Help of a panel: what it shows, how to read it, what to look for."""

    shows: str
    read: str
    look_for: str


class Panel(Generic[D, O_co]):
    """Base of all panels; a subclass defines the class attributes, `load`, `describe`, `paint`.

    `load` raises `TraceError` if the trace cannot be read, and `Missing` if there is nothing to
    show.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    help: ClassVar[Help]
    depends_on_size: ClassVar[bool] = False
    """Whether the loaded data depends on the size, so that a resize loads it again."""
    needs_tokens: ClassVar[bool] = False
    """Whether it shows generated tokens, so that it does not apply to a training run."""
    actions: ClassVar[tuple[str, ...]] = ()
    """The actions (see `flexinspect.core.keyboard`) that `on_action` handles."""
    initial_options: ClassVar[Any] = NoOptions()
    """The options that the panel starts with."""
    cycles: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {}
    """The actions that select the next choice of an option: the option and its choices."""

    def load(self, source: Source, request: Request[O_co]) -> D:
        """Read the data of the request. Runs in a worker thread."""
        raise NotImplementedError

    def describe(self, data: D) -> list[str]:
        """Return the data as lines of plain, printable text."""
        raise NotImplementedError

    def paint(self, data: D, request: Request[O_co], theme: Theme) -> Picture:
        """Draw the data. Must be pure and fast: it draws only what is on screen."""
        raise NotImplementedError

    def on_action(self, action: str, data: D, request: Request[O_co]) -> O_co | Navigate | None:
        """Return new options or a place to go to, None for an action that changes nothing."""
        return request.with_next(*self.cycles[action]) if action in self.cycles else None

    def on_mouse(
        self, x: int, y: int, data: D, request: Request[O_co], *, click: bool
    ) -> O_co | Navigate | None:
        """Handle the mouse at cell (x, y) of the picture; returns the same as `on_action`.

        `click` is False when the mouse only moves over the cell, which most panels ignore.
        """
        return self.on_click(x, y, data, request) if click else None

    def on_click(self, x: int, y: int, data: D, request: Request[O_co]) -> O_co | Navigate | None:
        """Handle a click on cell (x, y) of the picture; returns the same as `on_action`."""
        response: O_co | Navigate | None
        response = self.paint(data, request, Theme("none")).target(x, y)
        return response


class Missing(Exception):
    """There is nothing to show: the reason as a sentence, and a hint on what to do."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint

    def lines(self) -> list[str]:
        """Return the reason, then the hint if there is one."""
        return [self.reason, self.hint] if self.hint else [self.reason]


def hook_hint(source: Source, hook: str, records: str) -> str:
    """Return the hint for records that a hook makes at every level, and that are missing."""
    if hint := import_hint(source):
        return hint
    return (
        f"The {hook} hook records {records} at every level; 'flexinspect dump' shows whether it "
        "was disabled."
    )


def import_hint(source: Source, otherwise: str = "") -> str:
    """Return the hint for records that an imported trace lacks; `otherwise` for other traces."""
    facts = imported_facts(source.reader.run())
    if facts is None:
        return otherwise
    return f"The trace was imported from {facts.source}, whose dump does not hold this."


def training_facts(source: Source, generation: int) -> Mapping[str, Any] | None:
    """Return the declared facts of a training run, None for a generation of tokens."""
    try:
        facts = source.reader.generation(generation).declared.get("training")
    except TraceError:
        return None
    return facts if isinstance(facts, dict) else None


def check_panel_applies(panel: Panel[Any, Any], source: Source, place: TracePlace) -> None:
    """Raise `Missing` for a panel that needs generated tokens and a training run."""
    if panel.needs_tokens and training_facts(source, place.generation) is not None:
        raise Missing(
            f"{panel.title} shows generated tokens, and a training run has none.",
            "Open Training, Gradient strip, Findings, Memory or Layers instead.",
        )


def require_training_facts(source: Source, place: TracePlace) -> Mapping[str, Any]:
    """Return the declared facts of a training run. Raises `Missing` for any other generation."""
    facts = training_facts(source, place.generation)
    if facts is None:
        hint = "Record one with flexinspect.watch_training(model, optimizer)."
        raise Missing("This generation is not a training run.", import_hint(source, hint))
    return facts


def format_placement(facts: Mapping[str, Any]) -> str:
    """Format the devices of a training run's weights, with the share of bytes on each."""
    placement = facts.get("placement")
    devices = placement if isinstance(placement, Mapping) else {}
    sizes = {name: n for name, n in devices.items() if is_count(n)}
    total = sum(sizes.values())
    if len(sizes) < 2 or not total:
        return "".join(map(str, sizes))
    return ", ".join(f"{name} ({n / total:.0%})" for name, n in sizes.items())


def is_count(value: object) -> bool:
    """Whether a value of a JSON document is a non-negative integer."""
    return isinstance(value, int) and value >= 0
