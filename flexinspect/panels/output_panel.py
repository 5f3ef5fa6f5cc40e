"""The output panel: what the program printed, up to the step that is shown."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rich.cells import cell_len, chop_cells
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Help, Missing, Panel, Picture, Request, TracePlace
from flexinspect.panels.source import Source
from flexinspect.trace.queries.search_queries import last_output
from flexinspect.trace.rows import OutputRow

MAX_DESCRIBED_LINES = 500
"""Lines that are told in words: the newest of them."""

_LINE_BYTES = 300
_MARGIN = 2

OutputStep = tuple[int, int]
_BEFORE_FIRST_STEP: OutputStep = (-1, -1)
"""Before the first step."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """`scroll` counts lines from the last one of the step, negative upwards."""

    scroll: int = 0
    stream: Literal["both", "stdout", "stderr"] = "both"


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A printed line, with the step during which, or after which, it began."""

    text: str
    stream: str
    step: OutputStep


@dataclass(frozen=True, slots=True)
class OutputData:
    """All lines in order; `anchor` is the last of them that came up to the step `at`."""

    lines: tuple[OutputLine, ...]
    anchor: int
    current_step: OutputStep


class OutputPanel(Panel[OutputData, OutputOptions]):
    """The lines that the program printed, those of the step marked."""

    name: ClassVar[str] = "output"
    title: ClassVar[str] = "Output"
    help: ClassVar[Help] = Help(
        "It shows what the program printed, up to the step that is shown; a run of our own "
        "generation prints nothing.",
        "Lines that came with this step are marked ▸, lines on stderr !; scroll with shift+up and "
        "shift+down, or step on, and the output goes along.",
        "Look for warnings and prints of the program's own near the step at which something went "
        "wrong; a traceback stands at the end.",
    )
    actions: ClassVar[tuple[str, ...]] = ("cursor.up", "cursor.down")

    def options(self) -> OutputOptions:
        """Return the options: both streams, at the step."""
        return OutputOptions()

    def load(self, source: Source, request: Request[OutputOptions]) -> OutputData:
        """Read the lines, again only when there are new ones."""
        reader = source.reader
        newest = last_output(reader)
        if newest is None:
            raise Missing(
                "This trace holds no output.",
                "What a program prints is kept when it runs as: flexinspect run SCRIPT.py",
            )
        lines = source.get_or_create(
            ("output", newest),
            lambda: tuple(_split_lines(reader.output())),
            lambda made: _LINE_BYTES * len(made) + sum(len(one.text) for one in made),
        )
        stream = request.options.stream
        if stream != "both":
            lines = tuple(one for one in lines if one.stream == stream)
        at = (request.place.generation, request.place.step)
        return OutputData(lines, _find_anchor(source, request.place, lines), at)

    def describe(self, data: OutputData) -> list[str]:
        """Return how much there is, then the lines up to the step, each with where it came."""
        n_err = sum(one.stream == "stderr" for one in data.lines)
        lines = [f"{len(data.lines)} lines, {n_err} of them on stderr."]
        shown = data.lines[: data.anchor + 1]
        if len(shown) > MAX_DESCRIBED_LINES:
            lines.append(f"The last {MAX_DESCRIBED_LINES} up to this step:")
        lines += [
            f"{_format_origin(one)}: {escape_unprintable(one.text)}"
            for one in shown[-MAX_DESCRIBED_LINES:]
        ]
        after = len(data.lines) - len(shown)
        return [*lines, f"And {after} more after this step."] if after else lines

    def paint(self, data: OutputData, request: Request[OutputOptions], theme: Theme) -> Picture:
        """Draw the lines that end at the step, or where it is scrolled to."""
        width, height = request.width, request.height
        if not data.lines:
            return Picture(
                wrap_paragraph("Nothing on this stream.", width, theme.style("text"))[:height]
            )
        bottom = _last_visible(data, request.options)
        strips: list[Strip] = []
        top = bottom + 1
        while top > 0 and len(strips) < height:
            top -= 1
            strips = [*_draw_line(data, top, width, theme), *strips]
        strips, last = strips[-height:], bottom
        while len(strips) < height and last + 1 < len(data.lines):
            last += 1
            strips += _draw_line(data, last, width, theme)
        note = f"lines {top + 1}-{last + 1} of {len(data.lines)}"
        return Picture(strips[:height], note)

    def on_action(
        self, action: str, data: OutputData, request: Request[OutputOptions]
    ) -> OutputOptions | None:
        """Scroll by a third of the height."""
        if action not in self.actions or not data.lines:
            return None
        here = _last_visible(data, request.options)
        move = max(request.height // 3, 1) * (1 if action == "cursor.down" else -1)
        there = max(0, min(here + move, len(data.lines) - 1))
        return replace(request.options, scroll=there - data.anchor) if there != here else None


def _last_visible(data: OutputData, options: OutputOptions) -> int:
    return max(0, min(data.anchor + options.scroll, len(data.lines) - 1))


def _find_anchor(source: Source, place: TracePlace, lines: tuple[OutputLine, ...]) -> int:
    """Return the last line up to the step; of the newest step, all that came after it too."""
    newest = source.reader.last_step(place.generation)
    at = (place.generation, place.step)
    if newest is None or (place.step >= newest and _is_last(source, place.generation)):
        return max(len(lines) - 1, 0)
    return max(bisect_right(lines, at, key=lambda one: one.step) - 1, 0)


def _is_last(source: Source, generation: int) -> bool:
    return all(row.generation <= generation for row in source.reader.generations())


def _split_lines(rows: Iterable[OutputRow]) -> list[OutputLine]:
    """Return the pieces as lines; one that a carriage return begins anew is its last state."""
    done: list[OutputLine] = []
    open_: dict[str, int] = {}
    newest = _BEFORE_FIRST_STEP
    for row in rows:
        piece = row.output
        if piece.generation is not None:
            # In order whatever the clocks say, so that a step finds its lines by halving.
            newest = max(newest, (piece.generation, piece.step or 0))
        for text in piece.text.splitlines(keepends=True) if piece.text else ():
            index = open_.pop(piece.stream, None)
            if index is None:
                index = len(done)
                done.append(OutputLine("", piece.stream, newest))
            done[index] = replace(done[index], text=done[index].text + text)
            if not text.endswith("\n"):
                open_[piece.stream] = index
    return [replace(one, text=_after_carriage_return(one.text)) for one in done]


def _after_carriage_return(text: str) -> str:
    states = [part for part in text.rstrip("\n").split("\r") if part]
    return states[-1] if states else ""


def _format_origin(one: OutputLine) -> str:
    if one.step == _BEFORE_FIRST_STEP:
        return f"{one.stream}, before the first step"
    return f"{one.stream}, generation {one.step[0]} step {one.step[1]}"


def _draw_line(data: OutputData, index: int, width: int, theme: Theme) -> list[Strip]:
    """Return one line as the rows that it takes."""
    one = data.lines[index]
    mark = "▸" if one.step == data.current_step else " "
    is_err = one.stream == "stderr"
    style = theme.style("warn" if is_err else "text")
    text, room = escape_unprintable(one.text), max(width - _MARGIN, 1)
    parts = chop_cells(text, room) if cell_len(text) > room else [text]
    head = [(mark, theme.style("chosen")), ("!" if is_err else " ", theme.style("warn"))]
    blank = [(" " * _MARGIN, theme.style("text"))]
    return [
        line([*(blank if number else head), (part, style)], width, theme.style("text"))
        for number, part in enumerate(parts)
    ]
