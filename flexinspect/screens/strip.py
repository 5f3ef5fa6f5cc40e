"""The token strip: one line of the sequence around the current token, always on screen."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.strip import Strip

from flexinspect.errors import FlexInspectError
from flexinspect.feed import Feed
from flexinspect.panels.base import Go, Missing, Place
from flexinspect.panels.parts.sequence import Window, load_window, segment_at, words
from flexinspect.screens.panelview import look_of
from flexinspect.screens.placed import PlacedLines
from flexinspect.text import visible
from flexinspect.widgets.lines import Span, line
from flexinspect.widgets.look import Look
from flexinspect.widgets.tokencells import Row, around

REACH = 96
"""Tokens before and after the current one; few words are shorter than two cells."""


def draw(window: Window, width: int, look: Look) -> tuple[list[Strip], Row]:
    """Return the two lines of the strip, and where its words lie.

    The first holds the words, the second names the segment under each of its beginnings.
    """
    found = words(window, "probability")
    index = len(found) - 1 if window.current is None else window.current - window.start
    row, _ = around(found, index, width)
    spans = row.spans(look, current=window.current, marked=frozenset())
    return [
        line(spans, width, look.style("text")),
        line(_labels(row, window, width, look), width, look.style("text")),
    ], row


def _labels(row: Row, window: Window, width: int, look: Look) -> list[Span]:
    """Return the line below the words: the current position first, segments where there is room."""
    found = sorted(_marks(row, window), key=lambda mark: not mark[2])
    placed: list[tuple[int, str, bool]] = []
    for column, text, current in found:
        text = text[: max(width - column, 0)]
        free = all(
            column + len(text) <= at or column >= at + len(other) + 1 for at, other, _ in placed
        )
        if text and free:
            placed.append((column, text, current))
    spans: list[Span] = []
    used = 0
    for column, text, current in sorted(placed):
        spans.append((" " * (column - used), look.style("text")))
        spans.append((text, look.style("strong" if current else "muted")))
        used = column + len(text)
    return spans


def _marks(row: Row, window: Window) -> list[tuple[int, str, bool]]:
    """Return (column, text, whether it is the current position) of all that could be written."""
    marks: list[tuple[int, str, bool]] = []
    last = None
    for word, column in zip(row.words, row.columns, strict=True):
        segment = segment_at(window.segments, word.pos)
        if word.pos == window.current:
            marks.append((column, f"▲{word.pos}", True))
        if segment is not None and segment is not last and segment.kind != "separator":
            marks.append((column, f"╵{visible(segment.label)}", False))
        last = segment
    return marks


class TokenStrip(PlacedLines[Window | None]):
    """Two lines that follow the screen's place."""

    DEFAULT_CSS = "TokenStrip { height: 2; }"

    @dataclass
    class Went(Message):
        """A token was clicked."""

        go: Go

    def __init__(self, feed: Feed, pool: Executor) -> None:
        super().__init__(feed, pool, id="strip")
        self._window: Window | None = None
        self._row: Row | None = None

    def _load(self, place: Place) -> Window | None:
        source = self._feed.source
        try:
            return None if source is None else load_window(source, place, REACH)
        except (Missing, FlexInspectError):
            return None  # the panels say why

    def _take(self, found: Window | None) -> None:
        self._window = found
        self.repaint()

    def repaint(self) -> None:
        """Draw what is loaded."""
        if self._window is None or self.size.area == 0:
            self._row = None
            self.show([])
            return
        strips, self._row = draw(self._window, self.size.width, look_of(self.app))
        self.show(strips)

    def on_click(self, event: events.Click) -> None:
        """Go to the token that was clicked."""
        word = self._row.at(event.x) if self._row and event.y == 0 else None
        if word is None or self._window is None:
            return
        token = self._window.token(word.pos)
        if token is None:
            return
        step = token.step
        self.post_message(self.Went(Go(step=0, pos=token.pos) if step is None else Go(step=step)))
