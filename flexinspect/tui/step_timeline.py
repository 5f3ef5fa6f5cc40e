"""One line with a cell per step: how uncertain and how close it was, and what happened there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor

from msgspec import Struct
from rich.cells import cell_len
from textual import events
from textual.strip import Strip

from flexinspect.core.errors import FlexInspectError
from flexinspect.drawing.text_lines import NamedSpan, Pen, merge_spans
from flexinspect.panels.base import Missing, Navigate
from flexinspect.panels.timeline import StepWindow, load_step_window
from flexinspect.panels.token_window import uncertainty
from flexinspect.records.finding import Severity
from flexinspect.trace import queries
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.panel_layout import trace_kind
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
CLOSE_MARGIN = 0.7
"""In logits. Below it the second candidate was at least half as probable as the first, so a little
would have changed the answer."""
STEP_STYLE, CLOSE_STYLE = "muted", "warn"
Legend = tuple[tuple[NamedSpan, ...], ...]
LEGEND: Legend = (
    (("entropy", STEP_STYLE),),
    (("█", CLOSE_STYLE), (f" margin < {CLOSE_MARGIN}", STEP_STYLE)),
    (("✖▲● findings", STEP_STYLE),),
    (("◉ breakpoint", STEP_STYLE),),
    (("┣ fork", STEP_STYLE),),
)
TRAINING_LEGEND: Legend = LEGEND[2:3]


class TimelineData(Struct, frozen=True):
    """The steps around the place; `levels` are 0 to 1 by step, `marks` (sign, style) by step.

    `close` are the steps whose margin is below `CLOSE_MARGIN`.
    """

    window: StepWindow
    levels: Mapping[int, float]
    close: Set[int]
    marks: Mapping[int, tuple[str, str]]
    is_training: bool = False


def draw_steps(data: TimelineData, pen: Pen) -> Strip:
    """Draw a column or more per step, and what they mean where there is room."""
    window = data.window
    each = window.columns_per_point(pen.width)
    spans: list[NamedSpan] = []
    for step in window.steps:
        own = CLOSE_STYLE if step in data.close else STEP_STYLE
        sign, style = data.marks.get(step, ("", own))
        level = data.levels.get(step, 0.0)
        block = BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)]
        is_current = step == window.current
        spans.append((sign[:each], "cursor" if is_current else style))
        spans.append((block * (each - len(sign)), "cursor" if is_current else own))
    legend = TRAINING_LEGEND if data.is_training else LEGEND
    spans += _fit_legend(legend, pen.width - each * len(window))
    return pen.line(*merge_spans(span for span in spans if span[0]))


def _fit_legend(legend: Legend, room: int) -> Iterator[NamedSpan]:
    """Yield the first parts of a legend, as many as there is room for."""
    for part in legend:
        spans: list[NamedSpan] = [("  " if part is legend[0] else " · ", STEP_STYLE), *part]
        room -= sum(cell_len(text) for text, _ in spans)
        if room < 0:
            return
        yield from spans


def _read_steps(
    reader: TraceReader,
    generation: int,
    start: int,
    stop: int,
    branch: int,
    forks: Iterable[int],
) -> tuple[dict[int, float], set[int], dict[int, tuple[str, str]]]:
    """Return the levels, the steps with a small margin, and the marks of a range of steps."""
    span = (generation, start, stop)
    steps = queries.step_range(reader, *span, branch)
    levels = {step.step: uncertainty(step, "entropy") or 0.0 for step in steps}
    margins = {step.step: step.margin for step in steps if step.margin is not None}
    close = {step for step, margin in margins.items() if margin < CLOSE_MARGIN}
    hits = queries.matching_events(reader, *span, "breakpoint", stop - start)
    marks = {hit.event.step: BREAKPOINT_MARK for hit in hits if hit.event.step is not None}
    marks |= dict.fromkeys(forks, BRANCH_MARK)
    found = queries.finding_steps(reader, *span)
    marks |= {step: _MARKS[severity] for step, severity in found.items()}
    return levels, close, marks


class StepTimeline(LoadedCanvas):
    """The timeline of the place's branch; a click or a drag goes to a step."""

    DEFAULT_CSS = "StepTimeline { height: 1; }"

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="timeline")
        self._session = session
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._data: TimelineData | None = None
        self._has_room = self._is_loaded = False

    def fit_screen(self, height: int) -> None:
        """Show it on a screen with lines to spare, unless there is only one step.

        Its line is kept until the steps are loaded: else all panels would be laid out again.
        """
        self._has_room = height >= MIN_SCREEN_HEIGHT
        self._set_display()

    def _set_display(self) -> None:
        has_steps = self._data is not None and len(self._data.window) > 1
        self.display = self._has_room and (has_steps or not self._is_loaded)

    def _load(self, request: PlaceLoadRequest) -> TimelineData | None:
        source, (place, version) = self._session.source, request
        if source is None:
            return None
        try:
            window = load_step_window(source.reader, place, max(self.app.size.width, 1))
            # From step to step most often only the place changes.
            span = (place.generation, window.start, window.stop)
            key = ("timeline", *span, place.branch, version)
            forks = source.get_newest(
                ("timeline.forks", place.generation),
                version,
                lambda: queries.fork_steps(source.reader, place.generation),
            )
            levels, close, marks = source.get_or_create(
                key, lambda: _read_steps(source.reader, *span, place.branch, forks)
            )
        except (Missing, FlexInspectError):
            return None  # the panels show the reason
        is_training = trace_kind(source) == "training"
        return TimelineData(window, levels, close, marks, is_training=is_training)

    def _show_loaded(self, request: PlaceLoadRequest, loaded: TimelineData | None) -> None:
        self._data, self._is_loaded = loaded, True
        self._set_display()
        self.repaint()

    def repaint(self) -> None:
        """Draw the loaded steps."""
        if self._data is None or not self.size.width:
            self.show([])
            return
        self.show([draw_steps(self._data, Pen(theme_of(self.app), self.size.width))])

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
