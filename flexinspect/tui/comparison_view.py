"""The drawing of two branches side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.analysis.run_diff.quantities import QuantityDifference
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.text_lines import NamedSpan, Pen, clip_text, join_blocks
from flexinspect.drawing.token_cells import TokenCell, token_style
from flexinspect.panels.logits_panel import NUMBER_WIDTH, format_probability, token_label
from flexinspect.panels.mask.cells_around import CELL_WIDTH, N_KEYS, N_ROWS, ROW_WORD_WIDTH
from flexinspect.panels.token_window import token_cells
from flexinspect.records.step import Candidate
from flexinspect.tui.comparison_data import PairData, Side, SideData, StepNumbers

BLOCKS = "▁▂▃▄▅▆▇█"
KL_TITLE = "KL  "
FULL_KL = 1.0
"""KL in nats that fills the height of the line."""
KL_LINE = 5
"""The line of KL per step, from the top."""
N_CANDIDATES = 5
LAYER_TITLE = "layers  "
LAYER_LINE = 7
"""The line of the difference of each layer, from the top."""
MASK_LINE = 15
"""The line of the masks, from the top, with all candidates."""
MASK_TEXT_WIDTH = 40
_GAP = 2


def draw_pair(data: PairData, sides: tuple[Side, Side], verdict: str, pen: Pen) -> list[Strip]:
    """Draw the verdict, the place, the tokens, KL per step, candidates and masks."""
    lines = [
        pen.line((verdict, "strong")),
        pen.line((_format_place(data), "muted")),
        *_draw_tokens(data, sides, pen),
        _draw_kl(data, pen),
        pen.line((_describe_kl(data), "text")),
        _draw_layers(data, pen),
    ]
    return [*lines, *_draw_candidates(data, sides, pen), pen.line(), *_draw_masks(data, sides, pen)]


def _format_place(data: PairData) -> str:
    place, n_steps = data.place, data.steps.last + 1
    differences = len(data.differences)
    parts = [f"token {place.step + 1} of {n_steps} (step {place.step})"]
    parts += [f"{differences} of {n_steps} tokens differ"]
    return " · ".join([*parts, f"layer {place.layer}", f"head {place.head}"])


def cells_that_fit(width: int, height: int) -> tuple[int, int]:
    """Return how many rows and keys of the masks a screen of this size shows."""
    n_keys = (width - MASK_TEXT_WIDTH - _GAP - ROW_WORD_WIDTH - 1) // CELL_WIDTH
    return max(height - MASK_LINE - 2, N_ROWS), max(n_keys, N_KEYS)


def step_at(data: PairData, x: int, width: int) -> int | None:
    """Return the step of the KL line at a column."""
    column = x - len(KL_TITLE)
    return data.steps.step_at(column, width - len(KL_TITLE)) if column >= 0 else None


# -- tokens ---------------------------------------------------------------------------------------


def _draw_tokens(data: PairData, sides: tuple[Side, Side], pen: Pen) -> list[Strip]:
    """Draw both texts, tokens of one position below each other, and marks of differences."""
    cells = [_cells_by_pos(side) for side in data.sides]
    positions = sorted(cells[0].keys() | cells[1].keys())
    if not positions:
        return [pen.line(("no tokens are recorded", "muted"))] * 3
    widths = {
        pos: max(cell_len(side[pos].text) if pos in side else 1 for side in cells)
        for pos in positions
    }
    current = next((s.window.current for s in data.sides if s.window is not None), None)
    name_width = min(max(len(side.name) for side in sides) + 1, 14)
    shown = _fit(positions, widths, current, pen.width - name_width)
    lines: list[list[NamedSpan]] = []
    for side, own in zip(sides, cells, strict=True):
        name = clip_text(escape_unprintable(side.name), name_width - 1) + " "
        spans: list[NamedSpan] = [(name, "title")]
        for pos in shown:
            cell = own.get(pos)
            text = "" if cell is None else cell.text
            style = (
                "muted" if cell is None else token_style(cell, pen.theme, current=pos == current)
            )
            spans.append((clip_text(text or "–", widths[pos]), style))
        lines.append(spans)
    marks: list[NamedSpan] = [(" " * name_width, "text")]
    for pos in shown:
        one, other = cells[0].get(pos), cells[1].get(pos)
        differs = one is None or other is None or one.text != other.text
        mark = "≠" if differs else "▲" if pos == current else ""
        marks.append((clip_text(mark, widths[pos]), "bad" if differs else "strong"))
    return [pen.line(*spans) for spans in (*lines, marks)]


def _cells_by_pos(side: SideData) -> dict[int, TokenCell]:
    if side.window is None:
        return {}
    return {cell.pos: cell for cell in token_cells(side.window, "probability")}


def _fit(
    positions: Sequence[int], widths: dict[int, int], current: int | None, room: int
) -> Sequence[int]:
    """Return the positions around the current one whose tokens fit."""
    at = positions.index(current) if current in positions else len(positions) - 1
    first = last = at
    used = widths[positions[at]]
    while True:
        left = used + widths[positions[first - 1]] if first > 0 else room + 1
        right = used + widths[positions[last + 1]] if last + 1 < len(positions) else room + 1
        if left <= room and (at - first <= last - at or right > room):
            first, used = first - 1, left
        elif right <= room:
            last, used = last + 1, right
        else:
            return positions[first : last + 1]


# -- distributions --------------------------------------------------------------------------------


def _draw_kl(data: PairData, pen: Pen) -> Strip:
    steps, width = data.steps, pen.width - len(KL_TITLE)
    each = steps.columns_per_point(width)
    spans: list[NamedSpan] = [(KL_TITLE, "title")]
    for step in steps.steps:
        value, _ = data.kl.get(step, (math.nan, False))
        sign = "?"
        if not math.isnan(value):
            sign = BLOCKS[min(int(value / FULL_KL * len(BLOCKS)), len(BLOCKS) - 1)]
        style = "bad" if step in data.differences else "accent"
        spans.append((sign * each, "cursor" if step == steps.current else style))
    return pen.line(*spans)


def _describe_kl(data: PairData) -> str:
    step = data.place.step
    if step not in data.kl:
        return f"Step {step}: a side has no logits, so there is no KL."
    value, is_bound = data.kl[step]
    bound = "at least " if is_bound else ""
    return f"Step {step}: KL {bound}{value:.3g} nats. Red: another token; ?: no logits."


def _draw_layers(data: PairData, pen: Pen) -> Strip:
    """Draw one sign per layer, or per few layers, and the numbers of the current one in words."""
    numbers = data.numbers
    if numbers is None:
        return pen.line((LAYER_TITLE, "title"), ("a side does not have this step", "muted"))
    spans: list[NamedSpan] = [(LAYER_TITLE, "title")]
    for layers in _layer_columns(data, pen.width):
        worst = [one for one in map(numbers.worst, layers) if one is not None]
        top = max(worst, key=lambda one: one.difference, default=None)
        sign = "?" if top is None else _size_sign(top, numbers)
        style = "muted" if sign == "·" else "accent"
        style = "bad" if any(map(numbers.is_beyond, worst)) else style
        spans.append((sign, "cursor" if data.place.layer in layers else style))
    return pen.line(*spans, (f"  {_describe_numbers(data, numbers)}", "text"))


def _size_sign(one: QuantityDifference, numbers: StepNumbers) -> str:
    """Return a sign for a difference: up to half height within noise, above that beyond it."""
    if not one.difference:
        return "·"
    limit, half = numbers.noise.limit(one.quantity, one.layer), len(BLOCKS) // 2
    if one.difference <= limit:
        return BLOCKS[min(int(one.difference / limit * half), half - 1)]
    tens = math.log10(one.difference / limit) if limit else math.inf
    return BLOCKS[half + int(min(tens, half - 1))]


def _describe_numbers(data: PairData, numbers: StepNumbers) -> str:
    """Return the first quantity of the layer beyond noise, or its worst, and the logits."""
    logits = (one for one in numbers.differences if one.quantity == "logits")
    shown = {f"layer {data.place.layer}": numbers.worst(data.place.layer)}
    shown["step"] = next(logits, None)
    parts = []
    for where, one in shown.items():
        if one is not None:
            if not one.difference:
                parts.append(f"{where}: equal")
                continue
            size = "other" if math.isinf(one.difference) else f"{one.difference:.2g}"
            sign = "≠ " if numbers.is_beyond(one) else ""
            parts.append(f"{where}: {sign}{one.quantity} {size}")
    return " · ".join(parts) or "no numbers that both have"


def _layer_columns(data: PairData, width: int) -> list[range]:
    """Return the layers of each sign: one, or as many as let the line fill half of the width."""
    numbers = data.numbers
    known = [one.layer for one in numbers.differences if one.layer is not None] if numbers else []
    n_layers = max(known, default=-1) + 1
    each = max(-(-n_layers // max(width // 2 - len(LAYER_TITLE), 1)), 1)
    return [range(first, min(first + each, n_layers)) for first in range(0, n_layers, each)]


def layer_at(data: PairData, x: int, width: int) -> int | None:
    """Return the layer of the line of layers at a column."""
    columns, column = _layer_columns(data, width), x - len(LAYER_TITLE)
    return columns[column].start if 0 <= column < len(columns) else None


def _draw_candidates(data: PairData, sides: tuple[Side, Side], pen: Pen) -> list[Strip]:
    half = pen.resize((pen.width - _GAP) // 2)
    blocks = []
    for side, own, other in zip(sides, data.sides, reversed(data.sides), strict=True):
        title = f"candidates of {escape_unprintable(side.name)}"
        lines = [half.line((title, "title"))]
        there = {each.token_id: each for each in other.candidates}
        for candidate in _shown_candidates(own):
            lines.append(_draw_candidate(candidate, own, there, half))
        if not own.candidates:
            lines.append(half.line(("none are recorded", "muted")))
        blocks.append(lines)
    return join_blocks(blocks[0], blocks[1], pen.style("text"), gap=_GAP)


def _shown_candidates(side: SideData) -> Sequence[Candidate]:
    """Return the best candidates, the last of them replaced by a chosen one of lower rank."""
    chosen, best = side.chosen, side.candidates[:N_CANDIDATES]
    if chosen is None or any(one.token_id == chosen.token_id for one in best):
        return best
    return [*best[: N_CANDIDATES - 1], chosen]


def _draw_candidate(
    candidate: Candidate, own: SideData, there: dict[int, Candidate], pen: Pen
) -> Strip:
    own_rank, other = candidate.rank, there.get(candidate.token_id)
    if other is None:
        moved = "not listed there"
    elif other.rank != own_rank:
        moved = f"rank {other.rank} there"
    else:
        change = other.logit - candidate.logit
        moved = f"Δ {change:+.1g}" if change else ""
    is_chosen = own.chosen is not None and candidate.token_id == own.chosen.token_id
    return pen.line(
        (f"{'*' if is_chosen else ' '}{own_rank:>2} ", "chosen" if is_chosen else "text"),
        (
            clip_text(token_label(candidate.text, candidate.token_id), 14),
            "chosen" if is_chosen else "text",
        ),
        (f" {format_probability(candidate.logprob, NUMBER_WIDTH)} ", "text"),
        (moved, "warn"),
    )


# -- masks ----------------------------------------------------------------------------------------


def _draw_masks(data: PairData, sides: tuple[Side, Side], pen: Pen) -> list[Strip]:
    if data.cells is None:
        return pen.paragraph(
            "A side has no recorded mask cells, so masks are not compared.", "muted"
        )
    names = [escape_unprintable(side.name) for side in sides]
    if not any(data.n_only):
        return pen.paragraph("The executed masks are the same up to this step.", "good")
    width = data.cells.width
    text = pen.resize(max(pen.width - width - _GAP, 20))
    lines = text.paragraph("The executed masks differ:", "strong")
    for sign, style, n, name in zip("□✖", ("warn", "bad"), data.n_only, names, strict=True):
        if n:
            are = "is" if n == 1 else "are"
            lines += text.paragraph(f"{sign} {plural(n, 'cell')} {are} open in {name} only", style)
    lines += text.paragraph("■ open in both, · closed in both", "muted")
    lines += text.paragraph("The picture begins near the first difference.", "muted")
    if pen.width < width + 20 + _GAP:
        return lines
    cells = [pen.resize(width).line(*line) for line in data.cells.lines()]
    return join_blocks(lines, cells, pen.style("text"), gap=_GAP)
