"""Timelines over steps: which steps fit in a width, their drawing, and what a click selects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.plots import timeline
from flexinspect.drawing.text_lines import NamedSpan, Pen, join_blocks, visible
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, TracePlace
from flexinspect.trace.queries import newest_events, step_bounds
from flexinspect.trace.reader import TraceReader

MAX_WINDOW_STEPS = 256
"""Maximum number of steps in a window of single steps."""

MAX_STEP_WIDTH = 4
"""Maximum number of columns of one step."""

MIN_TWO_COLUMN_WIDTH = 84
"""Width from which timelines are drawn beside the rest of a panel instead of below it."""

COLUMN_GAP = 3
"""Blank columns between the two."""

MAX_PLOT_HEIGHT = 8
"""Maximum lines of a timeline, its title included."""


class StepWindow(Struct, frozen=True):
    """Steps `start <= step < stop` around `current`; steps `first` to `last` are recorded.

    A timeline has `n_points` values, each of one step or of a bucket of neighbouring steps.
    """

    start: int
    stop: int
    current: int
    first: int
    last: int
    n_points: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def steps(self) -> range:
        """The steps of the window."""
        return range(self.start, self.stop)

    @property
    def current_point(self) -> int:
        """Index of the value of the current step."""
        return (self.current - self.start) * self.n_points // len(self)

    def columns_per_point(self, width: int) -> int:
        """Return the columns of one value: more than one where there are few."""
        return max(1, min(width // self.n_points, MAX_STEP_WIDTH))

    def current_column(self, width: int) -> int:
        """Return the column in the middle of the current value."""
        each = self.columns_per_point(width)
        return self.current_point * each + each // 2

    def step_at(self, x: int, width: int) -> int | None:
        """Return the first step at a column of a timeline of this width, None outside of it."""
        drawn = min(self.n_points * self.columns_per_point(width), width)
        if not 0 <= x < drawn:
            return None
        return self.start + -(-(x * self.n_points // drawn) * len(self) // self.n_points)

    def format_steps(self) -> str:
        """Return "step 4", "steps 0-40", "steps 3-9 of 0-40" or "steps 0-499, 5 per column"."""
        shown = f"steps {self.start}-{self.stop - 1}" if len(self) > 1 else f"step {self.start}"
        if self.start > self.first or self.stop <= self.last:
            shown += f" of {self.first}-{self.last}"
        per = len(self) / self.n_points
        return f"{shown}, {per:.0f} per column" if per > 1.5 else shown


def step_window(
    step: int, first: int, last: int, n_columns: int, most: int = MAX_WINDOW_STEPS
) -> StepWindow:
    """Return the steps that fit in `n_columns`, around `step` and within `first` to `last`."""
    current = min(max(step, first), last)
    size = min(max(n_columns, 1), most, last - first + 1)
    shown = range(first, last + 1)[visible(current - first, size, last - first + 1)]
    return StepWindow(shown.start, shown.stop, current, first, last, size)


def load_step_window(reader: TraceReader, place: TracePlace, n_columns: int) -> StepWindow:
    """Return the window around a place, with two queries. Raises `Missing` without any step."""
    bounds = step_bounds(reader, place.generation, place.branch)
    if bounds is None:
        raise no_steps(reader)
    return step_window(place.step, *bounds, n_columns)


def no_steps(reader: TraceReader) -> Missing:
    """Return the error for a generation without any recorded step, with the reason if known."""
    if reader.state == "recording":
        return Missing("No step of this generation is recorded yet.", "Wait for its first step.")
    kinds = ("error", "not-recorded")
    reasons = (row.event.text for kind in kinds for row in newest_events(reader, kind, 0, 1))
    hint = "It ended before its first step; the Output panel shows what it printed."
    return Missing(
        "No step of this generation is recorded.", escape_unprintable(next(reasons, hint))
    )


def load_whole_run(reader: TraceReader, place: TracePlace, n_columns: int) -> StepWindow:
    """Return all recorded steps in at most `n_columns` points. Raises `Missing` without any."""
    bounds = step_bounds(reader, place.generation, place.branch)
    if bounds is None:
        raise Missing("No training step is recorded yet.", "Wait for the first one.")
    first, last = bounds
    n_points = max(min(n_columns, last - first + 1), 1)
    return StepWindow(first, last + 1, min(max(place.step, first), last), first, last, n_points)


class Area(Struct, frozen=True):
    """A rectangle of a picture, in cells."""

    x: int
    y: int
    width: int
    height: int


def timeline_target(
    window: StepWindow, areas: Mapping[str, Area]
) -> Callable[[int, int], Navigate | None]:
    """Return the target of clicks on timelines: the step of the column."""

    def target(x: int, y: int) -> Navigate | None:
        for area in areas.values():
            if 0 <= y - area.y < area.height:
                step = window.step_at(x - area.x, area.width)
                return None if step is None else Navigate(step=step)
        return None

    return target


def column_widths(width: int) -> tuple[int, int]:
    """Return the columns of the rest of a panel, and of the timelines beside or below it."""
    if width < MIN_TWO_COLUMN_WIDTH:
        return width, width
    left = (width - COLUMN_GAP) // 2
    return left, width - left - COLUMN_GAP


def stack_timelines(
    names: Sequence[str], width: int, top: int, room: int, most: int = MAX_PLOT_HEIGHT
) -> dict[str, Area]:
    """Return the areas of timelines in `room` lines from line `top` on, without their titles.

    Each has at most `most` lines with its title; those without room for two are left out.
    """
    names = names[: max(room // 2, 0)]
    each = min(room // len(names), most) if names else 0
    left, n_columns = column_widths(width)
    x = left + COLUMN_GAP if left < width else 0
    return {
        name: Area(x, top + each * index + 1, n_columns, each - 1)
        for index, name in enumerate(names)
    }


def draw_beside(
    left: Sequence[Strip], timelines: Sequence[Strip], height: int, pen: Pen
) -> list[Strip]:
    """Draw timelines beside the rest of a panel, or below it in a narrow picture."""
    left_width, n_columns = column_widths(pen.width)
    if left_width == pen.width:
        return [*left, *timelines][:height]
    empty = [pen.resize(n_columns).line()] * (height - len(timelines))
    return join_blocks(left, [*timelines, *empty], pen.style("text"), gap=COLUMN_GAP)[:height]


def draw_timeline(
    title: Sequence[NamedSpan],
    values: Iterable[float | None],
    window: StepWindow,
    area: Area,
    theme: Theme,
    *,
    style: str = "accent",
) -> list[Strip]:
    """Draw a title, unless it is empty, and one value per point; the current one is marked."""
    each = window.columns_per_point(area.width)
    columns = [value for value in values for _ in range(each)]
    marked = window.current_column(area.width)
    plot = timeline(columns, area.width, area.height, theme, marked=marked, style=style)
    heading = Pen(theme, area.width).line(*drop_cut_span(title, area.width))
    return [heading, *plot] if title else plot


def drop_cut_span(spans: Sequence[NamedSpan], width: int) -> Sequence[NamedSpan]:
    """Return the spans of a title, without the last one if they are wider than `width`."""
    return spans if sum(cell_len(text) for text, _ in spans) <= width else spans[:-1]
