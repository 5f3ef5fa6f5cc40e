"""The attention panel: the attention of every head by segment, and of one head by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexinspect.drawing.plots import format_number
from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.masks.attention_row import worst_check
from flexinspect.panels.attention.attention_data import (
    NO_OPEN_KEY,
    SINK,
    AttentionData,
    AttentionGrid,
    AttentionOptions,
    format_share,
    format_value,
    load_attention,
)
from flexinspect.panels.attention.attention_drawing import (
    attention_layout,
    draw_attention,
    row_lse_check,
)
from flexinspect.panels.attention.row_recompute import EXTREME_ONLY
from flexinspect.panels.base import CURSOR_MOVES, Help, Navigate, Panel, Picture, Request
from flexinspect.panels.panel_source import Source

MAX_TABLE_LAYERS, MAX_TABLE_HEADS = 12, 16
"""The largest grid that `describe` writes as a table."""

N_LISTED_TOKENS = 10


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
        strips = draw_attention(data, request.height, Pen(theme, request.width))
        grid_check, check = worst_check(data.grid.lse_checks), row_lse_check(data)
        alarm = grid_check.is_failed or check.is_failed
        note = check.describe() + (": not what ran" if check.is_failed else "")
        if grid_check.is_failed and not check.is_failed:
            note += f" · grid {grid_check.describe()}"
        if data.missing_reason == EXTREME_ONLY:
            note += " · by token: --level extreme"
        return Picture(
            strips, f"{data.grid.measure} · {note}{_format_visible_range(data, request)}", alarm
        )

    def on_action(
        self, action: str, data: AttentionData, request: Request[AttentionOptions]
    ) -> AttentionOptions | Navigate | None:
        """Change the measure, or go to another layer or head (in a prefill, another row)."""
        if action == "view.measure":
            return request.with_next("measure", data.grid.measures, data.grid.measure)
        down, across = CURSOR_MOVES.get(action, (0, 0))
        if down and 0 <= data.grid_row + down < len(data.grid.layers):
            return Navigate(layer=data.grid.layers[data.grid_row + down])
        return _move_sideways(across, data, request) if across else None

    def on_click(
        self, x: int, y: int, data: AttentionData, request: Request[AttentionOptions]
    ) -> Navigate | None:
        """Go to the layer and head that were clicked."""
        cell = attention_layout(data, request.width, request.height).cell_at(x, y)
        return Navigate(layer=data.grid.layers[cell[0]], head=cell[1]) if cell else None


def _move_sideways(
    by: int, data: AttentionData, request: Request[AttentionOptions]
) -> AttentionOptions | Navigate | None:
    if len(data.rows) > 1:
        row = data.q_idx + by
        if row not in data.rows:
            return None
        return replace(request.options, row=None if row == data.rows[-1] else row)
    head = data.head + by
    return Navigate(head=head) if 0 <= head < data.grid.values.shape[1] else None


def _format_visible_range(data: AttentionData, request: Request[AttentionOptions]) -> str:
    """Return the visible layers and heads if not all are visible."""
    layout = attention_layout(data, request.width, request.height)
    n_layers, n_heads = data.grid.values.shape
    text = ""
    if len(layout.rows) < n_layers:
        layers = data.grid.layers
        text += f" · layers {layers[layout.rows[0]]}-{layers[layout.rows[-1]]} of {n_layers}"
    if len(layout.heads) < n_heads:
        text += f" · heads {layout.heads[0]}-{layout.heads[-1]} of {n_heads}"
    return text


# -- text -----------------------------------------------------------------------------------------


def _describe_grid(data: AttentionData) -> list[str]:
    grid = data.grid
    title = f"share of its attention on {grid.measure}"
    if grid.unit == "nats":
        title = "entropy in nats"
    elif grid.measure == SINK:
        title = "share of its attention on the first token"
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
    checks = zip(grid.layers, grid.lse_checks, strict=True)
    bad = ", ".join(str(layer) for layer, check in checks if check.is_failed)
    lines += [f"Not what ran, so not shown: layers {bad}."] if bad else []
    return [*lines, f"Measures: {', '.join(grid.measures)}."]


def _describe_layer(layer: int, grid: AttentionGrid, row: int) -> str:
    values = grid.drawable_values()[row]
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"Layer {layer}: no values."
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    mean, lowest, highest = (
        format_value(float(value), grid.unit)
        for value in (finite.mean(), values[low], values[high])
    )
    return (
        f"Layer {layer}: mean {mean}, lowest {lowest} at head {low}, "
        f"highest {highest} at head {high}."
    )


def _describe_row(data: AttentionData) -> list[str]:
    word = f" '{data.query.text}'" if data.query else ""
    which = "newest row" if data.is_newest else "row"
    lines = [f"Layer {data.layer}, head {data.head}, {which} {data.q_idx}{word}:"]
    if data.segment_attention is not None:
        shares = zip(data.segments, data.segment_attention.tolist(), strict=False)
        parts = ", ".join(
            f"{segment.label} {format_share(segment_attention)}"
            for segment, segment_attention in shares
        )
        lines.append(f"Attention by segment ({data.segment_check.describe()}): {parts}.")
    if data.mismatch or data.tokens is None:
        lines.append(data.mismatch or data.missing_reason)
        return lines
    return [*lines, *_describe_tokens(data)]


def _describe_tokens(data: AttentionData) -> list[str]:
    row = data.tokens
    assert row is not None
    check = data.lse_check.describe()
    if not data.lse_check.is_checked:
        newest = data.newest_lse_check.describe()
        check = f"recomputed, not checked against the kernel; newest row: {newest}"
    n_open, n_keys = int(row.open_keys.sum()), len(row.weights)
    lines = [
        f"{n_open} of {n_keys} keys are open, entropy {format_number(row.entropy)} nats ({check})."
    ]
    if not n_open:
        return [*lines, NO_OPEN_KEY]
    lines.append(f"Heaviest tokens, the first {min(N_LISTED_TOKENS, len(row.heaviest))}:")
    for key in row.heaviest[:N_LISTED_TOKENS].tolist():
        pos = row.first_pos + key
        text = row.tokens[pos].text if pos in row.tokens else "?"
        share, segment = format_share(float(row.weights[key])), data.segment_label(pos)
        lines.append(f"  {share:>8}  {pos:>6} '{text}' {segment}".rstrip())
    return lines
