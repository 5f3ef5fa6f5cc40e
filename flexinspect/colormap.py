"""Numbers into colours: quantised levels, and palettes that know their terminal cells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from rich.color import Color
from rich.segment import Segment
from rich.style import Style

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
