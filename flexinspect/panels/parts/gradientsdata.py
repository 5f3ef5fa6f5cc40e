"""What the gradients panel knows: a token's gradients by segment and by layer, and their gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding
from flexinspect.gradientrecords import PARAMETER_PARTS, GradientRecord, GradientStat
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.parts.sequence import TokenWindow, load_token_window, segment_color
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment
from flexinspect.rules.gradients import GradientsRule
from flexinspect.text import escape_unprintable
from flexinspect.trace.gradients import steps_with_gradients
from flexinspect.trace.ranges import branch_of_step
from flexinspect.widgets.plots import format_number

Values = npt.NDArray[np.float64]

HIDDEN_COLUMN = "hidden"
"""The column of the norms at the layers' outputs."""

CAVEAT = (
    "First order, at this text alone: it is not what would happen without a segment or a token "
    "(flexinspect prove changes them and runs again), and not attention."
)
"""What an attribution by gradients is not."""


@dataclass(frozen=True, slots=True)
class SegmentShare:
    """A segment's part in the token: its sum of gradient times input, signed, as a share of all
    tokens' absolute values; and its share of the gradient's norms."""

    label: str
    segment_color: int
    n_tokens: int
    signed: float
    norm: float


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """One line of the norms: a layer, or what belongs to none (`layer` None)."""

    label: str
    layer: int | None
    norms: tuple[float | None, ...]
    n_bad: int


@dataclass(frozen=True, slots=True)
class GradientsData:
    """The gradients of the place's token. `shares` and `rows` are empty behind a red gate."""

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
        """Return a token's gradient times input, or its gradient's norm; None behind the token."""
        tokens = self.record.tokens
        if tokens is None or not 0 <= pos < tokens.shape[1]:
            return None
        return float(tokens[int(by_norm), pos])

    def largest(self, by_norm: bool) -> float:
        """Return the largest absolute value of all tokens that is finite."""
        tokens = self.record.tokens
        fine = np.zeros(1) if tokens is None else np.abs(tokens[int(by_norm)])
        return float(np.max(fine, where=np.isfinite(fine), initial=0.0))


def load_gradients(source: Source, place: TracePlace, reach: int) -> GradientsData:
    """Read the gradients of the place's step, and about `reach` tokens around it.

    Raises `Missing` when the step has none, saying which steps have.
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
        *(place, record, _quote(chosen[0].text if chosen else f"token {record.token_id}")),
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
            "No gradients are recorded of this generation.",
            "Run with --grads; they are taken when the generation is over.",
        )
    shown = ", ".join(map(str, others[:12])) + (" …" if len(others) > 12 else "")
    return Missing(
        f"No gradients are recorded of step {place.step}.", f"Of steps {shown} they are."
    )


def _quote(text: str) -> str:
    return f'"{escape_unprintable(text)}"'


def _load_rival(source: Source, place: TracePlace, branch: int, record: GradientRecord) -> str:
    if record.rival is None:
        return ""
    candidates = source.reader.candidates(place.generation, place.step, branch)
    known = (_quote(one.text) for one in candidates if one.token_id == record.rival)
    return next(known, f"token {record.rival}")


def segment_shares(record: GradientRecord, segments: Sequence[Segment]) -> tuple[SegmentShare, ...]:
    """Return each segment's part in the token, in the order of the text."""
    if record.tokens is None:
        return ()
    signed, norms = np.asarray(record.tokens, np.float64)
    with np.errstate(all="ignore"):
        parts = signed / np.abs(signed).sum(), norms / norms.sum()
    found = []
    for at, segment in enumerate(segments):
        where = slice(segment.start, min(segment.stop, len(signed)))
        n_tokens = max(where.stop - where.start, 0)
        if n_tokens:
            sums = (float(part[where].sum()) for part in parts)
            found.append(
                SegmentShare(
                    escape_unprintable(segment.label), segment_color(at, segments), n_tokens, *sums
                )
            )
    return tuple(found)


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
    """Return the norms of what belongs to no layer, by part."""
    mine = [stat for stat in record.stats if stat.layer is None]
    parts = [part for part in PARAMETER_PARTS if any(stat.part == part for stat in mine)]
    found = [(part, _joint_norm([stat for stat in mine if stat.part == part])) for part in parts]
    return [(part, norm) for part, norm in found if norm is not None]


