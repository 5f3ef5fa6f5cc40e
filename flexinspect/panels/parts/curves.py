"""Curves over a whole training run: which steps a column stands for, and how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from textual.strip import Strip

from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.parts.windows import Area
from flexinspect.trace.ranges import step_bounds
from flexinspect.trace.reader import TraceReader
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import timeline

MAX_STEP_WIDTH = 4
"""Columns that one step takes at most."""


@dataclass(frozen=True, slots=True)
class CurveSpan:
    """The steps `first` to `last` in `n_points` points, `each` columns wide; `current` is shown."""

    first: int
    last: int
    current: int
    n_points: int
    columns_per_point: int

    @property
    def n_steps(self) -> int:
        """How many steps there are."""
        return self.last - self.first + 1

    @property
    def current_point(self) -> int:
        """The point of the current step."""
        return (self.current - self.first) * self.n_points // self.n_steps

    def step_at(self, column: int) -> int | None:
        """Return the first step of a column, None beside the curve."""
        if not 0 <= column < self.n_points * self.columns_per_point:
            return None
        return self.first + -(-(column // self.columns_per_point) * self.n_steps // self.n_points)

    def format_steps(self) -> str:
        """Return "steps 0-499", and how many a column holds where it is more than one."""
        shown = f"steps {self.first}-{self.last}"
        per = self.n_steps / self.n_points
        return f"{shown}, {per:.0f} per column" if per > 1.5 else shown


def load_curve_span(reader: TraceReader, place: TracePlace, columns: int) -> CurveSpan:
    """Return the whole run in at most so many columns. Raises `Missing` without a step."""
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
    """Return values by point as columns; the current step's is marked."""
    columns = [
        values.get(point) for point in range(span.n_points) for _ in range(span.columns_per_point)
    ]
    middle = span.current_point * span.columns_per_point + span.columns_per_point // 2
    return timeline(columns, area.width, area.height, theme, marked=middle, style=style)
