"""The mask panel: which tokens attend to which, as executed, and how that differs from declared."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from msgspec.structs import replace
from rich.cells import cell_len, chop_cells, set_cell_size
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.heatmap import Levels
from flexinspect.drawing.text_lines import (
    NamedSpan,
    Pen,
    align_right,
    clip_text,
    join_blocks,
    join_strips,
    merge_spans,
)
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, token_style
from flexinspect.panels.base import CURSOR_MOVES, Help, Navigate, Panel, Picture, Request
from flexinspect.panels.mask import mask_text
from flexinspect.panels.mask.mask_data import (
    MaskData,
    load_mask,
    segment_color_at,
    segment_number,
)
from flexinspect.panels.mask.mask_layout import (
    MaskOptions,
    MaskViewMode,
    column_edges,
    format_scale,
    scroll_window,
)
from flexinspect.panels.mask.mask_matrix import draw_matrix
from flexinspect.panels.mask.mask_pixels import (
    grid_strips,
    grid_tints,
    map_strips,
    mask_legend,
    step_strip,
    wrap_legend,
)
from flexinspect.panels.panel_source import Source

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
        "Bright cells are open, dark ones closed; a half-bright one stands for several cells, some "
        "of them open. The axes show the tokens and their segments, the line below the mask all "
        "keys of the newest row, and the text the cell under the cursor. Zooming out of the whole "
        "mask leads to its segments, where a number with - or + counts lost or leaked cells.",
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
        alarm = data.lse_check.is_failed or mask_text.has_difference(data)
        return Picture(strips, format_note(data), alarm)

    def on_action(
        self, action: str, data: MaskData, request: Request[MaskOptions]
    ) -> MaskOptions | Navigate | None:
        """Zoom, flip the view, show blocks, move the cursor, go to the step of the cursor's row."""
        options, layout = request.options, data.layout
        if action in ("zoom.in", "zoom.out"):
            # Not the zoom of the layout: an earlier key may still be loading.
            zoom = min(max(options.zoom, layout.first_zoom), layout.last_zoom)
            zoom += 1 if action == "zoom.in" else -1
            if not layout.first_zoom <= zoom <= layout.last_zoom:
                return None
            zoomed = replace(options, zoom=zoom, row=None, key=None)
            target = data.cursor or _first_difference(data)
            return _with_cursor(data, zoomed, target) if zoom > 0 and target else zoomed
        if action == "view.flip":
            modes = [m for m in VIEW_MODES if data.mask_view.spec or m in ("executed", "received")]
            mode = data.view_mode if data.view_mode in modes else modes[0]
            return request.with_next("view", modes, mode)
        if action == "view.blocks":
            return replace(options, blocks=not options.blocks)
        if action == "cursor.enter" and data.cursor is not None and layout.zoom < 0:
            return replace(options, zoom=layout.word_zoom, row=None, key=None)
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
        pair = data.matrix.pair_at(x, y) if data.matrix and y < data.layout.matrix else None
        if click and pair is not None:
            cell = _first_cell_of(data, pair)
        if cell is None or cell[0] >= data.mask_view.n_rows or cell[1] >= data.mask_view.n_keys:
            return None
        options = replace(request.options, row=grid.row, key=grid.key)
        return None if cell == data.cursor else _with_cursor(data, options, cell)


def format_note(data: MaskData) -> str:
    """Return the note in the border: a narrow panel cuts its end.

    So it begins with the layer and head, which keys change, and goes on with the problems. The head
    is that of the place, also where all heads have the same mask.
    """
    mask_view, layer = data.mask_view, data.place.layer
    shared = mask_view.heads == 1  # all heads have the same mask
    head = f"head {mask_view.head} of {mask_view.heads}"
    if shared:
        head = f"head {data.place.head} (all heads alike)"
    where, scale = f"layer {layer} · {head}", format_scale(data.layout)
    if data.layout.width < NARROW_WIDTH:
        own = f"H{data.place.head}=all" if shared else f"H{mask_view.head}/{mask_view.heads}"
        where = f"L{layer} {own}"
    elif data.layout.zoom >= 0:
        scale = f"zoom {scale}"
    show_difference = mask_text.has_difference(data) or data.view_mode == "difference"
    parts = [
        where,
        mask_text.format_difference(data) if show_difference else "",
        mask_text.VIEW_LABELS[data.view_mode],
        mask_text.format_check(data),
        scale,
        f"rows of {mask_text.format_steps(data)}" if mask_view.is_truncated else "",
    ]
    return " · ".join(part for part in parts if part)


