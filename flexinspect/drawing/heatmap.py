"""Arrays of levels as cells of colour: two rows per line, or boxes of some columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from rich.color import Color
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.theme import Theme

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


RGB = tuple[int, int, int]
Levels = npt.NDArray[np.uint8]

_MAX_CACHED_RUNS = 20_000
"""Runs of equal cells that a palette remembers, some megabytes, before it starts afresh."""


class Palette:
    """Colours of levels 0 to `size` - 1, and every (upper, lower) pair of them as a half block.

    A pair has the key `upper * size + lower`. All cells of one pair share one `Segment`, so that
    a repaint makes no styles and few objects.
    """

    def __init__(self, rgb: Sequence[RGB], ramp: str, centre: int = 0) -> None:
        """Take one colour and one character of `ramp`, for terminals without colours, per level.

        `centre` is the level that means nothing: of two levels in one character the one farther
        from it is shown. Raises `ValueError` if the lengths differ or do not fit a byte.
        """
        if not 0 < len(rgb) <= 256 or len(rgb) != len(ramp):
            raise ValueError(f"{len(rgb)} colours and {len(ramp)} characters make no palette")
        self.rgb: tuple[RGB, ...] = tuple(rgb)
        self.ramp = ramp
        self.centre = centre
        self._runs: dict[tuple[int, int], tuple[Segment, str]] = {}

    @property
    def size(self) -> int:
        """Return the number of levels."""
        return len(self.rgb)

    @cached_property
    def pairs(self) -> list[Segment]:
        """One shared segment of one cell per key; a blank where both colours are equal."""
        colors = [Color.from_rgb(*rgb) for rgb in self.rgb]
        return [
            Segment(" ", Style(bgcolor=upper))
            if upper is lower
            else Segment("▀", Style(color=upper, bgcolor=lower))
            for upper in colors
            for lower in colors
        ]

    @cached_property
    def ansi(self) -> list[str]:
        """The bytes of the same for a terminal with 24-bit colours, without a reset at the end."""
        codes = [";".join(map(str, rgb)) for rgb in self.rgb]
        return [
            f"\x1b[48;2;{lower}m " if upper is lower else f"\x1b[38;2;{upper};48;2;{lower}m▀"
            for upper in codes
            for lower in codes
        ]

    def run(self, key: int, length: int) -> tuple[Segment, str]:
        """Return `length` equal cells as a segment and as bytes; remembered."""
        found = self._runs.get((key, length))
        if found is None:
            if len(self._runs) >= _MAX_CACHED_RUNS:
                self._runs.clear()
            cell, code = self.pairs[key], self.ansi[key]
            found = (Segment(cell.text * length, cell.style), code + cell.text * (length - 1))
            self._runs[key, length] = found
        return found

    def text_color(self, level: int) -> Color:
        """Return black or white, whichever is read more easily on the colour of a level."""
        red, green, blue = self.rgb[level]
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 127  # luma of ITU-R BT.601
        return Color.from_rgb(0, 0, 0) if bright else Color.from_rgb(255, 255, 255)


def quantise(values: npt.ArrayLike, low: float, high: float, size: int) -> Levels:
    """Return the nearest of `size` levels per value: `low` is 0, `high` is `size` - 1.

    Values outside are clipped, infinite ones too; NaN is 0. Everything is 0 where `low` to `high`
    is no range: empty, backwards or not finite.
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
    """Return levels of a palette whose last level marks what is not a finite number."""
    array = np.asarray(values, dtype=np.float64)
    levels = quantise(array, low, high, palette.size - 1)
    levels[~np.isfinite(array)] = palette.size - 1
    return levels


def blend(anchors: Sequence[RGB], size: int) -> list[RGB]:
    """Return `size` colours, evenly spaced on straight lines in sRGB between `anchors`."""
    table = np.array(anchors, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, size)
    channels = [np.interp(at, np.arange(len(anchors)), table[:, channel]) for channel in range(3)]
    return [(int(r), int(g), int(b)) for r, g, b in np.rint(np.stack(channels, axis=1))]


def ramp(characters: str, size: int) -> str:
    """Return `size` characters, each of `characters` about equally often."""
    return "".join(characters[level * len(characters) // size] for level in range(size))


# Cividis: Nunez, Anderton and Renslow 2018, https://doi.org/10.1371/journal.pone.0199239. These
# are entries 0, 17, 34 ... 255 of matplotlib's table of 256 (`_cividis_data`), as bytes. What lies
# between them is interpolated: not the table's own value, but within 10 of 255 of it.
_CIVIDIS_ANCHORS: tuple[RGB, ...] = (
    (0, 34, 78),
    (0, 46, 108),
    (30, 58, 111),
    (53, 69, 108),
    (71, 81, 108),
    (87, 93, 109),
    (102, 105, 112),
    (117, 117, 117),
    (132, 130, 121),
    (148, 142, 119),
    (165, 156, 116),
    (183, 169, 110),
    (200, 184, 102),
    (219, 199, 90),
    (238, 214, 73),
    (254, 232, 56),
)

# Blue and orange as light as each other, of Okabe and Ito (https://jfly.uni-koeln.de/color/), so
# that strength is lightness and sign is hue; a dark grey, close to the background, means nothing.
_DIVERGING_ANCHORS: tuple[RGB, ...] = ((86, 180, 233), (58, 58, 62), (240, 165, 30))

CIVIDIS = Palette(blend(_CIVIDIS_ANCHORS, 32), ramp(" ░▒▓█", 32))
"""32 levels from dark blue to yellow; read alike with and without colour blindness."""

CIVIDIS_MARKED = Palette([*CIVIDIS.rgb, (230, 40, 60)], CIVIDIS.ramp + "!")
"""`CIVIDIS` and a last level, red, for NaN and infinite values: see `quantise_marked`."""

DIVERGING = Palette(
    blend(_DIVERGING_ANCHORS, 33), ramp("#=-", 15) + "   " + ramp("░▒▓", 12) + "███", centre=16
)
"""33 levels: blue below, grey in the middle (level 16), orange above; strokes below, shades above
where there are no colours."""
