"""The mask panel drawn: the cells, words and segments along the axes, the cursor in words below."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from rich.cells import cell_len
from rich.segment import Segment as RichSegment
from textual.strip import Strip

from flexinspect.panels.parts.maskcells import grid_strips, legend
from flexinspect.panels.parts.maskdata import MaskData
from flexinspect.panels.parts.masktokens import band_of
from flexinspect.panels.parts.maskwords import (
    CellWords,
    cell_words,
    count_words,
    first_pairs,
    token_words,
)
from flexinspect.text import visible
from flexinspect.widgets.lines import Span, clipped, line, right
from flexinspect.widgets.look import Look
from flexinspect.widgets.tokencells import Word, word_style

NARROW = 72
"""Columns below which the note says layer, head and scale briefly."""


def picture(data: MaskData, look: Look) -> list[Strip]:
    """Return at most `height` strips of exactly `width` cells, as the data's frame says."""
    frame = data.frame
    strips = [_segment_header(data, look)] * frame.header + _word_header(data, look)
    strips += _body(data, look)
    strips += _footer(data, look)[: frame.footer]
    return strips[: frame.height]


def _body(data: MaskData, look: Look) -> list[Strip]:
    frame = data.frame
    blank = frame.width - frame.left - frame.columns
    end = Strip([RichSegment(" " * blank, look.style("text"))] if blank > 0 else [])
    cells = grid_strips(data, look)[: frame.lines]
    labels = [Strip(_label(data, number, look)) for number in range(len(cells))]
    return [Strip.join([*parts, end]) for parts in zip(labels, cells, strict=True)]


# -- margins --------------------------------------------------------------------------------------


def _label(data: MaskData, number: int, look: Look) -> list[RichSegment]:
    """Return the left margin of a line: words or segments, and the mark of the current rows."""
    frame, sheet = data.frame, data.sheet
    if not frame.left:
        return []
    rows = _rows_of_line(data, number)
    width = frame.left - 1
    mark = _mark(data, rows, look)
    first_line = frame.enlarged < 2 or number * 2 % frame.enlarged == 0
    if frame.grid.row_scale == 1 and width >= (6 if frame.enlarged > 1 else 10):
        positions = [int(sheet.positions[row]) for row in rows]  # one or two of them
        spans = _words_at(data, positions, width, look) if first_line else None
        if spans is None:
            spans = [(" " * width, word_style(_blank(data, positions[0]), look))]
    else:
        spans = [_segment_at(data, number, width, look)]
    strip = line(spans, width, look.style("text"))
    return [*strip, RichSegment(mark[0], mark[1])]


