"""The cells of a mask around the place of a finding: a small picture beside its sentence."""

from __future__ import annotations

from msgspec import Struct

from flexinspect.drawing.text_lines import NamedSpan, clip_text, visible
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN, UNKNOWN
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask.cell_states import find_center, load_mask_view, row_states
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments, load_token_cells

N_ROWS, N_KEYS = 5, 7
CELL_WIDTH = 3
"""Columns of a cell, which show the beginning of a word."""
ROW_WORD_WIDTH = 8
CELLS_WIDTH = ROW_WORD_WIDTH + N_KEYS * CELL_WIDTH + 1
"""Columns of the picture."""

_SIGNS = {
    OPEN: ("■", "text"),
    CLOSED: ("·", "muted"),
    LEAKED: ("✖", "bad"),
    LOST: ("□", "warn"),
    UNKNOWN: ("?", "muted"),
}


class CellsAround(Struct, frozen=True):
    """The words of some rows and keys, and the state of each of their cells."""

    row_words: tuple[str, ...]
    key_words: tuple[str, ...]
    states: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """The columns of the picture."""
        return ROW_WORD_WIDTH + 1 + CELL_WIDTH * len(self.key_words)

    def lines(self) -> list[list[NamedSpan]]:
        """Return the words of the keys, then a line per row, as spans of `width` cells."""
        words = "".join(clip_text(word, CELL_WIDTH - 1) + " " for word in self.key_words)
        lines: list[list[NamedSpan]] = [[(" " * (ROW_WORD_WIDTH + 1) + words, "muted")]]
        for word, row in zip(self.row_words, self.states, strict=True):
            cells = [
                (sign.ljust(CELL_WIDTH), style) for sign, style in map(_SIGNS.__getitem__, row)
            ]
            lines.append([(clip_text(word, ROW_WORD_WIDTH) + " ", "muted"), *cells])
        return lines


def load_cells_around(source: Source, place: TracePlace, pos: int | None) -> CellsAround | None:
    """Return the cells around the first difference in the row of `pos`, or else in the mask.

    Without a difference they are those around cell (`pos`, `pos`). None if there are none, for
    instance because no mask was recorded.
    """
    view = load_mask_view(source, place)
    center = None if view is None else find_center(view, pos)
    if view is None or center is None:
        return None
    rows = range(view.n_rows)[visible(center[0], N_ROWS, view.n_rows)]
    keys = range(view.n_keys)[visible(center[1], N_KEYS, view.n_keys)]
    positions = view.positions[rows.start : rows.stop].tolist()
    segments = load_segments(source.reader, place)
    tokens = load_token_cells(source, place, segments, {*positions, *keys})
    words = {at: cell.text.strip() or cell.text for at, cell in tokens.items()}
    return CellsAround(
        tuple(words.get(at, str(at)) for at in positions),
        tuple(words.get(at, str(at)) for at in keys),
        tuple(tuple(row_states(view, row)[keys.start : keys.stop].tolist()) for row in rows),
    )
