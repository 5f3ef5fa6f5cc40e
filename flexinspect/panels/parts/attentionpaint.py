"""The attention panel drawn: the grid of layers and heads, mass by segment, weights by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from flexinspect.attention import Gate, worst
from flexinspect.colormap import CIVIDIS_MARKED, quantise_marked
from flexinspect.panels.parts.attentiondata import (
    AttentionData,
    Grid,
    TokenRow,
    mass_parts,
    measured,
    share,
)
from flexinspect.panels.parts.sequence import band
from flexinspect.widgets.heat import boxes
from flexinspect.widgets.lines import Span, beside, clipped, line, paragraph, right
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import bar, number, sparkline
from flexinspect.widgets.tokencells import Word, word_style

BESIDE = 72
"""Columns from which the row stands beside the grid, not below it."""

_NUMBER = 8
_TIGHT = 6
"""Lines below which bars leave no room for words around them."""

_GAP = 2
_SCALE = np.linspace(0, CIVIDIS_MARKED.size - 2, 8).astype(np.uint8)[None]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the grid lies: its cells begin at (`left`, `top`), `cell` columns each.

    `rows` and `heads` are those shown; `width` and `height` are of the whole block with its title,
    header and legend.
    """

    width: int
    height: int
    left: int
    top: int
    cell: int
    rows: range
    heads: range
    beside: bool

    @property
    def legend(self) -> bool:
        """Whether there is a line for the legend."""
        return self.height > self.top + len(self.rows)

    def at(self, x: int, y: int) -> tuple[int, int] | None:
        """Return the row of the grid and the head at a cell of the picture."""
        if x < self.left or y < self.top:
            return None
        row, head = y - self.top, (x - self.left) // self.cell
        if row >= len(self.rows) or head >= len(self.heads):
            return None
        return self.rows[row], self.heads[head]


