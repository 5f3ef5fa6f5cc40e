"""Named styles, from the colours of the theme and the colour depth of the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Literal

from msgspec import Struct, field
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual import color as textual_color
from textual.filter import LineFilter

MIN_CONTRAST = 4.5
"""Contrast of text of WCAG 2.2, level AA (https://www.w3.org/TR/WCAG22/#contrast-minimum)."""

ColorDepth = Literal["truecolor", "256", "none"]

DARK_COLORS: Mapping[str, str] = {
    "foreground": "#e0e0e0",
    "background": "#121212",
    "surface": "#1e1e1e",
    "muted": "#8a8f98",
    "primary": "#0178d4",
    "accent": "#ffa62b",
    "success": "#4ebf71",
    "warning": "#e6b422",
    "error": "#f0556d",
}
"""Colours for use without a running app: exported pictures, and tests."""

SEGMENT_COLORS: tuple[str, ...] = (
    "#0072b2",
    "#b8860b",
    "#00806a",
    "#a85088",
    "#7a7a00",
    "#5a6fc0",
    "#a04a20",
    "#407a90",
)
"""Backgrounds of neighbouring segments, after Okabe and Ito: colour-blind readers can distinguish
them (https://jfly.uni-koeln.de/color/). Darkened, so that white text on them is readable."""


class Theme(Struct, frozen=True, dict=True):
    """Styles for one terminal: `depth` is its number of colours, "none" for NO_COLOR.

    Without colours, bold, dim, underline, reverse and characters carry the meaning.
    """

    depth: ColorDepth = "truecolor"
    colors: Mapping[str, str] = field(default_factory=lambda: dict(DARK_COLORS))

    @property
    def no_color(self) -> bool:
        """Whether no colour may be used."""
        return self.depth == "none"

    def style(self, name: str) -> Style:
        """Return a style by its name. Raises `KeyError` for an unknown one."""
        return self._styles[name]

    def color(self, name: str) -> Color:
        """Return a colour of the theme by its name, a key of `DARK_COLORS`.

        A colour of text is moved away from the background until it is readable there.
        """
        color, background = Color.parse(self.colors[name]), Color.parse(self.colors["background"])
        return color if name in ("background", "surface") else readable(color, background)

    @cached_property
    def _styles(self) -> dict[str, Style]:
        on, tint = Style(), dict.fromkeys(self.colors, Style())
        if not self.no_color:
            on = Style(color=self.color("foreground"), bgcolor=self.color("background"))
            tint = {name: Style(color=self.color(name)) for name in self.colors}
        muted = on + (Style(dim=True) if self.no_color else tint["muted"])
        return {
            "text": on,
            "strong": on + Style(bold=True),
            "muted": muted,
            "title": on + tint["primary"] + Style(bold=True),
            "accent": on + tint["accent"],
            "good": on + tint["success"],
            "warn": on + tint["warning"] + Style(bold=self.no_color),
            "bad": on + tint["error"] + Style(bold=True),
            "chosen": on + tint["accent"] + Style(bold=True),
            "cursor": on + Style(reverse=True, bold=True),
            "special": on + tint["accent"] + Style(italic=True),
            "invisible": muted,
        }


def readable(color: Color, other: Color) -> Color:
    """Return a colour with at least `MIN_CONTRAST` to another one, otherwise as it is.

    It is mixed with white, or with black if that contrasts more.
    """
    start = color.get_truecolor()
    light, dark = Color.from_rgb(255, 255, 255), Color.from_rgb(0, 0, 0)
    end = max((light, dark), key=lambda extreme: contrast(extreme, other)).get_truecolor()
    mixed = (
        Color.from_rgb(*(round(a + (b - a) * share / 20) for a, b in zip(start, end, strict=True)))
        for share in range(21)
    )
    return next((one for one in mixed if contrast(one, other) >= MIN_CONTRAST), color)


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio of two colours, 1 to 21, by WCAG 2.2.

    See https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: Color) -> float:
    """Return the relative luminance of an sRGB colour, 0 to 1."""
    shares = (part / 255 for part in color.get_truecolor())
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class NoColorFilter(LineFilter):
    """Removes all colours; Textual's own filter converts them to greys."""

    def apply(self, segments: list[Segment], background: textual_color.Color) -> list[Segment]:
        """Return the segments without colours; their meta data (click actions) stay."""
        return [
            Segment(text, style and _without_colors(style), control)
            for text, style, control in segments
        ]


@lru_cache(1024)
def _without_colors(style: Style) -> Style:
    return style.without_color + Style.from_meta(style.meta)
