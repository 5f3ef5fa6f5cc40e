"""The diagnosis: the worst finding of a place and its fix in a few lines, or what was verified."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.cells import cell_len
from textual import events
from textual.message import Message
from textual.strip import Strip

from flexinspect.core.errors import FlexInspectError
from flexinspect.drawing.text_lines import NamedSpan, Pen, clip_text, join_blocks
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.findings_of_place import FindingSummary, load_summary, navigate_to_finding
from flexinspect.panels.findings_panel import Coverage, describe_coverage, load_coverage
from flexinspect.records.finding import Finding, Severity
from flexinspect.tui.code_editor import ABOUT_ATTENTION
from flexinspect.tui.panel_view import LoadedCanvas, Loader, theme_of
from flexinspect.tui.trace_session import TraceSession

if TYPE_CHECKING:
    from flexinspect.panels.mask.cells_around import CellsAround

SIGNS = {
    Severity.ERROR: ("✖", "bad"),
    Severity.WARNING: ("▲", "warn"),
    Severity.NOTE: ("●", "strong"),
}
"""The sign of a finding, and the name of its style."""

MIN_TEXT_WIDTH = 60
"""Columns of text that the picture of the cells must leave."""


class Diagnosis(Struct, frozen=True):
    """What the card shows: a finding with the cells around it, or what was verified without any.

    All are None before anything is recorded.
    """

    summary: FindingSummary | None = None
    finding: Finding | None = None
    coverage: Coverage | None = None
    cells: CellsAround | None = None


CardRequest = tuple[TracePlace, int, Finding | None]
"""The place, the version of the trace, and the finding that the user went to."""


def card_height(screen_height: int) -> int:
    """Return the lines of the card on a screen of this many lines; 0 where panels need them all."""
    heights = ((44, 6), (30, 5), (20, 4), (14, 2), (8, 1))
    return next((lines for least, lines in heights if screen_height >= least), 0)


LINES_WITHOUT_FINDING = 2
"""Lines that most traces without a finding need: a guess, until the trace is read."""


class DiagnosisCard(LoadedCanvas):
    """Shows the finding that the user went to, or else the worst one of the place's generation."""

    DEFAULT_CSS = "DiagnosisCard { height: 4; }"

    class Shown(Message):
        """The card shows another finding, or none."""

    class Opened(Message):
        """The user clicked the card, to read all of the finding."""

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="diagnosis")
        self._session = session
        self.loader = Loader(pool, self._next_request, self._load, self._show_loaded)
        self._diagnosis = Diagnosis()
        self._max_height = 0
        self._is_loaded = False
        self._visited: tuple[TracePlace, Finding] | None = None
        self._first_line = 0

    @property
    def finding(self) -> Finding | None:
        """The finding that is shown."""
        return self._diagnosis.finding

    def show_finding(self, finding: Finding) -> None:
        """Show a finding until the user leaves its place."""
        self._visited = (self.trace_screen.place, finding)
        self.loader.request_load()

    def _next_request(self) -> CardRequest:
        place, version = self.place_request()
        if self._visited is not None and self._visited[0] != place:
            self._visited = None
        return place, version, self._visited[1] if self._visited is not None else None

    def preload(self, place: TracePlace) -> None:
        self.loader.preload((place, self.trace_screen.version, None))

    def _load(self, request: CardRequest) -> Diagnosis:
        place, _, visited = request
        source = self._session.source
        if source is None or self._session.is_waiting:
            return Diagnosis()
        try:
            summary = load_summary(source, place)
            finding = visited or summary.worst
            if finding is None:
                return Diagnosis(summary, coverage=load_coverage(source.reader))
        except FlexInspectError:
            return Diagnosis()  # the panels show the reason
        return Diagnosis(summary, finding, cells=self._load_cells(place, finding))

    def _load_cells(self, place: TracePlace, finding: Finding) -> CellsAround | None:
        """Return the cells around the first position of a finding about a mask, if they fit."""
        source = self._session.source
        if source is None or not _is_about_mask(finding) or not self._has_room_for_cells():
            return None
        # The mask panel has loaded them already; another layout does not need them.
        from flexinspect.panels.mask.cells_around import load_cells_around

        target = navigate_to_finding(finding)
        where = TracePlace(
            finding.generation,
            finding.branch,
            place.step if finding.step is None else finding.step,
            place.layer if finding.layer is None else finding.layer,
            place.head if finding.head is None else finding.head,
        )
        with suppress(Missing, FlexInspectError):  # the mask panel shows the reason
            return load_cells_around(source, where, target.pos)
        return None

    def _has_room_for_cells(self) -> bool:
        from flexinspect.panels.mask.cells_around import CELLS_WIDTH

        return self.size.height >= 4 and self.size.width - CELLS_WIDTH >= MIN_TEXT_WIDTH

    def _show_loaded(self, request: CardRequest, loaded: Diagnosis) -> None:
        if loaded != self._diagnosis or not self._is_loaded:  # most steps have the same one
            self._diagnosis, self._is_loaded, self._first_line = loaded, True, 0
            self._set_height()
            self.repaint()
            self.post_message(self.Shown())

    def fit_screen(self, screen_height: int) -> None:
        """Take the lines that the panels of a screen of this height can spare."""
        self._max_height = card_height(screen_height)
        self._set_height()

    def _set_height(self) -> None:
        width = self.size.width or self.app.size.width
        verified = _draw_verified(self._diagnosis, Pen(theme_of(self.app), width))
        needed = len(verified) if self._is_loaded else LINES_WITHOUT_FINDING
        lines = self._max_height if self._diagnosis.finding is not None else needed
        self.styles.height = max(min(lines, self._max_height), 1)
        self.display = min(lines, self._max_height) > 0

    def on_resize(self, event: events.Resize) -> None:
        self.loader.request_load()
        self.repaint()

    def repaint(self) -> None:
        """Draw the finding with the cells at its right, or what was verified."""
        width, height = self.size
        if not width or not height:
            return
        pen, diagnosis = Pen(theme_of(self.app), width), self._diagnosis
        if diagnosis.finding is None:
            self.show(_draw_verified(diagnosis, pen)[:height])
            return
        keys = {name: str(self.app.keys_of(name)) for name in CARD_KEYS}  # type: ignore[attr-defined]
        self.show(_draw_finding(diagnosis, diagnosis.finding, pen, height, keys, self._first_line))

    def on_click(self) -> None:
        """Ask to show the whole finding."""
        self.post_message(self.Opened())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the text of the finding."""
        self._scroll(event, 1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the text of the finding back."""
        self._scroll(event, -1)

    def _scroll(self, event: events.MouseEvent, n_lines: int) -> None:
        finding, (width, height) = self._diagnosis.finding, self.size
        if finding is None or not height:
            return
        event.stop()
        text = _text_of(self._diagnosis, finding, Pen(theme_of(self.app), width))
        last = max(len(text.sentence) + len(text.fix) - _room(height), 0)
        first = min(max(self._first_line + n_lines, 0), last)
        if first != self._first_line:
            self._first_line = first
            self.repaint()


