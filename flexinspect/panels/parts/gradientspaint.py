"""Drawing the gradients panel: bars per segment, tokens as coloured cells, norms per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from flexinspect.colormap import CIVIDIS, DIVERGING, Palette, quantise
from flexinspect.panels.parts.gradientsdata import (
    CAVEAT,
    HIDDEN_COLUMN,
    GradientsData,
    LayerGradients,
    SegmentShare,
    format_check,
    format_percent,
    format_title,
    merge_separators,
    norms_outside_layers,
)
from flexinspect.panels.parts.sequence import token_cells
from flexinspect.widgets import tokencells
from flexinspect.widgets.lines import Span, align_right, clip_text, line, wrap_paragraph
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import bar, format_number
from flexinspect.widgets.tokencells import wrap_cells

LABEL_WIDTH = 12
"""Columns of a layer's name."""
_SHARE_WIDTH = 7
_BAD_STYLE = Style.parse("bold #ffffff on #e6283c")
_CURRENT_STYLE = Style.parse("bold #000000 on #ffffff")


def draw_header(data: GradientsData, width: int, theme: Theme) -> list[Strip]:
    """Return what was differentiated and the gate, a line each, and what is wrong."""
    good = data.record.matches_recorded
    strips = [
        line([(format_title(data), theme.style("title"))], width, theme.style("text")),
        line(
            [(format_check(data.record), theme.style("good" if good else "bad"))],
            width,
            theme.style("text"),
        ),
    ]
    for finding in data.findings[:2]:
        strips += wrap_paragraph(finding.sentence, width, theme.style("bad"))[:3]
    return strips


# -- which segment and which token made it ---------------------------------------------------------