def _joint_norm(stats: Sequence[GradientStat]) -> float | None:
    """Return the norm of several parameters' gradients together, None of none."""
    if not stats:
        return None
    return float(np.sqrt(np.sum(np.square([stat.norm for stat in stats]))))


def _count_bad(stats: Sequence[GradientStat]) -> int:
    return sum(stat.n_nan + stat.n_inf for stat in stats)


# -- in words --------------------------------------------------------------------------------------


def format_title(data: GradientsData) -> str:
    """Return what was differentiated: 'log-probability -0.21 of "Paris", step 0'."""
    record = data.record
    value = format_number(record.value)
    if record.target == "margin":
        return f"margin {value} of {data.token} to {data.rival}, step {record.step}"
    return f"log-probability {value} of {data.token}, step {record.step}"


def format_check(record: GradientRecord) -> str:
    """Return whether the forward that was differentiated is what ran, by how much, and by what."""
    than = "≤" if record.matches_recorded else ">"
    far = f"off by {record.gate:.1e} {than} {record.tolerance:.0e} of the largest"
    result = (
        "gate ✓ logits as recorded" if record.matches_recorded else "gate ✗ not what ran: logits"
    )
    return f"{result}, {far}; {record.path}"


def describe_gradients(data: GradientsData) -> list[str]:
    """Return the token, the gate, segments, the strongest tokens, layers, and what is wrong."""
    title = format_title(data)
    lines = [f"Gradient of the {title}.", f"{format_check(data.record)}."]
    if not data.record.matches_recorded:
        return [*lines, "Nothing is drawn of it.", *_finding_sentences(data)]
    lines += [*_share_table(data), *_describe_strongest(data), *_norm_table(data)]
    lines += _finding_sentences(data) or ["No gradient is NaN, Inf, exploding, vanishing or dead."]
    took = f"It took {data.record.wall_ms:.0f} ms"
    return [
        *lines,
        CAVEAT,
        f"{took}; {format_number(data.record.scale)} is its norm at the logits.",
    ]


def _finding_sentences(data: GradientsData) -> list[str]:
    return [escape_unprintable(finding.sentence) for finding in data.findings]


def _share_table(data: GradientsData) -> list[str]:
    head = f"{'segment':<20}{'tokens':>8}{'gradient×input':>16}{'norm':>8}"
    rows = [
        f"{one.label[:20]:<20}{one.n_tokens:>8}{format_percent(one.signed, sign=True):>16}"
        f"{format_percent(one.norm):>8}"
        for one in data.shares
    ]
    return ["", head, *rows, ""]


def _describe_strongest(data: GradientsData) -> list[str]:
    """Return the tokens that speak most for it and most against it, of those that are loaded."""
    found = [(data.value_at(token.pos, False), token) for token in data.window.tokens]
    known = [(value, token) for value, token in found if value is not None and value]
    lines = []
    for name, sign in (("For", 1), ("Against", -1)):
        mine = [(sign * value, token) for value, token in known if sign * value > 0]
        mine.sort(key=lambda pair: -pair[0])
        words = [
            f"{_quote(token.text or token.token)} at {token.pos} ({format_number(sign * size)})"
            for size, token in mine[:5]
        ]
        if words:
            lines.append(f"{name} it: {', '.join(words)}.")
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
    """Return the shares with those of all separators together, at the end."""
    apart = [one for one in shares if one.segment_color >= 0]
    between = [one for one in shares if one.segment_color < 0]
    if between:
        n_tokens = sum(one.n_tokens for one in between)
        sums = (sum(one.signed for one in between), sum(one.norm for one in between))
        apart.append(SegmentShare("separators", -1, n_tokens, *sums))
    return apart


def format_percent(share: float, *, sign: bool = False) -> str:
    """Return a share as "12 %" or "+12 %", "?" for NaN."""
    if share != share:
        return "?"
    whole = round(100 * share)
    return f"{whole:+d} %" if sign and whole else f"{whole} %"
