"""A mask in words: segments, positions and cells, and the picture of its phases as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from msgspec import Struct, field
from rich.cells import cell_len

from flexinspect.core.languages import Labels
from flexinspect.core.text import printable, truncate
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.census import past_cells, take_census
from flexinspect.masks.counting import Counts
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import IntArray, Segments
from flexinspect.masks.viewport import BOTH, CLOSED, LEAKED, LOST, OPEN, UNKNOWN
from flexinspect.records.prompt import Segment, SegmentKind, generated_start, segment_index

MAX_SHOWN_SEGMENTS, MAX_SHOWN_TOKENS = 12, 8
"""Segments and generated tokens that the text picture shows."""

MAX_NAME = 14  # characters of a word at a row of a picture

ALL, SOME, NONE = "■", "▒", "·"
STATE_CHARACTERS = {
    **dict.fromkeys(range(CLOSED + 1, OPEN), SOME),
    CLOSED: NONE,
    OPEN: ALL,
    LOST: "-",
    LEAKED: "+",
    BOTH: "±",
    UNKNOWN: "?",
}


class Places(Struct, frozen=True):
    """Names the places of a mask in one language; `words` are token texts by position."""

    labels: Labels
    segments: Segments = ()
    words: Mapping[int, str] = field(default_factory=dict)

    def segment(self, segment: Segment, position: int | None = None) -> str:
        """Return the name of a segment, of a generated token if a position is given."""
        if segment.kind is SegmentKind.GENERATED:
            if position is None:
                return self.labels("text_generated_tokens")
            return self.labels("text_generated", number=position - segment.start + 1)
        numbered = re.fullmatch(rf"{segment.kind.value}(?: (\d+))?", segment.label)
        if numbered is None:
            return printable(segment.label)
        return self.labels(f"text_{segment.kind.value}", number=numbered[1] or "").strip()

    def position(self, position: int) -> str:
        """Return `23 ("the", paraphrase 2)`, as much of it as is known."""
        if not self.segments:
            return str(position)
        segment = self.segments[segment_index(self.segments, position)]
        facts = {"position": position, "segment": self.segment(segment, position)}
        if (word := self.words.get(position)) is not None:
            return self.labels("text_position_word", word=printable(word), **facts)
        return self.labels("text_position", **facts)

    def cell(self, row: int, key: int, *, is_open: bool = True, head: int | None = None) -> str:
        """Return `row 23 (paraphrase 2) attends to key 3 (paraphrase 1)`."""
        label = "text_cell" if is_open else "text_cell_lost"
        cell = self.labels(label, row=self.position(row), key=self.position(key))
        return cell if head is None else self.labels("text_head", head=head, cell=cell)


# -- the phases as text ---------------------------------------------------------------------------


class PhaseTable(Struct, frozen=True):
    """The open cells of segments, with their separators, and of each generated token.

    `names` are Seg1, Seg2, ..., Gen1, Gen2, ... in the order of rows and keys, "" for the segments
    or tokens that are not shown; the first `n_segments` are segments. `open` and `past` count open
    cells and those up to the diagonal, int64 (names, names).
    """

    names: tuple[str, ...]
    n_segments: int
    open: Counts
    past: Counts

    def is_isolated(self, row: int) -> bool:
        """Whether a paraphrase attends to itself and to no other paraphrase."""
        paraphrases = [n for n in range(self.n_segments) if self.names[n][:3] in ("Seg", "")]
        others = [key for key in paraphrases if key != row]
        is_alone = bool(self.open[row, row]) and not self.open[row, others].any()
        return row in paraphrases and len(others) > 0 and is_alone

    def is_fused(self, row: int) -> bool:
        """Whether a generated token attends to all keys up to its own."""
        return bool((self.open[row] >= self.past[row]).all())


def phase_table(mask: CellMask, segments: Segments, *, head: int = 0) -> PhaseTable:
    """Count the open cells of segments and of generated tokens, each of the first ones by itself.

    Other text than paraphrases is named by its kind.
    """
    starts, names = _phase_ranges(segments)
    if not starts:
        return PhaseTable((), 0, np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
    edges: IntArray = np.array([*starts, segments[-1].stop], np.int32)
    table = take_census(mask, edges, edges, head=head).table
    generated = generated_start(segments)
    n_segments = len(starts) if generated is None else int((edges[:-1] < generated).sum())
    return PhaseTable(tuple(names), n_segments, table, past_cells(edges, edges))


def _phase_ranges(segments: Segments) -> tuple[list[int], list[str]]:
    """Return where the ranges of a phase table start, and their names."""
    starts: list[int] = []
    names: list[str] = []
    n_paraphrases = 0
    for index, segment in enumerate(segments):
        if segment.kind is SegmentKind.GENERATED:
            shown = range(segment.start, min(segment.stop, segment.start + MAX_SHOWN_TOKENS))
            starts += shown
            names += [f"Gen{number}" for number in range(1, len(shown) + 1)]
            if segment.stop > shown.stop:
                starts.append(shown.stop)
                names.append("")
        elif segment.owner == index and len(starts) <= MAX_SHOWN_SEGMENTS:
            is_paraphrase = segment.kind is SegmentKind.PARAPHRASE
            n_paraphrases += is_paraphrase
            name = f"Seg{n_paraphrases}" if is_paraphrase else segment.kind.value.title()
            names.append(name if len(starts) < MAX_SHOWN_SEGMENTS else "")
            starts.append(segment.start)
    return starts, names


def phase_lines(table: PhaseTable, labels: Labels) -> list[str]:
    """Draw the encoding and the generation phase as text.

    One row per segment and one per generated token; a mark says whether it attends to all, some or
    none of the keys before it. Paraphrases that attend to no other one are marked as isolated, rows
    that attend to all keys before them as fusion. Of long lists the first ones are shown.
    """
    n, lines = table.n_segments, []
    if n:
        lines += [labels("text_encoding"), *_phase_rows(table, range(n), range(n), labels), ""]
    if tokens := range(n, len(table.names)):
        keys = range(len(table.names))
        lines += [labels("text_generation"), *_phase_rows(table, tokens, keys, labels), ""]
    return [*lines, labels("text_legend", all=ALL, some=SOME, none=NONE)] if lines else []


def _phase_rows(table: PhaseTable, rows: range, keys: range, labels: Labels) -> list[str]:
    names = [name or "…" for name in table.names]
    width = max(len(names[index]) for index in {*rows, *keys}) + 1
    lines = ["".join([" " * (width + 2), *(names[key].rjust(width) for key in keys)])]
    for row in rows:
        line = f"  {names[row].rjust(width)}"
        if table.names[row]:
            marks = (_mark(int(table.open[row, key]), int(table.past[row, key])) for key in keys)
            line += "".join(mark.rjust(width) for mark in marks)
            if row < table.n_segments:
                line += f"  {labels('text_isolated')}" if table.is_isolated(row) else ""
            elif table.is_fused(row):
                line += f"  {labels('text_fusion')}"
        lines.append(line)
    return lines


def _mark(n_open: int, past: int) -> str:
    return NONE if n_open == 0 else ALL if n_open >= past > 0 else SOME


# -- the picture in characters --------------------------------------------------------------------


def row_names(picture: MaskPicture) -> list[str]:
    """Return the name of each row of a picture: its word, Seg1 or Gen1 where they begin, or ""."""
    names = {}
    n_paraphrases = 0
    for segment in picture.segments:
        if segment.kind is SegmentKind.PARAPHRASE:
            n_paraphrases += 1
            names[segment.start] = f"Seg{n_paraphrases}"
        elif segment.kind is SegmentKind.GENERATED:
            tokens = range(segment.start, segment.stop)
            names |= {at: f"Gen{number}" for number, at in enumerate(tokens, start=1)}
    words = {at: truncate(printable(word), MAX_NAME) for at, word in picture.words.items()}
    edges = picture.row_edges.tolist()
    return [
        words.get(start, names.get(start, "")) if stop - start == 1 else names.get(start, "")
        for start, stop in pairwise(edges)
    ]


def picture_lines(picture: MaskPicture, labels: Labels) -> list[str]:
    """Draw a picture in characters, one per cell, with a legend of those that occur."""
    names = row_names(picture)
    width = max((cell_len(name) for name in names), default=0)
    lines = []
    for name, states, is_empty in zip(
        names, picture.states.tolist(), picture.empty_rows.tolist(), strict=True
    ):
        cells = " ".join(STATE_CHARACTERS[state] for state in states)
        pad = " " * (width - cell_len(name))
        lines.append(f"{pad}{name} {cells}{' ∅' if is_empty else ''}"[0 if width else 1 :])
    if picture.unseen_keys.any():
        marks = " ".join("∅" if unseen else " " for unseen in picture.unseen_keys.tolist())
        lines.append(f"{' ' * width} {marks}"[0 if width else 1 :].rstrip())
    return [*lines, "", *legend_lines(picture, labels)]


LEGEND = {OPEN: "open", 3: "share", CLOSED: "closed", LOST: "lost", LEAKED: "leaked", BOTH: "both"}


def legend_lines(picture: MaskPicture, labels: Labels) -> list[str]:
    """Return the meaning of the characters of a picture."""
    found = set(np.flatnonzero(np.bincount(picture.states.ravel())).tolist())
    found = {3 if CLOSED < state < OPEN else state for state in found}
    entries = [
        f"{STATE_CHARACTERS[state]} {labels(f'text_{name}')}"
        for state, name in LEGEND.items()
        if state in found
    ]
    return ["   ".join([*entries, *mark_meanings(picture, labels)])]


def mark_meanings(picture: MaskPicture, labels: Labels) -> list[str]:
    """Return the meaning of the marks beside a picture, if there are any."""
    flags = {"empty_row": picture.empty_rows, "unseen_key": picture.unseen_keys}
    return [f"∅ {labels(f'text_{name}')}" for name, flag in flags.items() if flag.any()]


def size_line(picture: MaskPicture, labels: Labels) -> str:
    """Return `143 rows × 143 keys, shown in 31 × 31 cells`."""
    n_rows, n_keys = (int(edges[-1]) for edges in (picture.row_edges, picture.key_edges))
    text = labels("text_size", rows=n_rows, keys=n_keys)
    if picture.is_sampled:
        rows, keys = picture.states.shape
        text = labels("text_sampled", size=text, rows=rows, keys=keys)
    return text
