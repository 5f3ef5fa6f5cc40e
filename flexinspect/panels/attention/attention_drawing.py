"""Drawing of the attention panel: the grid of layers and heads, and the row of one head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from flexinspect.drawing.heatmap import CIVIDIS_MARKED, boxes, quantise_marked
from flexinspect.drawing.plots import bar, format_number, sparkline
from flexinspect.drawing.text_lines import (
    Span,
    align_right,
    clip_text,
    join_blocks,
    line,
    wrap_paragraph,
)
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, token_style
from flexinspect.masks.attention_row import LseCheck, worst_check
from flexinspect.panels.attention.attention_data import (
    AttentionData,
    AttentionGrid,
    TokenRow,
    attention_shares,
    format_share,
    format_value,
)
from flexinspect.panels.token_window import segment_color

MIN_TWO_COLUMN_WIDTH = 72
"""Width from which the row is drawn beside the grid instead of below it."""

_NUMBER_WIDTH = 8
_TIGHT_HEIGHT = 6
"""Height below which bars leave no room for text around them."""

_COLUMN_GAP = 2
_SCALE_LEVELS = np.linspace(0, CIVIDIS_MARKED.size - 2, 8).astype(np.uint8)[None]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The layout of the grid: its cells begin at (`left`, `top`), each `cell_width` columns wide.

    `rows` and `heads` are the visible ones; `width` and `height` are those of the whole block with
    title, header and legend. `is_two_column` is True if the row is drawn beside it.
    """

    width: int
    height: int
    left: int
    top: int
    cell_width: int
    rows: range
    heads: range
    is_two_column: bool

    @property
    def has_legend(self) -> bool:
        """Whether there is a line for the legend."""
        return self.height > self.top + len(self.rows)

    def cell_at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the row of the grid and the head at a cell of the picture."""
        if x < self.left or y < self.top:
            return None
        row, head = y - self.top, (x - self.left) // self.cell_width
        if row >= len(self.rows) or head >= len(self.heads):
            return None
        return self.rows[row], self.heads[head]


def attention_layout(data: AttentionData, width: int, height: int) -> AttentionLayout:
    """Lay out the grid in a picture of this size; the selected cell is always visible."""
    n_layers, n_heads = data.grid.values.shape
    left = len(str(max(data.grid.layers))) + 1
    wide = width >= MIN_TWO_COLUMN_WIDTH and height >= 6
    room = (width // 2 if wide else width) - left
    cell = min(max(room // n_heads, 1), 3)
    shown = min(n_heads, max(room // cell, 1))
    most = height if wide else max(height // 2, 1)
    extra = (most >= 2) + (most >= 4) + (most >= 5)
    count = min(n_layers, max(most - extra, 1))
    return AttentionLayout(
        width=min(max(left + cell * shown, 34), width // 2) if wide else width,
        height=count + extra,
        left=left,
        top=(most >= 2) + (most >= 5),
        cell_width=cell,
        rows=_range_around(data.grid_row, count, n_layers),
        heads=_range_around(data.head, shown, n_heads),
        is_two_column=wide,
    )


def _range_around(middle: int, count: int, total: int) -> range:
    start = min(max(middle - count // 2, 0), total - count)
    return range(start, start + count)


def draw_attention(data: AttentionData, width: int, height: int, theme: Theme) -> list[Strip]:
    """Draw the whole picture: at most `height` strips of `width` cells."""
    layout = attention_layout(data, width, height)
    grid = draw_grid(data, layout, theme)
    if not layout.is_two_column:
        return [*grid, *draw_row(data, width, height - len(grid), theme)][:height]
    spare = height - len(grid) - 1
    below = len(data.segments) < spare and data.tokens is not None
    if below:
        grid += [
            _blank_strip(layout.width, theme),
            *draw_segment_attention(data, layout.width, spare, theme),
        ]
    grid += [_blank_strip(layout.width, theme)] * (height - len(grid))
    gap = [_blank_strip(_COLUMN_GAP, theme)] * height
    rest = width - layout.width - _COLUMN_GAP
    row = draw_row(data, rest, height, theme, with_segments=not below)
    row += [_blank_strip(rest, theme)] * (height - len(row))
    left = join_blocks(grid[:height], gap, theme.style("text"))
    return join_blocks(left, row[:height], theme.style("text"))


def _blank_strip(width: int, theme: Theme) -> Strip:
    return line([], width, theme.style("text"))


# -- the grid -------------------------------------------------------------------------------------


def draw_grid(data: AttentionData, layout: AttentionLayout, theme: Theme) -> list[Strip]:
    """Draw the grid, with its title, the numbers of the heads and the legend if there is room.

    Cells of layers whose check failed are "!".
    """
    grid = data.grid
    strips: list[Strip] = []
    if layout.top > 0:
        strips.append(_grid_title(data, layout, theme))
    if layout.top > 1:
        strips.append(_head_numbers(layout, theme))
    values = grid.drawable_values()[layout.rows.start : layout.rows.stop]
    levels = quantise_marked(values, 0.0, _grid_max(grid), CIVIDIS_MARKED)
    levels = levels[:, layout.heads.start : layout.heads.stop]
    marked = (data.grid_row - layout.rows.start, data.head - layout.heads.start)
    cells = boxes(levels, CIVIDIS_MARKED, theme, cell_width=layout.cell_width, marked=marked)
    for row, strip in zip(layout.rows, cells, strict=True):
        label = _layer_label(grid.layers[row], row == data.grid_row, layout.left, theme)
        whole = Strip.join([label, strip])
        strips.append(whole.adjust_cell_length(layout.width, theme.style("text")))
    if layout.has_legend:
        strips.append(_grid_legend(grid, layout, theme))
    return strips


def _grid_max(grid: AttentionGrid) -> float:
    values = grid.drawable_values()
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _layer_label(layer: int, chosen: bool, width: int, theme: Theme) -> Strip:
    mark, style = ("▸", "chosen") if chosen else (" ", "muted")
    return line([(f"{layer:>{width - 1}}{mark}", theme.style(style))], width)


def _grid_title(data: AttentionData, layout: AttentionLayout, theme: Theme) -> Strip:
    grid = data.grid
    value = grid.drawable_values()[data.grid_row, data.head]
    spans: list[Span] = [
        (grid.measure, theme.style("title")),
        (f" {format_value(float(value), grid.unit)}", theme.style("strong")),
    ]
    if not data.is_newest:
        spans.append((" of the newest row", theme.style("muted")))
    if not layout.has_legend:
        spans.insert(
            2,
            (
                " " + worst_check(grid.lse_checks).describe(),
                check_style(worst_check(grid.lse_checks), theme),
            ),
        )
    return line(spans, layout.width, theme.style("text"))


def _head_numbers(layout: AttentionLayout, theme: Theme) -> Strip:
    """Draw the numbers of the heads, as many as there is room for."""
    need = len(str(layout.heads.stop)) + 1
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * layout.cell_width >= need)
    cells = [
        clip_text(str(head), every * layout.cell_width)
        for head in layout.heads
        if head % every == 0
    ]
    first = next((head for head in layout.heads if head % every == 0), layout.heads.start)
    lead = " " * (layout.left + (first - layout.heads.start) * layout.cell_width)
    text = (lead + "".join(cells)).rstrip()
    if len(text) > layout.width:  # a number that is cut would be another number
        text = text.rpartition(" ")[0]
    return line([(text, theme.style("muted"))], layout.width, theme.style("text"))


def _grid_legend(grid: AttentionGrid, layout: AttentionLayout, theme: Theme) -> Strip:
    high = _grid_max(grid)
    check = worst_check(grid.lse_checks)
    (scale,) = boxes(_SCALE_LEVELS, CIVIDIS_MARKED, theme, cell_width=1)
    muted = theme.style("muted")
    before = line([("0 ", muted)], 2)
    unit = " nats" if grid.unit == "nats" else ""
    after: list[Span] = [
        (f" {format_number(high)}{unit}  ", muted),
        (check.describe(), check_style(check, theme)),
    ]
    bad = [grid.layers[row] for row, one in enumerate(grid.lse_checks) if one.is_failed]
    if bad:
        after.append((f" ! {_format_layers(bad)}: not what ran", theme.style("bad")))
    rest = line(after, max(layout.width - 10, 0), theme.style("text"))
    return Strip.join([before, scale, rest]).adjust_cell_length(layout.width)


def _format_layers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" ..." if len(numbers) > 6 else "")
    return f"layer{'s' if len(numbers) > 1 else ''} {shown}"


def check_style(check: LseCheck, theme: Theme) -> Style:
    """Return the style of a check's text: good, bad, or muted without a value."""
    return theme.style("bad" if check.is_failed else "good" if check.is_checked else "muted")


