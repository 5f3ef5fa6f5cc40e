"""What `NO_COLOR` asks for: bold, dim, underline and reverse reach the terminal, colours do not."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual import color as textual_color
from textual.filter import LineFilter


class NoColorFilter(LineFilter):
    """Takes all colours off what is drawn; Textual's own filter makes greys of them."""

    def apply(self, segments: list[Segment], background: textual_color.Color) -> list[Segment]:
        """Return the segments without colours; what a click on them does stays."""
        return [
            Segment(text, style and _without_colors(style), control)
            for text, style, control in segments
        ]


@lru_cache(1024)
def _without_colors(style: Style) -> Style:
    return style.without_color + Style.from_meta(style.meta)
