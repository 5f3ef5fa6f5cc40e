"""Colours of figures: light (the colours of the notebook), dark, colour-blind-safe, grayscale."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from rich.color import Color

from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean
from flexinspect.drawing.theme import contrast
from flexinspect.masks import viewport


class FigureTheme(Struct, frozen=True, kw_only=True):
    """The colours of a figure, as `#rrggbb`.

    `dot` marks a closed cell and has the edge `dot_edge`. `boundary` is the line between segments,
    `generation` the one before the first generated token, `newest` the row that a step computes,
    `mark` an empty row or an unseen key. `flow` are the fills of the flowchart's boxes by kind of
    box; None stands for the colours of its configuration.
    """

    name: str
    background: str = "#ffffff"
    ink: str = "#1c1f23"
    muted: str = "#5c636b"
    frame: str = "#9aa0a6"
    open: str
    closed: str
    dot: str = "#ffffff"
    dot_edge: str
    unknown: str
    applied: str
    lost: str
    leaked: str
    both: str
    boundary: str
    generation: str
    newest: str
    mark: str
    flow: tuple[str, ...] | None = None

    def state_color(self, state: int) -> str:
        """Return the colour of a state of `flexinspect.masks.viewport`."""
        if viewport.CLOSED < state < viewport.OPEN:
            share = state / viewport.OPEN
            return mix_colors(self.closed, self.open, 0.15 + 0.6 * share)
        return {
            viewport.CLOSED: self.closed,
            viewport.OPEN: self.open,
            viewport.UNKNOWN: self.unknown,
            viewport.LOST: self.lost,
            viewport.LEAKED: self.leaked,
            viewport.BOTH: self.both,
            viewport.APPLIED: self.applied,
        }[state]


def mix_colors(first: str, second: str, share: float) -> str:
    """Blend two colours `#rrggbb`; `share`, from 0 to 1, is that of `second`."""
    parts = (
        round(int(first[at : at + 2], 16) * (1 - share) + int(second[at : at + 2], 16) * share)
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def sign_color(background: str) -> str:
    """Return black or white, whichever contrasts more with a colour `#rrggbb`."""
    color = Color.parse(background)
    return max(("#000000", "#ffffff"), key=lambda sign: contrast(Color.parse(sign), color))


_LIGHT = FigureTheme(
    name="light",
    open="#4caf50",
    closed="#eceff1",
    dot_edge="#b0b8be",
    unknown="#c9cdd1",
    applied="#a5d6a7",
    lost="#ffa000",
    leaked="#c2185b",
    both="#5e35b1",
    boundary="#e53935",
    generation="#1e6fe0",
    newest="#ff8f00",
    mark="#c62828",
)
_DARK = FigureTheme(
    name="dark",
    background="#121212",
    ink="#e8e8e8",
    muted="#a3a9b1",
    frame="#5a6068",
    open="#4ebf71",
    closed="#26292d",
    dot="#e0e0e0",
    dot_edge="#26292d",
    unknown="#4a4f56",
    applied="#2f6b43",
    lost="#ffb300",
    leaked="#f06292",
    both="#b39ddb",
    boundary="#ff5f56",
    generation="#64b5f6",
    newest="#ffca28",
    mark="#ff8a80",
    flow=("#17344d", "#4a3513", "#3d2247", "#1d4023", "#4d1f30"),
)
_COLOR_BLIND = FigureTheme(
    name="colorblind",
    open="#009e73",
    closed="#eef0f2",
    dot_edge="#a9b0b6",
    unknown="#c4c8cc",
    applied="#80cfb9",
    lost="#e69f00",
    leaked="#cc79a7",
    both="#56b4e9",
    boundary="#d55e00",
    generation="#0072b2",
    newest="#f0e442",
    mark="#000000",
    flow=("#cfe6f5", "#fbe7c2", "#f0dbe7", "#c7ebe0", "#f7d9c4"),
)
_GRAYSCALE = FigureTheme(
    name="grayscale",
    ink="#000000",
    muted="#4d4d4d",
    frame="#808080",
    open="#555555",
    closed="#f4f4f4",
    dot_edge="#9a9a9a",
    unknown="#dcdcdc",
    applied="#9c9c9c",
    lost="#ffffff",
    leaked="#000000",
    both="#bdbdbd",
    boundary="#000000",
    generation="#000000",
    newest="#000000",
    mark="#000000",
    flow=("#f7f7f7", "#ececec", "#dedede", "#ececec", "#f7f7f7"),
)

THEMES: Mapping[str, FigureTheme] = {
    theme.name: theme for theme in (_LIGHT, _DARK, _COLOR_BLIND, _GRAYSCALE)
}
"""The themes by name. `colorblind` has the colours of Okabe and Ito
(https://jfly.uni-koeln.de/color/); `grayscale` is for print without colour."""


def find_theme(name: str) -> FigureTheme:
    """Return a theme by its name. Raises `UsageError` with the known names."""
    if name not in THEMES:
        hint = did_you_mean(name, THEMES, f"The themes are {', '.join(THEMES)}.")
        raise UsageError(f"There is no theme '{name}' for figures.", hint=hint)
    return THEMES[name]