def _first_difference(data: MaskData) -> tuple[int, int] | None:
    """Return the first leaked or lost cell where the differences are shown."""
    if data.view_mode != "difference":
        return None
    return data.mask_view.first_cell("leaked") or data.mask_view.first_cell("lost")


def _first_cell_of(data: MaskData, pair: tuple[int, int]) -> tuple[int, int]:
    """Return the first (row, key) of a pair of segments that differs, the first one if none."""
    mask_view, (row, key) = data.mask_view, (data.segments[number] for number in pair)
    start, stop = np.searchsorted(mask_view.positions, (row.start, row.stop)).tolist()
    found = mask_view.first_difference(range(start, stop), range(key.start, key.stop))
    return found or (min(start, mask_view.n_rows - 1), min(key.start, mask_view.n_keys - 1))


def _move_cursor(action: str, data: MaskData, options: MaskOptions) -> MaskOptions | None:
    mask_view, grid = data.mask_view, data.layout.grid
    if data.cursor is None:
        row = mask_view.n_rows - 1 if data.focus_row is None else data.focus_row
        cell = row, min(int(mask_view.positions[row]), mask_view.n_keys - 1)
    else:
        down, across = CURSOR_MOVES[action]
        if data.layout.zoom < 0:
            return _move_by_segment(data, options, down, across)
        row = data.cursor[0] + down * grid.row_scale
        key = data.cursor[1] + across * grid.key_scale
        cell = min(max(row, 0), mask_view.n_rows - 1), min(max(key, 0), mask_view.n_keys - 1)
        if cell == data.cursor:
            return None
    first_row, first_key = scroll_window(data.layout, *cell)
    return _with_cursor(data, replace(options, row=first_row, key=first_key), cell)


def _move_by_segment(
    data: MaskData, options: MaskOptions, down: int, across: int
) -> MaskOptions | None:
    assert data.cursor is not None
    row, key = int(data.mask_view.positions[data.cursor[0]]), data.cursor[1]
    pair = segment_number(data.segments, row) + down, segment_number(data.segments, key) + across
    last = len(data.segments) - 1
    cell = _first_cell_of(data, (min(max(pair[0], 0), last), min(max(pair[1], 0), last)))
    return None if cell == data.cursor else _with_cursor(data, options, cell)


def _with_cursor(data: MaskData, options: MaskOptions, cell: tuple[int, int]) -> MaskOptions:
    return replace(options, q=int(data.mask_view.positions[cell[0]]), kv=cell[1])


NARROW_WIDTH = 72
"""Width below which the note shows layer, head and scale in a short form."""


def draw_mask(data: MaskData, theme: Theme) -> list[Strip]:
    """Draw at most `height` strips of exactly `width` cells; both are those of the layout."""
    layout = data.layout
    pen = Pen(theme, layout.width)
    strips = []
    if data.matrix is not None:
        strips = draw_matrix(data, data.matrix, pen)[: layout.matrix]
        strips += [pen.line()] * (layout.matrix - len(strips) if layout.zoom >= 0 else 0)
    tints = grid_tints(data)
    strips += _draw_grid(data, tints, pen)
    row = step_strip(data, pen)
    if row is not None:
        text = mask_text.format_step_row(data)
        if cell_len(text) > pen.width:
            text = mask_text.format_step_row(data, segment=False)
        label = pen.line((text, "strong"))
        strips += [label, row][2 - layout.strip :]
    return [*strips, *_draw_footer(data, tints, pen, max(layout.height - len(strips), 0))]


def _draw_grid(data: MaskData, tints: Levels, pen: Pen) -> list[Strip]:
    """Draw the heads and lines of the grid, and the map beside them."""
    layout, own = data.layout, pen.resize(data.layout.grid_width)
    strips = [_draw_segment_header(data, own)] * layout.header + _draw_token_header(data, own)
    for number, cells in enumerate(grid_strips(data, tints, pen.theme)[: layout.lines]):
        row = join_strips(_draw_row_margin(data, number, pen.resize(layout.left)), cells)
        strips.append(row.adjust_cell_length(own.width, pen.style("text")))
    if layout.map_grid is None:
        return strips
    beside = map_strips(data, pen.theme)[: len(strips)]
    blank = pen.resize(1).line()
    whole = [join_strips(blank, strip) for strip in beside]
    return join_blocks(strips, whole, pen.style("text"))


