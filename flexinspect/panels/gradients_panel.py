"""The gradients panel: gradients of a generated token, by segment and token, and by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from msgspec import Struct
from rich.color import Color
from rich.style import Style
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.heatmap import BAD_CELL_STYLE, CIVIDIS, DIVERGING, quantise
from flexinspect.drawing.plots import bar, format_number
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text, visible
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import CURRENT_TOKEN_STYLE, wrap_cells
from flexinspect.panels import token_window
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    Panel,
    Picture,
    Request,
    TracePlace,
    import_hint,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import Segment
from flexinspect.records.step import PARAMETER_PARTS, GradientRecord, GradientStat
from flexinspect.rules.training.token_gradient_rule import GradientsRule
from flexinspect.trace.queries import branch_of_step
from flexinspect.trace.reader import steps_with_gradients

LABEL_WIDTH = 12
"""Columns of a layer's name."""

HIDDEN_COLUMN = "hidden"
"""The column of the norms at the layers' outputs."""

CAVEAT = (
    "First order, only for this text: it does not show what would happen without a segment or a "
    "token (flexinspect prove changes them and runs again), and it is not attention."
)
"""The limits of an attribution by gradients."""

_SHARE_WIDTH = 7
_MAX_CAVEAT_LINES = 4


# -- data ------------------------------------------------------------------------------------------


class SegmentShare(Struct, frozen=True):
    """The contribution of a segment to the token.

    `signed` is its sum of gradient times input, as a share of the absolute values of all tokens;
    `norm` its share of the gradient norms.
    """

    label: str
    segment_color: int
    n_tokens: int
    signed: float
    norm: float


class LayerGradients(Struct, frozen=True):
    """The norms of one layer by column; `n_bad` is its number of NaN and Inf."""

    layer: int
    norms: tuple[float | None, ...]
    n_bad: int


class GradientsData(Struct, frozen=True):
    """The gradients of the place's token.

    `shares` and `rows` are empty if the differentiated forward does not match the recorded one.
    """

    place: TracePlace
    record: GradientRecord
    token: str
    runner_up: str
    window: token_window.TokenWindow
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


def _quote(text: str) -> str:
    return f'"{escape_unprintable(text)}"'


def segment_shares(record: GradientRecord, segments: Sequence[Segment]) -> tuple[SegmentShare, ...]:
    """Return the contribution of each segment to the token, in the order of the text."""
    if record.tokens is None:
        return ()
    signed, norms = np.asarray(record.tokens, np.float64)
    with np.errstate(all="ignore"):
        signed, norms = signed / np.abs(signed).sum(), norms / norms.sum()
    spans = [slice(segment.start, min(segment.stop, len(signed))) for segment in segments]
    return tuple(
        SegmentShare(
            label=escape_unprintable(segment.label),
            segment_color=token_window.segment_color(number, segments),
            n_tokens=span.stop - span.start,
            signed=float(signed[span].sum()),
            norm=float(norms[span].sum()),
        )
        for number, (segment, span) in enumerate(zip(segments, spans, strict=True))
        if span.start < span.stop
    )


def gradient_norms(record: GradientRecord) -> tuple[tuple[str, ...], tuple[LayerGradients, ...]]:
    """Return the columns (parts, then the hidden states) and a row per layer."""
    by_layer: dict[int, list[GradientStat]] = {}
    for stat in record.stats:
        if stat.layer is not None:
            by_layer.setdefault(stat.layer, []).append(stat)
    present = {stat.part for stats in by_layer.values() for stat in stats}
    parts = tuple(part for part in PARAMETER_PARTS if part in present)
    rows = []
    for layer, stats in sorted(by_layer.items()):
        norms = [_joint_norm(stats, part) for part in parts]
        if record.layers is not None:
            hidden = record.layers[layer + 1 : layer + 2]
            norms.append(float(hidden[0]) if len(hidden) else None)
        n_bad = sum(stat.n_nan + stat.n_inf for stat in stats)
        rows.append(LayerGradients(layer, tuple(norms), n_bad))
    return (*parts, *((HIDDEN_COLUMN,) if record.layers is not None else ())), tuple(rows)