def draw_share_bars(data: GradientsData, width: int, theme: Theme) -> list[Strip]:
    """Return a line per segment: gradient times input, signed, and the share of the norms."""
    shares = merge_separators(data.shares)
    label = max(min(max((len(one.label) for one in shares), default=0) + 1, width // 3), 4)
    room = max((width - label - 2 * _SHARE_WIDTH - 1) // 2, 0)
    text, muted = theme.style("text"), theme.style("muted")
    names = f"{clip_text('segment', label)}{align_right('input', _SHARE_WIDTH)} {' ' * room}"
    strips = [line([(f"{names}{align_right('norm', _SHARE_WIDTH)}", muted)], width, text)]
    most = max((abs(one.signed) for one in shares if one.signed == one.signed), default=0.0)
    for one in shares:
        spans = _share_line(one, label, room, most or 1.0, theme)
        strips.append(line(spans, width, text))
    return strips


def _share_line(one: SegmentShare, label: int, room: int, most: float, theme: Theme) -> list[Span]:
    sign = "for" if one.signed >= 0 else "against"
    style = theme.style("text") if theme.no_color else theme.style("text") + _sign_style(sign)
    return [
        (
            clip_text(one.label, label),
            theme.style("muted") if one.segment_color < 0 else theme.style("text"),
        ),
        (align_right(format_percent(one.signed, sign=True), _SHARE_WIDTH), theme.style("strong")),
        (f" {bar(abs(one.signed) / most, room)}", style),
        (align_right(format_percent(one.norm), _SHARE_WIDTH), theme.style("strong")),
        (bar(one.norm, room), theme.style("muted")),
    ]


@lru_cache(maxsize=4)
def _sign_style(name: str) -> Style:
    level = DIVERGING.size - 1 if name == "for" else 0
    return Style(color=Color.from_rgb(*DIVERGING.rgb[level]))


def layout_rows(data: GradientsData, width: int) -> list[tokencells.TokenCellRow]:
    """Return the tokens laid out in rows."""
    return wrap_cells(token_cells(data.window, "segment"), width)


def first_visible_row(rows: list[tokencells.TokenCellRow], data: GradientsData, height: int) -> int:
    """Return the first row to draw, so that the token itself is the last thing on screen."""
    current = data.window.current
    at = next(
        (i for i, row in enumerate(rows) if any(word.pos == current for word in row.cells)),
        len(rows) - 1,
    )
    return max(0, min(at - height + 1, len(rows) - height))


def draw_tokens(
    data: GradientsData, width: int, height: int, theme: Theme, *, by_norm: bool
) -> list[Strip]:
    """Return the tokens coloured by their part in the generated one, which is white."""
    rows = layout_rows(data, width)
    top, largest = first_visible_row(rows, data, height), data.largest(by_norm)
    strips = []
    for row in rows[top : top + height]:
        spans = [
            (word.text, _token_style(data, word.pos, largest, theme, by_norm=by_norm))
            for word in row.cells
        ]
        strips.append(line(spans, width, theme.style("text")))
    return strips


def _token_style(
    data: GradientsData, pos: int, largest: float, theme: Theme, *, by_norm: bool
) -> Style:
    own = data.record.tokens
    if own is not None and pos == own.shape[1]:
        return theme.style("cursor") if theme.no_color else _CURRENT_STYLE
    value = data.value_at(pos, by_norm)
    if value is None:
        return theme.style("muted")
    if not math.isfinite(value):
        return theme.style("bad") if theme.no_color else _BAD_STYLE
    palette, low = (CIVIDIS, 0.0) if by_norm else (DIVERGING, -largest)
    level = int(quantise(np.array([value]), low, largest, palette.size)[0])
    if not largest:
        level = palette.centre
    return _colorless_style(level, palette) if theme.no_color else _cell_style(level, palette)


def _colorless_style(level: int, palette: Palette) -> Style:
    """Return bold for what speaks for the token, underline for what speaks against it."""
    share = (level - palette.centre) / (palette.size - 1 - palette.centre)
    return Style(bold=share > 0.25, underline=share < -0.25)


def _cell_style(level: int, palette: Palette) -> Style:
    return Style(color=palette.text_color(level), bgcolor=Color.from_rgb(*palette.rgb[level]))


def draw_caveat(width: int, theme: Theme) -> list[Strip]:
    """Return what the colours mean, and what they are not."""
    marks = "Bold speaks for the token, underlined against it."
    colours = "Orange speaks for the token, blue against it."
    return wrap_paragraph(
        f"{marks if theme.no_color else colours} {CAVEAT}", width, theme.style("muted")
    )


# -- where in the model ----------------------------------------------------------------------------


def draw_norms(data: GradientsData, width: int, height: int, theme: Theme) -> list[Strip]:
    """Return the norms, a line per layer and a column per group, coloured by their logarithm."""
    if not data.rows or not data.columns:
        return []
    each = max(min((width - LABEL_WIDTH) // len(data.columns), 10), 1)
    text, muted = theme.style("text"), theme.style("muted")
    names = "".join(align_right(name, each - 1) + " " for name in data.columns)
    strips = [line([(" " * LABEL_WIDTH + names, muted)], width, text)]
    bounds = [_log_bounds(data, at) for at in range(len(data.columns))]
    top = first_visible_layer(data, height - 2)
    for row in data.rows[top : top + max(height - 2, 1)]:
        strips.append(line(_norm_line(row, data, each, bounds, theme), width, text))
    rest = "  ".join(
        f"{part} {format_number(norm)}" for part, norm in norms_outside_layers(data.record)
    )
    return [*strips, line([(f"outside: {rest}", muted)], width, text)][:height]


def first_visible_layer(data: GradientsData, room: int) -> int:
    """Return the index of the first layer to draw, so that the place's is on screen."""
    at = next((i for i, row in enumerate(data.rows) if row.layer == data.place.layer), 0)
    return max(0, min(at - room // 2, len(data.rows) - room))


def _norm_line(
    row: LayerGradients,
    data: GradientsData,
    each: int,
    bounds: Sequence[tuple[float, float]],
    theme: Theme,
) -> list[Span]:
    here = row.layer == data.place.layer
    bad_layers = {layer for f in data.findings for layer in (*f.layers, f.layer)}
    mark = "!" if row.n_bad or row.layer in bad_layers else " "
    label = f"{'▸' if here else ' '}{clip_text(row.label, LABEL_WIDTH - 3)}"
    spans: list[Span] = [
        (label, theme.style("chosen" if here else "muted")),
        (f"{mark} ", theme.style("bad")),
    ]
    for value, ends in zip(row.norms, bounds, strict=True):
        inside = align_right(format_number(value, each - 1) if each > 4 else "", each - 1)
        spans += [(inside, _norm_style(value, ends, theme)), (" ", theme.style("text"))]
    return spans


def _log_bounds(data: GradientsData, column: int) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest norm above 0.

    Of all parameters together, or of the hidden states, which are another kind of thing.
    """
    kind = data.columns[column] == HIDDEN_COLUMN
    cells = [
        norm
        for row in data.rows
        for norm, name in zip(row.norms, data.columns, strict=True)
        if (name == HIDDEN_COLUMN) == kind
    ]
    values = [norm for norm in cells if norm is not None and 0 < norm < math.inf]
    if not values:
        return 0.0, 0.0
    return math.log(min(values)), math.log(max(values))


def _norm_style(value: float | None, bounds: tuple[float, float], theme: Theme) -> Style:
    if value is None:
        return theme.style("muted")
    if not math.isfinite(value) or value == 0:
        return theme.style("bad") if theme.no_color else _BAD_STYLE
    if theme.no_color:
        return theme.style("text")
    level = int(quantise(np.array([math.log(value)]), *bounds, CIVIDIS.size)[0])
    return _cell_style(level, CIVIDIS)
