"""The two lines of facts: the header, and the line of findings."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from textual import events
from textual.reactive import reactive

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed, Status
from flexinspect.findings import Finding, Severity
from flexinspect.panels.base import Place
from flexinspect.panels.findings import FindingSummary, summary_line
from flexinspect.screens.panelview import look_of
from flexinspect.screens.placed import PlacedLines
from flexinspect.screens.remote import Standing
from flexinspect.text import visible
from flexinspect.trace.rows import StepRow
from flexinspect.widgets.canvas import Canvas
from flexinspect.widgets.header import header
from flexinspect.widgets.lines import line


@dataclass(frozen=True, slots=True)
class Facts:
    """What the two lines say of a place."""

    step: StepRow | None = None
    summary: FindingSummary | None = None


_UNKNOWN = Standing()


def header_parts(
    status: Status,
    place: Place,
    step: StepRow | None,
    *,
    following: bool,
    standing: Standing = _UNKNOWN,
) -> list[tuple[str, str, int]]:
    """Return the parts of the header: text, style, importance (1 is kept longest)."""
    model = status.run.get("model")
    model = model if isinstance(model, dict) else {}
    where = f"{model.get('device', '')} {model.get('dtype', '')}".strip()
    parts = [
        (visible(str(model.get("name", "flexinspect"))), "title", 2),
        (visible(where), "text", 6),
        (_level(status, standing), "text", 5),
    ]
    if status.generations > 1:
        # Counted from 0 up to the last one, like steps, and as --generation and findings count.
        parts.append((f"generation {place.generation}/{status.generations - 1}", "text", 3))
    if place.branch:
        parts.append((f"branch {place.branch}", "text", 3))
    parts.append((_steps(status, place, step), "strong", 1))
    parts.append((_cost(status, step), "muted", 7))
    behind = (status.last_step or 0) - place.step
    halted = _halted(standing)
    if status.live and halted:
        parts.append((halted, "warn", 1))
    elif status.live and not following and behind > 0:
        parts.append((f"{behind} behind, f follows", "warn", 2))
    elif status.state == "recording":
        parts.append(("following" if following else "live", "good", 4))
    elif status.state in ("failed", "dead", "interrupted"):
        parts.append((status.state, "bad", 2))
    return parts


def _level(status: Status, standing: Standing) -> str:
    """Return the level as it is now: a command may have changed that of the manifest."""
    return _level_of(standing) or visible(str(status.run.get("level", "")))


def _level_of(standing: Standing) -> str:
    return standing.status.level if standing.status is not None else ""


_HALTS = {"paused": "paused", "pausing": "pausing", "holding": "done, model held"}


def _halted(standing: Standing) -> str:
    """Return why no step comes, in a few words; empty when the model runs."""
    if standing.held:
        return "held by a debugger"
    return "held by a debugger?" if standing.is_silent else _HALTS.get(standing.state, "")


def _steps(status: Status, place: Place, step: StepRow | None) -> str:
    if status.last_step is None:
        return "no step yet"
    phase = f" {step.phase}" if step is not None else ""
    return f"step {place.step}/{status.last_step}{visible(phase)}"


def _cost(status: Status, step: StepRow | None) -> str:
    cost = status.run.get("cost")
    ratio = cost.get("ratio") if isinstance(cost, dict) else None
    if isinstance(ratio, (int, float)):
        return f"capture {100 * ratio:.1f} %"
    if step is not None and step.wall_ms and step.capture_ms == step.capture_ms:
        return f"capture {step.capture_ms:.2f} of {step.wall_ms:.1f} ms"
    return ""


def finding_text(found: FindingSummary | None) -> tuple[str, str]:
    """Return the line of findings and its style."""
    if found is None:
        return "", "text"
    if found.errors:
        return f"✖ {found.text()}", "bad"
    if found.warnings:
        return f"▲ {found.text()}", "warn"
    return (f"● {found.text()}", "text") if found.notes else ("no findings", "muted")


_STYLES = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "text"}


class FactLines(PlacedLines[Facts]):
    """Loads what both lines need, once; shows the header and hands the findings to their line."""

    DEFAULT_CSS = "FactLines { height: 1; }"
    following: reactive[bool] = reactive(True, repaint=False, init=False)

    def __init__(self, feed: Feed, pool: Executor, findings: FindingLine) -> None:
        super().__init__(feed, pool, id="header")
        self._findings = findings
        self._facts = Facts()
        self.status = Status()
        self._standing = Standing()

    @property
    def standing(self) -> Standing:
        """How the capture stands."""
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        before = self._standing
        changed = (_halted(standing), _level_of(standing)) != (_halted(before), _level_of(before))
        self._standing = standing
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

    def _load(self, place: Place) -> Facts:
        source = self._feed.source
        if source is None:
            return Facts()
        try:
            step = source.reader.step(place.generation, place.step, place.branch)
            return Facts(step, summary_line(source, place))
        except FlexInspectError:
            return Facts()  # the panels say why

    def _take(self, found: Facts) -> None:
        self._facts = found
        self.repaint()
        self._findings.say(found.summary)

    def repaint(self) -> None:
        """Draw the header."""
        if self.size.width:
            step = self._facts.step if self._facts.step and self._fits() else None
            parts = header_parts(
                self.status,
                self.place,
                step,
                following=self.following,
                standing=self._standing,
            )
            self.show([header(parts, self.size.width, look_of(self.app))])

    def _fits(self) -> bool:
        return self._facts.step is not None and self._facts.step.step == self.place.step


class FindingLine(Canvas):
    """One line: how many findings there are, and the one that matters here."""

    DEFAULT_CSS = "FindingLine { height: 1; }"

    def __init__(self) -> None:
        super().__init__(id="finding")
        self._summary: FindingSummary | None = None
        self._told: Finding | None = None
        self._told_now = False

    def say(self, found: FindingSummary | None) -> None:
        """Show another summary, unless a finding that was gone to still stands here."""
        self._summary = found
        if self._told is not None and not self._told_now:
            self._told = None
        self._told_now = False
        self.repaint()

    def tell(self, finding: Finding) -> None:
        """Show one finding until the next step away from it."""
        self._told, self._told_now = finding, True
        self.repaint()

    def on_resize(self, event: events.Resize) -> None:
        """Draw in the new width."""
        self.repaint()

    def repaint(self) -> None:
        """Draw the line."""
        if not self.size.width:
            return
        look = look_of(self.app)
        text, style = finding_text(self._summary)
        if self._told is not None:
            text, style = visible(self._told.sentence), _STYLES[self._told.severity]
        self.show([line([(text, look.style(style))], self.size.width, look.style("text"))])
