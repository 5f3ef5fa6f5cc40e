"""The lines around the panels: header, token strip, and banner of the run's status."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.strip import Strip
from textual.widgets import Static

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable, truncate
from flexinspect.drawing.text_lines import Pen, Span, header, line
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCellRow, row_around
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.token_window import (
    Answer,
    TokenWindow,
    load_answer,
    load_token_window,
    segment_at,
    token_cells,
)
from flexinspect.panels.xray import SIGNS, WEIGHT_SIGNS, Direction, WeightsOf, XRay
from flexinspect.trace.query_results import StepRow
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PlaceLoadRequest, theme_of
from flexinspect.tui.trace_session import CaptureStatus, RunStatus, TraceSession

if TYPE_CHECKING:
    from flexinspect.control.messages import StatusResponse

BAR_WIDTH = 30

STAGES = (
    ("starting",),
    ("importing torch",),
    ("importing transformers",),
    ("downloading", "reading weights", "making weights"),
    ("preparing the first step", "generating", "compiling"),
)
"""Stages before the first token of a generation, by the first words of their phases."""


def banner_text(status: RunStatus, seconds: int = 0, *, is_paused: bool = False) -> tuple[str, str]:
    """Return the text of the banner and its class: "", "busy" or "bad".

    `seconds` is the duration of the current phase. A capture that is paused does not do what its
    phase says.
    """
    if status.error_lines:
        return "\n".join((_format_title(status), *status.error_lines, *status.notes)), "bad"
    if status.live and status.last_step is None and is_paused:
        return "\n".join(("paused before the first step", *status.notes)), "busy"
    if status.live and status.last_step is None:
        lasted = f" ({seconds} s)" if seconds else ""
        lines = [(escape_unprintable(status.phase) or "waiting") + lasted]
        stage = next((n for n, names in enumerate(STAGES) if status.phase.startswith(names)), None)
        if status.fraction is not None:
            lines[0] += f"  {_format_bar(status.fraction)} {100 * status.fraction:.0f} %"
        elif stage is not None:
            lines[0] += f"  {_format_bar(stage / len(STAGES))} {stage + 1} of {len(STAGES)}"
        else:
            lines[0] += " …"
        if status.detail:
            lines.append(escape_unprintable(status.detail))
        return "\n".join((*lines, *status.notes)), "busy"
    if status.last_step is None:
        why = status.notes or ("The run ended before its first token.",)
        return "\n".join(("This trace has no step.", *why)), "bad"
    return "", ""


def _format_bar(fraction: float) -> str:
    done = round(BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    return "━" * done + "╌" * (BAR_WIDTH - done)


_TITLES = {
    "dead": "The trace was never finished.",
    "damaged": "The beginning of this trace could not be read; the readable part is shown.",
    "failed": "The run failed",
    "interrupted": "The run was interrupted",
}


def _format_title(status: RunStatus) -> str:
    title = _TITLES.get(status.state, "The run went wrong.")
    if status.state not in ("failed", "interrupted"):
        return title
    if status.last_step is None and status.generations < 2:
        return f"{title} before its first token."
    return f"{title}. What was recorded before is here."


class StatusBanner(Static):
    """A few lines about the status of the run, hidden while there is nothing to report."""

    def __init__(self) -> None:
        super().__init__("", id="notice", markup=False)
        self.display = False
        self._phase, self._since = "", time.monotonic()
        self._shown_text = ""

    def show_status(self, status: RunStatus, *, is_paused: bool = False) -> None:
        """Show the banner of a status, or hide it; costs nothing when the text is unchanged."""
        if status.phase != self._phase:
            self._phase, self._since = status.phase, time.monotonic()
        text, kind = banner_text(status, int(time.monotonic() - self._since), is_paused=is_paused)
        if text == self._shown_text:
            return
        self._shown_text = text
        self.display = bool(text)
        self.set_class(kind == "bad", "bad")
        self.update(Content(text))


HeaderData = tuple[StepRow | None, Answer | None]
"""The step of the header, and the answer of its branch."""

MAX_ANSWER_CHARS = 24
MAX_ANSWER_START = 400
"""Characters of an answer that are read for the header: it may have a hundred thousand tokens."""
MAX_REASON_CHARS = 48

_NO_CAPTURE = CaptureStatus()


def header_parts(
    status: RunStatus,
    place: TracePlace,
    step: StepRow | None,
    answer: Answer | None = None,
    *,
    following: bool,
    capture_status: CaptureStatus = _NO_CAPTURE,
) -> list[tuple[str, str, int]]:
    """Return the parts of the header: text, style and priority (1 is dropped last).

    Ordinals ("token 2 of 3") count from 1; ids ("step 1") count from 0 as in commands and files.
    """
    parts = [_format_answer(answer)]
    if status.generations > 1:
        so_far = " so far" if status.state == "recording" else ""
        parts.append((f"answer {place.generation + 1} of {status.generations}{so_far}", "text", 3))
    if place.branch:
        parts.append((f"branch {place.branch}", "text", 3))
    parts.append((_format_step(status, place, step), "strong", 1))
    behind = (status.last_step or 0) - place.step
    halted = _format_halt(capture_status)
    has_steps = status.last_step is not None
    is_loading = capture_status.is_unresponsive and not has_steps  # nothing can answer yet
    if status.live and halted and not is_loading:
        parts.append((halted, "warn", 1))
    elif status.live and not following and behind > 0:
        parts.append((f"{behind} behind, f follows", "warn", 2))
    elif status.state == "recording":
        parts.append(("following" if following else "live", "good", 4))
    elif status.state in ("failed", "dead", "interrupted"):
        parts.append((status.state, "bad", 2))
    return [*parts, *_format_run(status, step, capture_status)]


def _format_answer(answer: Answer | None) -> tuple[str, str, int]:
    start = answer.text[:MAX_ANSWER_START] if answer is not None else ""
    text = escape_unprintable(" ".join(start.split()))
    if answer is None or not text:
        return "", "text", 3
    sign, style = {None: ("", "text"), True: (" ✓", "good"), False: (" ✖", "bad")}[
        answer.is_correct
    ]
    return f"“{truncate(text, MAX_ANSWER_CHARS)}”{sign}", style, 3


def _format_step(status: RunStatus, place: TracePlace, step: StepRow | None) -> str:
    if status.last_step is None:
        return "no step yet"
    what = "iteration" if status.run.get("watch_training") else "token"
    phase = escape_unprintable(f", {step.phase}") if step is not None and step.phase else ""
    return f"{what} {place.step + 1} of {status.last_step + 1} (step {place.step}{phase})"


def _format_run(
    status: RunStatus, step: StepRow | None, capture_status: CaptureStatus
) -> list[tuple[str, str, int]]:
    """Return the parts that describe the run: its model, device, level and cost."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    name = escape_unprintable(str(model.get("name", "flexinspect")))
    name = name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name
    where = f"{model.get('device', '')} {model.get('dtype', '')}".strip()
    capture = capture_status.status  # a command may have changed the level of the manifest
    level = status.run.get("level", "") if capture is None else capture.level
    return [
        (name, "title", 5),
        (escape_unprintable(where), "muted", 7),
        (escape_unprintable(str(level)), "muted", 6),
        (_format_cost(status, step), "muted", 8),
    ]


