"""The attention panel: the attention of every head by segment, and of one head by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.core.text import format_share
from flexinspect.drawing.heatmap import CIVIDIS, CIVIDIS_MARKED, boxes, draw_scale, quantise_marked
from flexinspect.drawing.plots import bar, format_number, sparkline
from flexinspect.drawing.text_lines import (
    NamedSpan,
    Pen,
    align_right,
    clip_text,
    join_blocks,
    join_strips,
    merge_spans,
    visible,
)
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, token_style
from flexinspect.masks.attention_row import LseCheck, entropy, worst_check
from flexinspect.panels.attention.attention_data import (
    NO_OPEN_KEY,
    SINK,
    AttentionData,
    AttentionGrid,
    AttentionOptions,
    attention_shares,
    format_value,
    load_attention,
)
from flexinspect.panels.attention.row_recompute import EXTREME_ONLY, TokenRow
from flexinspect.panels.base import CURSOR_MOVES, Help, Navigate, Panel, Picture, Request
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import segment_color

MAX_TABLE_LAYERS, MAX_TABLE_HEADS = 12, 16
"""The largest grid that `describe` writes as a table."""

N_LISTED_TOKENS = 10
SINGLE_PART = "the prompt is one segment"
"""Why the default measure is not the attention on a segment."""


class AttentionPanel(Panel[AttentionData, AttentionOptions]):
    """Attention of one row: a grid of layers and heads, and the weights of the chosen head."""

    name = "attention"
    title = "Attention"
    initial_options = AttentionOptions()
    needs_tokens = True
    help = Help(
        "It shows how much of the newest row's attention each head of each layer gave to a part "
        "of the sequence, and the tokens that one head attended to.",
        "Layers go down, heads across, brighter is more; the bars are the weights of the selected "
        "head, the check shows how far the picture is from what ran (0 is exact), v shows another "
        "measure, and shift+left another row of a prefill at level extreme.",
        "Look for heads that ignore a paraphrase, put all attention on BOS, or attend where the "
        "mask should be closed; a check above 0.01 means that this is not what ran.",
    )
    actions = ("view.measure", *CURSOR_MOVES)

    def load(self, source: Source, request: Request[AttentionOptions]) -> AttentionData:
        """Read the step's grid and the row of the place's layer and head."""
        return load_attention(source, request)

    def describe(self, data: AttentionData) -> list[str]:
        """Return the grid, the selected head's attention by segment, and its heaviest tokens."""
        return [*_describe_grid(data), *_describe_row(data)]

    def paint(
        self, data: AttentionData, request: Request[AttentionOptions], theme: Theme
    ) -> Picture:
        """Draw the grid with the row beside or below it."""
        grid = data.grid
        layout = attention_layout(data, request.width, request.height)
        strips = draw_attention(data, layout, request.height, Pen(theme, request.width))
        grid_check, check = worst_check(grid.lse_checks), row_lse_check(data)
        note = grid.measure + (f" ({SINGLE_PART})" if grid.is_single_part else "")
        note += f" · {check.describe()}"
        note += ": not what ran" if check.is_failed else ""
        if grid_check.is_failed and not check.is_failed:
            note += f" · grid {grid_check.describe()}"
        if data.missing_reason == EXTREME_ONLY:
            note += " · by token: --level extreme"
        rows, heads, (n_layers, n_heads) = layout.rows, layout.heads, grid.values.shape
        if len(rows) < n_layers:
            note += f" · layers {grid.layers[rows[0]]}-{grid.layers[rows[-1]]} of {n_layers}"
        if len(heads) < n_heads:
            note += f" · heads {heads[0]}-{heads[-1]} of {n_heads}"

        def target(x: int, y: int) -> Navigate | None:
            row, column = y - layout.top, (x - layout.left) // layout.cell_width
            if not (0 <= row < len(rows) and 0 <= column < len(heads)):
                return None
            return Navigate(layer=grid.layers[rows[row]], head=heads[column])

        return Picture(strips, note, grid_check.is_failed or check.is_failed, target)

    def on_action(
        self, action: str, data: AttentionData, request: Request[AttentionOptions]
    ) -> AttentionOptions | Navigate | None:
        """Change the measure, or go to another layer or head (in a prefill, another row)."""
        if action == "view.measure":
            return request.with_next("measure", data.grid.measures, data.grid.measure)
        down, across = CURSOR_MOVES.get(action, (0, 0))
        if down and 0 <= data.grid_row + down < len(data.grid.layers):
            return Navigate(layer=data.grid.layers[data.grid_row + down])
        if across and len(data.rows) > 1:
            row = data.q_idx + across
            chosen = None if row == data.rows[-1] else row
            return replace(request.options, row=chosen) if row in data.rows else None
        head = data.head + across
        return Navigate(head=head) if across and head in range(data.grid.values.shape[1]) else None


