"""The two lines of facts: the header, and the line of findings."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from textual import events
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Canvas, header, line
from flexinspect.panels.base import TracePlace
from flexinspect.panels.findings_panel import FindingSummary, load_summary
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.rows import StepRow
from flexinspect.tui.capture_client import CaptureStatus
from flexinspect.tui.panel_view import Loader, theme_of
from flexinspect.tui.trace_session import RunStatus, TraceSession

BAR_WIDTH = 30

STAGES = (
    ("starting",),
    ("importing torch",),
    ("importing transformers",),
    ("downloading", "reading weights", "making weights"),
    ("generating", "compiling"),
)
"""What comes before the first token of a run of ours, by the first words of the phases."""


def banner_text(status: RunStatus, seconds: int = 0) -> tuple[str, str]:
    """Return what is to be said, and its class: "", "busy" or "bad".

    `seconds` is how long the phase has lasted.
    """
    if status.error_lines:
        return "\n".join((_format_title(status), *status.error_lines)), "bad"
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
        return "\n".join(
            [*lines, *([escape_unprintable(status.detail)] if status.detail else [])]
        ), "busy"
    if status.last_step is None:
        return "This trace holds no step: the run ended before its first token.", "bad"
    return "", ""


def _format_bar(fraction: float) -> str:
    done = round(BAR_WIDTH * min(max(fraction, 0.0), 1.0))
    return "━" * done + "╌" * (BAR_WIDTH - done)


_TITLES = {
    "dead": "The trace was never ended.",
    "damaged": "This trace cannot be read from its beginning; what can be read is shown.",
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
    """A few lines that are there only when there is something to say."""

    def __init__(self) -> None:
        super().__init__("", id="notice", markup=False)
        self.display = False
        self._phase, self._since = "", time.monotonic()
        self._shown_text = ""

    def show_status(self, status: RunStatus) -> None:
        """Show what the status has to say, or nothing at all; costs nothing when unchanged."""
        if status.phase != self._phase:
            self._phase, self._since = status.phase, time.monotonic()
        text, kind = banner_text(status, int(time.monotonic() - self._since))
        if text == self._shown_text:
            return
        self._shown_text = text
        self.display = bool(text)
        self.set_class(kind == "bad", "bad")
        self.update(Content(text))


R = TypeVar("R")
PlaceLoadRequest = tuple[TracePlace, int]
"""A place, and the version of the trace that it is to be shown of."""


class LoadedLines(Canvas, Generic[R]):
    """Bound to the screen's `place` and `version`; a subclass loads, takes and draws."""

    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False, init=False)
    version: reactive[int] = reactive(0, repaint=False, init=False)

    def __init__(self, session: TraceSession, pool: Executor, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._session = session
        self._loader: Loader[PlaceLoadRequest, R] = Loader(
            pool,
            self._next_request,
            lambda wish: self._load(wish[0]),
            lambda _, found: self._show_loaded(found),
        )

    def _load(self, place: TracePlace) -> R:
        """Return what is to be drawn. Runs in a worker thread."""
        raise NotImplementedError

    def _show_loaded(self, found: R) -> None:
        """Draw what was loaded."""
        raise NotImplementedError

    @property
    def loader(self) -> Loader[Any, Any]:
        """What loads it; at rest when all that is wanted is on the screen."""
        return self._loader

    def on_mount(self) -> None:
        """Begin to load."""
        self.run_worker(self._loader.run(), exclusive=True)
        self._loader.request_load()

    def preload(self, place: TracePlace) -> None:
        """Load what this place will need, if it is where the user goes next."""
        self._loader.preload((place, self.version))

    def _next_request(self) -> PlaceLoadRequest:
        return self.place, self.version

    def watch_place(self) -> None:
        """The screen went elsewhere."""
        self._loader.request_load()

    def watch_version(self) -> None:
        """The trace grew."""
        self._loader.request_load()

    def on_resize(self, event: events.Resize) -> None:
        """Draw in the new size."""
        self.repaint()


@dataclass(frozen=True, slots=True)
class HeaderData:
    """What the two lines say of a place."""

    step: StepRow | None = None
    summary: FindingSummary | None = None


_NO_CAPTURE = CaptureStatus()


def header_parts(
    status: RunStatus,
    place: TracePlace,
    step: StepRow | None,
    *,
    following: bool,
    capture_status: CaptureStatus = _NO_CAPTURE,
) -> list[tuple[str, str, int]]:
    """Return the parts of the header: text, style, importance (1 is kept longest)."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    where = f"{model.get('device', '')} {model.get('dtype', '')}".strip()
    parts = [
        (escape_unprintable(str(model.get("name", "flexinspect"))), "title", 2),
        (escape_unprintable(where), "text", 6),
        (_format_level(status, capture_status), "text", 5),
    ]
    if status.generations > 1:
        # Counted from 0 up to the last one, like steps, and as --generation and findings count.
        parts.append((f"generation {place.generation}/{status.generations - 1}", "text", 3))
    if place.branch:
        parts.append((f"branch {place.branch}", "text", 3))
    parts.append((_format_step(status, place, step), "strong", 1))
    parts.append((_format_cost(status, step), "muted", 7))
    behind = (status.last_step or 0) - place.step
    halted = _format_halt(capture_status)
    if status.live and halted:
        parts.append((halted, "warn", 1))
    elif status.live and not following and behind > 0:
        parts.append((f"{behind} behind, f follows", "warn", 2))
    elif status.state == "recording":
        parts.append(("following" if following else "live", "good", 4))
    elif status.state in ("failed", "dead", "interrupted"):
        parts.append((status.state, "bad", 2))
    return parts


def _format_level(status: RunStatus, capture_status: CaptureStatus) -> str:
    """Return the level as it is now: a command may have changed that of the manifest."""
    return _live_level(capture_status) or escape_unprintable(str(status.run.get("level", "")))


def _live_level(capture_status: CaptureStatus) -> str:
    return capture_status.status.level if capture_status.status is not None else ""


_HALT_TEXTS = {"paused": "paused", "pausing": "pausing", "holding": "done, model held"}


def _format_halt(capture_status: CaptureStatus) -> str:
    """Return why no step comes, in a few words; empty when the model runs."""
    if capture_status.debugger_stop:
        return "held by a debugger"
    return (
        "held by a debugger?"
        if capture_status.is_unresponsive
        else _HALT_TEXTS.get(capture_status.state, "")
    )


def _format_step(status: RunStatus, place: TracePlace, step: StepRow | None) -> str:
    if status.last_step is None:
        return "no step yet"
    phase = f" {step.phase}" if step is not None else ""
    return f"step {place.step}/{status.last_step}{escape_unprintable(phase)}"


def _format_cost(status: RunStatus, step: StepRow | None) -> str:
    cost = status.run.get("cost")
    ratio = cost.get("ratio") if isinstance(cost, dict) else None
    if isinstance(ratio, (int, float)):
        return f"capture {100 * ratio:.1f} %"
    if step is not None and step.wall_ms and step.capture_ms == step.capture_ms:
        return f"capture {step.capture_ms:.2f} of {step.wall_ms:.1f} ms"
    return ""


def format_finding_summary(found: FindingSummary | None) -> tuple[str, str]:
    """Return the line of findings and its style."""
    if found is None:
        return "", "text"
    if found.errors:
        return f"✖ {found.text()}", "bad"
    if found.warnings:
        return f"▲ {found.text()}", "warn"
    return (f"● {found.text()}", "text") if found.notes else ("no findings", "muted")


_FINDING_STYLES = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "text"}


class TraceHeader(LoadedLines[HeaderData]):
    """Loads what both lines need, once; shows the header and hands the findings to their line."""

    DEFAULT_CSS = "TraceHeader { height: 1; }"
    following: reactive[bool] = reactive(True, repaint=False, init=False)

    def __init__(self, session: TraceSession, pool: Executor, findings: FindingLine) -> None:
        super().__init__(session, pool, id="header")
        self._findings = findings
        self._data = HeaderData()
        self.status = RunStatus()
        self._capture_status = CaptureStatus()

    @property
    def capture_status(self) -> CaptureStatus:
        """How the capture stands."""
        return self._capture_status

    @capture_status.setter
    def capture_status(self, capture_status: CaptureStatus) -> None:
        before = self._capture_status
        changed = (_format_halt(capture_status), _live_level(capture_status)) != (
            _format_halt(before),
            _live_level(before),
        )
        self._capture_status = capture_status
        if changed:
            self.repaint()

    def watch_place(self) -> None:
        """Name the new step at once: nothing has to be loaded for that."""
        super().watch_place()
        self.repaint()

    def watch_version(self) -> None:
        """Name the newest step at once."""
        super().watch_version()
        self.repaint()

    def watch_following(self) -> None:
        """Say so."""
        self.repaint()

    def _load(self, place: TracePlace) -> HeaderData:
        source = self._session.source
        if source is None:
            return HeaderData()
        try:
            step = source.reader.step(place.generation, place.step, place.branch)
            return HeaderData(step, load_summary(source, place))
        except FlexInspectError:
            return HeaderData()  # the panels say why

    def _show_loaded(self, found: HeaderData) -> None:
        self._data = found
        self.repaint()
        self._findings.show_summary(found.summary)

    def repaint(self) -> None:
        """Draw the header."""
        if self.size.width:
            step = self._data.step if self._data.step and self._is_current() else None
            parts = header_parts(
                self.status,
                self.place,
                step,
                following=self.following,
                capture_status=self._capture_status,
            )
            self.show([header(parts, self.size.width, theme_of(self.app))])

    def _is_current(self) -> bool:
        return self._data.step is not None and self._data.step.step == self.place.step


class FindingLine(Canvas):
    """One line: how many findings there are, and the one that matters here."""

    DEFAULT_CSS = "FindingLine { height: 1; }"

    def __init__(self) -> None:
        super().__init__(id="finding")
        self._summary: FindingSummary | None = None
        self._finding: Finding | None = None
        self._is_new_finding = False

    def show_summary(self, found: FindingSummary | None) -> None:
        """Show another summary, unless a finding that was gone to still stands here."""
        self._summary = found
        if self._finding is not None and not self._is_new_finding:
            self._finding = None
        self._is_new_finding = False
        self.repaint()

    def show_finding(self, finding: Finding) -> None:
        """Show one finding until the next step away from it."""
        self._finding, self._is_new_finding = finding, True
        self.repaint()

    def on_resize(self, event: events.Resize) -> None:
        """Draw in the new width."""
        self.repaint()

    def repaint(self) -> None:
        """Draw the line."""
        if not self.size.width:
            return
        theme = theme_of(self.app)
        text, style = format_finding_summary(self._summary)
        if self._finding is not None:
            text, style = (
                escape_unprintable(self._finding.sentence),
                _FINDING_STYLES[self._finding.severity],
            )
        self.show([line([(text, theme.style(style))], self.size.width, theme.style("text"))])