def format_outside_norms(record: GradientRecord) -> list[str]:
    """Return the parts of parameters outside of the layers, each with its norm."""
    outside = [stat for stat in record.stats if stat.layer is None]
    norms = ((part, _joint_norm(outside, part)) for part in PARAMETER_PARTS)
    return [f"{part} {format_number(norm)}" for part, norm in norms if norm is not None]


def _joint_norm(stats: Sequence[GradientStat], part: str) -> float | None:
    """Return the joint norm of the gradients of a part's parameters, None without any."""
    norms = [stat.norm for stat in stats if stat.part == part]
    return float(np.sqrt(np.sum(np.square(norms)))) if norms else None


# -- text ------------------------------------------------------------------------------------------


def format_title(data: GradientsData) -> str:
    """Return the target of the gradient: 'log-probability -0.21 of "Paris", step 0'."""
    record = data.record
    value = format_number(record.value)
    if record.target == "margin":
        return f"margin {value} of {data.token} to {data.runner_up}, step {record.step}"
    return f"log-probability {value} of {data.token}, step {record.step}"


def format_check(record: GradientRecord) -> str:
    """Return whether the logits of the differentiated forward match the recorded ones."""
    matches = record.matches_recorded
    result = "check ✓ logits as recorded" if matches else "check ✗ not what ran: logits"
    error = f"off by {record.logits_error:.1e} {'≤' if matches else '>'} {record.tolerance:.0e}"
    return f"{result}, {error} of the largest; {record.path}"


def _describe_strongest(data: GradientsData) -> list[str]:
    values = [(data.value_at(token.pos, False) or 0.0, token) for token in data.window.tokens]
    lines = []
    for name, sign in (("For", 1), ("Against", -1)):
        ranked = sorted((pair for pair in values if sign * pair[0] > 0), key=lambda p: -abs(p[0]))
        texts = ", ".join(
            f"{_quote(token.text or token.token)} at {token.pos} ({format_number(value)})"
            for value, token in ranked[:5]
        )
        lines += [f"{name} it: {texts}."] if texts else []
    return lines


def _norm_table(data: GradientsData) -> list[str]:
    rows = [("", *data.columns)]
    rows += [(f"layer {row.layer}", *map(format_number, row.norms)) for row in data.rows]
    lines = [f"{name:<10}{''.join(f'{cell:>10}' for cell in cells)}" for name, *cells in rows]
    outside = ", ".join(format_outside_norms(data.record)) or "none"
    return ["", "Norms:", *lines, f"Outside of the layers: {outside}.", ""]


def merge_separators(shares: Sequence[SegmentShare]) -> list[SegmentShare]:
    """Merge the shares of all separators to one at the end."""
    separators = [share for share in shares if share.segment_color < 0]
    others = [share for share in shares if share.segment_color >= 0]
    if not separators:
        return others
    figures = ((share.n_tokens, share.signed, share.norm) for share in separators)
    return [*others, SegmentShare("separators", -1, *map(sum, zip(*figures, strict=True)))]


def format_percent(share: float, *, sign: bool = False) -> str:
    """Return a share as "12 %" or "+12 %", "?" for NaN."""
    if share != share:
        return "?"
    whole = round(100 * share)
    return f"{whole:+d} %" if sign and whole else f"{whole} %"


# -- the panel -------------------------------------------------------------------------------------


class GradientsOptions(Struct, frozen=True):
    """`side` is "who" (attribution to segments and tokens) or "where" (norms by layer).

    `by` colours tokens by gradient times input, or by the gradient norm.
    """

    side: Literal["who", "where"] = "who"
    by: Literal["input", "norm"] = "input"


