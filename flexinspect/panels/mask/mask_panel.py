"""The mask panel: which tokens attend to which, as executed, and how that differs from declared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import numpy as np
from msgspec.structs import replace
from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.heatmap import RGB, Levels, Palette, blend, heat
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text, merge_spans
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, token_style
from flexinspect.masks.viewport import APPLIED, BOTH, CLOSED, LEAKED, LOST, N_STATES, OPEN, UNKNOWN
from flexinspect.panels.base import CURSOR_MOVES, Help, Navigate, Panel, Picture, Request
from flexinspect.panels.mask import mask_text
from flexinspect.panels.mask.mask_data import (
    MaskData,
    MaskOptions,
    MaskViewMode,
    format_scale,
    load_mask,
    scroll_window,
    segment_color_at,
    segment_number,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.prompt import SegmentKind

VIEW_MODES: tuple[MaskViewMode, ...] = ("executed", "received", "declared", "difference")


class MaskPanel(Panel[MaskData, MaskOptions]):
    """The mask of the whole sequence: a row per input token, a column per key."""

    name = "mask"
    title = "Mask"
    initial_options = MaskOptions()
    needs_tokens = True
    help = Help(
        "It shows for one layer and head which tokens (across) each token (down) attends to: the "
        "executed, received or declared mask, or where the executed mask differs from the declared "
        "one.",
        "Bright cells are open, dark ones closed, in between where a pixel holds both; the axes "
        "show the tokens and their segments, and the text below explains the cell under the "
        "cursor.",
        "Look for lost cells (declared open, but not executed), leaked cells (executed, but "
        "declared closed), rows that attend to no key, and paraphrases that attend to each other.",
    )
    depends_on_size = True
    actions = ("zoom.in", "zoom.out", "view.flip", "view.blocks", *CURSOR_MOVES, "cursor.enter")

    def load(self, source: Source, request: Request[MaskOptions]) -> MaskData:
        """Read the visible window; parts of the mask are cached for the next step."""
        return load_mask(source, request)

    def describe(self, data: MaskData) -> list[str]:
        """Describe the mask, its differences from the declared one, and the cursor's cell."""
        return mask_text.describe_mask(data)

    def paint(self, data: MaskData, request: Request[MaskOptions], theme: Theme) -> Picture:
        """Draw the visible window."""
        strips = draw_mask(data, theme)[: request.height]
        if data.layout.width != request.width:  # the panel was resized since it was loaded
            strips = [strip.adjust_cell_length(request.width) for strip in strips]
        return Picture(
            strips, format_note(data), data.lse_check.is_failed or mask_text.has_difference(data)
        )

    def on_action(
        self, action: str, data: MaskData, request: Request[MaskOptions]
    ) -> MaskOptions | Navigate | None:
        """Zoom, flip the view, show blocks, move the cursor, go to the step of the cursor's row."""
        options, layout = request.options, data.layout
        if action in ("zoom.in", "zoom.out"):
            zoom = layout.zoom + (1 if action == "zoom.in" else -1)
            if not 0 <= zoom <= layout.last_zoom:
                return None
            return replace(options, zoom=zoom, row=None, key=None)
        if action == "view.flip":
            modes = [m for m in VIEW_MODES if data.mask_view.spec or m in ("executed", "received")]
            mode = data.view_mode if data.view_mode in modes else modes[0]
            return request.with_next("view", modes, mode)
        if action == "view.blocks":
            return replace(options, blocks=not options.blocks)
        if action == "cursor.enter" and data.cursor is not None:
            row = data.cursor[0]
            step_rows = data.mask_view.part_of(row).step_at(row)
            pos = None if step_rows.n_rows == 1 else int(data.mask_view.positions[row])
            return Navigate(step=step_rows.step, pos=pos)
        return _move_cursor(action, data, options) if action in CURSOR_MOVES else None

    def on_mouse(
        self, x: int, y: int, data: MaskData, request: Request[MaskOptions], *, click: bool
    ) -> MaskOptions | Navigate | None:
        """Move the cursor to the mouse without scrolling the window."""
        cell, grid = data.layout.cell_at(x, y), data.layout.grid
        if cell is None or cell[0] >= data.mask_view.n_rows or cell[1] >= data.mask_view.n_keys:
            return None
        options = replace(request.options, row=grid.row, key=grid.key)
        return None if cell == data.cursor else _with_cursor(data, options, cell)