# -- the row --------------------------------------------------------------------------------------


def draw_row(
    data: AttentionData, width: int, height: int, theme: Theme, *, with_segments: bool = True
) -> list[Strip]:
    """Draw the row of the selected head: title, weights by token if known, segment attention."""
    if height <= 0:
        return []
    strips = [_row_title(data, width, theme), *([_row_summary(data, width, theme)] * (height > 2))]
    left = height - len(strips)
    if data.mismatch:
        strips += wrap_paragraph(data.mismatch, width, theme.style("bad"))
        strips += draw_segment_attention(data, width, height - len(strips), theme)
        return strips[:height]
    if data.tokens is None:
        reason = wrap_paragraph(data.missing_reason, width, theme.style("muted"))
        if left - len(reason) < _TIGHT_HEIGHT:  # the note below the picture has a short form
            reason = []
        strips += draw_segment_attention(data, width, left - len(reason), theme)
        return [*strips, *reason][:height]
    n_open = int(data.tokens.open_keys.sum())
    n_segments = min(len(data.segments) + 2, left - min(n_open + 1, 8))
    if with_segments and n_segments >= _TIGHT_HEIGHT:
        strips += draw_tokens(data, data.tokens, width, left - n_segments, theme)
        strips.append(_blank_strip(width, theme))
        return [*strips, *draw_segment_attention(data, width, n_segments - 1, theme)]
    return [*strips, *draw_tokens(data, data.tokens, width, left, theme)]


