"""The attention panel: the attention of every head by segment, and of one head by token."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from flexinspect.drawing.plots import format_number
from flexinspect.drawing.theme import Theme
from flexinspect.masks.attention_row import worst_check
from flexinspect.panels.attention.attention_data import (
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
from flexinspect.panels.base import Help, Navigate, Panel, Picture, Request
from flexinspect.panels.panel_source import Source

MAX_TABLE_LAYERS, MAX_TABLE_HEADS = 12, 16
"""The largest grid that `describe` writes as a table."""

N_LISTED_TOKENS = 10


class AttentionPanel(Panel[AttentionData, AttentionOptions]):
    """Attention of one row: a grid of layers and heads, and the weights of the chosen head."""

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "Attention"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows how much of the newest row's attention each head of each layer gave to a part "
        "of the sequence, and the tokens that one head attended to.",
        "Layers go down, heads across, brighter is more; the bars are the weights of the selected "
        "head, the check shows how far the picture is from what ran (0 is exact), v shows another "
        "measure, and shift+left another row of a prefill at level extreme.",
        "Look for heads that ignore a paraphrase, put all attention on BOS, or attend where the "
        "mask should be closed; a check above 0.01 means that this is not what ran.",
    )
    actions: ClassVar[tuple[str, ...]] = (
        "view.measure",
        "cursor.left",
        "cursor.right",
        "cursor.up",
        "cursor.down",
    )

    def options(self) -> AttentionOptions:
        """Return the initial options: the first measure, the newest row."""
        return AttentionOptions()

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
        strips = draw_attention(data, request.width, request.height, theme)
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
            names = data.grid.measures
            following = names[(names.index(data.grid.measure) + 1) % len(names)]
            return replace(request.options, measure=following)
        if action in ("cursor.up", "cursor.down"):
            row = data.grid_row + (1 if action == "cursor.down" else -1)
            inside = 0 <= row < len(data.grid.layers)
            return Navigate(layer=data.grid.layers[row]) if inside else None
        if action in ("cursor.left", "cursor.right"):
            return _move_sideways(1 if action == "cursor.right" else -1, data, request)
        return None

    def on_mouse(
        self,
        x: int,
        y: int,
        data: AttentionData,
        request: Request[AttentionOptions],
        *,
        click: bool,
    ) -> Navigate | None:
        """Go to the layer and head that were clicked."""
        layout = attention_layout(data, request.width, request.height)
        cell = layout.cell_at(x, y) if click else None
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
    values = grid.drawable_values()
    if values.shape[0] <= MAX_TABLE_LAYERS and values.shape[1] <= MAX_TABLE_HEADS:
        heads = " ".join(f"{head:>7}" for head in range(values.shape[1]))
        lines.append(f"layer\\head {heads}")
    lines += [_describe_layer(layer, grid, row) for row, layer in enumerate(grid.layers)]
    bad = [
        layer for layer, gate in zip(grid.layers, grid.lse_checks, strict=True) if gate.is_failed
    ]
    if bad:
        names = ", ".join(map(str, bad))
        lines.append(f"Not what ran, so not shown: layers {names}.")
    lines.append(f"Measures: {', '.join(grid.measures)}.")
    return lines


def _format_cell(value: float, unit: str) -> str:
    return format_share(value) if unit == "share" else format_number(value)


def _describe_layer(layer: int, grid: AttentionGrid, row: int) -> str:
    values, unit = grid.drawable_values()[row], grid.unit
    if grid.values.shape[0] <= MAX_TABLE_LAYERS and grid.values.shape[1] <= MAX_TABLE_HEADS:
        return f"{layer:>10} " + " ".join(
            f"{_format_cell(float(value), unit):>7}" for value in values
        )
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"Layer {layer}: no values."
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    return (
        f"Layer {layer}: mean {format_value(float(finite.mean()), unit)}, "
        f"lowest {format_value(float(values[low]), unit)} at head {low}, "
        f"highest {format_value(float(values[high]), unit)} at head {high}."
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
        return [*lines, "This row attends to no key: its output is zero."]
    lines.append(f"Heaviest tokens, the first {min(N_LISTED_TOKENS, len(row.heaviest))}:")
    for key in row.heaviest[:N_LISTED_TOKENS].tolist():
        pos = row.first_pos + key
        text = row.tokens[pos].text if pos in row.tokens else "?"
        segment = next((s.label for s in data.segments if s.start <= pos < s.stop), "")
        lines.append(
            f"  {format_share(float(row.weights[key])):>8}  {pos:>6} '{text}' {segment}".rstrip()
        )
    return lines
