"""Tokens as terminal cells: visible text, coloured by segment or value, laid out in rows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from msgspec import Struct
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Span
from flexinspect.drawing.theme import SEGMENT_COLORS, Theme, readable

PARTIAL_CHARACTER = "◌"
"""Shown for a token with only some bytes of a character, which a later token completes."""
_BYTES = re.compile("[!-~¡-\u0143]*[¡-\u0143][!-~¡-\u0143]*")
"""Bytes, one letter each, as byte-level vocabularies write them; at least one is not ASCII."""
_WHITESPACE_SYMBOLS = {"\n": "↵", "\r": "␍", "\t": "→", " ": "·", "\u00a0": "⍽"}
MAX_TOKEN_CHARS = 32
SEPARATOR_COLOR = "#4a4d55"
"""Background of separators: grey, between segments with a colour of their own."""


class TokenCell(Struct, frozen=True):
    """One token ready to be drawn.

    `text` is printable. `special` marks special tokens such as BOS, `invisible` tokens without
    visible text (whitespace, control characters, part of a character). `segment_color` is the
    number of its segment's colour, negative for separators. `heat`, from 0 to 1, colours the
    token instead if it is not None.
    """

    pos: int
    text: str
    segment_color: int
    special: bool = False
    invisible: bool = False
    heat: float | None = None


def display_text(token: str, text: str, *, special: bool) -> tuple[str, bool]:
    """Return the printable text of a token, and whether the token is invisible.

    `token` is the vocabulary's string, `text` what the token adds to the text. A single leading
    space stays a space: on a coloured background it shows where a word begins. A token with part
    of a character is `PARTIAL_CHARACTER`, not the letters that a byte-level vocabulary writes.
    """
    if special:
        return escape_unprintable(token) or "<>", False
    if not text and _BYTES.fullmatch(token):
        return PARTIAL_CHARACTER, True
    if not text:
        return (escape_unprintable(token) or "∅")[:MAX_TOKEN_CHARS], True
    if not text.strip() or not text.isprintable():
        shown = "".join(_WHITESPACE_SYMBOLS.get(char) or escape_unprintable(char) for char in text)
        return shown[:MAX_TOKEN_CHARS], not any(map(str.isalnum, text))
    return text.replace("\\", "\\\\")[:MAX_TOKEN_CHARS], False


def token_style(cell: TokenCell, theme: Theme, *, current: bool = False) -> Style:
    """Return the style of a token: its colour, lighter at odd positions, and its attributes."""
    style = segment_style(cell.segment_color, cell.pos % 2, theme.no_color)
    if cell.heat is not None:
        style = _heat_style(min(max(int(cell.heat * 15), 0), 15), theme.no_color)
    if cell.special:
        style += Style(italic=True, bold=True)
    if cell.invisible:
        style += Style(dim=True)
    if current:
        style += Style(reverse=True, bold=True) if theme.no_color else CURRENT_TOKEN_STYLE
    return style


CURRENT_TOKEN_STYLE = Style.parse("bold #000000 on #ffffff")


@lru_cache(maxsize=64)
def segment_style(number: int, odd: int, plain: bool) -> Style:
    """Return the background of segment `number`, lighter at odd positions; neighbours differ."""
    if plain:
        return Style(underline=bool(odd))
    back = SEPARATOR_COLOR if number < 0 else SEGMENT_COLORS[number % len(SEGMENT_COLORS)]
    ink = Color.parse("#ffffff")
    parts = Color.parse(back).get_truecolor()
    lighter = Color.from_rgb(*(round(part + (255 - part) * 0.14 * odd) for part in parts))
    return Style(color=ink, bgcolor=readable(lighter, ink))


@lru_cache(maxsize=64)
def _heat_style(level: int, plain: bool) -> Style:
    """Return a style on a scale from blue-grey (certain) to orange, safe for colour blindness."""
    if plain:
        return Style(bold=level >= 8, underline=level >= 4)
    share = level / 15
    low, high = (38, 60, 92), (230, 140, 30)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    ink = "#000000" if share > 0.6 else "#ffffff"
    return Style(color=Color.parse(ink), bgcolor=Color.from_rgb(red, green, blue))


class TokenStyler(Protocol):
    """Returns the style of a token."""

    def __call__(self, cell: TokenCell, theme: Theme, *, current: bool) -> Style: ...


class TokenCellRow(Struct, frozen=True):
    """A row of token cells."""

    cells: tuple[TokenCell, ...]

    @property
    def columns(self) -> list[int]:
        """The column at which each cell begins, and the one after the last cell."""
        return [0, *accumulate(cell_len(cell.text) for cell in self.cells)]

    def spans(
        self, theme: Theme, *, current: int | None, style: TokenStyler | None = None
    ) -> list[Span]:
        """Return the row as spans; `current` is the position of the current token.

        `style` returns the style of a token, by default `token_style`.
        """
        style = style or token_style
        return [(c.text, style(c, theme, current=c.pos == current)) for c in self.cells]

    def cell_at(self, column: int) -> TokenCell | None:
        """Return the token cell at a column, None outside of the row."""
        index = bisect_right(self.columns, column) - 1
        return self.cells[index] if 0 <= index < len(self.cells) else None


def wrap_cells(cells: Sequence[TokenCell], width: int) -> list[TokenCellRow]:
    """Lay token cells out in rows of `width` columns; a wider cell has a row of its own."""
    rows: list[list[TokenCell]] = []
    used = 0
    for cell in cells:
        length = cell_len(cell.text)
        if not rows or used + length > width:
            rows.append([])
            used = 0
        rows[-1].append(cell)
        used += length
    return [TokenCellRow(tuple(row)) for row in rows]


def row_around(cells: Sequence[TokenCell], current: int, width: int) -> TokenCellRow:
    """Return a row of at most `width` columns with the cell at index `current` near its middle."""
    if not cells:
        return TokenCellRow(())
    lengths = [cell_len(cell.text) for cell in cells]
    start = min(max(current, 0), len(cells) - 1)
    stop = start + 1
    used = lengths[start]
    while True:
        left = start > 0 and used + lengths[start - 1] <= width
        right = stop < len(cells) and used + lengths[stop] <= width
        if not left and not right:
            break
        left_is_shorter = sum(lengths[start:current]) <= sum(lengths[current + 1 : stop])
        if left and (left_is_shorter or not right):
            start -= 1
            used += lengths[start]
        else:
            used += lengths[stop]
            stop += 1
    return TokenCellRow(tuple(cells[start:stop]))
