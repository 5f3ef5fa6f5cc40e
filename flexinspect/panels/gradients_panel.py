"""The gradients panel: gradients of a generated token, by segment and token, and by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing import token_cells as tokencells
from flexinspect.drawing.heatmap import BAD_CELL_STYLE, CIVIDIS, DIVERGING, Palette, quantise
from flexinspect.drawing.plots import bar, format_number
from flexinspect.drawing.text_lines import Span, align_right, clip_text, line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import wrap_cells
from flexinspect.panels.base import Help, Missing, Navigate, Panel, Picture, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import (
    TokenWindow,
    load_token_window,
    segment_color,
    token_cells,
)
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import Segment
from flexinspect.records.token_gradients import PARAMETER_PARTS, GradientRecord, GradientStat
from flexinspect.rules.training.token_gradient_rule import GradientsRule
from flexinspect.trace.queries.range_queries import branch_of_step
from flexinspect.trace.reader import steps_with_gradients

LABEL_WIDTH = 12
"""Columns of a layer's name."""

HIDDEN_COLUMN = "hidden"
"""The column of the norms at the layers' outputs."""

CAVEAT = (
    "First order, at this text alone: it does not show what would happen without a segment or a "
    "token (flexinspect prove changes them and runs again), and it is not attention."
)
"""The limits of an attribution by gradients."""

_SHARE_WIDTH = 7
_MAX_CAVEAT_LINES = 4
_CURRENT_STYLE = Style.parse("bold #000000 on #ffffff")


def draw_header(data: GradientsData, width: int, theme: Theme) -> list[Strip]:
    """Draw the target and the check, a line each, and the first findings."""
    text = theme.style("text")
    check_style = theme.style("good" if data.record.matches_recorded else "bad")
    strips = [
        line([(format_title(data), theme.style("title"))], width, text),
        line([(format_check(data.record), check_style)], width, text),
    ]
    for finding in data.findings[:2]:
        strips += wrap_paragraph(finding.sentence, width, theme.style("bad"))[:3]
    return strips


# -- attribution to segments and tokens ------------------------------------------------------------