# -- text -----------------------------------------------------------------------------------------


def _describe_grid(data: AttentionData) -> list[str]:
    grid = data.grid
    measured = "the first token" if grid.measure == SINK else grid.measure
    title = "entropy in nats" if grid.unit == "nats" else f"share of its attention on {measured}"
    title += f" ({SINGLE_PART})" if grid.is_single_part else ""
    check = worst_check(grid.lse_checks).describe()
    lines = [f"Step {data.place.step}, newest row, {title}, by layer and head ({check})."]
    n_layers, n_heads = grid.values.shape
    if n_layers <= MAX_TABLE_LAYERS and n_heads <= MAX_TABLE_HEADS:
        lines.append(rf"layer\head {' '.join(f'{head:>7}' for head in range(n_heads))}")
        format_cell = format_share if grid.unit == "share" else format_number
        for layer, row in zip(grid.layers, grid.drawable_values().tolist(), strict=True):
            lines.append(f"{layer:>10} {' '.join(f'{format_cell(value):>7}' for value in row)}")
    else:
        lines += [_describe_layer(layer, grid, row) for row, layer in enumerate(grid.layers)]
    if bad := ", ".join(map(str, grid.failed_layers)):
        lines.append(f"Not what ran, so not shown: layers {bad}.")
    return [*lines, f"Measures: {', '.join(grid.measures)}."]


def _describe_layer(layer: int, grid: AttentionGrid, row: int) -> str:
    values = grid.drawable_values()[row]
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"Layer {layer}: no values."
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    figures = (float(finite.mean()), float(values[low]), float(values[high]))
    mean, least, most = (format_value(value, grid.unit) for value in figures)
    ends = f"lowest {least} at head {low}, highest {most} at head {high}"
    return f"Layer {layer}: mean {mean}, {ends}."


def _describe_row(data: AttentionData) -> list[str]:
    word = f" '{data.query.text}'" if data.query else ""
    which = "newest row" if data.is_newest else "row"
    lines = [f"Layer {data.layer}, head {data.head}, {which} {data.q_idx}{word}:"]
    if data.segment_attention is not None:
        shares = zip(data.segments, data.segment_attention.tolist(), strict=False)
        parts = ", ".join(f"{segment.label} {format_share(share)}" for segment, share in shares)
        lines.append(f"Attention by segment ({data.segment_check.describe()}): {parts}.")
    if data.mismatch or data.tokens is None:
        return [*lines, data.mismatch or data.missing_reason]
    return [*lines, *_describe_tokens(data, data.tokens)]


def _describe_tokens(data: AttentionData, row: TokenRow) -> list[str]:
    check = data.lse_check.describe()
    if not data.lse_check.is_checked:
        newest = data.newest_lse_check.describe()
        check = f"recomputed, not checked against the kernel; newest row: {newest}"
    n_open, n_keys = int(row.open_keys.sum()), len(row.weights)
    facts = f"entropy {format_number(entropy(row.weights))} nats ({check})"
    lines = [f"{n_open} of {n_keys} keys are open, {facts}."]
    if not n_open:
        return [*lines, NO_OPEN_KEY]
    listed = row.heaviest[:N_LISTED_TOKENS].tolist()
    lines.append(f"Heaviest tokens, the first {len(listed)}:")
    for key in listed:
        pos = row.first_pos + key
        text = data.cells[pos].text if pos in data.cells else "?"
        share, segment = format_share(float(row.weights[key])), data.segment_label(pos)
        lines.append(f"  {share:>8}  {pos:>6} '{text}' {segment}".rstrip())
    return lines


MIN_TWO_COLUMN_WIDTH = 72
"""Width from which the row is drawn beside the grid instead of below it."""

_NUMBER_WIDTH = 8
_TIGHT_HEIGHT = 6
"""Height below which bars leave no room for text around them."""

_COLUMN_GAP = 2