def _is_about_mask(finding: Finding) -> bool:
    return finding.id.partition(".")[0] in ("mask", "segments", "decode", "attention")


def _asks_for_declaration(finding: Finding) -> bool:
    """Whether `mask.declare` answers the finding: its segments were not declared."""
    is_inferred = finding.id in ("segments.inferred", "segments.suspect-border")
    return is_inferred and "flexinspect declare" in finding.fix


CARD_KEYS = {
    "finding.read": "reads on",
    "finding.next": "next",
    "code.show": "why",
    "code.open": "code",
    "mask.declare": "declares the mask",
}
"""The actions that the last line of the card names, and what they do."""


class _CardText(Struct, frozen=True):
    """The lines of a finding, as wide as the `picture` of the cells at their right lets them."""

    pen: Pen
    sentence: list[Strip]
    fix: list[Strip]
    picture: list[Strip]

    def lines(self, room: int, style: str, first_line: int) -> tuple[list[Strip], bool]:
        """Return `room` lines, and whether any are left out below.

        Unless it is scrolled, the card keeps a line or two for the fix, which says what to do.
        """
        if first_line:
            whole = [*self.sentence, *self.fix]
            return whole[first_line : first_line + room], first_line + room < len(whole)
        n_fix = min(len(self.fix), 2 if room >= 4 else 1) if room > 1 else 0
        shown, is_cut = _cut(self.sentence, max(room - n_fix, 1), self.pen, style)
        fix, is_fix_cut = _cut(self.fix, room - len(shown), self.pen, "text")
        return [*shown, *fix], is_cut or is_fix_cut