_HALT_TEXTS = {"paused": "paused", "pausing": "pausing", "holding": "finished, model still loaded"}


def _format_halt(capture_status: CaptureStatus) -> str:
    """Return in a few words why the model does not run; empty while it does."""
    if capture_status.debugger_stop:
        return "held by a debugger"
    if capture_status.is_unresponsive:
        return "busy, no reply"
    status = capture_status.status
    if status is not None and status.state == "running" and status.until:
        return "pausing"
    text = _HALT_TEXTS.get(capture_status.state, "")
    reason = pause_reason(status) if status is not None and text == "paused" else ""
    return f"paused: {truncate(reason, MAX_REASON_CHARS)}" if reason else text


def pause_reason(status: StatusResponse) -> str:
    """Return why a run is paused: the condition of a breakpoint; empty if a command asked for it.

    The values that the condition was evaluated with are left out: the panels show them.
    """
    from flexinspect.control.messages import PAUSE_REQUESTED

    if status.reason == PAUSE_REQUESTED:
        return ""
    hit = re.match(r"breakpoint \d+, (.+?): step \d", status.reason)
    return escape_unprintable(f"breakpoint `{hit[1]}`" if hit else status.reason)


def is_at_branch_end(status: StatusResponse) -> bool:
    """Whether a run is paused because a fork or an edited mask has come to its end."""
    from flexinspect.control.messages import describe_branch_end

    return status.state == "paused" and status.reason == describe_branch_end(status.place)


def pause_message(status: StatusResponse, keys: Sequence[str]) -> str:
    """Return in one line where a run is paused, why, and what keys do now."""
    step = status.place.step
    where = f"at token {step + 1}" if step >= 0 else "before the first token"
    return " · ".join(filter(None, (f"Paused {where}", pause_reason(status), *keys)))