# -- margins --------------------------------------------------------------------------------------


def _draw_row_margin(data: MaskData, number: int, pen: Pen) -> Strip:
    layout, mask_view, width = data.layout, data.mask_view, pen.width - 1
    if not pen.width:
        return Strip([])
    rows = _rows_of_line(data, number)
    if layout.grid.row_scale == 1 and width >= (6 if layout.cell_height > 1 else 10):
        positions = [int(mask_view.positions[row]) for row in rows]  # one or two of them
        if layout.cell_height < 2 or number * 2 % layout.cell_height == 0:
            spans = _draw_tokens_at(data, positions, width, pen)
        else:
            spans = [(" " * width, token_style(_blank_cell(data, positions[0]), pen.theme))]
    else:
        spans = [_draw_segment_at(data, number, width, pen)]
    return join_strips(pen.resize(width).line(*spans), pen.resize(1).line(_row_mark(data, rows)))


def _rows_of_line(data: MaskData, number: int) -> range:
    grid, enlarged = data.layout.grid, data.layout.cell_height
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
    widths = dict(zip(keys, np.diff(column_edges(grid, layout.columns)).tolist(), strict=True))
    corner = clip_text("row ↓ key →" if layout.left >= 11 else "", layout.left)
    spans: list[NamedSpan] = [(corner, "muted")]
    bar = "│" if pen.theme.no_color else ""
    for number, run in groupby(keys, key=lambda key: segment_number(data.segments, key)):
        own = list(run)
        width = sum(widths[key] for key in own)
        label = escape_unprintable(data.segments[number].label) if number >= 0 else str(own[0])
        text = bar + _shorten_label(label, width - 1 - len(bar)) if width > 3 else bar
        text = clip_text(text, width - 1) + " " if width > 1 else text
        spans.append((clip_text(text, width), token_style(_blank_cell(data, own[0]), pen.theme)))
    return pen.line(*spans)


def _draw_token_header(data: MaskData, pen: Pen) -> list[Strip]:
    """Draw the tokens of the keys."""
    layout = data.layout
    if not layout.token_lines:
        return []
    keys = range(layout.grid.key, min(layout.grid.key_stop, data.mask_view.n_keys))
    cells = [data.tokens.get(key, _blank_cell(data, key)) for key in keys]
    styles = [token_style(cell, pen.theme) for cell in cells]
    widths = np.diff(column_edges(layout.grid, layout.columns)).tolist()
    texts = [
        _token_lines(cell.text, width, layout.token_lines, vertical=layout.cell_width == 1)
        for cell, width in zip(cells, widths, strict=False)
    ]
    return [
        pen.line((" " * layout.left, "text"), *merge_spans(zip(row, styles, strict=True)))
        for row in zip(*texts, strict=True)
    ]


def _token_lines(text: str, width: int, lines: int, *, vertical: bool) -> list[str]:
    """Return the beginning of a token in `lines` lines of `width` cells.

    If `vertical`, its letters go from top to bottom and end above the grid.
    """
    shown = text.strip() or text
    if not vertical:
        rows = [*chop_cells(shown, width), *[""] * lines]
        return [set_cell_size(row, width) for row in rows[:lines]]
    letters = [char if cell_len(char) == 1 else "□" for char in shown if cell_len(char) > 0]
    if len(letters) > lines:
        letters = [*letters[: lines - 1], "…"]
    return [clip_text(letter, width) for letter in [""] * (lines - len(letters)) + letters]


# -- the footer -----------------------------------------------------------------------------------


def _draw_footer(data: MaskData, tints: Levels, pen: Pen, room: int) -> list[Strip]:
    """Draw what the cells mean in `room` lines: all of it where it fits, else its beginnings."""
    for short in (False, True):
        texts = [text for text in _footer_texts(data, pen, short) if text[0]]
        legend = wrap_legend(mask_legend(data, tints, pen, short=short), pen)
        whole = [*pen.paragraphs(texts), *legend]
        if len(whole) <= room:
            return whole
    n_texts = max(room - len(legend), 1)
    return [*[pen.line(text) for text in texts[:n_texts]], *legend][:room]


def _footer_texts(data: MaskData, pen: Pen, short: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the two texts below the picture, the more important one first, and their styles."""
    cell, counts = mask_text.describe_cell(data), mask_text.format_counts(data, segment=not short)
    if cell is None and data.layout.strip > 1:
        counts = ""  # they are the label of the strip
    pairs = mask_text.describe_first_pairs(data, short=short)
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
