"""The token strip: one line of the sequence around the current token, always on screen."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.strip import Strip

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Span, line
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCellRow, row_around
from flexinspect.panels.base import Missing, Navigate
from flexinspect.panels.token_window import (
    TokenWindow,
    load_token_window,
    segment_at,
    token_cells,
)
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PlaceLoadRequest, theme_of
from flexinspect.tui.trace_session import TraceSession

TOKEN_RADIUS = 96
"""Tokens loaded before and after the current one; few are narrower than two cells."""


def draw_token_strip(
    window: TokenWindow, width: int, theme: Theme
) -> tuple[list[Strip], TokenCellRow]:
    """Return the two lines of the strip, and the columns of its tokens.

    The first line has the tokens, the second the label of each segment at its start.
    """
    cells = token_cells(window, "probability")
    index = len(cells) - 1 if window.current is None else window.current - window.start
    row = row_around(cells, index, width)
    spans = row.spans(theme, current=window.current)
    return [
        line(spans, width, theme.style("text")),
        line(_draw_labels(row, window, width, theme), width, theme.style("text")),
    ], row


def _draw_labels(row: TokenCellRow, window: TokenWindow, width: int, theme: Theme) -> list[Span]:
    """Return the line below the tokens: the current position, and the labels that fit beside it."""
    candidates = sorted(_label_candidates(row, window), key=lambda label: not label[2])
    placed: list[tuple[int, str, bool]] = []
    for column, text, current in candidates:
        text = text[: max(width - column, 0)]
        is_free = all(
            column + len(text) <= at or column >= at + len(other) + 1 for at, other, _ in placed
        )
        if text and is_free:
            placed.append((column, text, current))
    spans: list[Span] = []
    used = 0
    for column, text, current in sorted(placed):
        spans.append((" " * (column - used), theme.style("text")))
        spans.append((text, theme.style("strong" if current else "muted")))
        used = column + len(text)
    return spans


def _label_candidates(row: TokenCellRow, window: TokenWindow) -> list[tuple[int, str, bool]]:
    """Return column and text of each possible label, and whether it is the current position."""
    labels: list[tuple[int, str, bool]] = []
    last = None
    for cell, column in zip(row.cells, row.columns, strict=False):
        segment = segment_at(window.segments, cell.pos)
        if cell.pos == window.current:
            labels.append((column, f"▲{cell.pos}", True))
        if segment is not None and segment is not last and segment.kind != "separator":
            labels.append((column, f"╵{escape_unprintable(segment.label)}", False))
        last = segment
    return labels


class TokenStrip(LoadedCanvas):
    """Two lines with the tokens around the screen's place."""

    DEFAULT_CSS = "TokenStrip { height: 2; }"

    @dataclass
    class TokenClicked(Message):
        """A token was clicked."""

        target: Navigate

    def __init__(self, session: TraceSession, pool: Executor) -> None:
        super().__init__(id="strip")
        self._session = session
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._window: TokenWindow | None = None
        self._row: TokenCellRow | None = None

    def _load(self, request: PlaceLoadRequest) -> TokenWindow | None:
        source, place = self._session.source, request[0]
        try:
            return None if source is None else load_token_window(source, place, TOKEN_RADIUS)
        except (Missing, FlexInspectError):
            return None  # the panels show the reason

    def _show_loaded(self, request: PlaceLoadRequest, loaded: TokenWindow | None) -> None:
        self._window = loaded
        self.repaint()

    def repaint(self) -> None:
        """Draw the loaded tokens."""
        if self._window is None or self.size.area == 0:
            self._row = None
            self.show([])
            return
        strips, self._row = draw_token_strip(self._window, self.size.width, theme_of(self.app))
        self.show(strips)

    def on_click(self, event: events.Click) -> None:
        """Go to the token that was clicked."""
        cell = self._row.cell_at(event.x) if self._row and event.y == 0 else None
        if cell is None or self._window is None:
            return
        token = self._window.token(cell.pos)
        if token is None:
            return
        is_prompt = token.step is None
        target = Navigate(step=0, pos=token.pos) if is_prompt else Navigate(step=token.step)
        self.post_message(self.TokenClicked(target))
