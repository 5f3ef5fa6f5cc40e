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
    NOT,
    OUTPUT,
    GradientsData,
    Row,
    Share,
    gate_words,
    merged,
    outside,
    percent,
    title_of,
)
from flexinspect.panels.parts.sequence import words
from flexinspect.widgets import tokencells
from flexinspect.widgets.lines import Span, clipped, line, paragraph, right
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import bar, number
from flexinspect.widgets.tokencells import wrap

LABEL = 12
"""Columns of a layer's name."""
_SHARE = 7
_SICK = Style.parse("bold #ffffff on #e6283c")
_CURRENT = Style.parse("bold #000000 on #ffffff")


def head(data: GradientsData, width: int, look: Look) -> list[Strip]:
    """Return what was differentiated and the gate, a line each, and what is wrong."""
    good = data.record.agrees
    strips = [
        line([(title_of(data), look.style("title"))], width, look.style("text")),
        line(
            [(gate_words(data.record), look.style("good" if good else "bad"))],
            width,
            look.style("text"),
        ),
    ]
    for finding in data.findings[:2]:
        strips += paragraph(finding.sentence, width, look.style("bad"))[:3]
    return strips


# -- which segment and which token made it ---------------------------------------------------------


def share_bars(data: GradientsData, width: int, look: Look) -> list[Strip]:
    """Return a line per segment: gradient times input, signed, and the share of the norms."""
    shares = merged(data.shares)
    label = max(min(max((len(one.label) for one in shares), default=0) + 1, width // 3), 4)
    room = max((width - label - 2 * _SHARE - 1) // 2, 0)
    text, muted = look.style("text"), look.style("muted")
    names = f"{clipped('segment', label)}{right('input', _SHARE)} {' ' * room}"
    strips = [line([(f"{names}{right('norm', _SHARE)}", muted)], width, text)]
    most = max((abs(one.signed) for one in shares if one.signed == one.signed), default=0.0)
    for one in shares:
        spans = _share(one, label, room, most or 1.0, look)
        strips.append(line(spans, width, text))
    return strips


def _share(one: Share, label: int, room: int, most: float, look: Look) -> list[Span]:
    sign = "for" if one.signed >= 0 else "against"
    style = look.style("text") if look.plain else look.style("text") + _signed(sign)
    return [
        (clipped(one.label, label), look.style("muted") if one.band < 0 else look.style("text")),
        (right(percent(one.signed, sign=True), _SHARE), look.style("strong")),
        (f" {bar(abs(one.signed) / most, room)}", style),
        (right(percent(one.norm), _SHARE), look.style("strong")),
        (bar(one.norm, room), look.style("muted")),
    ]


@lru_cache(maxsize=4)
def _signed(name: str) -> Style:
    level = DIVERGING.size - 1 if name == "for" else 0
    return Style(color=Color.from_rgb(*DIVERGING.rgb[level]))


def rows_of(data: GradientsData, width: int) -> list[tokencells.Row]:
    """Return the tokens laid out in rows."""
    return wrap(words(data.window, "segment"), width)


def first_row(rows: list[tokencells.Row], data: GradientsData, height: int) -> int:
    """Return the first row to draw, so that the token itself is the last thing on screen."""
    current = data.window.current
    at = next(
        (i for i, row in enumerate(rows) if any(word.pos == current for word in row.words)),
        len(rows) - 1,
    )
    return max(0, min(at - height + 1, len(rows) - height))


def token_rows(
    data: GradientsData, width: int, height: int, look: Look, *, by_norm: bool
) -> list[Strip]:
    """Return the tokens coloured by their part in the generated one, which is white."""
    rows = rows_of(data, width)
    top, largest = first_row(rows, data, height), data.largest(by_norm)
    strips = []
    for row in rows[top : top + height]:
        spans = [
            (word.text, _word_style(data, word.pos, largest, look, by_norm=by_norm))
            for word in row.words
        ]
        strips.append(line(spans, width, look.style("text")))
    return strips


def _word_style(
    data: GradientsData, pos: int, largest: float, look: Look, *, by_norm: bool
) -> Style:
    own = data.record.tokens
    if own is not None and pos == own.shape[1]:
        return look.style("cursor") if look.plain else _CURRENT
    value = data.value_at(pos, by_norm)
    if value is None:
        return look.style("muted")
    if not math.isfinite(value):
        return look.style("bad") if look.plain else _SICK
    palette, low = (CIVIDIS, 0.0) if by_norm else (DIVERGING, -largest)
    level = int(quantise(np.array([value]), low, largest, palette.size)[0])
    if not largest:
        level = palette.centre
    return _plain(level, palette) if look.plain else _cell(level, palette)


def _plain(level: int, palette: Palette) -> Style:
    """Return bold for what speaks for the token, underline for what speaks against it."""
    share = (level - palette.centre) / (palette.size - 1 - palette.centre)
    return Style(bold=share > 0.25, underline=share < -0.25)


def _cell(level: int, palette: Palette) -> Style:
    return Style(color=palette.ink(level), bgcolor=Color.from_rgb(*palette.rgb[level]))


def caveat(width: int, look: Look) -> list[Strip]:
    """Return what the colours mean, and what they are not."""
    marks = "Bold speaks for the token, underlined against it."
    colours = "Orange speaks for the token, blue against it."
    return paragraph(f"{marks if look.plain else colours} {NOT}", width, look.style("muted"))


# -- where in the model ----------------------------------------------------------------------------


def norm_rows(data: GradientsData, width: int, height: int, look: Look) -> list[Strip]:
    """Return the norms, a line per layer and a column per group, coloured by their logarithm."""
    if not data.rows or not data.columns:
        return []
    each = max(min((width - LABEL) // len(data.columns), 10), 1)
    text, muted = look.style("text"), look.style("muted")
    names = "".join(right(name, each - 1) + " " for name in data.columns)
    strips = [line([(" " * LABEL + names, muted)], width, text)]
    bounds = [_bounds(data, at) for at in range(len(data.columns))]
    top = first_layer(data, height - 2)
    for row in data.rows[top : top + max(height - 2, 1)]:
        strips.append(line(_norms(row, data, each, bounds, look), width, text))
    rest = "  ".join(f"{part} {number(norm)}" for part, norm in outside(data.record))
    return [*strips, line([(f"outside: {rest}", muted)], width, text)][:height]


def first_layer(data: GradientsData, room: int) -> int:
    """Return the index of the first layer to draw, so that the place's is on screen."""
    at = next((i for i, row in enumerate(data.rows) if row.layer == data.place.layer), 0)
    return max(0, min(at - room // 2, len(data.rows) - room))


def _norms(
    row: Row, data: GradientsData, each: int, bounds: Sequence[tuple[float, float]], look: Look
) -> list[Span]:
    here = row.layer == data.place.layer
    sick = {layer for f in data.findings for layer in (*f.layers, f.layer)}
    mark = "!" if row.n_bad or row.layer in sick else " "
    label = f"{'▸' if here else ' '}{clipped(row.label, LABEL - 3)}"
    spans: list[Span] = [
        (label, look.style("chosen" if here else "muted")),
        (f"{mark} ", look.style("bad")),
    ]
    for value, ends in zip(row.norms, bounds, strict=True):
        inside = right(number(value, each - 1) if each > 4 else "", each - 1)
        spans += [(inside, _norm_style(value, ends, look)), (" ", look.style("text"))]
    return spans


def _bounds(data: GradientsData, column: int) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest norm above 0.

    Of all parameters together, or of the hidden states, which are another kind of thing.
    """
    kind = data.columns[column] == OUTPUT
    cells = [
        norm
        for row in data.rows
        for norm, name in zip(row.norms, data.columns, strict=True)
        if (name == OUTPUT) == kind
    ]
    values = [norm for norm in cells if norm is not None and 0 < norm < math.inf]
    if not values:
        return 0.0, 0.0
    return math.log(min(values)), math.log(max(values))


def _norm_style(value: float | None, bounds: tuple[float, float], look: Look) -> Style:
    if value is None:
        return look.style("muted")
    if not math.isfinite(value) or value == 0:
        return look.style("bad") if look.plain else _SICK
    if look.plain:
        return look.style("text")
    level = int(quantise(np.array([math.log(value)]), *bounds, CIVIDIS.size)[0])
    return _cell(level, CIVIDIS)
