"""The widget that shows ready-made strips: the one place where pictures meet Textual."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


class Canvas(Widget):
    """Shows strips as they are.

    It overrides `render_lines`, which skips Textual's line filters and caches (they rebuild every
    segment and cost more than the picture); so borders and padding belong to its parent, and
    whoever makes the strips minds `NO_COLOR`.
    """

    ALLOW_SELECT = False
    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._strips: Sequence[Strip] = ()

    @property
    def strips(self) -> Sequence[Strip]:
        """What is shown."""
        return self._strips

    def show(self, strips: Sequence[Strip]) -> None:
        """Show these strips from the next repaint on."""
        self._strips = strips
        self.refresh()

    def repaint(self) -> None:
        """Make the strips again, in the size and colours of now; for subclasses."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region, cut and filled up to the widget's size."""
        width = self.size.width
        style = self.rich_style.without_color if self.app.no_color else self.rich_style
        strips = [
            strip if strip.cell_length == width else strip.adjust_cell_length(width, style)
            for strip in self._strips[crop.y : crop.bottom]
        ]
        if len(strips) < crop.height:
            strips += [Strip.blank(width, style)] * (crop.height - len(strips))
        if crop.column_span != (0, width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips
