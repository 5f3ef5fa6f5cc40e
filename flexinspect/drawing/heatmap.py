"""Heat maps: arrays of levels as coloured cells, two rows per line or one box per value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.theme import Theme


def heat(levels: Levels, palette: Palette, theme: Theme) -> list[Strip]:
    """Draw levels of shape (rows, columns) as ceil(rows / 2) strips of `columns` cells.

    One cell is one column and two rows; an odd last row fills its cell. Without colours a cell
    shows the one of its two levels that is farther from the palette's centre.
    """
    levels = _clamp_levels(levels, palette)
    if len(levels) % 2:
        levels = np.vstack([levels, levels[-1:]])
    return _draw_pairs(levels[0::2], levels[1::2], palette, theme)


def boxes(
    levels: Levels,
    palette: Palette,
    theme: Theme,
    *,
    cell_width: int,
    marked: tuple[int, int] | None = None,
) -> list[Strip]:
    """Draw one strip per row of levels, `cell_width` cells per column.

    `marked` is the row and column of the cursor: brackets around its box, a "+" in a box of one
    cell. A cursor outside of the levels is not drawn.
    """
    wide = np.repeat(_clamp_levels(levels, palette), max(cell_width, 0), axis=1)
    strips = _draw_pairs(wide, wide, palette, theme)
    rows, columns = levels.shape
    if marked and 0 <= marked[0] < rows and 0 <= marked[1] < columns and cell_width > 0:
        row, column = marked
        level, at = int(wide[row, column * cell_width]), column * cell_width
        inside, style = " ", palette.style(level) + Style(bold=True)
        if theme.no_color:
            inside, style = palette.ramp[level], theme.style("cursor")
        box = "+" if cell_width == 1 else f"[{inside * (cell_width - 2)}]"
        strips[row] = replace_cells(strips[row], at, Segment(box, style))
    return strips


def draw_scale(palette: Palette, theme: Theme) -> list[tuple[str, Style]]:
    """Return the colours of a palette from the lowest to the highest level as spans of a legend."""
    levels = np.linspace(0, palette.size - 1, 8).astype(np.uint8)
    (scale,) = boxes(levels[None], palette, theme, cell_width=1)
    return [(segment.text, segment.style or Style.null()) for segment in scale]


def _clamp_levels(levels: Levels, palette: Palette) -> Levels:
    return np.minimum(levels, np.uint8(palette.size - 1))


def _draw_pairs(upper: Levels, lower: Levels, palette: Palette, theme: Theme) -> list[Strip]:
    """Draw pairs of levels as cells; without colours, the one farther from the centre."""
    if not theme.no_color:
        return _color_strips(upper, lower, palette)
    above, below = (np.abs(part.astype(int) - palette.centre) for part in (upper, lower))
    style, levels = theme.style("text"), np.where(above >= below, upper, lower)
    texts = ["".join([palette.ramp[level] for level in row]) for row in levels.tolist()]
    return [Strip([Segment(text, style)] if text else [], len(text)) for text in texts]


def _color_strips(upper: Levels, lower: Levels, palette: Palette) -> list[Strip]:
    keys = upper.astype(np.uint16) * np.uint16(palette.size) + lower
    return [palette.line(row) for row in keys]


def replace_cells(strip: Strip, at: int, piece: Segment) -> Strip:
    """Replace the cells of a strip from column `at` on by a piece of narrow characters."""
    end = at + len(piece.text)
    middle = Strip([piece], len(piece.text))
    return Strip.join([strip.crop(0, at), middle, strip.crop(end, strip.cell_length)])


RGB = tuple[int, int, int]
Levels = npt.NDArray[np.uint8]

_MAX_CACHED_RUNS = 20_000
"""Runs of equal cells that a palette caches, some megabytes; then the cache is cleared."""

_MAX_CACHED_LINES = 2_000
"""Lines that a palette caches; then the cache is cleared."""


class _SingleCells(dict[int, Segment]):
    """One cell per key of a palette, made when it is first drawn."""

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self._palette = palette

    def __missing__(self, key: int) -> Segment:
        cell = self[key] = self._palette.run(key, 1)
        return cell


class Palette:
    """Colours of levels 0 to `size` - 1, and every (upper, lower) pair of them as a half block.

    A pair has the key `upper * size + lower`. All cells of one pair share one `Segment`, so that
    a repaint creates no styles and few objects.
    """

    def __init__(self, rgb: Sequence[RGB], ramp: str, centre: int = 0) -> None:
        """Take one colour and one character of `ramp` (for terminals without colours) per level.

        `centre` is the neutral level: without colours, the one of two levels that is farther from
        it is shown. Raises `ValueError` if the lengths differ or there are not 1 to 256 levels.
        """
        if not 0 < len(rgb) <= 256 or len(rgb) != len(ramp):
            raise ValueError(
                "a palette needs 1 to 256 colours and as many characters, got "
                f"{len(rgb)} colours and {len(ramp)} characters"
            )
        self.rgb: tuple[RGB, ...] = tuple(rgb)
        self.ramp = ramp
        self.centre = centre
        self._runs: dict[tuple[int, int], Segment] = {}
        self._cells = _SingleCells(self)
        self._lines: dict[bytes, Strip] = {}

    @property
    def size(self) -> int:
        """Number of levels."""
        return len(self.rgb)

    @cached_property
    def _colors(self) -> list[Color]:
        return [Color.from_rgb(*rgb) for rgb in self.rgb]

    def line(self, keys: npt.NDArray[np.uint16]) -> Strip:
        """Return the cells of these keys, shape (columns,), as a strip; cached.

        From one step to the next most lines of a picture stay. They are the same strips then, with
        all that the compositor has cached in them.
        """
        code = keys.tobytes()
        strip = self._lines.get(code)
        if strip is None:
            if len(self._lines) >= _MAX_CACHED_LINES:
                self._lines.clear()
            strip = self._lines[code] = Strip(self._runs_of(keys), len(keys))
        return strip

    def _runs_of(self, keys: npt.NDArray[np.uint16]) -> list[Segment]:
        starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] ^ 1))
        if 2 * len(starts) > len(keys):  # hardly two neighbours are equal
            cells = self._cells
            return [cells[key] for key in keys.tolist()]
        lengths = np.diff(starts, append=len(keys)).tolist()
        return [self.run(*run) for run in zip(keys[starts].tolist(), lengths, strict=True)]

    def run(self, key: int, length: int) -> Segment:
        """Return `length` cells: half blocks, or blanks where both levels are equal; cached."""
        run = self._runs.get((key, length))
        if run is None:
            if len(self._runs) >= _MAX_CACHED_RUNS:
                self._runs.clear()
            upper, lower = (self._colors[level] for level in divmod(key, self.size))
            is_blank = upper is lower
            style = Style(bgcolor=upper) if is_blank else Style(color=upper, bgcolor=lower)
            run = self._runs[key, length] = Segment((" " if is_blank else "▀") * length, style)
        return run

    def style(self, level: int) -> Style:
        """Return the style of text on a level: black or white, whichever contrasts more."""
        red, green, blue = self.rgb[level]
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 127  # luma of ITU-R BT.601
        ink = Color.from_rgb(0, 0, 0) if bright else Color.from_rgb(255, 255, 255)
        return Style(color=ink, bgcolor=Color.from_rgb(red, green, blue))


def quantise(values: npt.ArrayLike, low: float, high: float, size: int) -> Levels:
    """Return the nearest of `size` levels per value: `low` is 0, `high` is `size` - 1.

    The result has the shape of `values`. Values outside of the range are clipped, infinite ones
    too; NaN is 0. All levels are 0 unless `low` < `high` and both are finite.
    """
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        span = float(np.float64(high) - np.float64(low))
        if not (np.isfinite(span) and span > 0):
            return np.zeros(array.shape, np.uint8)
        scaled = (array - low) / span * (size - 1)
    clipped = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=size - 1, neginf=0.0), 0, size - 1)
    return np.rint(clipped).astype(np.uint8)


def quantise_marked(values: npt.ArrayLike, low: float, high: float, palette: Palette) -> Levels:
    """Quantise for a palette whose last level marks NaN and infinite values."""
    array = np.asarray(values, dtype=np.float64)
    levels = quantise(array, low, high, palette.size - 1)
    levels[~np.isfinite(array)] = palette.size - 1
    return levels


def blend(anchors: Sequence[Sequence[int]], size: int) -> list[RGB]:
    """Return `size` colours, evenly spaced on straight lines in sRGB between `anchors`."""
    table = np.array(anchors, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, size)
    channels = [np.interp(at, np.arange(len(anchors)), table[:, channel]) for channel in range(3)]
    return [(int(r), int(g), int(b)) for r, g, b in np.rint(np.stack(channels, axis=1))]


def ramp(characters: str, size: int) -> str:
    """Return `size` characters in which each of `characters` is about equally frequent."""
    return "".join(characters[level * len(characters) // size] for level in range(size))


# Cividis: Nunez, Anderton and Renslow 2018, https://doi.org/10.1371/journal.pone.0199239. These
# are entries 0, 17, 34 ... 255 of matplotlib's table of 256 (`_cividis_data`), as bytes. Colours
# between them are interpolated and differ from the table by at most 10 of 255.
_CIVIDIS_BYTES = bytes.fromhex(
    "00224e 002e6c 1e3a6f 35456c 47516c 575d6d 666970 757575"
    "848279 948e77 a59c74 b7a96e c8b866 dbc75a eed649 fee838"
)
_CIVIDIS_ANCHORS = np.frombuffer(_CIVIDIS_BYTES, np.uint8).reshape(-1, 3).tolist()

# Blue and orange of equal lightness, after Okabe and Ito (https://jfly.uni-koeln.de/color/), so
# that magnitude is lightness and sign is hue; the middle is a dark grey near the background.
_DIVERGING_ANCHORS: tuple[RGB, ...] = ((86, 180, 233), (58, 58, 62), (240, 165, 30))

CIVIDIS = Palette(blend(_CIVIDIS_ANCHORS, 32), ramp(" ░▒▓█", 32))
"""32 levels from dark blue to yellow, with the same appearance for colour-blind readers."""

CIVIDIS_MARKED = Palette([*CIVIDIS.rgb, (230, 40, 60)], CIVIDIS.ramp + "!")
"""`CIVIDIS` and a last level, red, for NaN and infinite values: see `quantise_marked`."""

CIVIDIS_MISSING = Palette([*CIVIDIS_MARKED.rgb, (58, 58, 62)], CIVIDIS_MARKED.ramp + "·")
"""`CIVIDIS_MARKED` and a last level, dark grey, for values that were not recorded."""

BAD_CELL_STYLE = Style.parse("bold #ffffff on #e6283c")
"""White on the red of `CIVIDIS_MARKED`, for text in cells of NaN and infinite values."""

DIVERGING = Palette(
    blend(_DIVERGING_ANCHORS, 33), ramp("#=-", 15) + "   " + ramp("░▒▓", 12) + "███", centre=16
)
"""33 levels: blue below, grey in the middle (level 16), orange above; without colours, strokes
below and shades above."""