def format_note(data: MaskData) -> str:
    """Return the note in the border: problems first, because a narrow panel cuts its end."""
    mask_view, layer = data.mask_view, data.place.layer
    shared = mask_view.heads == 1  # all heads have the same mask
    head = "all heads" if shared else f"head {mask_view.head} of {mask_view.heads}"
    where, scale = f"layer {layer} · {head}", f"zoom {format_scale(data.layout)}"
    if data.layout.width < NARROW_WIDTH:
        where = f"L{layer} " + ("all" if shared else f"H{mask_view.head}/{mask_view.heads}")
        scale = format_scale(data.layout)
    show_difference = mask_text.has_difference(data) or data.view_mode == "difference"
    parts = [
        data.view_mode,
        mask_text.format_difference(data) if show_difference else "",
        data.lse_check.describe() + (": not what ran" if data.lse_check.is_failed else ""),
        where,
        scale,
        f"rows of {mask_text.format_steps(data)}" if mask_view.is_truncated else "",
    ]
    return " · ".join(part for part in parts if part)


def _move_cursor(action: str, data: MaskData, options: MaskOptions) -> MaskOptions | None:
    mask_view, grid = data.mask_view, data.layout.grid
    if data.cursor is None:
        row = mask_view.n_rows - 1 if data.focus_row is None else data.focus_row
        cell = row, min(int(mask_view.positions[row]), mask_view.n_keys - 1)
    else:
        down, across = CURSOR_MOVES[action]
        row = data.cursor[0] + down * grid.row_scale
        key = data.cursor[1] + across * grid.key_scale
        cell = min(max(row, 0), mask_view.n_rows - 1), min(max(key, 0), mask_view.n_keys - 1)
        if cell == data.cursor:
            return None
    first_row, first_key = scroll_window(data.layout, *cell)
    return _with_cursor(data, replace(options, row=first_row, key=first_key), cell)


def _with_cursor(data: MaskData, options: MaskOptions, cell: tuple[int, int]) -> MaskOptions:
    return replace(options, q=int(data.mask_view.positions[cell[0]]), kv=cell[1])


NARROW_WIDTH = 72
"""Width below which the note shows layer, head and scale in a short form."""


def draw_mask(data: MaskData, theme: Theme) -> list[Strip]:
    """Draw at most `height` strips of exactly `width` cells; both are those of the layout."""
    layout = data.layout
    pen = Pen(theme, layout.width)
    strips = [_draw_segment_header(data, pen)] * layout.header + _draw_token_header(data, pen)
    for number, cells in enumerate(grid_strips(data, theme)[: layout.lines]):
        row = Strip.join([_draw_row_margin(data, number, pen.resize(layout.left)), cells])
        strips.append(row.adjust_cell_length(layout.width, pen.style("text")))
    return [*strips, *_draw_footer(data, pen, max(layout.height - len(strips), 0))]


# -- margins --------------------------------------------------------------------------------------


def _draw_row_margin(data: MaskData, number: int, pen: Pen) -> Strip:
    layout, mask_view, width = data.layout, data.mask_view, pen.width - 1
    if not pen.width:
        return Strip([])
    rows = _rows_of_line(data, number)
    if layout.grid.row_scale == 1 and width >= (6 if layout.cell_width > 1 else 10):
        positions = [int(mask_view.positions[row]) for row in rows]  # one or two of them
        if layout.cell_width < 2 or number * 2 % layout.cell_width == 0:
            spans = _draw_tokens_at(data, positions, width, pen)
        else:
            spans = [(" " * width, token_style(_blank_cell(data, positions[0]), pen.theme))]
    else:
        spans = [_draw_segment_at(data, number, width, pen)]
    return Strip.join([pen.resize(width).line(*spans), pen.resize(1).line(_row_mark(data, rows))])


