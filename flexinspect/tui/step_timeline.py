"""One line with a cell per step: how uncertain the model was, and what happened there."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

from msgspec import Struct
from textual import events

from flexinspect.core.errors import FlexInspectError
from flexinspect.drawing.text_lines import NamedSpan, Pen
from flexinspect.panels.base import Missing, Navigate, is_training_trace
from flexinspect.panels.timeline import StepWindow, load_step_window
from flexinspect.panels.token_window import uncertainty
from flexinspect.records.finding import Severity
from flexinspect.trace import queries
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PlaceLoadRequest, theme_of
from flexinspect.tui.trace_session import TraceSession

MIN_SCREEN_HEIGHT = 18
BLOCKS = "▁▂▃▄▅▆▇█"
_MARKS = {
    Severity.ERROR: ("✖", "bad"),
    Severity.WARNING: ("▲", "warn"),
    Severity.NOTE: ("●", "text"),
}
BREAKPOINT_MARK, BRANCH_MARK = ("◉", "accent"), ("┣", "accent")
LEGEND = "entropy · ✖▲● findings · ◉ breakpoint · ┣ fork"
TRAINING_LEGEND = "✖▲● findings"


class TimelineData(Struct, frozen=True):
    """The steps around the place; `levels` are 0 to 1 by step, `marks` (sign, style) by step."""

    window: StepWindow
    levels: Mapping[int, float]
    marks: Mapping[int, tuple[str, str]]
    legend: str = LEGEND


class StepTimeline(LoadedCanvas):
    """The timeline of the place's branch; a click or a drag goes to a step."""

    DEFAULT_CSS = "StepTimeline { height: 1; }"

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="timeline")
        self._session = session
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._data: TimelineData | None = None
        self._has_room = False

    def fit_screen(self, height: int) -> None:
        """Show it on a screen with lines to spare, if there is more than one step."""
        self._has_room = height >= MIN_SCREEN_HEIGHT
        self._set_display()

    def _set_display(self) -> None:
        self.display = self._has_room and self._data is not None and len(self._data.window) > 1

    def _load(self, request: PlaceLoadRequest) -> TimelineData | None:
        source, place = self._session.source, request[0]
        if source is None:
            return None
        reader, width = source.reader, max(self.app.size.width, 1)
        try:
            window = load_step_window(reader, place, width)
            span = (place.generation, window.start, window.stop)
            levels = {
                step.step: uncertainty(step, "entropy") or 0.0
                for step in queries.step_range(reader, *span, place.branch)
            }
            hits = queries.matching_events(reader, *span, "breakpoint", len(window))
            marks = {hit.event.step: BREAKPOINT_MARK for hit in hits if hit.event.step is not None}
            for row in reader.branches(place.generation):
                if row.fork_step is not None:
                    marks[row.fork_step] = BRANCH_MARK
            found = queries.finding_steps(reader, *span)
            marks |= {step: _MARKS[severity] for step, severity in found.items()}
        except (Missing, FlexInspectError):
            return None  # the panels show the reason
        legend = TRAINING_LEGEND if is_training_trace(source) else LEGEND
        return TimelineData(window, levels, marks, legend)

    def _show_loaded(self, request: PlaceLoadRequest, loaded: TimelineData | None) -> None:
        self._data = loaded
        self._set_display()
        self.repaint()

    def repaint(self) -> None:
        """Draw a column or more per step, and what they mean where there is room."""
        if self._data is None or not self.size.width:
            self.show([])
            return
        pen, window = Pen(theme_of(self.app), self.size.width), self._data.window
        each = window.columns_per_point(pen.width)
        spans: list[NamedSpan] = []
        for step in window.steps:
            sign, style = self._data.marks.get(step, ("", "muted"))
            level = self._data.levels.get(step, 0.0)
            block = BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)]
            text = (sign + block * each)[:each]
            spans.append((text, "cursor" if step == window.current else style))
        legend = self._data.legend
        if pen.width - each * len(window) > len(legend) + 2:
            spans.append((f"  {legend}", "muted"))
        self.show([pen.line(*spans)])

    def on_click(self, event: events.Click) -> None:
        """Go to the step that was clicked."""
        self._go_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Go to the step under the mouse while its button is pressed."""
        if event.button:
            self._go_to(event.x)

    def _go_to(self, x: int) -> None:
        step = self._data.window.step_at(x, self.size.width) if self._data is not None else None
        if step is not None and step != self.trace_screen.place.step:
            self.post_message(self.NavigationRequest(Navigate(step=step)))
