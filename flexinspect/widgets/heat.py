"""Arrays of levels as cells of colour: two rows per line, or boxes of some columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.colormap import Levels, Palette
from flexinspect.widgets.look import Theme

_MIN_MEAN_RUN = 2.0
"""The mean length of a run of equal cells from which runs are quicker than single cells."""

_RESET = "\x1b[0m"


class CellStrip(Strip):
    """A line of cells that already knows its bytes for a terminal with 24-bit colours.

    Its segments are real, so that a crop, a picture and a lesser terminal get the same cells.
    """

    __slots__ = ("_codes",)

    def __init__(self, segments: Iterable[Segment], width: int, codes: list[str]) -> None:
        super().__init__(segments, width)
        self._codes = codes

    def render(self, console: Console) -> str:
        """Return the bytes; see `Strip.render`."""
        if console.color_system != "truecolor":
            return super().render(console)
        return "".join(self._codes) + _RESET


def heat(levels: Levels, palette: Palette, theme: Theme) -> list[Strip]:
    """Return levels of shape (rows, columns) as ceil(rows / 2) strips of `columns` cells.

    One cell is one column and two rows; an odd last row fills its cell. Without colours the cell
    shows the level of the two that is farther from the palette's centre.
    """
    safe = _clamp_levels(levels, palette)
    if len(safe) % 2:
        safe = np.vstack([safe, safe[-1:]])
    upper, lower = safe[0::2], safe[1::2]
    if theme.no_color:
        return _character_strips(_farther_levels(upper, lower, palette), palette, theme)
    return _color_strips(upper, lower, palette, theme)


def boxes(
    levels: Levels,
    palette: Palette,
    theme: Theme,
    *,
    cell_width: int,
    marked: tuple[int, int] | None = None,
) -> list[Strip]:
    """Return one strip per row of levels, `cell_width` cells per column.

    `marked` is the row and column of the cursor: brackets around its box, a "+" in a narrow one.
    One that lies outside is not drawn.
    """
    wide = np.repeat(_clamp_levels(levels, palette), max(cell_width, 0), axis=1)
    if theme.no_color:
        strips = _character_strips(wide, palette, theme)
    else:
        strips = _color_strips(wide, wide, palette, theme)
    rows, columns = levels.shape
    if marked and 0 <= marked[0] < rows and 0 <= marked[1] < columns and cell_width > 0:
        row, column = marked
        box = _cursor_segment(int(wide[row, column * cell_width]), cell_width, palette, theme)
        strips[row] = _replace_cells(strips[row], column * cell_width, box)
    return strips


def _clamp_levels(levels: Levels, palette: Palette) -> Levels:
    return np.minimum(levels, np.uint8(palette.size - 1))


def _farther_levels(upper: Levels, lower: Levels, palette: Palette) -> Levels:
    far = np.abs(upper.astype(np.int16) - palette.centre)
    return np.where(far >= np.abs(lower.astype(np.int16) - palette.centre), upper, lower)


def _character_strips(levels: Levels, palette: Palette, theme: Theme) -> list[Strip]:
    style, ramp = theme.style("text"), palette.ramp
    texts = ["".join([ramp[level] for level in row]) for row in levels.tolist()]
    return [Strip([Segment(text, style)] if text else [], len(text)) for text in texts]


def _color_strips(upper: Levels, lower: Levels, palette: Palette, theme: Theme) -> list[Strip]:
    keys = upper.astype(np.uint32) * palette.size + lower
    if not keys.size:
        return [Strip([], 0) for _ in keys]
    starts = np.ones(keys.shape, bool)
    starts[:, 1:] = keys[:, 1:] != keys[:, :-1]
    if theme.depth == "truecolor" and keys.size < _MIN_MEAN_RUN * np.count_nonzero(starts):
        return [_cell_strip(row, palette) for row in keys.tolist()]
    return _run_strips(keys, starts, palette, theme)


def _cell_strip(keys: list[int], palette: Palette) -> Strip:
    pairs, ansi = palette.pairs, palette.ansi
    return CellStrip([pairs[key] for key in keys], len(keys), [ansi[key] for key in keys])


def _run_strips(
    keys: npt.NDArray[np.uint32], starts: npt.NDArray[np.bool_], palette: Palette, theme: Theme
) -> list[Strip]:
    rows, width = keys.shape
    at = np.flatnonzero(starts)
    lengths = np.diff(at, append=rows * width).tolist()
    found = [palette.run(*run) for run in zip(keys.ravel()[at].tolist(), lengths, strict=True)]
    ends = np.cumsum(np.count_nonzero(starts, axis=1)).tolist()
    strips: list[Strip] = []
    begin = 0
    for end in ends:
        segments = [segment for segment, _ in found[begin:end]]
        codes = [code for _, code in found[begin:end]]
        plain = theme.depth != "truecolor"
        strips.append(Strip(segments, width) if plain else CellStrip(segments, width, codes))
        begin = end
    return strips


def _cursor_segment(level: int, width: int, palette: Palette, theme: Theme) -> Segment:
    if theme.no_color:
        inside, style = palette.ramp[level], theme.style("cursor")
    else:
        back = palette.pairs[level * palette.size + level].style or Style.null()
        inside, style = " ", back + Style(color=palette.text_color(level), bold=True)
    return Segment("+" if width == 1 else f"[{inside * (width - 2)}]", style)


def _replace_cells(strip: Strip, at: int, piece: Segment) -> Strip:
    end = at + len(piece.text)
    middle = Strip([piece], len(piece.text))
    return Strip.join([strip.crop(0, at), middle, strip.crop(end, strip.cell_length)])