def _rows_of_line(data: MaskData, number: int) -> range:
    grid, enlarged = data.layout.grid, data.layout.cell_width
    start = grid.row + 2 * number // enlarged * grid.row_scale
    stop = grid.row + (-(-2 * (number + 1) // enlarged)) * grid.row_scale
    last = data.mask_view.n_rows
    return range(min(start, last - 1), max(min(stop, last), min(start, last - 1) + 1))


def _row_mark(data: MaskData, rows: range) -> tuple[str, str]:
    if data.cursor is not None and data.cursor[0] in rows:
        return "▸", "chosen"
    current = data.current
    if current is None or len(current) == data.mask_view.n_rows:
        return " ", "text"
    is_here = rows.start < current.stop and current.start < rows.stop
    return ("▶" if len(current) == 1 else "▌", "accent") if is_here else (" ", "text")


def _blank_cell(data: MaskData, position: int) -> TokenCell:
    return TokenCell(2 * position, "", segment_color_at(data.segments, position))


def _draw_tokens_at(data: MaskData, positions: list[int], width: int, pen: Pen) -> list[NamedSpan]:
    cells = [data.tokens.get(p, _blank_cell(data, p)) for p in positions[:2]]
    second = 0
    if len(cells) == 2:
        second = min(cell_len(cells[1].text), max(width // 2, width - cell_len(cells[0].text)))
    texts = (align_right(cells[0].text, width - second), clip_text(cells[-1].text, second))
    return [(text, token_style(cell, pen.theme)) for text, cell in zip(texts, cells, strict=False)]


def _draw_segment_at(data: MaskData, number: int, width: int, pen: Pen) -> NamedSpan:
    """Draw the label of a segment at the line where it begins, on other lines its colour."""
    position = _middle_position(data, number)
    style = token_style(_blank_cell(data, position), pen.theme)
    segment = data.segment(position)
    if segment is None:
        return align_right(str(position), width), style
    if number == 0 or data.segment(_middle_position(data, number - 1)) is not segment:
        return clip_text(_shorten_label(escape_unprintable(segment.label), width), width), style
    return align_right(str(position) if number % 8 == 4 and width >= 5 else "", width), style


def _middle_position(data: MaskData, number: int) -> int:
    rows = _rows_of_line(data, number)
    middle = int(data.mask_view.positions[rows[(len(rows) - 1) // 2]])
    if segment_color_at(data.segments, middle) < 0:  # prefer its neighbour to a separator
        middle = int(data.mask_view.positions[rows[len(rows) // 2]])
    return middle


def _shorten_label(label: str, width: int) -> str:
    """Shorten a label to a width: "paraphrase 12" to "para 12" or "p12"."""
    if len(label) <= width:
        return label
    name, _, number = label.rpartition(" ")
    if not (name and number.isdigit()):
        return label
    room = width - len(number) - 1
    return f"{name[:room]} {number}" if room >= 3 else f"{name[:1]}{number}"


def _draw_segment_header(data: MaskData, pen: Pen) -> Strip:
    layout, grid = data.layout, data.layout.grid
    keys = (grid.key + grid.key_scale * np.arange(grid.width)).tolist()
    corner = clip_text("row ↓ key →" if layout.left >= 11 else "", layout.left)
    spans: list[NamedSpan] = [(corner, "muted")]
    bar = "│" if pen.theme.no_color else ""
    for number, run in groupby(keys, key=lambda key: segment_number(data.segments, key)):
        own = list(run)
        width = len(own) * layout.cell_width
        label = escape_unprintable(data.segments[number].label) if number >= 0 else str(own[0])
        text = bar + _shorten_label(label, width - len(bar)) if width > 3 else bar
        spans.append((clip_text(text, width), token_style(_blank_cell(data, own[0]), pen.theme)))
    return pen.line(*spans)


def _draw_token_header(data: MaskData, pen: Pen) -> list[Strip]:
    """Draw the tokens of the keys, vertically unless a cell is wide enough."""
    layout = data.layout
    if not layout.token_lines:
        return []
    keys = range(layout.grid.key, min(layout.grid.key_stop, data.mask_view.n_keys))
    cells = [data.tokens.get(key, _blank_cell(data, key)) for key in keys]
    styles = [token_style(cell, pen.theme) for cell in cells]
    texts = [_vertical_text(cell.text, layout.cell_width, layout.token_lines) for cell in cells]
    return [
        pen.line((" " * layout.left, "text"), *merge_spans(zip(row, styles, strict=True)))
        for row in zip(*texts, strict=True)
    ]


def _vertical_text(text: str, width: int, lines: int) -> list[str]:
    """Return a token's text in `lines` lines of `width` cells."""
    if lines == 1 and width > 1:
        return [clip_text(text.strip(), width)]
    letters = [char for char in text.strip() or text if cell_len(char) > 0]
    shown = [char if cell_len(char) <= width else "□" for char in letters]
    if len(shown) > lines:
        shown = [*shown[: lines - 1], "…"]
    return [clip_text(char, width) for char in [" "] * (lines - len(shown)) + shown]


# -- the footer -----------------------------------------------------------------------------------


def _draw_footer(data: MaskData, pen: Pen, room: int) -> list[Strip]:
    """Draw what the cells mean in `room` lines: whole where they suffice, else the beginnings."""
    first, rest = _footer_texts(data, pen)
    texts = [text for text in (first, rest) if text[0]]
    swatches = [pen.line(*spans) for spans in _wrap_legend(mask_legend(data, pen), pen.width)]
    whole = [*pen.paragraphs(texts), *swatches]
    if len(whole) <= room:
        return whole
    if room >= 3:
        return [*map(pen.line, texts), *swatches][:room]
    legend = mask_legend(data, pen, short=True)
    if data.view_mode != "difference" and rest[0]:
        legend = [rest, ("  ", "text"), *legend]
    return [pen.line(first), pen.line(*legend)][:room]


def _wrap_legend(legend: Sequence[NamedSpan], width: int) -> list[list[NamedSpan]]:
    """Distribute the swatches with their names over lines of `width` cells."""
    lines: list[list[NamedSpan]] = [[]]
    used = 0
    for entry in _legend_entries(legend):
        length = sum(cell_len(text) for text, _ in entry)
        if used and used + length > width + 2:  # the two blanks at its end may be cut
            lines.append([])
            used = 0
        lines[-1] += entry
        used += length
    return [line for line in lines if line]


def _legend_entries(legend: Sequence[NamedSpan]) -> Iterator[list[NamedSpan]]:
    """Yield the spans of each entry: swatches and the name that follows them."""
    entry: list[NamedSpan] = []
    for span in legend:
        entry.append(span)
        if span[0].endswith("  "):
            yield entry
            entry = []
    if entry:
        yield entry


def _footer_texts(data: MaskData, pen: Pen) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the two texts below the picture, the more important one first, and their styles."""
    cell, counts = mask_text.describe_cell(data), mask_text.format_counts(data)
    pairs = mask_text.describe_first_pairs(data)
    if cell is None and data.fallback_reason:
        return (data.fallback_reason, "warn"), (counts, "text")
    if cell is None:
        return ((pairs[0], "bad"), (counts, "text")) if pairs else ((counts, "text"), ("", "text"))
    if cell_len(cell.sentence()) <= pen.width:
        return (cell.sentence(), cell.style), (counts, "text")
    text = f"row {cell.row} {cell.relation} {cell.key}"
    if cell_len(text) > pen.width and data.cursor is not None:
        position = int(data.mask_view.positions[data.cursor[0]])
        row = mask_text.format_token(data, position, segment=False)
        text = f"{row} {cell.relation} {cell.key}"
    return (text, cell.style), (cell.reason, cell.style) if cell.reason else (counts, "text")


EVEN, ODD, GENERATED, CROSS, CURSOR, UNVISITED, PARTIAL, FULL = range(8)
"""Tints of a cell: neighbouring segments, generated text, the cursor's row and column, the cursor,
and the states of the block tables."""

_CLOSED_RGB: tuple[RGB, ...] = (
    *((22, 26, 38), (33, 39, 56), (20, 42, 46), (62, 66, 84), (120, 70, 160)),
    *((40, 40, 44), (24, 36, 74), (20, 60, 44)),
)
_OPEN_RGB: tuple[RGB, ...] = (
    *((233, 206, 92), (206, 172, 58), (140, 208, 160), (255, 240, 178), (255, 255, 255)),
    *((220, 150, 130), (240, 222, 120), (150, 225, 150)),
)
_STATE_RGB: dict[int, RGB] = {
    UNKNOWN: (96, 62, 84),
    LOST: (86, 180, 233),
    LEAKED: (240, 52, 92),
    BOTH: (205, 120, 230),
    APPLIED: (106, 140, 196),
}
_STATE_NAMES = {
    LEAKED: "leaked: should be closed",
    LOST: "lost: should be open",
    BOTH: "both",
    UNKNOWN: "not recorded",
    OPEN: "open",
    3: "partly open",
    CLOSED: "closed",
    APPLIED: "partial block",
}
"""In the order of the legend, of which a narrow panel cuts the end."""
_STATE_CHARS = {LOST: "-", LEAKED: "+", BOTH: "±", UNKNOWN: "?", APPLIED: "▒"}
"""Characters of states on terminals without colours; open and closed cells are half blocks."""

_CLOSED_CELL = "·"
_SHADE_CHARS = "·░░▒▓▓█"


@cache
def mask_palette() -> Palette:
    """Return the palette of all states in all tints: level `tint * N_STATES + state`."""
    rgb: list[RGB] = []
    for closed, open_ in zip(_CLOSED_RGB, _OPEN_RGB, strict=True):
        # From 28 % to 72 % of the way, so that a partly open pixel differs from both however small
        # its part is.
        mixed = blend((closed, open_), 26)
        rgb += [closed, *blend((mixed[7], mixed[18]), OPEN - 1), open_]
        rgb += [_STATE_RGB[state] for state in sorted(_STATE_RGB)]
    return Palette(rgb, " " * len(rgb))


# -- the grid -------------------------------------------------------------------------------------


def grid_strips(data: MaskData, theme: Theme) -> list[Strip]:
    """Draw the lines of the grid, each as wide as the grid."""
    n = data.layout.cell_width
    pixels = (data.states, _tints(data))
    states, tints = (each.repeat(n, axis=0).repeat(n, axis=1) for each in pixels)
    if theme.no_color:
        return _colorless_strips(states, tints, theme)
    return heat(tints * np.uint8(N_STATES) + states, mask_palette(), theme)


def _tints(data: MaskData) -> Levels:
    """Return the tint of each pixel, from the segments (or block tables) and the cursor."""
    tables, grid = data.tables, data.layout.grid
    if tables is None:
        tints = _segment_tints(data)
    else:
        tints = np.full(tables.shape, PARTIAL, np.uint8)
        for state, tint in ((CLOSED, UNVISITED), (OPEN, FULL), (UNKNOWN, EVEN)):
            tints[tables == state] = tint
    if data.cursor is not None:
        row = (data.cursor[0] - grid.row) // grid.row_scale
        key = (data.cursor[1] - grid.key) // grid.key_scale
        has_row, has_key = 0 <= row < grid.height, 0 <= key < grid.width
        if has_row:
            tints[row] = CROSS
        if has_key:
            tints[:, key] = CROSS
        if has_row and has_key:
            tints[row, key] = CURSOR
    return tints


def _segment_tints(data: MaskData) -> Levels:
    grid, mask_view = data.layout.grid, data.mask_view
    rows = np.minimum(grid.row + grid.row_scale * np.arange(grid.height), mask_view.n_rows - 1)
    keys = grid.key + grid.key_scale * np.arange(grid.width)
    # A number for each owner of segments, to which its separators belong.
    first, ids, is_generated = [0], [0], [False]
    owner = -1
    for index, segment in enumerate(data.segments):
        own = segment.owner if segment.kind is SegmentKind.SEPARATOR else index
        first.append(segment.start)
        ids.append(ids[-1] + (own != owner))
        is_generated.append(segment.kind is SegmentKind.GENERATED)
        owner = own
    starts, numbers, generated = np.array(first), np.array(ids), np.array(is_generated)
    of_row = np.searchsorted(starts, mask_view.positions[rows], side="right") - 1
    of_key = np.searchsorted(starts, keys, side="right") - 1
    tints: Levels = ((numbers[of_row][:, None] + numbers[of_key][None]) % 2).astype(np.uint8)
    tints[generated[of_row]] = GENERATED
    tints[:, generated[of_key]] = GENERATED
    return tints


def _colorless_strips(states: Levels, tints: Levels, theme: Theme) -> list[Strip]:
    """Draw states as half blocks and shades, with styles for the cursor."""
    if len(states) % 2:
        states, tints = (np.vstack([part, part[-1:]]) for part in (states, tints))
    pen, strips = Pen(theme, states.shape[1]), []
    pairs = zip(states[::2], states[1::2], tints[::2], tints[1::2], strict=True)
    for upper, lower, tint, under in pairs:
        marks = np.where(under == CURSOR, under, tint).tolist()
        cells = []
        for a, b, mark in zip(upper.tolist(), lower.tolist(), marks, strict=True):
            char = _cell_char(a, b)
            if char == _CLOSED_CELL:
                char = _CLOSED_CELL_CHARS.get(mark, char)
            cells.append((char, _TINT_STYLES.get(mark, "text")))
        strips.append(pen.line(*merge_spans(cells)))
    return strips


_TINT_STYLES = {CURSOR: "cursor", CROSS: "strong"}
_CLOSED_CELL_CHARS = {UNVISITED: " ", FULL: ":"}
"""Characters of a closed cell by the state of its block."""


def _cell_char(upper: int, lower: int) -> str:
    for letter in (BOTH, LEAKED, LOST, UNKNOWN):
        if letter in (upper, lower):
            return _STATE_CHARS[letter]
    if upper in (OPEN, CLOSED) and lower in (OPEN, CLOSED):
        return f"{_CLOSED_CELL}▄▀█"[2 * (upper == OPEN) + (lower == OPEN)]
    if APPLIED in (upper, lower):
        return _STATE_CHARS[APPLIED]
    return _SHADE_CHARS[min(max((upper + lower) // 2, 1), OPEN - 1)]


# -- the legend -----------------------------------------------------------------------------------


def mask_legend(data: MaskData, pen: Pen, *, short: bool = False) -> list[NamedSpan]:
    """Draw the meaning of the colours on screen, and the counts of the block tables if shown."""
    visible = {3 if CLOSED < n < OPEN else n for n in np.unique(data.states).tolist()}
    names = {**_STATE_NAMES, **({OPEN: "full block"} if data.view_mode == "received" else {})}
    spans: list[NamedSpan] = []
    for state in (n for n in _STATE_NAMES if n in visible):
        name = names[state].partition(":")[0] if short else names[state]
        spans += [_swatch(state, EVEN, pen), (f" {name}  ", "text")]
    if data.tables is not None:
        label = mask_text.format_block_counts(data)
        spans.append((f"{label}  " if label else "", "title"))
        if pen.theme.no_color:
            spans.append(("closed cells: blank not visited, · partial, : full", "text"))
        else:
            for tint, name in ((UNVISITED, "not visited"), (PARTIAL, "partial"), (FULL, "full")):
                spans += [_swatch(CLOSED, tint, pen), _swatch(OPEN, tint, pen)]
                spans.append((f" {name}  ", "text"))
    return spans


def _swatch(state: int, tint: int, pen: Pen) -> NamedSpan:
    if pen.theme.no_color:
        return _cell_char(state, state), "text"
    rgb = mask_palette().rgb[tint * N_STATES + state]
    return "■", pen.style("text") + Style(color=Color.from_rgb(*rgb))