def _rows_of_line(data: MaskData, number: int) -> range:
    """Return the rows of the sheet that a line of the grid shows."""
    grid, enlarged = data.frame.grid, data.frame.enlarged
    start = grid.row + 2 * number // enlarged * grid.row_scale
    stop = grid.row + (-(-2 * (number + 1) // enlarged)) * grid.row_scale
    last = data.sheet.n_rows
    return range(min(start, last - 1), max(min(stop, last), min(start, last - 1) + 1))


def _mark(data: MaskData, rows: range, look: Look) -> Span:
    if data.cursor is not None and data.cursor[0] in rows:
        return "▸", look.style("chosen")
    current = data.current
    whole = current is not None and len(current) == data.sheet.n_rows
    if (
        current is not None
        and not whole
        and rows.start < current.stop
        and current.start < rows.stop
    ):
        return "▶" if len(current) == 1 else "▌", look.style("accent")
    return " ", look.style("text")


def _blank(data: MaskData, position: int) -> Word:
    return Word(2 * position, "", band_of(data.segments, position))


def _words_at(data: MaskData, positions: list[int], width: int, look: Look) -> list[Span]:
    """Return the words of one or two rows at the right of the margin, in their segments' bands."""
    words = [data.words.get(p, _blank(data, p)) for p in positions]
    if len(words) == 1:
        room = [width]
    else:
        second = min(cell_len(words[1].text), max(width // 2, width - cell_len(words[0].text)))
        room = [width - second, second]
    spans: list[Span] = []
    for number, (word, cells) in enumerate(zip(words, room, strict=False)):
        text = right(word.text, cells) if number == 0 else clipped(word.text, cells)
        spans.append((text, word_style(word, look)))
    return spans


def _segment_at(data: MaskData, number: int, width: int, look: Look) -> Span:
    """Return the label of a segment at the line where it begins, else its band."""
    position = _middle(data, number)
    style = word_style(_blank(data, position), look)
    about = data.segment(position)
    if about is None:
        return right(str(position), width), style
    if number == 0 or data.segment(_middle(data, number - 1)) is not about:
        return clipped(_short(visible(about.label), width), width), style
    text = str(position) if number % 8 == 4 and width >= 5 else ""
    return right(text, width), style


def _middle(data: MaskData, number: int) -> int:
    """Return the position of the row in the middle of a line."""
    rows = _rows_of_line(data, number)
    middle = int(data.sheet.positions[rows[(len(rows) - 1) // 2]])
    if band_of(data.segments, middle) < 0:  # a separator is not worth a label
        middle = int(data.sheet.positions[rows[len(rows) // 2]])
    return middle


def _short(label: str, width: int) -> str:
    """Return a label that fits: "paraphrase 12" as "para 12", "p12" where there is no room."""
    if len(label) <= width:
        return label
    name, _, number = label.rpartition(" ")
    if not (name and number.isdigit()):
        return label
    room = width - len(number) - 1
    return f"{name[:room]} {number}" if room >= 3 else f"{name[:1]}{number}"


def _segment_header(data: MaskData, look: Look) -> Strip:
    frame = data.frame
    grid = frame.grid
    keys = (grid.key + grid.key_scale * np.arange(grid.width)).tolist()
    spans: list[Span] = [(_corner(data), look.style("muted"))] if frame.left else []
    for number, run in groupby(keys, key=lambda key: _segment_index(data, key)):
        own = list(run)
        width = len(own) * frame.enlarged
        label = visible(data.segments[number].label) if number >= 0 else str(own[0])
        bar = "│" if look.plain else ""
        text = clipped(bar + _short(label, width - len(bar)), width) if width > 3 else bar * 1
        spans.append((text.ljust(width)[:width], word_style(_blank(data, own[0]), look)))
    return line(spans, frame.width, look.style("text"))


def _segment_index(data: MaskData, key: int) -> int:
    about = data.segment(key)
    return -1 if about is None else data.segments.index(about)


def _corner(data: MaskData) -> str:
    return clipped("row ↓ key →" if data.frame.left >= 11 else "", data.frame.left)


def _word_header(data: MaskData, look: Look) -> list[Strip]:
    """Return the words of the keys: from top to bottom, or across where a cell is wide enough."""
    frame, sheet = data.frame, data.sheet
    if not frame.words:
        return []
    keys = range(frame.grid.key, min(frame.grid.key_stop, sheet.n_keys))
    words = [data.words.get(key, _blank(data, key)) for key in keys]
    styles = [word_style(word, look) for word in words]
    cells = [_letters(word.text, frame.enlarged, frame.words) for word in words]
    strips = []
    for number in range(frame.words):
        spans: list[Span] = [(" " * frame.left, look.style("text"))] if frame.left else []
        spans += [(cell[number], style) for cell, style in zip(cells, styles, strict=True)]
        strips.append(line(_merged(spans), frame.width, look.style("text")))
    return strips


def _letters(text: str, width: int, lines: int) -> list[str]:
    """Return a word in `lines` lines of `width` cells."""
    if lines == 1 and width > 1:
        return [clipped(text.strip(), width)]
    letters = [char for char in text.strip() or text if cell_len(char) > 0]
    shown = [char if cell_len(char) <= width else "□" for char in letters]
    if len(shown) > lines:
        shown = [*shown[: lines - 1], "…"]
    return [clipped(char, width) for char in [" "] * (lines - len(shown)) + shown]


def _merged(spans: list[Span]) -> list[Span]:
    return [
        ("".join(text for text, _ in run), style)
        for style, run in groupby(spans, key=lambda span: span[1])
    ]


# -- the foot -------------------------------------------------------------------------------------


def _footer(data: MaskData, look: Look) -> list[Strip]:
    frame = data.frame
    words, counts = cell_words(data), count_words(data)
    text = look.style("text")
    if words is None:
        first, rest = _without_cursor(data, look)
    elif cell_len(words.sentence()) <= frame.width:
        first, rest = [(words.sentence(), look.style(words.style))], [(counts, text)]
    else:
        first = [(_shorter(data, words), look.style(words.style))]
        rest = [(words.why or counts, look.style(words.style) if words.why else text)]
    gap: list[Span] = [("  ", text)] if rest else []
    second = [*rest, *gap, *legend(data, look)]
    if frame.footer > 2 and frame.width < 2 * NARROW:
        return [line(spans, frame.width, text) for spans in (first, rest, legend(data, look))]
    return [line(spans, frame.width, text) for spans in (first, second, [])]


def _without_cursor(data: MaskData, look: Look) -> tuple[list[Span], list[Span]]:
    counts: list[Span] = [(count_words(data), look.style("text"))]
    if data.why:
        return [(data.why, look.style("warn"))], counts
    pairs = first_pairs(data)
    return ([(pairs[0], look.style("bad"))], counts) if pairs else (counts, [])


def _shorter(data: MaskData, words: CellWords) -> str:
    """Return who may look at whom, without the row's segment where it is too long with it."""
    whole = f"row {words.row} {words.may} {words.key}"
    if cell_len(whole) <= data.frame.width or data.cursor is None:
        return whole
    may = words.may.replace("may look at", "sees").replace("may not look at", "does not see")
    position = int(data.sheet.positions[data.cursor[0]])
    return f"{token_words(data, position, segment=False)} {may} {words.key}"
