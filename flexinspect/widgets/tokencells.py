"""Tokens as cells: words made visible, coloured by segment, laid out in rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style

from flexinspect.text import visible
from flexinspect.widgets.lines import Span
from flexinspect.widgets.look import BANDS, Look

PART = "◌"
"""Stands for a token that holds only some bytes of a character: a later one completes it."""
_BYTES = re.compile("[!-~¡-\u0143]*[¡-\u0143][!-~¡-\u0143]*")
"""Bytes, one letter each, as byte-level vocabularies write them; not all of them ASCII."""
_PICTURES = {"\n": "↵", "\r": "␍", "\t": "→", " ": "·", "\u00a0": "⍽"}
MAX_WORD = 32
SEPARATOR = "#4a4d55"
"""Background of separators: no colour of its own, between those that have one."""


@dataclass(frozen=True, slots=True)
class Word:
    """One token ready to be drawn.

    `text` is printable. `special` marks BOS and the like, `invisible` what has no ink of its own
    (whitespace, control characters, half a character). `band` is the number of its segment,
    negative for separators, `heat` a share from 0 to 1 that colours it instead, None for none.
    """

    pos: int
    text: str
    band: int
    special: bool = False
    invisible: bool = False
    heat: float | None = None


def shown(token: str, text: str, *, special: bool) -> tuple[str, bool]:
    """Return what is drawn for a token, and whether it is something that has no ink.

    `token` is the vocabulary's string, `text` what the token adds to the text. A single leading
    space stays a space: on a coloured band it is seen as the beginning of a word. Bytes that make
    no character yet are not the letters that the vocabulary writes for them.
    """
    if special:
        return visible(token) or "<>", False
    if not text:
        return PART if _BYTES.fullmatch(token) else (visible(token) or "∅")[:MAX_WORD], True
    if not text.strip() or not text.isprintable():
        return _pictured(text)[:MAX_WORD], not any(char.isalnum() for char in text)
    return text.replace("\\", "\\\\")[:MAX_WORD], False


def _pictured(text: str) -> str:
    return "".join(_PICTURES.get(char) or visible(char) for char in text)


def word_style(word: Word, look: Look, *, current: bool = False, marked: bool = False) -> Style:
    """Return the style of a token: its band, lighter at every second token, and what it is."""
    style = _band(word.band, word.pos % 2, look.plain)
    if word.heat is not None:
        style = _heated(min(max(int(word.heat * 15), 0), 15), look.plain)
    if word.special:
        style += Style(italic=True, bold=True)
    if word.invisible:
        style += Style(dim=True)
    if marked:
        style += Style(underline=True, bold=True)
    if current:
        style += Style(reverse=True, bold=True) if look.plain else _CURRENT
    return style


_CURRENT = Style(color=Color.parse("#000000"), bgcolor=Color.parse("#ffffff"), bold=True)


@lru_cache(maxsize=64)
def _band(number: int, odd: int, plain: bool) -> Style:
    if plain:
        return Style(underline=bool(odd))
    back = SEPARATOR if number < 0 else BANDS[number % len(BANDS)]
    return Style(color=Color.parse("#ffffff"), bgcolor=_lighter(back, 0.14 * odd))


@lru_cache(maxsize=64)
def _heated(level: int, plain: bool) -> Style:
    """A scale from blue-grey (sure) to orange (unsure), safe for colour-blind readers."""
    if plain:
        return Style(bold=level >= 8, underline=level >= 4)
    share = level / 15
    low, high = (38, 60, 92), (230, 140, 30)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    ink = "#000000" if share > 0.6 else "#ffffff"
    return Style(color=Color.parse(ink), bgcolor=Color.from_rgb(red, green, blue))


def _lighter(back: str, share: float) -> Color:
    red, green, blue = Color.parse(back).get_truecolor()
    return Color.from_rgb(*(round(part + (255 - part) * share) for part in (red, green, blue)))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of words: which, and the column each begins at."""

    words: tuple[Word, ...]
    columns: tuple[int, ...]

    @property
    def width(self) -> int:
        """Cells taken."""
        return self.columns[-1] + cell_len(self.words[-1].text) if self.words else 0

    def spans(self, look: Look, *, current: int | None, marked: frozenset[int]) -> list[Span]:
        """Return the row as spans; `current` and `marked` are positions."""
        return [
            (w.text, word_style(w, look, current=w.pos == current, marked=w.pos in marked))
            for w in self.words
        ]

    def at(self, column: int) -> Word | None:
        """Return the word at a column."""
        for word, start in zip(self.words, self.columns, strict=True):
            if start <= column < start + cell_len(word.text):
                return word
        return None


def wrap(words: Sequence[Word], width: int) -> list[Row]:
    """Return the words in rows of at most `width` cells; a word wider than that is cut."""
    rows: list[Row] = []
    row: list[Word] = []
    columns: list[int] = []
    used = 0
    for word in words:
        length = cell_len(word.text)
        if row and used + length > width:
            rows.append(Row(tuple(row), tuple(columns)))
            row, columns, used = [], [], 0
        row.append(word)
        columns.append(used)
        used += length
    if row:
        rows.append(Row(tuple(row), tuple(columns)))
    return rows


def around(words: Sequence[Word], current: int, width: int) -> tuple[Row, int]:
    """Return one row of at most `width` cells with the word at index `current` about its middle.

    The second value is the index of the first word in it.
    """
    if not words:
        return Row((), ()), 0
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
    return wrap(words[start:stop], max(width, used))[0], start