class AttentionLayout(Struct, frozen=True):
    """The layout of the grid: its cells begin at (`left`, `top`), each `cell_width` columns wide.

    `rows` and `heads` are the visible ones; `width` is that of the whole block: less than that of
    the picture if the row is drawn beside it.
    """

    width: int
    left: int
    top: int
    cell_width: int
    rows: range
    heads: range
    has_legend: bool


def attention_layout(data: AttentionData, width: int, height: int) -> AttentionLayout:
    """Lay out the grid in a picture of this size; the selected cell is always visible."""
    n_layers, n_heads = data.grid.values.shape
    left = len(str(max(data.grid.layers))) + 1
    wide = width >= MIN_TWO_COLUMN_WIDTH and height >= 6
    room = (width // 2 if wide else width) - left
    cell = min(max(room // n_heads, 1), 3)
    shown = min(n_heads, max(room // cell, 1))
    # Below a narrow grid are two lines of text and one for each segment.
    spare = height - 2 - len(data.segments)
    most = height if wide else max(height // 2, min(spare, n_layers + 3), 1)
    top, has_legend = (most >= 2) + (most >= 5), most >= 4
    count = min(n_layers, max(most - top - has_legend, 1))
    return AttentionLayout(
        width=min(max(left + cell * shown, 34), width // 2) if wide else width,
        left=left,
        top=top,
        cell_width=cell,
        rows=range(n_layers)[visible(data.grid_row, count, n_layers)],
        heads=range(n_heads)[visible(data.head, shown, n_heads)],
        has_legend=has_legend,
    )


def draw_attention(
    data: AttentionData, layout: AttentionLayout, height: int, pen: Pen
) -> list[Strip]:
    """Draw the whole picture: at most `height` strips."""
    grid_pen = pen.resize(layout.width)
    grid = _draw_grid(data, layout, grid_pen)
    if layout.width == pen.width:
        return [*grid, *_draw_row(data, height - len(grid), pen)][:height]
    spare = height - len(grid) - 1
    below = len(data.segments) < spare and data.tokens is not None
    if below:
        grid += [grid_pen.line(), *_draw_segment_attention(data, spare, grid_pen)]
    row_pen = pen.resize(pen.width - layout.width - _COLUMN_GAP)
    row = _draw_row(data, height, row_pen, with_segments=not below)
    grid += [grid_pen.line()] * (height - len(grid))
    return join_blocks(grid[:height], row[:height], pen.style("text"), gap=_COLUMN_GAP)


# -- the grid -------------------------------------------------------------------------------------


def _draw_grid(data: AttentionData, layout: AttentionLayout, pen: Pen) -> list[Strip]:
    """Draw the grid, with its title, the numbers of the heads and the legend if there is room.

    Cells of layers whose check failed are "!".
    """
    grid, values = data.grid, data.grid.drawable_values()
    strips = [_grid_title(data, layout, pen)] if layout.top > 0 else []
    strips += [_head_numbers(layout, pen)] if layout.top > 1 else []
    highest = float(np.max(values, where=np.isfinite(values), initial=0.0))
    values = values[layout.rows.start : layout.rows.stop]
    levels = quantise_marked(values, 0.0, highest, CIVIDIS_MARKED)
    levels = levels[:, layout.heads.start : layout.heads.stop]
    marked = (data.grid_row - layout.rows.start, data.head - layout.heads.start)
    cells = boxes(levels, CIVIDIS_MARKED, pen.theme, cell_width=layout.cell_width, marked=marked)
    for row, strip in zip(layout.rows, cells, strict=True):
        mark, style = ("▸", "chosen") if row == data.grid_row else (" ", "muted")
        label = f"{grid.layers[row]:>{layout.left - 1}}{mark}"
        whole = join_strips(pen.resize(layout.left).line((label, style)), strip)
        strips.append(whole.adjust_cell_length(layout.width, pen.style("text")))
    return [*strips, _grid_legend(grid, highest, pen)] if layout.has_legend else strips


def _grid_title(data: AttentionData, layout: AttentionLayout, pen: Pen) -> Strip:
    grid, check = data.grid, worst_check(data.grid.lse_checks)
    value = grid.drawable_values()[data.grid_row, data.head]
    return pen.line(
        (grid.measure, "title"),
        (f" {format_value(float(value), grid.unit)}", "strong"),
        ("" if layout.has_legend else " " + check.describe(), check_style(check)),
        ("" if data.is_newest else " of the newest row", "muted"),
    )


def _head_numbers(layout: AttentionLayout, pen: Pen) -> Strip:
    """Draw the numbers of the heads, as many as there is room for."""
    need = len(str(layout.heads.stop)) + 1
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * layout.cell_width >= need)
    numbered = [head for head in layout.heads if head % every == 0]
    cells = [clip_text(str(head), every * layout.cell_width) for head in numbered]
    first = numbered[0] if numbered else layout.heads.start
    lead = " " * (layout.left + (first - layout.heads.start) * layout.cell_width)
    text = (lead + "".join(cells)).rstrip()
    if len(text) > layout.width:  # a number that is cut would be another number
        text = text.rpartition(" ")[0]
    return pen.line((text, "muted"))


def _grid_legend(grid: AttentionGrid, highest: float, pen: Pen) -> Strip:
    check, bad, warning = worst_check(grid.lse_checks), grid.failed_layers, ""
    unit = " nats" if grid.unit == "nats" else ""
    if bad:
        shown = ", ".join(map(str, bad[:6])) + (" ..." if len(bad) > 6 else "")
        warning = f" ! layer{'s' if len(bad) > 1 else ''} {shown}: not what ran"
    return pen.line(
        ("0 ", "muted"),
        *draw_scale(CIVIDIS, pen.theme),
        (f" {format_number(highest)}{unit}  ", "muted"),
        (check.describe(), check_style(check)),
        (warning, "bad"),
    )


def check_style(check: LseCheck) -> str:
    """Return the style of a check's text: good, bad, or muted without a value."""
    return "bad" if check.is_failed else "good" if check.is_checked else "muted"


# -- the row --------------------------------------------------------------------------------------


def _draw_row(
    data: AttentionData, height: int, pen: Pen, *, with_segments: bool = True
) -> list[Strip]:
    if height <= 0:
        return []
    which = "newest row" if data.is_newest else "row"
    query = [(data.query.text, token_style(data.query, pen.theme))] if data.query else []
    title = (f"layer {data.layer} head {data.head}", "title")
    strips = [pen.line(title, (f" {which} {data.q_idx} ", "text"), *query)]
    strips += [_row_summary(data, pen)] * (height > 2)
    left = height - len(strips)
    if data.mismatch:
        strips += pen.paragraph(data.mismatch, "bad")
        return [*strips, *_draw_segment_attention(data, height - len(strips), pen)][:height]
    if data.tokens is None:
        reason = pen.paragraph(data.missing_reason, "muted")
        if left - len(reason) < _TIGHT_HEIGHT:  # the note below the picture has a short form
            reason = []
        segments = _draw_segment_attention(data, left - len(reason), pen)
        return [*strips, *segments, *reason][:height]
    n_segments = min(len(data.segments) + 2, left - min(int(data.tokens.open_keys.sum()) + 1, 8))
    if not with_segments or n_segments < _TIGHT_HEIGHT:
        return [*strips, *_draw_tokens(data, data.tokens, left, pen)]
    strips += [*_draw_tokens(data, data.tokens, left - n_segments, pen), pen.line()]
    return [*strips, *_draw_segment_attention(data, n_segments - 1, pen)]


def row_lse_check(data: AttentionData) -> LseCheck:
    """Return the check of what is drawn of the row: its tokens, or else its segment attention."""
    return data.lse_check if data.tokens is not None or data.mismatch else data.segment_check


def _row_summary(data: AttentionData, pen: Pen) -> Strip:
    check = row_lse_check(data)
    facts = ""
    if not check.is_checked and data.newest_lse_check.is_checked:
        facts = f" (newest {data.newest_lse_check.describe()})"
    if data.tokens is not None:
        n_open = int(data.tokens.open_keys.sum())
        facts += f" {format_number(entropy(data.tokens.weights))} nats"
        facts += f" {n_open}/{len(data.tokens.weights)} open"
    return pen.line((check.describe(), check_style(check)), (facts, "muted"))


def _draw_segment_attention(data: AttentionData, height: int, pen: Pen) -> list[Strip]:
    if height <= 0 or data.segment_attention is None:
        return []
    headed = height > _TIGHT_HEIGHT
    parts = attention_shares(data, height - headed)
    strips = [pen.line(("attention by segment", "muted"))] * headed
    name = min(max((len(label) for label, _, _ in parts), default=1), max(pen.width // 2, 1))
    high = max((share for _, _, share in parts if np.isfinite(share)), default=0.0)
    for label, number, share in parts:
        style = token_style(_segment_cell(data, number, pen), pen.theme)
        strips.append(_bar_line([(clip_text(label, name), style)], name, share, high, pen))
    return strips[:height]


def _segment_cell(data: AttentionData, number: int, pen: Pen) -> TokenCell:
    """Return a blank cell in the colour of a segment; without colours neighbours alternate."""
    return TokenCell(number if pen.theme.no_color else 0, "", segment_color(number, data.segments))


def _bar_line(spans: Sequence[NamedSpan], used: int, value: float, high: float, pen: Pen) -> Strip:
    """Draw a line that ends in a bar and a number."""
    room = max(pen.width - used - 1 - _NUMBER_WIDTH, 0)
    # No bar for a value that is written as "<0.0001", otherwise every line would have one.
    length = bar(value / high if high > 0 and not value < 1e-4 else 0.0, room)
    number = align_right(format_share(value), _NUMBER_WIDTH)
    return pen.line(*spans, (" ", "text"), (length, "accent"), (number, "text"))


def _draw_tokens(data: AttentionData, row: TokenRow, height: int, pen: Pen) -> list[Strip]:
    """Draw all tokens of the row in order if they fit, otherwise an overview and the heaviest."""
    n_keys, n_open = len(row.weights), int(row.open_keys.sum())
    if height <= 0:
        return []
    if not n_open:
        return pen.paragraph(NO_OPEN_KEY, "warn")[:height]
    if n_keys <= min(height, len(data.cells)):
        return [_token_line(data, row, key, pen) for key in range(n_keys)]
    strips = [_draw_overview(data, row, pen)] if height > 1 else []
    shown = row.heaviest[: height - len(strips)]
    if len(shown) < n_open and len(shown) > 3:
        shown = shown[:-1]
    strips += [_token_line(data, row, int(key), pen) for key in shown]
    if len(shown) < n_open and len(strips) < height:
        rest = max(float(row.weights.sum() - row.weights[shown].sum()), 0.0)
        text = f"{n_open - len(shown)} more tokens: {format_share(rest)} together"
        strips.append(pen.line((text, "muted")))
    return strips


def _token_line(data: AttentionData, row: TokenRow, key: int, pen: Pen) -> Strip:
    pos = row.first_pos + key
    digits = len(str(row.first_pos + len(row.weights)))
    name = min(max(pen.width // 3, 1), 16)
    cell = data.cells.get(pos, TokenCell(pos, "?", 0))
    text = cell.text if cell_len(cell.text) <= name else clip_text(cell.text, name)
    spans: list[NamedSpan] = [
        (f"{pos:>{digits}} ", "muted"),
        (text, token_style(cell, pen.theme)),  # only the token itself has its colour
        (" " * (name - cell_len(text)), "text"),
    ]
    used = digits + 1 + name
    if pen.width >= 56:
        spans.append((" " + clip_text(data.segment_label(pos), 13), "muted"))
        used += 14
    if not row.open_keys[key]:
        return pen.line(*spans, (" closed", "muted"))
    high = float(row.weights.max(initial=0.0))
    return _bar_line(spans, used, float(row.weights[key]), high, pen)


def _draw_overview(data: AttentionData, row: TokenRow, pen: Pen) -> Strip:
    """Draw all keys in one line: the largest weight of each column on its segment's colour.

    A column without an open key is blank.
    """
    n_keys = len(row.weights)
    columns = min(n_keys, pen.width)
    edges = np.arange(columns) * n_keys // columns
    highest = np.maximum.reduceat(row.weights, edges).tolist()
    opened = np.logical_or.reduceat(row.open_keys, edges).tolist()
    weights = [w if is_open else None for w, is_open in zip(highest, opened, strict=True)]
    starts = [segment.start for segment in data.segments]
    numbers = np.searchsorted(starts, edges + row.first_pos, side="right") - 1
    spans = [
        (char, token_style(_segment_cell(data, number, pen), pen.theme))
        for char, number in zip(sparkline(weights, columns), numbers.tolist(), strict=True)
    ]
    return pen.line(*merge_spans(spans))
