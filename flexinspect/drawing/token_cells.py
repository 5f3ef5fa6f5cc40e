"""Tokens as cells: words made visible, coloured by segment, laid out in rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Span
from flexinspect.drawing.theme import SEGMENT_COLORS, Theme

PARTIAL_CHARACTER = "◌"
"""Stands for a token that holds only some bytes of a character: a later one completes it."""
_BYTES = re.compile("[!-~¡-\u0143]*[¡-\u0143][!-~¡-\u0143]*")
"""Bytes, one letter each, as byte-level vocabularies write them; not all of them ASCII."""
_WHITESPACE_SYMBOLS = {"\n": "↵", "\r": "␍", "\t": "→", " ": "·", "\u00a0": "⍽"}
MAX_TOKEN_CHARS = 32
SEPARATOR_COLOR = "#4a4d55"
"""Background of separators: no colour of its own, between those that have one."""


@dataclass(frozen=True, slots=True)
class TokenCell:
    """One token ready to be drawn.

    `text` is printable. `special` marks BOS and the like, `invisible` what has no ink of its own
    (whitespace, control characters, half a character). `band` is the number of its segment,
    negative for separators, `heat` a share from 0 to 1 that colours it instead, None for none.
    """

    pos: int
    text: str
    segment_color: int
    special: bool = False
    invisible: bool = False
    heat: float | None = None


def display_text(token: str, text: str, *, special: bool) -> tuple[str, bool]:
    """Return what is drawn for a token, and whether it is something that has no ink.

    `token` is the vocabulary's string, `text` what the token adds to the text. A single leading
    space stays a space: on a coloured band it is seen as the beginning of a word. Bytes that make
    no character yet are not the letters that the vocabulary writes for them.
    """
    if special:
        return escape_unprintable(token) or "<>", False
    if not text:
        return PARTIAL_CHARACTER if _BYTES.fullmatch(token) else (escape_unprintable(token) or "∅")[
            :MAX_TOKEN_CHARS
        ], True
    if not text.strip() or not text.isprintable():
        return _show_whitespace(text)[:MAX_TOKEN_CHARS], not any(char.isalnum() for char in text)
    return text.replace("\\", "\\\\")[:MAX_TOKEN_CHARS], False


def _show_whitespace(text: str) -> str:
    return "".join(_WHITESPACE_SYMBOLS.get(char) or escape_unprintable(char) for char in text)


def token_style(
    word: TokenCell, theme: Theme, *, current: bool = False, marked: bool = False
) -> Style:
    """Return the style of a token: its band, lighter at every second token, and what it is."""
    style = _segment_style(word.segment_color, word.pos % 2, theme.no_color)
    if word.heat is not None:
        style = _heat_style(min(max(int(word.heat * 15), 0), 15), theme.no_color)
    if word.special:
        style += Style(italic=True, bold=True)
    if word.invisible:
        style += Style(dim=True)
    if marked:
        style += Style(underline=True, bold=True)
    if current:
        style += Style(reverse=True, bold=True) if theme.no_color else _CURRENT_STYLE
    return style


_CURRENT_STYLE = Style(color=Color.parse("#000000"), bgcolor=Color.parse("#ffffff"), bold=True)


@lru_cache(maxsize=64)
def _segment_style(number: int, odd: int, plain: bool) -> Style:
    if plain:
        return Style(underline=bool(odd))
    back = SEPARATOR_COLOR if number < 0 else SEGMENT_COLORS[number % len(SEGMENT_COLORS)]
    return Style(color=Color.parse("#ffffff"), bgcolor=_lighten(back, 0.14 * odd))


@lru_cache(maxsize=64)
def _heat_style(level: int, plain: bool) -> Style:
    """A scale from blue-grey (sure) to orange (unsure), safe for colour-blind readers."""
    if plain:
        return Style(bold=level >= 8, underline=level >= 4)
    share = level / 15
    low, high = (38, 60, 92), (230, 140, 30)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    ink = "#000000" if share > 0.6 else "#ffffff"
    return Style(color=Color.parse(ink), bgcolor=Color.from_rgb(red, green, blue))


def _lighten(back: str, share: float) -> Color:
    red, green, blue = Color.parse(back).get_truecolor()
    return Color.from_rgb(*(round(part + (255 - part) * share) for part in (red, green, blue)))


@dataclass(frozen=True, slots=True)
class TokenCellRow:
    """A row of words: which, and the column each begins at."""

    cells: tuple[TokenCell, ...]
    columns: tuple[int, ...]

    @property
    def width(self) -> int:
        """Cells taken."""
        return self.columns[-1] + cell_len(self.cells[-1].text) if self.cells else 0

    def spans(self, theme: Theme, *, current: int | None, marked: frozenset[int]) -> list[Span]:
        """Return the row as spans; `current` and `marked` are positions."""
        return [
            (w.text, token_style(w, theme, current=w.pos == current, marked=w.pos in marked))
            for w in self.cells
        ]

    def cell_at(self, column: int) -> TokenCell | None:
        """Return the word at a column."""
        for word, start in zip(self.cells, self.columns, strict=True):
            if start <= column < start + cell_len(word.text):
                return word
        return None


def wrap_cells(words: Sequence[TokenCell], width: int) -> list[TokenCellRow]:
    """Return the words in rows of at most `width` cells; a word wider than that is cut."""
    rows: list[TokenCellRow] = []
    row: list[TokenCell] = []
    columns: list[int] = []
    used = 0
    for word in words:
        length = cell_len(word.text)
        if row and used + length > width:
            rows.append(TokenCellRow(tuple(row), tuple(columns)))
            row, columns, used = [], [], 0
        row.append(word)
        columns.append(used)
        used += length
    if row:
        rows.append(TokenCellRow(tuple(row), tuple(columns)))
    return rows


def row_around(words: Sequence[TokenCell], current: int, width: int) -> tuple[TokenCellRow, int]:
    """Return one row of at most `width` cells with the word at index `current` about its middle.

    The second value is the index of the first word in it.
    """
    if not words:
        return TokenCellRow((), ()), 0
    lengths = [cell_len(word.text) for word in words]
    start = stop = min(max(current, 0), len(words) - 1)
    used = lengths[start]
    stop += 1
    while True:
        left = start > 0 and used + lengths[start - 1] <= width
        right = stop < len(words) and used + lengths[stop] <= width
        if not left and not right:
            break
        centre = sum(lengths[start:current]) <= sum(lengths[current + 1 : stop])
        if left and (centre or not right):
            start -= 1
            used += lengths[start]
        else:
            used += lengths[stop]
            stop += 1
    return wrap_cells(words[start:stop], max(width, used))[0], start