def _format_cost(status: RunStatus, step: StepRow | None) -> str:
    """Return the time of capture in percent of the model's own: of an ended run, or of a step."""
    cost = status.run.get("cost")
    ratio = cost.get("ratio") if isinstance(cost, dict) else None
    if not isinstance(ratio, (int, float)) and step is not None:
        model_ms = step.wall_ms - step.capture_ms
        ratio = step.capture_ms / model_ms if model_ms > 0 else None
    return f"overhead {100 * ratio:.0f} %" if isinstance(ratio, (int, float)) else ""


class TraceHeader(LoadedCanvas):
    """The header: the answer, the place, the state of the run, and what ran."""

    DEFAULT_CSS = "TraceHeader { height: 1; }"

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="header")
        self._session = session
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._step: StepRow | None = None
        self._answer: Answer | None = None

    def on_mount(self) -> None:
        for name in ("following", "capture_status"):
            self.watch(self.screen, name, self.repaint, init=False)

    def _load(self, request: PlaceLoadRequest) -> HeaderData:
        source, place = self._session.source, request[0]
        if source is None:
            return None, None
        try:
            step = source.reader.step(place.generation, place.step, place.branch)
            return step, load_answer(source, place)
        except FlexInspectError:
            return None, None  # the panels show the reason

    def _show_loaded(self, request: PlaceLoadRequest, loaded: HeaderData) -> None:
        self._step, self._answer = loaded
        self.repaint()

    def repaint(self) -> None:
        if self.size.width:
            screen, step = self.trace_screen, self._step
            parts = header_parts(
                screen.status,
                screen.place,
                step if step is not None and step.step == screen.place.step else None,
                self._answer,
                following=screen.following,
                capture_status=screen.capture_status,
            )
            self.show([header(parts, self.size.width, theme_of(self.app))])


StripRequest = tuple[TracePlace, int, Direction, WeightsOf]
"""The place, the version of the trace, the direction of the X-ray, and whose weights it has."""

NO_XRAY = "X-ray: the mask of this token's row is not recorded in this layer."
TOKEN_RADIUS = 96
"""Tokens loaded before and after the current one; few are narrower than two cells."""


def draw_token_strip(
    window: TokenWindow, width: int, theme: Theme, xray: XRay | None = None
) -> tuple[list[Strip], TokenCellRow]:
    """Return the two lines of the strip, and the columns of its tokens.

    The first line has the tokens, the second the label of each segment at its start, or with an
    X-ray the sign of each token.
    """
    cells = token_cells(window, "probability")
    index = len(cells) - 1
    if window.current is not None:  # a damaged trace has gaps
        index = min(bisect_left(cells, window.current, key=lambda cell: cell.pos), index)
    row = row_around(cells, index, width)
    style = xray.style if xray is not None else None
    labels = _draw_labels(row, window, width, theme)
    if xray is not None:
        labels = _draw_signs(row, xray, theme)
    return [
        line(row.spans(theme, current=window.current, style=style), width, theme.style("text")),
        line(labels, width, theme.style("text")),
    ], row


def _draw_signs(row: TokenCellRow, xray: XRay, theme: Theme) -> list[Span]:
    """Return the line below the tokens: whether each is seen, leaked or lost, and its weight."""
    styles = {"leaked": "bad", "lost": "warn"}
    spans: list[Span] = []
    for cell in row.cells:
        state = xray.states.get(cell.pos, "closed")
        sign = "▲" if cell.pos == xray.pos and state == "open" else SIGNS.get(state, " ")
        level = xray.weights.level(cell.pos) if xray.weights is not None else None
        weight = " " if level is None or state not in ("open", "leaked") else WEIGHT_SIGNS[level]
        if sign == "━":
            sign = weight = weight.strip() or sign
        text = sign.ljust(cell_len(cell.text), weight)
        spans.append((text, theme.style(styles.get(state, "text"))))
    return spans


class _Label(NamedTuple):
    """A text below the tokens from a column on; that of a segment has as many cells as this."""

    column: int
    text: str
    cells: int
    is_current: bool = False