def draw_share_bars(data: GradientsData, width: int, theme: Theme) -> list[Strip]:
    """Draw a line per segment: gradient times input, signed, and the share of the norms."""
    shares = merge_separators(data.shares)
    label = max(min(max((len(share.label) for share in shares), default=0) + 1, width // 3), 4)
    room = max((width - label - 2 * _SHARE_WIDTH - 1) // 2, 0)
    text, muted = theme.style("text"), theme.style("muted")
    names = f"{clip_text('segment', label)}{align_right('input', _SHARE_WIDTH)} {' ' * room}"
    strips = [line([(f"{names}{align_right('norm', _SHARE_WIDTH)}", muted)], width, text)]
    largest = max((abs(s.signed) for s in shares if not math.isnan(s.signed)), default=0.0)
    for share in shares:
        spans = _share_line(share, label, room, largest or 1.0, theme)
        strips.append(line(spans, width, text))
    return strips


def _share_line(
    share: SegmentShare, label: int, room: int, largest: float, theme: Theme
) -> list[Span]:
    text, strong, muted = theme.style("text"), theme.style("strong"), theme.style("muted")
    bar_style = text if theme.no_color else text + _sign_style(share.signed >= 0)
    return [
        (clip_text(share.label, label), muted if share.segment_color < 0 else text),
        (align_right(format_percent(share.signed, sign=True), _SHARE_WIDTH), strong),
        (f" {bar(abs(share.signed) / largest, room)}", bar_style),
        (align_right(format_percent(share.norm), _SHARE_WIDTH), strong),
        (bar(share.norm, room), muted),
    ]


@lru_cache(maxsize=2)
def _sign_style(positive: bool) -> Style:
    return Style(color=Color.from_rgb(*DIVERGING.rgb[-1 if positive else 0]))


def layout_rows(data: GradientsData, width: int) -> list[tokencells.TokenCellRow]:
    """Lay the tokens out in rows."""
    return wrap_cells(token_cells(data.window, "segment"), width)


def first_visible_row(rows: list[tokencells.TokenCellRow], data: GradientsData, height: int) -> int:
    """Return the first row to draw, so that the row of the current token is the last one."""
    current = data.window.current
    at = next(
        (i for i, row in enumerate(rows) if any(word.pos == current for word in row.cells)),
        len(rows) - 1,
    )
    return max(0, min(at - height + 1, len(rows) - height))


def draw_tokens(
    data: GradientsData, width: int, height: int, theme: Theme, *, by_norm: bool
) -> list[Strip]:
    """Draw the tokens coloured by their contribution to the generated token, which is white."""
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
        return theme.style("bad") if theme.no_color else BAD_CELL_STYLE
    palette, low = (CIVIDIS, 0.0) if by_norm else (DIVERGING, -largest)
    level = int(quantise(np.array([value]), low, largest, palette.size)[0])
    if not largest:
        level = palette.centre
    return _colorless_style(level, palette) if theme.no_color else _cell_style(level, palette)


def _colorless_style(level: int, palette: Palette) -> Style:
    """Return bold for a contribution for the token, underline for one against it."""
    share = (level - palette.centre) / (palette.size - 1 - palette.centre)
    return Style(bold=share > 0.25, underline=share < -0.25)


def _cell_style(level: int, palette: Palette) -> Style:
    return Style(color=palette.text_color(level), bgcolor=Color.from_rgb(*palette.rgb[level]))


def draw_caveat(width: int, theme: Theme) -> list[Strip]:
    """Draw the meaning of the colours, and the limits of the attribution."""
    legend = "Orange contributes to the token, blue acts against it."
    if theme.no_color:
        legend = "Bold contributes to the token, underlined acts against it."
    return wrap_paragraph(f"{legend} {CAVEAT}", width, theme.style("muted"))


# -- norms by layer --------------------------------------------------------------------------------


def draw_norms(data: GradientsData, width: int, height: int, theme: Theme) -> list[Strip]:
    """Draw the norms, a line per layer and a column per group, coloured by their logarithm."""
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
    """Return the index of the first layer to draw, so that the place's layer is visible."""
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

    The columns of parameters share their bounds; the hidden states have their own.
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
        return theme.style("bad") if theme.no_color else BAD_CELL_STYLE
    if theme.no_color:
        return theme.style("text")
    level = int(quantise(np.array([math.log(value)]), *bounds, CIVIDIS.size)[0])
    return _cell_style(level, CIVIDIS)


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentShare:
    """The contribution of a segment to the token.

    `signed` is its sum of gradient times input, as a share of the absolute values of all tokens;
    `norm` its share of the gradient norms.
    """

    label: str
    segment_color: int
    n_tokens: int
    signed: float
    norm: float


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """The norms of one layer by column; `n_bad` is its number of NaN and Inf."""

    label: str
    layer: int | None
    norms: tuple[float | None, ...]
    n_bad: int


@dataclass(frozen=True, slots=True)
class GradientsData:
    """The gradients of the place's token.

    `shares` and `rows` are empty if the differentiated forward does not match the recorded one.
    """

    place: TracePlace
    record: GradientRecord
    token: str
    rival: str
    window: TokenWindow
    shares: tuple[SegmentShare, ...]
    columns: tuple[str, ...]
    rows: tuple[LayerGradients, ...]
    findings: tuple[Finding, ...]

    def value_at(self, pos: int, by_norm: bool) -> float | None:
        """Return a token's gradient times input, or its gradient norm; None from the token on."""
        tokens = self.record.tokens
        if tokens is None or not 0 <= pos < tokens.shape[1]:
            return None
        return float(tokens[int(by_norm), pos])

    def largest(self, by_norm: bool) -> float:
        """Return the largest finite absolute value of all tokens."""
        tokens = self.record.tokens
        values = np.zeros(1) if tokens is None else np.abs(tokens[int(by_norm)])
        return float(np.max(values, where=np.isfinite(values), initial=0.0))


def load_gradients(source: Source, place: TracePlace, reach: int) -> GradientsData:
    """Read the gradients of the place's step, and about `reach` tokens around it.

    Raises `Missing` with the steps that have gradients when the step has none.
    """
    reader = source.reader
    branch = branch_of_step(reader, place.generation, place.step, place.branch)
    record = reader.gradients(place.generation, place.step, branch)
    if record is None:
        raise _missing_gradients(source, place, branch)
    segments = tuple(reader.segments(place.generation, place.branch))
    chosen = reader.step_tokens(place.generation, place.step, branch)
    columns, rows = gradient_norms(record)
    return GradientsData(
        place=place,
        record=record,
        token=_quote(chosen[0].text if chosen else f"token {record.token_id}"),
        rival=_load_rival(source, place, branch, record),
        window=load_token_window(source, place, reach),
        shares=segment_shares(record, segments),
        columns=columns,
        rows=rows,
        findings=tuple(GradientsRule().on_gradients(record)),
    )


def _missing_gradients(source: Source, place: TracePlace, branch: int) -> Missing:
    others = steps_with_gradients(source.reader, place.generation, branch)
    if not others:
        return Missing(
            "No gradients are recorded for this generation.",
            "Run with --grads; they are computed at the end of the generation.",
        )
    shown = ", ".join(map(str, others[:12])) + (" …" if len(others) > 12 else "")
    return Missing(
        f"No gradients are recorded for step {place.step}.", f"These steps have some: {shown}."
    )


def _quote(text: str) -> str:
    return f'"{escape_unprintable(text)}"'


def _load_rival(source: Source, place: TracePlace, branch: int, record: GradientRecord) -> str:
    if record.rival is None:
        return ""
    candidates = source.reader.candidates(place.generation, place.step, branch)
    texts = (_quote(c.text) for c in candidates if c.token_id == record.rival)
    return next(texts, f"token {record.rival}")


def segment_shares(record: GradientRecord, segments: Sequence[Segment]) -> tuple[SegmentShare, ...]:
    """Return the contribution of each segment to the token, in the order of the text."""
    if record.tokens is None:
        return ()
    signed, norms = np.asarray(record.tokens, np.float64)
    with np.errstate(all="ignore"):
        signed, norms = signed / np.abs(signed).sum(), norms / norms.sum()
    shares = []
    for number, segment in enumerate(segments):
        start, stop = segment.start, min(segment.stop, len(signed))
        if start < stop:
            shares.append(
                SegmentShare(
                    label=escape_unprintable(segment.label),
                    segment_color=segment_color(number, segments),
                    n_tokens=stop - start,
                    signed=float(signed[start:stop].sum()),
                    norm=float(norms[start:stop].sum()),
                )
            )
    return tuple(shares)


def gradient_norms(record: GradientRecord) -> tuple[tuple[str, ...], tuple[LayerGradients, ...]]:
    """Return the columns (parts, then the hidden states) and a row per layer."""
    stats = record.stats
    columns = tuple(
        part for part in PARAMETER_PARTS if any(s.part == part for s in stats if _is_in_layer(s))
    )
    columns = (*columns, *((HIDDEN_COLUMN,) if record.layers is not None else ()))
    hidden = [] if record.layers is None else [float(norm) for norm in record.layers]
    layers = sorted({stat.layer for stat in stats if stat.layer is not None})
    rows = []
    for layer in layers:
        mine = [stat for stat in stats if stat.layer == layer]
        norms: list[float | None] = [_joint_norm([s for s in mine if s.part == c]) for c in columns]
        if hidden:
            norms[-1] = hidden[layer + 1] if layer + 1 < len(hidden) else None
        rows.append(LayerGradients(f"layer {layer}", layer, tuple(norms), _count_bad(mine)))
    return columns, tuple(rows)


def _is_in_layer(stat: GradientStat) -> bool:
    return stat.layer is not None


def norms_outside_layers(record: GradientRecord) -> list[tuple[str, float]]:
    """Return the norms of parameters outside of the layers, by part."""
    outside = [stat for stat in record.stats if stat.layer is None]
    norms = (
        (part, _joint_norm([stat for stat in outside if stat.part == part]))
        for part in PARAMETER_PARTS
    )
    return [(part, norm) for part, norm in norms if norm is not None]


def _joint_norm(stats: Sequence[GradientStat]) -> float | None:
    """Return the joint norm of the gradients of several parameters, None without any."""
    if not stats:
        return None
    return float(np.sqrt(np.sum(np.square([stat.norm for stat in stats]))))


def _count_bad(stats: Sequence[GradientStat]) -> int:
    return sum(stat.n_nan + stat.n_inf for stat in stats)


# -- text ------------------------------------------------------------------------------------------


def format_title(data: GradientsData) -> str:
    """Return the target of the gradient: 'log-probability -0.21 of "Paris", step 0'."""
    record = data.record
    value = format_number(record.value)
    if record.target == "margin":
        return f"margin {value} of {data.token} to {data.rival}, step {record.step}"
    return f"log-probability {value} of {data.token}, step {record.step}"


def format_check(record: GradientRecord) -> str:
    """Return whether the logits of the differentiated forward match the recorded ones."""
    matches = record.matches_recorded
    result = "check ✓ logits as recorded" if matches else "check ✗ not what ran: logits"
    error = f"off by {record.gate:.1e} {'≤' if matches else '>'} {record.tolerance:.0e}"
    return f"{result}, {error} of the largest; {record.path}"


def describe_gradients(data: GradientsData) -> list[str]:
    """Return the target, the check, segments, the strongest tokens, norms, and the findings."""
    lines = [f"Gradient of the {format_title(data)}.", f"{format_check(data.record)}."]
    if not data.record.matches_recorded:
        return [*lines, "Nothing is shown.", *_finding_sentences(data)]
    lines += [*_share_table(data), *_describe_strongest(data), *_norm_table(data)]
    lines += _finding_sentences(data) or ["No gradient is NaN, Inf, exploding, vanishing or dead."]
    scale = format_number(data.record.scale)
    return [*lines, CAVEAT, f"It took {data.record.wall_ms:.0f} ms; norm at the logits {scale}."]


def _finding_sentences(data: GradientsData) -> list[str]:
    return [escape_unprintable(finding.sentence) for finding in data.findings]


def _share_table(data: GradientsData) -> list[str]:
    header = f"{'segment':<20}{'tokens':>8}{'gradient×input':>16}{'norm':>8}"
    rows = [
        f"{share.label[:20]:<20}{share.n_tokens:>8}{format_percent(share.signed, sign=True):>16}"
        f"{format_percent(share.norm):>8}"
        for share in data.shares
    ]
    return ["", header, *rows, ""]


def _describe_strongest(data: GradientsData) -> list[str]:
    """Return the loaded tokens that contribute most to the token, and most against it."""
    values = [(data.value_at(token.pos, False), token) for token in data.window.tokens]
    known = [(value, token) for value, token in values if value]
    lines = []
    for name, sign in (("For", 1), ("Against", -1)):
        ranked = [(sign * value, token) for value, token in known if sign * value > 0]
        ranked.sort(key=lambda pair: -pair[0])
        texts = [
            f"{_quote(token.text or token.token)} at {token.pos} ({format_number(sign * size)})"
            for size, token in ranked[:5]
        ]
        if texts:
            lines.append(f"{name} it: {', '.join(texts)}.")
    return lines


def _norm_table(data: GradientsData) -> list[str]:
    head = f"{'':<10}{''.join(f'{name:>10}' for name in data.columns)}"
    rows = [
        f"{row.label:<10}{''.join(f'{format_number(value):>10}' for value in row.norms)}"
        for row in data.rows
    ]
    rest = ", ".join(
        f"{part} {format_number(norm)}" for part, norm in norms_outside_layers(data.record)
    )
    return ["", "Norms:", head, *rows, f"Outside of the layers: {rest or 'none'}.", ""]


def merge_separators(shares: Sequence[SegmentShare]) -> list[SegmentShare]:
    """Merge the shares of all separators to one at the end."""
    merged = [share for share in shares if share.segment_color >= 0]
    separators = [share for share in shares if share.segment_color < 0]
    if separators:
        merged.append(
            SegmentShare(
                label="separators",
                segment_color=-1,
                n_tokens=sum(share.n_tokens for share in separators),
                signed=sum(share.signed for share in separators),
                norm=sum(share.norm for share in separators),
            )
        )
    return merged


def format_percent(share: float, *, sign: bool = False) -> str:
    """Return a share as "12 %" or "+12 %", "?" for NaN."""
    if share != share:
        return "?"
    whole = round(100 * share)
    return f"{whole:+d} %" if sign and whole else f"{whole} %"


# -- the panel -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientsOptions:
    """`side` is "who" (attribution to segments and tokens) or "where" (norms by layer).

    `by` colours tokens by gradient times input, or by the gradient norm.
    """

    side: Literal["who", "where"] = "who"
    by: Literal["input", "norm"] = "input"


class GradientsPanel(Panel[GradientsData, GradientsOptions]):
    """The gradient of the step's token, at the tokens before it and at the model's parameters."""

    name: ClassVar[str] = "gradients"
    needs_tokens: ClassVar[bool] = True
    title: ClassVar[str] = "Gradients"
    help: ClassVar[Help] = Help(
        "It shows the gradient of this token's log-probability (or margin): at each token before "
        "it, summed per segment, and per layer and group of parameters.",
        "m switches between who (orange tokens contribute to the token, blue ones act against it; "
        "v: gradient times input, or its norm) and where (norms: bright is high, red or ! is NaN, "
        "Inf or 0); the check shows whether the differentiated forward is the one that ran.",
        "Look for a paraphrase that acts against the others, for an answer that comes from the cue "
        "alone, and for layers with gradients of 0, NaN, or a hundred times their neighbours'.",
    )
    depends_on_size: ClassVar[bool] = True
    actions: ClassVar[tuple[str, ...]] = ("view.flip", "view.measure")

    def options(self) -> GradientsOptions:
        """Return the initial options: attribution by gradient times input."""
        return GradientsOptions()

    def load(self, source: Source, request: Request[GradientsOptions]) -> GradientsData:
        """Read the gradients of the place's step, and the tokens that fit."""
        reach = max(request.width * request.height // 4, 64)
        return load_gradients(source, request.place, reach)

    def describe(self, data: GradientsData) -> list[str]:
        """Return the check, segments, strongest tokens, norms and findings as text."""
        return describe_gradients(data)

    def paint(
        self, data: GradientsData, request: Request[GradientsOptions], theme: Theme
    ) -> Picture:
        """Draw one of the two sides, or only the header if the check failed."""
        width, height = request.width, request.height
        strips = draw_header(data, width, theme)
        if not data.record.matches_recorded:
            text = "Nothing is drawn: these are not the gradients of the recorded forward."
            strips += wrap_paragraph(text, width, theme.style("text"))
            return Picture(strips[:height], "not what ran", alarm=True)
        if request.options.side == "where":
            strips += draw_norms(data, width, height - len(strips), theme)
        else:
            strips += _draw_attribution(data, request, height - len(strips), theme)
        return Picture(
            strips[:height], _format_note(data, request.options), alarm=bool(data.findings)
        )

    def on_action(
        self, action: str, data: GradientsData, request: Request[GradientsOptions]
    ) -> GradientsOptions | None:
        """`view.flip`: the other side; `view.measure`: colour tokens by the other measure."""
        options = request.options
        if action == "view.flip":
            return replace(options, side="where" if options.side == "who" else "who")
        if action == "view.measure":
            return replace(options, by="norm" if options.by == "input" else "input")
        return None

    def on_mouse(
        self,
        x: int,
        y: int,
        data: GradientsData,
        request: Request[GradientsOptions],
        *,
        click: bool,
    ) -> Navigate | None:
        """Go to the clicked layer, or to the step or prompt position of the clicked token."""
        if not click or not data.record.matches_recorded:
            return None
        top = len(draw_header(data, request.width, Theme("none")))
        if request.options.side == "where":
            first = first_visible_layer(data, request.height - top - 2)
            index = y - top - 1 + first
            rows = data.rows if index >= first else ()
            return Navigate(layer=rows[index].layer) if index < len(rows) else None
        return _navigate_to_token(x, y - top - _share_bars_height(data) - 1, data, request, top)


def _share_bars_height(data: GradientsData) -> int:
    return len(merge_separators(data.shares)) + 1


def _navigate_to_token(
    x: int, y: int, data: GradientsData, request: Request[GradientsOptions], top: int
) -> Navigate | None:
    room = _tokens_height(data, request, request.height - top)
    rows = layout_rows(data, request.width)
    index = y + first_visible_row(rows, data, room)
    cell = rows[index].cell_at(x) if 0 <= y < room and index < len(rows) else None
    token = None if cell is None else data.window.token(cell.pos)
    if token is None:
        return None
    return Navigate(step=0, pos=token.pos) if token.step is None else Navigate(step=token.step)


def _tokens_height(data: GradientsData, request: Request[GradientsOptions], height: int) -> int:
    """Return the lines for tokens: what the bars, the caveat and a blank line leave."""
    n_caveat = len(_draw_caveat(request.width, height, Theme("none")))
    return max(height - _share_bars_height(data) - 1 - n_caveat, 0)


def _draw_caveat(width: int, height: int, theme: Theme) -> list[Strip]:
    strips = draw_caveat(width, theme)
    return strips if len(strips) <= _MAX_CAVEAT_LINES and height > 12 else strips[:1]


def _draw_attribution(
    data: GradientsData, request: Request[GradientsOptions], height: int, theme: Theme
) -> list[Strip]:
    width = request.width
    strips = draw_share_bars(data, width, theme)
    strips.append(line([], width, theme.style("text")))
    room = _tokens_height(data, request, height)
    by_norm = request.options.by == "norm"
    strips += draw_tokens(data, width, room, theme, by_norm=by_norm) if room else []
    blank = max(height - len(strips) - len(_draw_caveat(width, height, theme)), 0)
    strips += [line([], width, theme.style("text"))] * blank
    return [*strips, *_draw_caveat(width, height, theme)]


def _format_note(data: GradientsData, options: GradientsOptions) -> str:
    side = "norms per layer" if options.side == "where" else f"by {options.by}"
    return f"{side} · check {data.record.gate:.0e} · {data.record.wall_ms:.0f} ms"
