"""A terminal in memory: it draws text with escape codes, as far as the interface writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from textual.drivers.headless_driver import HeadlessDriver

_TOKENS = re.compile(r"\x1b\[(?P<codes>[\d;]*)(?P<kind>[Hm])|\x1b\[[?>\d;$]*[a-zA-Z]|[^\x1b]")
_ENDED_BY = {"22": "12", "23": "3", "24": "4", "27": "7"}
Drawn = tuple[str, str, str, str]


class TerminalScreen:
    """The characters of a terminal with their foreground, background and attributes."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], Drawn] = {}
        self._at = (1, 1)
        self._style = ("", "", "")

    def write(self, text: str) -> None:
        """Draw text with escape codes."""
        for token in _TOKENS.finditer(text):
            codes = token["codes"]
            if token["kind"] == "H":
                row, column = map(int, (codes or "1;1").split(";"))
                self._at = row, column
            elif token["kind"] == "m":
                self._style = _changed_style(self._style, codes)
            elif len(token[0]) == 1:
                self._draw(token[0])

    def text(self) -> str:
        """Return the characters, one line for each row that was drawn."""
        rows: dict[int, str] = {}
        for row, column in sorted(self.cells):
            rows[row] = rows.get(row, "") + self.cells[row, column][0]
        return "\n".join(rows.values())

    def _draw(self, character: str) -> None:
        row, column = self._at
        width = cell_len(character)
        if character == "\n":
            return
        if not width:
            before, *style = self.cells[row, column - 1]
            self.cells[row, column - 1] = (before + character, *style)  # type: ignore[assignment]
            return
        color, background, attributes = self._style
        if character == " " and not attributes:
            color = ""  # invisible
        self.cells[row, column] = (character, color, background, attributes)
        for covered in range(column + 1, column + width):
            self.cells[row, covered] = ("", color, background, attributes)
        self._at = row, column + width


def _changed_style(style: tuple[str, str, str], codes: str) -> tuple[str, str, str]:
    color, background, attributes = style
    numbers = iter((codes or "0").split(";"))
    for code in numbers:
        if code == "0":
            color = background = attributes = ""
        elif code in ("38", "48"):
            value = _color(numbers)
            color, background = (value, background) if code == "38" else (color, value)
        elif code in ("39", "49"):
            color, background = ("", background) if code == "39" else (color, "")
        elif code in _ENDED_BY:
            attributes = "".join(one for one in attributes if one not in _ENDED_BY[code])
        elif int(code) < 10:
            attributes = "".join(sorted({*attributes, code}))
        elif 30 <= int(code) < 38 or 90 <= int(code) < 98:
            color = code
        else:
            background = code
    return color, background, attributes


def _color(numbers: Iterator[str]) -> str:
    kind = next(numbers)
    return ";".join([kind, *(next(numbers) for _ in range(3 if kind == "2" else 1))])


class ScreenDriver(HeadlessDriver):
    """Draws what a terminal would get on a `TerminalScreen`, and counts its bytes."""

    screen = TerminalScreen()
    n_bytes = 0

    @property
    def is_headless(self) -> bool:
        """Return False: a headless app writes nothing."""
        return False

    def write(self, data: str) -> None:
        """Draw the data."""
        type(self).n_bytes += len(data.encode())
        self.screen.write(data)