def _row_title(data: AttentionData, width: int, theme: Theme) -> Strip:
    which = "newest row" if data.is_newest else "row"
    spans: list[Span] = [
        (f"layer {data.layer} head {data.head}", theme.style("title")),
        (f" {which} {data.q_idx} ", theme.style("text")),
    ]
    if data.query is not None:
        spans.append((data.query.text, token_style(data.query, theme)))
    return line(spans, width, theme.style("text"))


def row_lse_check(data: AttentionData) -> LseCheck:
    """Return the check of what is drawn of the row: its tokens, or else its segment attention."""
    return data.lse_check if data.tokens is not None or data.mismatch else data.segment_check


def _row_summary(data: AttentionData, width: int, theme: Theme) -> Strip:
    check = row_lse_check(data)
    muted = theme.style("muted")
    spans: list[Span] = [(check.describe(), check_style(check, theme))]
    if not check.is_checked and data.newest_lse_check.is_checked:
        spans.append((f" (newest {data.newest_lse_check.describe()})", muted))
    if data.tokens is not None:
        n_open = int(data.tokens.open_keys.sum())
        spans.append((f" {format_number(data.tokens.entropy)} nats", muted))
        spans.append((f" {n_open}/{len(data.tokens.weights)} open", muted))
    return line(spans, width, theme.style("text"))


