"""The output panel: what the program printed, up to the current step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len, chop_cells
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import (
    CURSOR_MOVES,
    Help,
    Missing,
    Panel,
    Picture,
    Request,
    TracePlace,
    import_hint,
)
from flexinspect.panels.panel_source import Source
from flexinspect.trace.queries import last_output, n_generations
from flexinspect.trace.query_results import OutputRow

MAX_DESCRIBED_LINES = 500
"""Maximum number of lines in `describe`: the newest ones."""

_LINE_BYTES = 300
_MARGIN = 2

OutputStep = tuple[int, int]
"""Generation and step."""
_BEFORE_FIRST_STEP: OutputStep = (-1, -1)


class OutputOptions(Struct, frozen=True):
    """`scroll` counts lines from the last one of the step; negative values scroll up."""

    scroll: int = 0
    stream: Literal["both", "stdout", "stderr"] = "both"


class OutputLine(Struct, frozen=True):
    """A printed line, with the step during or after which it began; after it in a training."""

    text: str
    stream: str
    step: OutputStep


class OutputData(Struct, frozen=True):
    """All lines in order; `anchor` is the index of the last one up to `current_step`."""

    lines: tuple[OutputLine, ...]
    anchor: int
    current_step: OutputStep


class OutputPanel(Panel[OutputData, OutputOptions]):
    """The lines that the program printed; those of the current step are marked."""

    name = "output"
    title = "Output"
    initial_options = OutputOptions()
    help = Help(
        "It shows what a program of yours printed, up to the current step; the built-in "
        "generation loop prints nothing.",
        "▸ marks lines of this step, ! lines on stderr; scroll with shift+up and shift+down; the "
        "output follows when you go to another step.",
        "Look for warnings and for prints of your program near the step at which something went "
        "wrong; a traceback is at the end.",
    )
    actions = ("cursor.up", "cursor.down")

    def load(self, source: Source, request: Request[OutputOptions]) -> OutputData:
        """Read the lines; they are cached until there are new ones."""
        reader = source.reader
        newest = last_output(reader)
        if newest is None:
            if source.reader.run().get("program") is not None:
                raise Missing("The program has printed nothing.")
            hint = "Output is recorded for programs that run as: flexinspect run SCRIPT.py"
            raise Missing("This trace holds no output.", import_hint(source, hint))
        lines = source.get_or_create(
            ("output", newest),
            lambda: tuple(_split_lines(reader.output())),
            lambda lines: _LINE_BYTES * len(lines) + sum(len(printed.text) for printed in lines),
        )
        stream = request.options.stream
        if stream != "both":
            lines = tuple(printed for printed in lines if printed.stream == stream)
        current_step = (request.place.generation, request.place.step)
        return OutputData(lines, _find_anchor(source, request.place, lines), current_step)

    def describe(self, data: OutputData) -> list[str]:
        """Return the number of lines, then the lines up to the step, each with its origin."""
        n_err = sum(printed.stream == "stderr" for printed in data.lines)
        lines = [f"{len(data.lines)} lines, {n_err} of them on stderr."]
        shown = data.lines[: data.anchor + 1]
        if len(shown) > MAX_DESCRIBED_LINES:
            lines.append(f"The last {MAX_DESCRIBED_LINES} up to this step:")
        for printed in shown[-MAX_DESCRIBED_LINES:]:
            where = f"generation {printed.step[0]} step {printed.step[1]}"
            if printed.step == _BEFORE_FIRST_STEP:
                where = "before the first step"
            lines.append(f"{printed.stream}, {where}: {escape_unprintable(printed.text)}")
        after = len(data.lines) - len(shown)
        return [*lines, f"And {after} more after this step."] if after else lines

    def paint(self, data: OutputData, request: Request[OutputOptions], theme: Theme) -> Picture:
        """Draw the lines that end at the current step, or at the scrolled position."""
        pen, height = Pen(theme, request.width), request.height
        if not data.lines:
            return Picture(pen.paragraph("No output on this stream.")[:height])
        last = top = _last_visible(data, request.options)
        strips = _draw_line(data, top, pen)
        while top > 0 and len(strips) < height:
            top -= 1
            strips = [*_draw_line(data, top, pen), *strips]
        strips = strips[-height:]
        while len(strips) < height and last + 1 < len(data.lines):
            last += 1
            strips += _draw_line(data, last, pen)
        return Picture(strips[:height], f"lines {top + 1}-{last + 1} of {len(data.lines)}")

    def on_action(
        self, action: str, data: OutputData, request: Request[OutputOptions]
    ) -> OutputOptions | None:
        """Scroll by a third of the height."""
        if action not in self.actions or not data.lines:
            return None
        bottom = _last_visible(data, request.options)
        move = max(request.height // 3, 1) * CURSOR_MOVES[action][0]
        moved = max(0, min(bottom + move, len(data.lines) - 1))
        return replace(request.options, scroll=moved - data.anchor) if moved != bottom else None


def _last_visible(data: OutputData, options: OutputOptions) -> int:
    return max(0, min(data.anchor + options.scroll, len(data.lines) - 1))


def _find_anchor(source: Source, place: TracePlace, lines: tuple[OutputLine, ...]) -> int:
    """Return the index of the last line up to the step; the newest step includes later lines."""
    newest = source.reader.last_step(place.generation)
    is_last = n_generations(source.reader) <= place.generation + 1
    if newest is None or (place.step >= newest and is_last):
        return max(len(lines) - 1, 0)
    step = (place.generation, place.step)
    return max(bisect_right(lines, step, key=lambda printed: printed.step) - 1, 0)


def _split_lines(rows: Iterable[OutputRow]) -> list[OutputLine]:
    """Join the recorded pieces to lines; of a line with carriage returns the last state is kept."""
    lines: list[OutputLine] = []
    unfinished: dict[str, int] = {}
    newest = _BEFORE_FIRST_STEP
    for row in rows:
        piece = row.output
        if piece.generation is not None:
            # Never decreasing, whatever the clocks say: `_find_anchor` bisects by step.
            newest = max(newest, (piece.generation, piece.step or 0))
        for text in piece.text.splitlines(keepends=True):
            index = unfinished.pop(piece.stream, len(lines))
            if index == len(lines):
                lines.append(OutputLine("", piece.stream, newest))
            lines[index] = replace(lines[index], text=lines[index].text + text)
            if not text.endswith("\n"):
                unfinished[piece.stream] = index
    # What follows the last carriage return that has text after it.
    states = (printed.text.rstrip("\n").rstrip("\r").rpartition("\r")[2] for printed in lines)
    return [replace(printed, text=text) for printed, text in zip(lines, states, strict=True)]


def _draw_line(data: OutputData, index: int, pen: Pen) -> list[Strip]:
    printed = data.lines[index]
    is_err = printed.stream == "stderr"
    text, room = escape_unprintable(printed.text), max(pen.width - _MARGIN, 1)
    first, *others = chop_cells(text, room) if cell_len(text) > room else [text]
    style = "warn" if is_err else "text"
    mark = "▸" if printed.step == data.current_step else " "
    head = pen.line((mark, "chosen"), ("!" if is_err else " ", "warn"), (first, style))
    return [head, *(pen.line((" " * _MARGIN, "text"), (part, style)) for part in others)]