def arrange(data: AttentionData, width: int, height: int) -> Frame:
    """Return where the grid goes in a picture of this size; the chosen cell is always inside."""
    n_layers, n_heads = data.grid.values.shape
    left = len(str(max(data.grid.layers))) + 1
    wide = width >= BESIDE and height >= 6
    room = (width // 2 if wide else width) - left
    cell = min(max(room // n_heads, 1), 3)
    shown = min(n_heads, max(room // cell, 1))
    most = height if wide else max(height // 2, 1)
    extra = (most >= 2) + (most >= 4) + (most >= 5)
    count = min(n_layers, max(most - extra, 1))
    return Frame(
        width=min(max(left + cell * shown, 34), width // 2) if wide else width,
        height=count + extra,
        left=left,
        top=(most >= 2) + (most >= 5),
        cell=cell,
        rows=_around(data.grid_row, count, n_layers),
        heads=_around(data.head, shown, n_heads),
        beside=wide,
    )


def _around(middle: int, count: int, total: int) -> range:
    start = min(max(middle - count // 2, 0), total - count)
    return range(start, start + count)


def picture(data: AttentionData, width: int, height: int, look: Look) -> list[Strip]:
    """Return the whole picture: `height` strips of `width` cells at most."""
    frame = arrange(data, width, height)
    grid = grid_block(data, frame, look)
    if not frame.beside:
        return [*grid, *row_block(data, width, height - len(grid), look)][:height]
    spare = height - len(grid) - 1
    below = len(data.segments) < spare and data.tokens is not None
    if below:
        grid += [_blank(frame.width, look), *mass_block(data, frame.width, spare, look)]
    grid += [_blank(frame.width, look)] * (height - len(grid))
    gap = [_blank(_GAP, look)] * height
    rest = width - frame.width - _GAP
    row = row_block(data, rest, height, look, with_mass=not below)
    row += [_blank(rest, look)] * (height - len(row))
    left = beside(grid[:height], gap, look.style("text"))
    return beside(left, row[:height], look.style("text"))


def _blank(width: int, look: Look) -> Strip:
    return line([], width, look.style("text"))


# -- the grid -------------------------------------------------------------------------------------


def grid_block(data: AttentionData, frame: Frame, look: Look) -> list[Strip]:
    """Return the grid with its title, the numbers of the heads, and the legend as far as it fits.

    Layers whose gate is bad are not drawn: "!" stands in their cells.
    """
    grid = data.grid
    strips: list[Strip] = []
    if frame.top > 0:
        strips.append(_grid_title(data, frame, look))
    if frame.top > 1:
        strips.append(_header(frame, look))
    values = grid.shown()[frame.rows.start : frame.rows.stop]
    levels = quantise_marked(values, 0.0, _high(grid), CIVIDIS_MARKED)
    levels = levels[:, frame.heads.start : frame.heads.stop]
    marked = (data.grid_row - frame.rows.start, data.head - frame.heads.start)
    cells = boxes(levels, CIVIDIS_MARKED, look, cell_width=frame.cell, marked=marked)
    for row, strip in zip(frame.rows, cells, strict=True):
        label = _layer_label(grid.layers[row], row == data.grid_row, frame.left, look)
        whole = Strip.join([label, strip])
        strips.append(whole.adjust_cell_length(frame.width, look.style("text")))
    if frame.legend:
        strips.append(_legend(grid, frame, look))
    return strips


def _high(grid: Grid) -> float:
    values = grid.shown()
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _layer_label(layer: int, chosen: bool, width: int, look: Look) -> Strip:
    mark, style = ("▸", "chosen") if chosen else (" ", "muted")
    return line([(f"{layer:>{width - 1}}{mark}", look.style(style))], width)


def _grid_title(data: AttentionData, frame: Frame, look: Look) -> Strip:
    grid = data.grid
    value = grid.shown()[data.grid_row, data.head]
    spans: list[Span] = [
        (grid.measure, look.style("title")),
        (f" {measured(float(value), grid.unit)}", look.style("strong")),
    ]
    if not data.newest:
        spans.append((" of the newest row", look.style("muted")))
    if not frame.legend:
        spans.insert(2, (" " + worst(grid.gates).words(), gate_style(worst(grid.gates), look)))
    return line(spans, frame.width, look.style("text"))


def _header(frame: Frame, look: Look) -> Strip:
    """Number the heads, as many as have room."""
    need = len(str(frame.heads.stop)) + 1
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * frame.cell >= need)
    cells = [clipped(str(head), every * frame.cell) for head in frame.heads if head % every == 0]
    first = next((head for head in frame.heads if head % every == 0), frame.heads.start)
    lead = " " * (frame.left + (first - frame.heads.start) * frame.cell)
    text = (lead + "".join(cells)).rstrip()
    if len(text) > frame.width:  # half a number would be another number
        text = text.rpartition(" ")[0]
    return line([(text, look.style("muted"))], frame.width, look.style("text"))


def _legend(grid: Grid, frame: Frame, look: Look) -> Strip:
    high = _high(grid)
    gate = worst(grid.gates)
    (scale,) = boxes(_SCALE, CIVIDIS_MARKED, look, cell_width=1)
    muted = look.style("muted")
    before = line([("0 ", muted)], 2)
    unit = " nats" if grid.unit == "nats" else ""
    after: list[Span] = [
        (f" {number(high)}{unit}  ", muted),
        (gate.words(), gate_style(gate, look)),
    ]
    bad = [grid.layers[row] for row, one in enumerate(grid.gates) if one.bad]
    if bad:
        after.append((f" ! {_layers(bad)}: not what ran", look.style("bad")))
    rest = line(after, max(frame.width - 10, 0), look.style("text"))
    return Strip.join([before, scale, rest]).adjust_cell_length(frame.width)


def _layers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" ..." if len(numbers) > 6 else "")
    return f"layer{'s' if len(numbers) > 1 else ''} {shown}"


def gate_style(gate: Gate, look: Look) -> Style:
    """Return the style of a gate's words: good, bad, or muted where there is no number."""
    return look.style("bad" if gate.bad else "good" if gate.checked else "muted")


# -- the row --------------------------------------------------------------------------------------


def row_block(
    data: AttentionData, width: int, height: int, look: Look, *, with_mass: bool = True
) -> list[Strip]:
    """Return the row of the chosen head: heading, weights by token where there are any, mass."""
    if height <= 0:
        return []
    strips = [_row_title(data, width, look), *([_row_facts(data, width, look)] * (height > 2))]
    left = height - len(strips)
    if data.refused:
        strips += paragraph(data.refused, width, look.style("bad"))
        strips += mass_block(data, width, height - len(strips), look)
        return strips[:height]
    if data.tokens is None:
        words = paragraph(data.why, width, look.style("muted"))
        if left - len(words) < _TIGHT:  # then the note below the picture says it
            words = []
        return [*strips, *mass_block(data, width, left - len(words), look), *words][:height]
    n_open = int(data.tokens.open_keys.sum())
    n_mass = min(len(data.segments) + 2, left - min(n_open + 1, 8))
    if with_mass and n_mass >= _TIGHT:
        strips += token_block(data, data.tokens, width, left - n_mass, look)
        strips += [_blank(width, look), *mass_block(data, width, n_mass - 1, look)]
        return strips
    return [*strips, *token_block(data, data.tokens, width, left, look)]


def _row_title(data: AttentionData, width: int, look: Look) -> Strip:
    which = "newest row" if data.newest else "row"
    spans: list[Span] = [
        (f"layer {data.layer} head {data.head}", look.style("title")),
        (f" {which} {data.q_idx} ", look.style("text")),
    ]
    if data.query is not None:
        spans.append((data.query.text, word_style(data.query, look)))
    return line(spans, width, look.style("text"))


def row_gate(data: AttentionData) -> Gate:
    """Return the gate of what is drawn of the row: its tokens, else its mass."""
    return data.gate if data.tokens is not None or data.refused else data.mass_gate


def _row_facts(data: AttentionData, width: int, look: Look) -> Strip:
    gate = row_gate(data)
    muted = look.style("muted")
    spans: list[Span] = [(gate.words(), gate_style(gate, look))]
    if not gate.checked and data.newest_gate.checked:
        spans.append((f" (newest {data.newest_gate.words()})", muted))
    if data.tokens is not None:
        n_open = int(data.tokens.open_keys.sum())
        spans.append((f" {number(data.tokens.entropy)} nats", muted))
        spans.append((f" {n_open}/{len(data.tokens.weights)} open", muted))
    return line(spans, width, look.style("text"))


def mass_block(data: AttentionData, width: int, height: int, look: Look) -> list[Strip]:
    """Return the mass by segment as bars: all segments, else kinds, else the largest of them."""
    if height <= 0 or data.mass is None:
        return []
    headed = height > _TIGHT
    parts = mass_parts(data, height - headed)
    title = line([("mass by segment", look.style("muted"))], width, look.style("text"))
    strips = [title] * headed
    name = min(max((len(label) for label, _, _ in parts), default=1), max(width // 2, 1))
    high = max((mass for _, _, mass in parts if np.isfinite(mass)), default=0.0)
    for label, number_, mass in parts:
        colour = band(number_, data.segments)
        word = Word(number_ if look.plain else 0, clipped(label, name), colour)
        spans = [(word.text, word_style(word, look))]
        strips.append(_bar_line(spans, name, mass, high, width, look))
    return strips[:height]


def _bar_line(
    spans: Sequence[Span], used: int, value: float, high: float, width: int, look: Look
) -> Strip:
    """Return a line that ends in a bar and a number."""
    room = max(width - used - 1 - _NUMBER, 0)
    # No bar for what is written as next to nothing, or every line had one.
    length = bar(value / high if high > 0 and not value < 1e-4 else 0.0, room)
    tail: list[Span] = [
        (" ", look.style("text")),
        (length, look.style("accent")),
        (right(share(value), _NUMBER), look.style("text")),
    ]
    return line([*spans, *tail], width, look.style("text"))


def token_block(
    data: AttentionData, row: TokenRow, width: int, height: int, look: Look
) -> list[Strip]:
    """Return the row's tokens: all in order where they fit, else a strip and the heaviest."""
    n_keys = len(row.weights)
    if height <= 0:
        return []
    if not row.open_keys.any():
        text = "This row sees no key at all: its output is zero."
        return paragraph(text, width, look.style("warn"))[:height]
    if n_keys <= min(height, len(row.words)):
        return [_token_line(data, row, key, width, look) for key in range(n_keys)]
    strips = [overview(data, row, width, look)] if height > 1 else []
    shown = row.heaviest[: height - len(strips)]
    n_open = int(row.open_keys.sum())
    if len(shown) < n_open and len(shown) > 3:
        shown = shown[:-1]
    strips += [_token_line(data, row, int(key), width, look) for key in shown]
    if len(shown) < n_open and len(strips) < height:
        rest = max(float(row.weights.sum() - row.weights[shown].sum()), 0.0)
        text = f"{n_open - len(shown)} more tokens: {share(rest)} together"
        strips.append(line([(text, look.style("muted"))], width, look.style("text")))
    return strips


def _token_line(data: AttentionData, row: TokenRow, key: int, width: int, look: Look) -> Strip:
    pos = row.first_pos + key
    digits = len(str(row.first_pos + len(row.weights)))
    name = min(max(width // 3, 1), 16)
    word = row.words.get(pos, Word(pos, "?", 0))
    spans: list[Span] = [
        (f"{pos:>{digits}} ", look.style("muted")),
        *_padded(word.text, name, word_style(word, look), look),
    ]
    used = digits + 1 + name
    if width >= 56:
        label = _label(data, pos)
        spans.append((" " + clipped(label, 13), look.style("muted")))
        used += 14
    if not row.open_keys[key]:
        return line([*spans, (" closed", look.style("muted"))], width, look.style("text"))
    high = float(row.weights.max(initial=0.0))
    return _bar_line(spans, used, float(row.weights[key]), high, width, look)


def _padded(text: str, width: int, style: Style, look: Look) -> list[Span]:
    """Return a word in `width` cells, only its own cells in its style."""
    room = width - cell_len(text)
    if room <= 0:
        return [(clipped(text, width), style)]
    return [(text, style), (" " * room, look.style("text"))]


def _label(data: AttentionData, pos: int) -> str:
    return next((s.label for s in data.segments if s.start <= pos < s.stop), "")


def overview(data: AttentionData, row: TokenRow, width: int, look: Look) -> Strip:
    """Return all keys in one line: the largest weight of each column on its segment's colour.

    A column whose keys are all closed is blank.
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
        word = Word(index if look.plain else 0, "", band(index, data.segments))
        spans.append((char, word_style(word, look)))
    return line(_merged(spans), width, look.style("text"))


def _merged(spans: Sequence[Span]) -> list[Span]:
    out: list[Span] = []
    for text, style in spans:
        if out and out[-1][1] is style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out