class GradientsPanel(Panel[GradientsData, GradientsOptions]):
    """The gradient of the step's token, at the tokens before it and at the model's parameters."""

    name = "gradients"
    needs_tokens = True
    title = "Gradients"
    initial_options = GradientsOptions()
    help = Help(
        "It shows the gradient of this token's log-probability (or margin): at each token before "
        "it, summed per segment, and per layer and group of parameters.",
        "m switches between who (orange tokens contribute to the token, blue ones act against it; "
        "v: gradient times input, or its norm) and where (norms: bright is high, red or ! is NaN, "
        "Inf or 0); the check shows whether the differentiated forward is the one that ran.",
        "Look for a paraphrase that acts against the others, for an answer that comes from the cue "
        "alone, and for layers with gradients of 0, NaN, or a hundred times their neighbours'.",
    )
    depends_on_size = True
    cycles: ClassVar = {
        "view.flip": ("side", ("who", "where")),
        "view.measure": ("by", ("input", "norm")),
    }
    actions = tuple(cycles)

    def load(self, source: Source, request: Request[GradientsOptions]) -> GradientsData:
        """Read the gradients of the place's step, and the tokens that fit."""
        reader, place = source.reader, request.place
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        record = reader.gradients(place.generation, place.step, branch)
        if record is None:
            others = steps_with_gradients(reader, place.generation, branch)
            if not others:
                hint = "Run with --grads; they are computed at the end of the generation."
                missing = "No gradients are recorded for this generation."
                raise Missing(missing, import_hint(source, hint))
            shown = ", ".join(map(str, others[:12])) + (" …" if len(others) > 12 else "")
            missing = f"No gradients are recorded for step {place.step}."
            raise Missing(missing, f"These steps have some: {shown}.")
        runner_up = ""
        if record.runner_up_id is not None:
            candidates = reader.candidates(place.generation, place.step, branch)
            texts = (_quote(c.text) for c in candidates if c.token_id == record.runner_up_id)
            runner_up = next(texts, f"token {record.runner_up_id}")
        segments = reader.segments(place.generation, place.branch)
        chosen = reader.step_tokens(place.generation, place.step, branch)
        columns, rows = gradient_norms(record)
        return GradientsData(
            place=place,
            record=record,
            token=_quote(chosen[0].text if chosen else f"token {record.token_id}"),
            runner_up=runner_up,
            window=token_window.load_token_window(
                source, place, max(request.width * request.height // 4, 64)
            ),
            shares=segment_shares(record, segments),
            columns=columns,
            rows=rows,
            findings=tuple(GradientsRule().on_gradients(record)),
        )

    def on_action(
        self, action: str, data: GradientsData, request: Request[GradientsOptions]
    ) -> GradientsOptions | Navigate | None:
        """Select the other side, or the measure of "who": the norms of "where" have no other."""
        if action == "view.measure" and request.options.side == "where":
            return None
        return super().on_action(action, data, request)

    def describe(self, data: GradientsData) -> list[str]:
        """Return the check, segments, strongest tokens, norms and findings as text."""
        lines = [f"Gradient of the {format_title(data)}.", f"{format_check(data.record)}."]
        findings = [escape_unprintable(finding.sentence) for finding in data.findings]
        if not data.record.matches_recorded:
            return [*lines, "Nothing is shown.", *findings]
        rows = [("segment", "tokens", "gradient×input", "norm")]
        for share in data.shares:
            signed, norm = format_percent(share.signed, sign=True), format_percent(share.norm)
            rows.append((share.label[:20], str(share.n_tokens), signed, norm))
        lines += ["", *(f"{name:<20}{n:>8}{signed:>16}{norm:>8}" for name, n, signed, norm in rows)]
        lines += ["", *_describe_strongest(data), *_norm_table(data)]
        lines += findings or ["No gradient is NaN, Inf, exploding, vanishing or dead."]
        took, scale = f"{data.record.wall_ms:.0f} ms", format_number(data.record.scale)
        return [*lines, CAVEAT, f"It took {took}; norm at the logits {scale}."]

    def paint(
        self, data: GradientsData, request: Request[GradientsOptions], theme: Theme
    ) -> Picture:
        """Draw one of the two sides, or only the header if the check failed."""
        pen, height, options = Pen(theme, request.width), request.height, request.options
        check_style = "good" if data.record.matches_recorded else "bad"
        strips = [pen.line((format_title(data), "title"))]
        strips.append(pen.line((format_check(data.record), check_style)))
        for finding in data.findings[:2]:
            strips += pen.paragraph(finding.sentence, "bad")[:3]
        if not data.record.matches_recorded:
            text = "Nothing is drawn: these are not the gradients of the recorded forward."
            return Picture([*strips, *pen.paragraph(text)][:height], "not what ran", alarm=True)
        top = len(strips)
        if options.side == "where":
            drawn = _draw_norms(data, height - top, pen)
        else:
            drawn = _draw_attribution(data, height - top, pen, by_norm=options.by == "norm")
        side = "norms per layer" if options.side == "where" else f"by {options.by}"
        note = f"{side} · check {data.record.logits_error:.0e} · {data.record.wall_ms:.0f} ms"
        strips = [*strips, *drawn.strips][:height]
        return Picture(strips, note, bool(data.findings), lambda x, y: drawn.target(x, y - top))


# -- attribution to segments and tokens ------------------------------------------------------------


def _draw_attribution(data: GradientsData, height: int, pen: Pen, *, by_norm: bool) -> Picture:
    """Draw the shares of the segments, and the rows of tokens up to the current one."""
    caveat, bars = _draw_caveat(height, pen), _draw_share_bars(data, pen)
    room, largest = max(height - len(bars) - 1 - len(caveat), 0), data.largest(by_norm)
    rows = wrap_cells(token_window.token_cells(data.window, "segment"), pen.width)
    top = min(data.window.row_of_current(rows) - room + 1, len(rows) - room)
    shown = rows[max(top, 0) :][:room]
    strips = [*bars, pen.line()]
    for row in shown:
        styles = (_token_style(data, cell.pos, largest, pen, by_norm) for cell in row.cells)
        strips.append(pen.line(*zip((cell.text for cell in row.cells), styles, strict=True)))

    def target(x: int, y: int) -> Navigate | None:
        line = y - len(bars) - 1
        at = shown[line].cell_at(x) if 0 <= line < len(shown) else None
        return data.window.navigate_to(at)

    blank = max(height - len(strips) - len(caveat), 0)
    return Picture([*strips, *[pen.line()] * blank, *caveat], target=target)


def _draw_caveat(height: int, pen: Pen) -> list[Strip]:
    """Draw the meaning of the colours, and the limits of the attribution."""
    legend = "Orange contributes to the token, blue acts against it."
    if pen.theme.no_color:
        legend = "Bold contributes to the token, underlined acts against it."
    strips = pen.paragraph(f"{legend} {CAVEAT}", "muted")
    return strips if len(strips) <= _MAX_CAVEAT_LINES and height > 12 else strips[:1]


def _draw_share_bars(data: GradientsData, pen: Pen) -> list[Strip]:
    shares = merge_separators(data.shares)
    label = max(min(max((len(s.label) for s in shares), default=0) + 1, pen.width // 3), 4)
    room = max((pen.width - label - 2 * _SHARE_WIDTH - 1) // 2, 0)
    names = f"{clip_text('segment', label)}{align_right('input', _SHARE_WIDTH)} {' ' * room}"
    strips = [pen.line((f"{names}{align_right('norm', _SHARE_WIDTH)}", "muted"))]
    sizes = (abs(share.signed) for share in shares if not math.isnan(share.signed))
    largest = max(sizes, default=0.0) or 1.0
    for share in shares:
        color = DIVERGING.rgb[-1 if share.signed >= 0 else 0]
        tint = Style() if pen.theme.no_color else Style(color=Color.from_rgb(*color))
        spans: list[NamedSpan] = [
            (clip_text(share.label, label), "muted" if share.segment_color < 0 else "text"),
            (align_right(format_percent(share.signed, sign=True), _SHARE_WIDTH), "strong"),
            (f" {bar(abs(share.signed) / largest, room)}", pen.style("text") + tint),
            (align_right(format_percent(share.norm), _SHARE_WIDTH), "strong"),
            (bar(share.norm, room), "muted"),
        ]
        strips.append(pen.line(*spans))
    return strips


def _token_style(data: GradientsData, pos: int, largest: float, pen: Pen, by_norm: bool) -> Style:
    """Return the colour of a token's contribution; the generated token itself is white."""
    own, plain = data.record.tokens, pen.theme.no_color
    if own is not None and pos == own.shape[1]:
        return pen.style("cursor") if plain else CURRENT_TOKEN_STYLE
    value = data.value_at(pos, by_norm)
    if value is None:
        return pen.style("muted")
    if not math.isfinite(value):
        return pen.style("bad") if plain else BAD_CELL_STYLE
    palette, low = (CIVIDIS, 0.0) if by_norm else (DIVERGING, -largest)
    level = int(quantise(value, low, largest, palette.size)) if largest else palette.centre
    if plain:  # bold for a contribution for the token, underlined for one against it
        share = (level - palette.centre) / (palette.size - 1 - palette.centre)
        return Style(bold=share > 0.25, underline=share < -0.25)
    return palette.style(level)


# -- norms by layer --------------------------------------------------------------------------------


def _draw_norms(data: GradientsData, height: int, pen: Pen) -> Picture:
    """Draw a line per layer; the place's layer is visible."""
    if not data.rows or not data.columns:
        return Picture([])
    each = max(min((pen.width - LABEL_WIDTH) // len(data.columns), 10), 1)
    names = "".join(align_right(name, each - 1) + " " for name in data.columns)
    bounds = _log_bounds(data)
    at = next((i for i, row in enumerate(data.rows) if row.layer == data.place.layer), 0)
    shown = data.rows[visible(at, max(height - 2, 1), len(data.rows))]
    strips = [
        pen.line((" " * LABEL_WIDTH + names, "muted")),
        *(_norm_line(row, data, each, bounds, pen) for row in shown),
        pen.line((f"outside: {'  '.join(format_outside_norms(data.record))}", "muted")),
    ]

    def target(x: int, y: int) -> Navigate | None:
        return Navigate(layer=shown[y - 1].layer) if 0 < y <= len(shown) else None

    return Picture(strips[:height], target=target)


def _norm_line(
    row: LayerGradients, data: GradientsData, each: int, bounds: Sequence[LogBounds], pen: Pen
) -> Strip:
    here = row.layer == data.place.layer
    bad_layers = {layer for f in data.findings for layer in (*f.layers, f.layer)}
    label = f"{'▸' if here else ' '}{clip_text(f'layer {row.layer}', LABEL_WIDTH - 3)}"
    spans: list[NamedSpan] = [
        (label, "chosen" if here else "muted"),
        ("! " if row.n_bad or row.layer in bad_layers else "  ", "bad"),
    ]
    for value, ends in zip(row.norms, bounds, strict=True):
        inside = align_right(format_number(value, each - 1) if each > 4 else "", each - 1)
        spans += [(inside, _norm_style(value, ends, pen)), (" ", "text")]
    return pen.line(*spans)


LogBounds = tuple[float, float]
"""The logarithms of the smallest and the largest norm above 0."""


def _log_bounds(data: GradientsData) -> list[LogBounds]:
    """Return the bounds of each column: those of parameters share theirs, hidden states do not."""
    logs: dict[bool, list[float]] = {True: [], False: []}
    for row in data.rows:
        for norm, name in zip(row.norms, data.columns, strict=True):
            if norm is not None and 0 < norm < math.inf:
                logs[name == HIDDEN_COLUMN].append(math.log(norm))
    columns = (logs[name == HIDDEN_COLUMN] or [0.0] for name in data.columns)
    return [(min(column), max(column)) for column in columns]


def _norm_style(value: float | None, bounds: LogBounds, pen: Pen) -> Style:
    plain = pen.theme.no_color
    if value is None:
        return pen.style("muted")
    if not math.isfinite(value) or value == 0:
        return pen.style("bad") if plain else BAD_CELL_STYLE
    if plain:
        return pen.style("text")
    return CIVIDIS.style(int(quantise(math.log(value), *bounds, CIVIDIS.size)))