def draw_segment_attention(
    data: AttentionData, width: int, height: int, theme: Theme
) -> list[Strip]:
    """Draw the attention by segment as bars; see `attention_shares`."""
    if height <= 0 or data.segment_attention is None:
        return []
    headed = height > _TIGHT_HEIGHT
    parts = attention_shares(data, height - headed)
    title = line([("attention by segment", theme.style("muted"))], width, theme.style("text"))
    strips = [title] * headed
    name = min(max((len(label) for label, _, _ in parts), default=1), max(width // 2, 1))
    high = max((mass for _, _, mass in parts if np.isfinite(mass)), default=0.0)
    for label, number_, segment_attention in parts:
        colour = segment_color(number_, data.segments)
        word = TokenCell(number_ if theme.no_color else 0, clip_text(label, name), colour)
        spans = [(word.text, token_style(word, theme))]
        strips.append(_bar_line(spans, name, segment_attention, high, width, theme))
    return strips[:height]


def _bar_line(
    spans: Sequence[Span], used: int, value: float, high: float, width: int, theme: Theme
) -> Strip:
    """Draw a line that ends in a bar and a number."""
    room = max(width - used - 1 - _NUMBER_WIDTH, 0)
    # No bar for a value that is written as "<0.0001", otherwise every line would have one.
    length = bar(value / high if high > 0 and not value < 1e-4 else 0.0, room)
    tail: list[Span] = [
        (" ", theme.style("text")),
        (length, theme.style("accent")),
        (align_right(format_share(value), _NUMBER_WIDTH), theme.style("text")),
    ]
    return line([*spans, *tail], width, theme.style("text"))


def draw_tokens(
    data: AttentionData, row: TokenRow, width: int, height: int, theme: Theme
) -> list[Strip]:
    """Draw all tokens of the row in order if they fit, otherwise an overview and the heaviest."""
    n_keys = len(row.weights)
    if height <= 0:
        return []
    if not row.open_keys.any():
        text = "This row attends to no key: its output is zero."
        return wrap_paragraph(text, width, theme.style("warn"))[:height]
    if n_keys <= min(height, len(row.tokens)):
        return [_token_line(data, row, key, width, theme) for key in range(n_keys)]
    strips = [draw_overview(data, row, width, theme)] if height > 1 else []
    shown = row.heaviest[: height - len(strips)]
    n_open = int(row.open_keys.sum())
    if len(shown) < n_open and len(shown) > 3:
        shown = shown[:-1]
    strips += [_token_line(data, row, int(key), width, theme) for key in shown]
    if len(shown) < n_open and len(strips) < height:
        rest = max(float(row.weights.sum() - row.weights[shown].sum()), 0.0)
        text = f"{n_open - len(shown)} more tokens: {format_share(rest)} together"
        strips.append(line([(text, theme.style("muted"))], width, theme.style("text")))
    return strips


def _token_line(data: AttentionData, row: TokenRow, key: int, width: int, theme: Theme) -> Strip:
    pos = row.first_pos + key
    digits = len(str(row.first_pos + len(row.weights)))
    name = min(max(width // 3, 1), 16)
    word = row.tokens.get(pos, TokenCell(pos, "?", 0))
    spans: list[Span] = [
        (f"{pos:>{digits}} ", theme.style("muted")),
        *_pad_text(word.text, name, token_style(word, theme), theme),
    ]
    used = digits + 1 + name
    if width >= 56:
        label = _segment_label(data, pos)
        spans.append((" " + clip_text(label, 13), theme.style("muted")))
        used += 14
    if not row.open_keys[key]:
        return line([*spans, (" closed", theme.style("muted"))], width, theme.style("text"))
    high = float(row.weights.max(initial=0.0))
    return _bar_line(spans, used, float(row.weights[key]), high, width, theme)


def _pad_text(text: str, width: int, style: Style, theme: Theme) -> list[Span]:
    """Pad a text to `width` cells; only its own cells have its style."""
    room = width - cell_len(text)
    if room <= 0:
        return [(clip_text(text, width), style)]
    return [(text, style), (" " * room, theme.style("text"))]


def _segment_label(data: AttentionData, pos: int) -> str:
    return next((s.label for s in data.segments if s.start <= pos < s.stop), "")


def draw_overview(data: AttentionData, row: TokenRow, width: int, theme: Theme) -> Strip:
    """Draw all keys in one line: the largest weight of each column on its segment's colour.

    A column without an open key is blank.
    """
    n_keys = len(row.weights)
    columns = min(n_keys, width)
    edges = np.arange(columns) * n_keys // columns
    highest = np.maximum.reduceat(row.weights, edges)
    opened = np.logical_or.reduceat(row.open_keys, edges)
    text = sparkline(
        [w if o else None for w, o in zip(highest.tolist(), opened.tolist(), strict=True)], columns
    )
    starts = [segment.start for segment in data.segments]
    numbers = np.searchsorted(starts, edges + row.first_pos, side="right") - 1
    spans: list[Span] = []
    for char, index in zip(text, numbers.tolist(), strict=True):
        word = TokenCell(index if theme.no_color else 0, "", segment_color(index, data.segments))
        spans.append((char, token_style(word, theme)))
    return line(_merge_spans(spans), width, theme.style("text"))


def _merge_spans(spans: Sequence[Span]) -> list[Span]:
    out: list[Span] = []
    for text, style in spans:
        if out and out[-1][1] is style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out
