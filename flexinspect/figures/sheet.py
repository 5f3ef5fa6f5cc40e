"""A sheet of paper measured in inches: text is measured before it is placed, then it is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from flexinspect.core.environment import require_library
from flexinspect.core.errors import UsageError
from flexinspect.core.text import printable
from flexinspect.figures.fonts import Fonts, find_fonts
from flexinspect.figures.themes import FigureTheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 72
"""Points per inch."""

MIN_FONT_SIZE = 6.0
"""Points; smaller text cannot be read in print."""

MIN_SIDE, MAX_SIDE = 2.0, 40.0
PAD = 0.08
"""Inches between what is drawn and the edge of the sheet."""

_MEASURE_SIZE = 48  # points; so large that pixels do not change the widths of letters
_HINTING = 1.03
"""Text may be wider than measured where its letters are fitted to larger pixels."""
_WORDS = re.compile(
    r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef][，。；：、）]?|\S+?(?=[\u2e80-\u9fff])|\S+"
)
"""What stays on one line: a word, or one Chinese character with the punctuation after it."""


def require_matplotlib() -> None:
    """Raise `UsageError` if matplotlib is not installed."""
    require_library("matplotlib.figure", "figures", "A figure")


@contextmanager
def figure_settings() -> Iterator[None]:
    """Set what matplotlib reads while it draws and saves: text stays text, files are the same.

    The user's own style sheets would change measures that the layout relies on.
    """
    import matplotlib.style

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "flexinspect",
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "axes.unicode_minus": False,
        "text.usetex": False,
        "text.parse_math": False,
        "path.simplify": False,
    }
    with matplotlib.style.context(settings, after_reset=True):
        yield


def base_font_size(width: float) -> float:
    """Return the size of text in points for a figure of a width in inches.

    7 points in a paper column (3.3 inches), 14 on a slide (13.3 inches).
    """
    return min(max(4.7 + 0.7 * width, MIN_FONT_SIZE + 0.5), 18.0)


def check_size(width: float, height: float | None) -> None:
    """Raise `UsageError` for a width or height in inches that no figure can have."""
    for side, length in (("wide", width), ("high", height)):
        if length is not None and not MIN_SIDE <= length <= MAX_SIDE:
            what = f"A figure cannot be {length:g} inches {side}."
            hint = (
                f"Choose {MIN_SIDE:g} to {MAX_SIDE:g}; a paper column has 3.3, a slide 13.3 by 7.5."
            )
            raise UsageError(what, hint=hint)


class Typesetter(Struct, frozen=True):
    """Measures and wraps text in the fonts of a figure; lengths are inches."""

    fonts: Fonts

    def size(self, text: str, points: float, *, bold: bool = False) -> float:
        """Return the width of a line of text."""
        families, is_bold = self.fonts.face(text, bold=bold)
        return _text_width(text, is_bold, families) * points

    def line_height(self, points: float) -> float:
        """Return the distance of two lines of text."""
        return 1.3 * points / POINTS

    def shorten(self, text: str, width: float, points: float) -> str:
        """Return text that is cut with "…" where it is wider than `width`."""
        if self.size(text, points) <= width:
            return text
        stop = len(text)
        while stop and self.size(text[:stop].rstrip() + "…", points) > width:
            stop -= 1
        return text[:stop].rstrip() + "…" if stop else ""

    def wrap(self, text: str, width: float, points: float, *, bold: bool = False) -> list[str]:
        """Return text as lines of at most `width`; a wider word has a line of its own."""
        lines = [""]
        end = 0
        for word in _WORDS.finditer(text):
            blank = " " if word.start() > end else ""
            end = word.end()
            longer = lines[-1] + blank + word[0] if lines[-1] else word[0]
            if lines[-1] and self.size(longer, points, bold=bold) > width:
                lines.append(word[0])
            else:
                lines[-1] = longer
        return lines


@lru_cache(maxsize=16384)
def _text_width(text: str, bold: bool, families: tuple[str, ...]) -> float:
    """Return the width of text per point of its size."""
    from matplotlib.font_manager import FontProperties

    weight = "bold" if bold else "normal"
    font = FontProperties(family=list(families), size=_MEASURE_SIZE, weight=weight)
    width, _, _ = _renderer().get_text_width_height_descent(text, font, False)
    return float(width) / POINTS / _MEASURE_SIZE * _HINTING


@lru_cache(maxsize=1)
def _renderer() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(8, 8, POINTS)


def typesetter(texts: Iterable[str]) -> Typesetter:
    """Return the typesetter for a figure with these texts. Raises as `find_fonts` does."""
    return Typesetter(find_fonts(texts))


class Sheet(Struct, frozen=True):
    """A figure of `width` by `height` inches, with places in inches from its upper left corner.

    `paper` is the axes over the whole figure in which they are drawn.
    """

    figure: Figure
    paper: Any
    theme: FigureTheme
    type: Typesetter
    width: float
    height: float

    def text(
        self,
        x: float,
        y: float,
        text: str,
        points: float,
        *,
        color: str | None = None,
        bold: bool = False,
        **options: Any,
    ) -> Any:
        """Draw a line of text, its middle at `y` if `va` is not given, and return it."""
        shown = self.type.fonts.safe(printable(text))
        families, is_bold = self.type.fonts.face(shown, bold=bold)
        return self.paper.text(
            x,
            y,
            shown,
            fontsize=points,
            family=list(families),
            weight="bold" if is_bold else "normal",
            color=color or self.theme.ink,
            parse_math=False,
            **{"va": "center_baseline", "ha": "left", **options},
        )

    def lines(
        self, x: float, y: float, lines: Sequence[str], points: float, **options: Any
    ) -> float:
        """Draw lines of text from `y` downwards and return where they end."""
        step = self.type.line_height(points)
        for number, each in enumerate(lines):
            self.text(x, y + (number + 0.5) * step, each, points, **options)
        return y + len(lines) * step

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, **options: Any) -> None:
        """Draw a line through points."""
        style = {"linewidth": 0.8, "solid_capstyle": "butt", "clip_on": False, **options}
        self.paper.plot(xs, ys, color=color, **style)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Return new axes with the upper left corner at (x, y)."""
        bottom = self.height - y - height
        share = (x / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(share, zorder=-1)


def new_sheet(
    width: float,
    height: float,
    theme: FigureTheme,
    type_: Typesetter,
    *,
    figure: Figure | None = None,
) -> Sheet:
    """Return an empty sheet; `figure` is an empty figure to use, by default a new one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    if figure is None:
        figure = NewFigure()
        FigureCanvasAgg(figure)
    figure.set_size_inches(width, height)
    figure.set_facecolor(theme.background)
    paper = figure.add_axes((0, 0, 1, 1))
    paper.set(xlim=(0, width), ylim=(height, 0))
    paper.axis("off")
    paper.patch.set_visible(False)
    return Sheet(figure, paper, theme, type_, width, height)