def _draw_labels(row: TokenCellRow, window: TokenWindow, width: int, theme: Theme) -> list[Span]:
    """Return the line below the tokens: the current position, and the labels that fit beside it.

    Of two segments whose labels overlap, the one with more cells in the row has its label.
    """
    candidates = [*_position_labels(row, window), *_segment_labels(row, window)]
    placed: list[_Label] = []
    for label in sorted(candidates, key=lambda one: (not one.is_current, -one.cells)):
        label = label._replace(text=label.text[: max(width - label.column, 0)])
        is_free = all(
            label.column + len(label.text) <= other.column
            or label.column >= other.column + len(other.text) + 1
            for other in placed
        )
        if label.text and is_free:
            placed.append(label)
    spans: list[Span] = []
    used = 0
    for label in sorted(placed):
        spans.append((" " * (label.column - used), theme.style("text")))
        spans.append((label.text, theme.style("strong" if label.is_current else "muted")))
        used = label.column + len(label.text)
    return spans


def _position_labels(row: TokenCellRow, window: TokenWindow) -> Iterator[_Label]:
    for cell, column in zip(row.cells, row.columns, strict=False):
        if cell.pos == window.current:
            yield _Label(column, f"▲{cell.pos}", cell_len(cell.text), is_current=True)


def _segment_labels(row: TokenCellRow, window: TokenWindow) -> Iterator[_Label]:
    cells = zip(row.cells, row.columns, strict=False)
    for segment, group in groupby(cells, lambda one: segment_at(window.segments, one[0].pos)):
        if segment is not None and segment.kind != "separator":
            own = [*group]
            n_cells = sum(cell_len(cell.text) for cell, _ in own)
            yield _Label(own[0][1], f"╵{escape_unprintable(segment.label)}", n_cells)


class TokenStrip(LoadedCanvas):
    """Two lines with the tokens around the screen's place, up to four with an X-ray."""

    DEFAULT_CSS = "TokenStrip { height: 2; }"

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="strip")
        self._session = session
        self.loader = Loader(pool, self._strip_request, self._load, self._show_loaded)
        self._window: TokenWindow | None = None
        self._xray: XRay | None = None
        self._row: TokenCellRow | None = None

    def on_mount(self) -> None:
        for name in ("xray", "weights"):
            self.watch(self.screen, name, self._on_xray, init=False)

    def _on_xray(self) -> None:
        screen = self.trace_screen
        self.styles.height = 2 if screen.xray == "off" else 3 + (screen.weights != "off")
        self.loader.request_load()

    def _strip_request(self) -> StripRequest:
        return *self.place_request(), self.trace_screen.xray, self.trace_screen.weights

    def preload(self, place: TracePlace) -> None:
        _, *rest = self._strip_request()
        self.loader.preload((place, *rest))

    def _load(self, request: StripRequest) -> tuple[TokenWindow, XRay | None] | None:
        source, (place, _, direction, weights) = self._session.source, request
        if source is None:
            return None
        try:
            window = load_token_window(source, place, TOKEN_RADIUS)
            if direction == "off":
                return window, None
            # Most of the time the X-ray is off, and needs neither numpy nor masks.
            from flexinspect.panels.xray_loading import load_xray

            return window, load_xray(source, place, window, direction, weights)
        except (Missing, FlexInspectError):
            return None  # the panels show the reason

    def _show_loaded(
        self, request: StripRequest, loaded: tuple[TokenWindow, XRay | None] | None
    ) -> None:
        self._window, self._xray = loaded or (None, None)
        self.repaint()

    def repaint(self) -> None:
        """Draw the loaded tokens."""
        if self._window is None or self.size.area == 0:
            self._row = None
            self.show([])
            return
        width, theme = self.size.width, theme_of(self.app)
        strips, self._row = draw_token_strip(self._window, width, theme, self._xray)
        if self.trace_screen.xray != "off":
            strips += self._draw_summary(Pen(theme, width))
        self.show(strips)

    def _draw_summary(self, pen: Pen) -> list[Strip]:
        """Draw what the token sees; then the weights, or the key that shows them."""
        xray = self._xray
        if xray is None:
            return [pen.line((NO_XRAY, "strong"))]
        summary = (xray.summary(), "strong")
        if xray.weights is None:
            key = self.trace_screen.keys_of("tokens.weights")
            hint = f"  {key} weighs them by attention" if xray.direction == "sees" else ""
            return [pen.line(summary, (hint, "muted"))]
        style = "bad" if xray.weights.is_mismatch else "text"
        return [pen.line(summary), pen.line((xray.weights.summary(), style))]

    def on_click(self, event: events.Click) -> None:
        """Go to the token that was clicked."""
        cell = self._row.cell_at(event.x) if self._row and event.y == 0 else None
        target = self._window.navigate_to(cell) if self._window is not None else None
        if target is not None:
            self.post_message(self.NavigationRequest(target))