def _text_of(diagnosis: Diagnosis, finding: Finding, pen: Pen) -> _CardText:
    cells = diagnosis.cells.lines() if diagnosis.cells is not None else []
    picture_width = max((sum(cell_len(text) for text, _ in line) for line in cells), default=0)
    picture = [pen.resize(picture_width).line(*line) for line in cells]
    narrow = pen.resize(pen.width - picture_width - (4 if cells else 2))
    where = f"generation {finding.generation}: " if _is_elsewhere(diagnosis) else ""
    sentence = narrow.paragraph(where + finding.sentence, SIGNS[finding.severity][1])
    fix = narrow.paragraph(f"Fix: {finding.fix}") if finding.fix else []
    return _CardText(narrow, sentence, fix, picture)


def _room(height: int) -> int:
    """Return the lines of text of a card: its last line names the keys."""
    return height - 1 if height > 1 else 1


def _draw_finding(
    diagnosis: Diagnosis,
    finding: Finding,
    pen: Pen,
    height: int,
    keys: dict[str, str],
    first_line: int,
) -> list[Strip]:
    sign, style = SIGNS[finding.severity]
    text = _text_of(diagnosis, finding, pen)
    lines, is_cut = text.lines(_room(height), style, first_line)
    lines += [text.pen.line()] * (_room(height) - len(lines))
    if height > 1:
        lines.append(text.pen.line(*_key_spans(diagnosis, keys, is_cut=is_cut)))
    bar = Pen(pen.theme, 2)
    margin = [bar.line((sign if n == 0 else "┃", style)) for n in range(len(lines))]
    blank, picture = pen.style("text"), text.picture[:height]
    return join_blocks(join_blocks(margin, lines, blank), picture, blank, gap=2 if picture else 0)


def _cut(strips: list[Strip], room: int, pen: Pen, style: str) -> tuple[list[Strip], bool]:
    """Return the lines of a paragraph for which there is room, with "…" at the end if it is cut."""
    if len(strips) <= room:
        return strips, False
    shown = strips[: max(room, 0)]
    if shown:
        shown[-1] = pen.line((clip_text(f"{shown[-1].text.rstrip()} …", pen.width), style))
    return shown, True


def _is_elsewhere(diagnosis: Diagnosis) -> bool:
    summary = diagnosis.summary
    return summary is not None and summary.elsewhere and diagnosis.finding is summary.worst


def _key_spans(diagnosis: Diagnosis, keys: dict[str, str], *, is_cut: bool) -> Iterator[NamedSpan]:
    """Yield the number of findings and the keys of the card."""
    counts = diagnosis.summary.counts() if diagnosis.summary is not None else ""
    yield counts, "strong"
    finding = diagnosis.finding
    left_out = set()
    if finding is None or not _is_about_mask(finding):
        left_out.add("code.show")
        if finding is None or finding.id.partition(".")[0] not in ABOUT_ATTENTION:
            left_out.add("code.open")
    if finding is None or not _asks_for_declaration(finding):
        left_out.add("mask.declare")
    for name, text in CARD_KEYS.items():
        if name in left_out:
            continue
        more = " (there is more)" if name == "finding.read" and is_cut else ""
        yield " · ", "muted"
        yield keys[name].split()[0], "accent"
        yield f" {text}{more}", "muted"


def _draw_verified(diagnosis: Diagnosis, pen: Pen) -> list[Strip]:
    if diagnosis.coverage is None:
        return []
    lines = [line for line in describe_coverage(diagnosis.coverage) if line[1] != "muted"]
    is_good = bool(lines) and lines[0][1] == "good"
    narrow = pen.resize(pen.width - 2)
    shown = narrow.paragraphs(lines)
    sign = ("✓", "good") if is_good else ("·", "muted")
    margin = [Pen(pen.theme, 2).line(sign if n == 0 else ("", "text")) for n in range(len(shown))]
    return join_blocks(margin, shown, pen.style("text"))
