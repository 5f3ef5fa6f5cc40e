"""Timelines over steps: which steps fit in a width, how they are drawn, and what a click selects.

`StepWindow` is a window of steps around the current one, for generations; `CurveSpan` is a whole
run in buckets of steps, for training runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.drawing.plots import timeline
from flexinspect.drawing.text_lines import Span, join_blocks, line
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, TracePlace
from flexinspect.trace.queries.range_queries import step_bounds
from flexinspect.trace.reader import TraceReader

MAX_WINDOW_STEPS = 256
"""Maximum number of steps in a window."""

MAX_STEP_WIDTH = 4
"""Maximum number of columns of one step."""

MIN_TWO_COLUMN_WIDTH = 84
"""Width from which timelines are drawn beside the rest of a panel instead of below it."""

COLUMN_GAP = 3
"""Blank columns between the two."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Steps `start <= step < stop` around `current`; steps `first` to `last` are recorded."""

    start: int
    stop: int
    current: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def steps(self) -> range:
        """The steps of the window."""
        return range(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        """Whether all steps are in the window."""
        return self.start <= self.first and self.stop > self.last

    def format_steps(self) -> str:
        """Return "step 4", "steps 0-40" or "steps 3-9 of 0-40"."""
        many = len(self) > 1
        shown = f"steps {self.start}-{self.stop - 1}" if many else f"step {self.start}"
        return shown if self.is_whole else f"{shown} of {self.first}-{self.last}"


def step_window(step: int, first: int, last: int, n_columns: int) -> StepWindow:
    """Return the steps that fit in `n_columns`, around `step` and within `first` to `last`."""
    current = min(max(step, first), last)
    size = min(max(n_columns, 1), MAX_WINDOW_STEPS, last - first + 1)
    start = max(first, min(current - size // 2, last + 1 - size))
    return StepWindow(start, start + size, current, first, last)


def load_step_window(reader: TraceReader, place: TracePlace, n_columns: int) -> StepWindow:
    """Return the window around a place, with two queries. Raises `Missing` without any step."""
    bounds = step_bounds(reader, place.generation, place.branch)
    if bounds is None:
        raise Missing("No step of this generation is recorded yet.", "Wait for its first step.")
    return step_window(place.step, *bounds, n_columns)


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of a picture, in cells."""

    x: int
    y: int
    width: int
    height: int

    def __contains__(self, cell: tuple[int, int]) -> bool:
        x, y = cell
        return 0 <= x - self.x < self.width and 0 <= y - self.y < self.height


def left_width(width: int) -> int:
    """Return the columns of the part beside or above the timelines."""
    return (width - COLUMN_GAP) // 2 if width >= MIN_TWO_COLUMN_WIDTH else width


def timeline_columns(width: int) -> int:
    """Return the columns of the timelines in a picture of this width."""
    return width - left_width(width) - COLUMN_GAP if width >= MIN_TWO_COLUMN_WIDTH else width


def draw_two_columns(
    left: Sequence[Strip], timelines: Sequence[Strip], width: int, height: int, theme: Theme
) -> list[Strip]:
    """Draw a picture of this size with timelines, `timeline_columns` wide, at its right."""
    plain = theme.style("text")
    gap = [line([], COLUMN_GAP, plain)] * height
    empty = line([], timeline_columns(width), plain)
    filled = [*timelines, *[empty] * (height - len(timelines))]
    return join_blocks(join_blocks(left, gap, plain), filled, plain)


def navigate_to_step(x: int, y: int, areas: Iterable[Area], window: StepWindow) -> Navigate | None:
    """Return the step at a cell of a timeline as a place to go to, None outside of all areas."""
    for area in areas:
        if (x, y) in area:
            step = step_at(x - area.x, window, area.width)
            return None if step is None else Navigate(step=step)
    return None


def columns_per_step(window: StepWindow, width: int) -> int:
    """Return the columns of one step: more than one where there are few steps."""
    return max(1, min(width // len(window), MAX_STEP_WIDTH))


def draw_timeline(
    values: Mapping[int, float | None],
    window: StepWindow,
    area: Area,
    theme: Theme,
    *,
    style: str = "accent",
) -> list[Strip]:
    """Draw the values of the window's steps, by step; the current step is marked."""
    each = columns_per_step(window, area.width)
    columns = [values.get(step) for step in window.steps for _ in range(each)]
    middle = (window.current - window.start) * each + each // 2
    return timeline(columns, area.width, area.height, theme, marked=middle, style=style)


def drop_cut_span(spans: Sequence[Span], width: int) -> Sequence[Span]:
    """Return the spans of a title, without the last one if they are wider than `width`."""
    return spans if sum(cell_len(text) for text, _ in spans) <= width else spans[:-1]


def step_at(x: int, window: StepWindow, width: int) -> int | None:
    """Return the step at a column of a timeline of this width, None outside of it."""
    each = columns_per_step(window, width)
    drawn = min(len(window) * each, width)
    if not 0 <= x < drawn:
        return None
    return window.start + x * len(window) // drawn


@dataclass(frozen=True, slots=True)
class CurveSpan:
    """Steps `first` to `last` in `n_points` buckets of `columns_per_point` columns each.

    `current` is the step of the place.
    """

    first: int
    last: int
    current: int
    n_points: int
    columns_per_point: int

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    @property
    def current_point(self) -> int:
        """Index of the bucket of the current step."""
        return (self.current - self.first) * self.n_points // self.n_steps

    def step_at(self, column: int) -> int | None:
        """Return the first step at a column, None outside of the curve."""
        if not 0 <= column < self.n_points * self.columns_per_point:
            return None
        return self.first + -(-(column // self.columns_per_point) * self.n_steps // self.n_points)

    def format_steps(self) -> str:
        """Return "steps 0-499", or "steps 0-499, 5 per column"."""
        shown = f"steps {self.first}-{self.last}"
        per = self.n_steps / self.n_points
        return f"{shown}, {per:.0f} per column" if per > 1.5 else shown


def load_curve_span(reader: TraceReader, place: TracePlace, columns: int) -> CurveSpan:
    """Return all recorded steps in at most `columns` buckets. Raises `Missing` without any."""
    bounds = step_bounds(reader, place.generation, place.branch)
    if bounds is None:
        raise Missing("No training step is recorded yet.", "Wait for the first one.")
    first, last = bounds
    n_points = max(min(columns, last - first + 1), 1)
    each = max(1, min(columns // n_points, MAX_STEP_WIDTH))
    return CurveSpan(first, last, min(max(place.step, first), last), n_points, each)


def draw_curve(
    values: Mapping[int, float | None],
    span: CurveSpan,
    area: Area,
    theme: Theme,
    *,
    style: str = "accent",
) -> list[Strip]:
    """Draw values by bucket; the bucket of the current step is marked."""
    columns = [
        values.get(point) for point in range(span.n_points) for _ in range(span.columns_per_point)
    ]
    middle = span.current_point * span.columns_per_point + span.columns_per_point // 2
    return timeline(columns, area.width, area.height, theme, marked=middle, style=style)
