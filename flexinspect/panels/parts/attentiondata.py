"""What the attention panel shows, fetched: the grid of a measure, and the row of one head.

The grid and the mass by segment were reduced during capture and are read as they are. The weights
of single tokens are recomputed from the stored queries and keys (see `attentionrows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexinspect.attention import (
    UNCHECKED,
    Bools,
    Floats,
    Gate,
    entropy,
    mass_by_segment,
)
from flexinspect.panels.base import Missing, Place, Request
from flexinspect.panels.parts.attentionrows import (
    Recomputed,
    StepView,
    Unrecorded,
    first_token_weights,
    recompute,
    view_step,
)
from flexinspect.panels.parts.sequence import band
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import TokenRecord
from flexinspect.text import visible
from flexinspect.trace.rows import ArrayInfo
from flexinspect.widgets.plots import number
from flexinspect.widgets.tokencells import Word, shown

ENTROPY, SINK = "entropy", "sink"
WHOLE = 512
"""Rows of up to this many keys come with all their words, longer ones with those of `HEAVIEST`."""

HEAVIEST = 64
_TOGETHER = {
    SegmentKind.BOS: "BOS",
    SegmentKind.SHARED: "shared",
    SegmentKind.SEPARATOR: "separators",
    SegmentKind.CUE: "cue",
    SegmentKind.GENERATED: "generated",
}
_ORDER = (SegmentKind.PARAPHRASE, *_TOGETHER)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What the user chose.

    `measure` is one of `Grid.measures` ("" or one that is not there: the first). `row` is the q_idx
    of a row of the step whose queries are stored, None for the newest.
    """

    measure: str = ""
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A measure of the newest row: `values` float64 (layers, heads), one gate per layer.

    `layers` names the layer of each row of it. `unit` is "nats" for the entropy, else "share".
    """

    measure: str
    measures: tuple[str, ...]
    layers: tuple[int, ...]
    values: Floats
    gates: tuple[Gate, ...]
    unit: str = "share"

    def shown(self) -> Floats:
        """Return the values that may be drawn: NaN in the layers whose gate is bad."""
        values = self.values.copy()
        values[[gate.bad for gate in self.gates]] = np.nan
        return values


def share(value: float) -> str:
    """Return a share of 1 with four decimals; what is smaller is not worth its exponent."""
    return "<0.0001" if 0 < value < 1e-4 else f"{value:.4f}" if value else "0"


def measured(value: float, unit: str) -> str:
    """Return a value of a grid with its unit: "0.1234" or "1.23 nats"."""
    return share(value) if unit == "share" else f"{number(value)} nats"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The weights of a row over its keys, float64 (keys,), 0 where `open_keys` is False.

    Key 0 stands at `first_pos`. `heaviest` lists keys by weight, largest first, at most `HEAVIEST`
    of them; `words`, by position, holds at least theirs.
    """

    first_pos: int
    weights: Floats
    open_keys: Bools
    entropy: float
    heaviest: npt.NDArray[np.intp]
    words: dict[int, Word]


@dataclass(frozen=True, slots=True)
class AttentionData:
    """One step's grid, and in it the row `q_idx` of one head of the layer in `grid_row`.

    `rows` are the q_idx that can be chosen. `mass` is float64 (segments,) of the row, None where
    there is none to show. `tokens` is None where single weights cannot be shown: `why` says what
    is missing, `refused` that they are not what ran. `newest_gate` is that of the newest row of the
    same head, which is all the evidence there is for an older row.
    """

    place: Place
    grid: Grid
    grid_row: int
    head: int
    q_idx: int
    newest: bool
    rows: range
    segments: tuple[Segment, ...]
    query: Word | None
    mass: Floats | None
    mass_gate: Gate
    gate: Gate = UNCHECKED
    newest_gate: Gate = UNCHECKED
    tokens: TokenRow | None = None
    why: str = ""
    refused: str = ""

    @property
    def layer(self) -> int:
        """The layer that is shown."""
        return self.grid.layers[self.grid_row]


def load_attention(source: Source, request: Request[AttentionOptions]) -> AttentionData:
    """Return what is known of the attention of a step. Raises `Missing`."""
    view = view_step(source, request.place)
    mass = view.array("attention.mass")
    if mass is None or mass.ndim != 3 or not mass.size or len(mass) != len(view.calls):
        raise Missing(
            f"Step {view.about.step} has no attention mass.",
            "It is recorded at --level advanced (by segment) and --level extreme (by token).",
        )
    infos = source.reader.arrays(view.place.generation, view.about.step, view.branch)
    segments = _segments(view, mass.shape[2])
    layers = [call.layer for call in view.calls]
    grid_row = layers.index(view.place.layer) if view.place.layer in layers else 0
    head = min(max(view.place.head, 0), mass.shape[1] - 1)
    rows = _rows(view, infos, layers[grid_row])
    chosen = request.options.row
    q_idx = chosen if chosen is not None and chosen in rows else view.about.kv_after - 1
    newest = q_idx == view.about.kv_after - 1
    call = view.calls[grid_row]
    gate = Gate(call.gate, call.gate_kind, call.dtype)
    data = AttentionData(
        place=view.place,
        grid=_grid(view, mass, segments, infos, request.options.measure),
        grid_row=grid_row,
        head=head,
        q_idx=q_idx,
        newest=newest,
        rows=rows,
        segments=segments,
        query=_words(view, [q_idx], segments).get(q_idx),
        mass=mass[grid_row, head].astype(np.float64) if newest and not gate.bad else None,
        mass_gate=gate,
    )
    return _with_tokens(view, data)


def _segments(view: StepView, n_segments: int) -> tuple[Segment, ...]:
    """Return the segments of the mass: those of the branch, or of its parent while it is open."""
    for branch in dict.fromkeys((view.branch, *(branch for branch, _, _ in view.owners), 0)):
        found = view.source.reader.segments(view.place.generation, branch)
        if len(found) == n_segments:
            return tuple(replace(one, label=visible(one.label)) for one in found)
    kind = SegmentKind.PARAPHRASE
    return tuple(Segment(0, 0, f"segment {i + 1}", kind, i) for i in range(n_segments))


def _rows(view: StepView, infos: Iterable[ArrayInfo], layer: int) -> range:
    """Return the rows of this step whose queries are stored for the layer."""
    stored = any(info.stream == "q" and info.layer == layer for info in infos)
    newest = view.about.kv_after - 1
    return range(view.about.kv_before if stored else newest, newest + 1)


# -- the grid -------------------------------------------------------------------------------------


def _grid(
    view: StepView,
    mass: npt.NDArray[np.floating],
    segments: Sequence[Segment],
    infos: Sequence[ArrayInfo],
    wanted: str,
) -> Grid:
    groups = measure_groups(segments)
    streams = {info.stream for info in infos}
    measures = list(groups)
    if "attention.entropy" in streams:
        measures.append(ENTROPY)
    one_token = [i for i, s in enumerate(segments) if s.start == 0 and len(s) == 1]
    stored = {"q", "k", "attention.lse"} <= streams and view.about.q_len == 1
    if one_token or stored:
        measures.append(SINK)
    measure = wanted if wanted in measures else measures[0]
    gates = tuple(Gate(call.gate, call.gate_kind, call.dtype) for call in view.calls)
    values: npt.NDArray[np.floating] | None
    if measure == ENTROPY:
        values = view.array("attention.entropy")
    elif measure == SINK and not one_token:
        values = first_token_weights(view)
        # The capture's gates are of sums that were not made with these weights.
        gates = tuple(Gate() for _ in gates)
    else:
        values = mass[:, :, one_token if measure == SINK else groups[measure]].sum(axis=2)
    if values is None or values.shape != mass.shape[:2]:
        values = np.full(mass.shape[:2], np.nan)
    unit = "nats" if measure == ENTROPY else "share"
    layers = tuple(call.layer for call in view.calls)
    return Grid(measure, tuple(measures), layers, values.astype(np.float64), gates, unit)


def measure_groups(segments: Sequence[Segment]) -> dict[str, list[int]]:
    """Return the measures that are masses, each with the numbers of its segments, in order.

    Every paraphrase is one of its own; other kinds are taken together.
    """
    groups: dict[str, list[int]] = {}
    for kind in _ORDER:
        for index, segment in enumerate(segments):
            if segment.kind is kind:
                groups.setdefault(_TOGETHER.get(kind, segment.label), []).append(index)
    return groups


def mass_parts(data: AttentionData, most: int) -> list[tuple[str, int, float]]:
    """Return (label, band, mass) of all segments, else by kind, else of the largest kinds.

    At most `most` of them; the band is -1 for separators.
    """
    mass = [] if data.mass is None else data.mass.tolist()
    every = [
        (segment.label, -1 if segment.kind is SegmentKind.SEPARATOR else index, value)
        for index, (segment, value) in enumerate(zip(data.segments, mass, strict=False))
    ]
    if len(every) <= most:
        return every
    groups = measure_groups(data.segments)
    kinds = [(name, every[at[0]][1], sum(mass[i] for i in at)) for name, at in groups.items()]
    if len(kinds) <= most:
        return kinds
    return sorted(kinds, key=lambda part: -part[2])[: max(most, 0)]


# -- the row --------------------------------------------------------------------------------------


def _with_tokens(view: StepView, data: AttentionData) -> AttentionData:
    """Return the data with the row's weights, or with why there are none."""
    try:
        newest = recompute(view, data.grid_row, data.head, view.about.kv_after - 1)
        found = newest
        if not data.newest:
            found = recompute(view, data.grid_row, data.head, data.q_idx)
    except Unrecorded as reason:
        return replace(data, why=str(reason))
    data = replace(data, newest_gate=newest.gate, gate=found.gate)
    if not (np.isfinite(newest.row.total) and np.isfinite(found.row.total)):
        return replace(data, why="The scores of this row are not finite, so it has no weights.")
    if newest.gate.bad:
        return replace(data, refused=not_what_ran(newest), grid=_doubted(data.grid, newest.gate))
    data = replace(data, tokens=_token_row(view, found, data.segments))
    if data.mass is None and any(map(len, data.segments)):
        mass = mass_by_segment(found.row.weights, data.segments, found.first_pos)
        return replace(data, mass=mass, mass_gate=found.gate)
    return data


def _doubted(grid: Grid, gate: Gate) -> Grid:
    """Return the grid with the gate of the row where its values were made in the same way."""
    if any(one.checked for one in grid.gates):
        return grid
    return replace(grid, gates=(gate,) * len(grid.gates))


def not_what_ran(newest: Recomputed) -> str:
    """Return the sentence for a row whose gate is bad."""
    value = newest.gate.value
    if newest.gate.kind == "output":
        return (
            f"This is not what ran: the row's output or its mass, recomputed, is off by "
            f"{value:.2g} where at most {newest.gate.bar:g} is rounding."
        )
    return (
        f"This is not what ran: recomputed from the stored queries and keys under the recorded "
        f"mask, the weights of the newest row sum to {newest.row.total:.4g} where 1 is right "
        f"(gate {value:.2g}). A cap on the scores or a score_mod, which a trace does not hold, "
        f"does this too."
    )


def _token_row(view: StepView, found: Recomputed, segments: Sequence[Segment]) -> TokenRow:
    weights = found.row.weights
    heaviest = _heaviest(weights, found.visible)
    whole = len(weights) <= WHOLE
    chosen = range(len(weights)) if whole else heaviest.tolist()
    positions = [found.first_pos + key for key in chosen]
    return TokenRow(
        first_pos=found.first_pos,
        weights=weights,
        open_keys=found.visible,
        entropy=entropy(weights),
        heaviest=heaviest,
        words=_words(view, positions, segments),
    )


def _heaviest(weights: Floats, open_keys: Bools) -> npt.NDArray[np.intp]:
    n = min(int(open_keys.sum()), HEAVIEST)
    ranked = np.where(open_keys, weights, -1.0)
    top = np.argpartition(-ranked, n - 1)[:n] if 0 < n < len(ranked) else np.arange(len(ranked))
    # Of equal weights the earlier key comes first.
    return top[np.lexsort((top, -ranked[top]))][:n]


def _words(
    view: StepView, positions: Sequence[int], segments: Sequence[Segment]
) -> dict[int, Word]:
    """Return the words at some positions: one query for neighbours, one each for the others."""
    if not positions:
        return {}
    first, last = min(positions), max(positions)
    spans = [(first, last + 1)] if last - first < WHOLE else [(p, p + 1) for p in positions]
    found: dict[int, Word] = {}
    for start, stop in spans:
        for token in _tokens(view, start, stop):
            found.setdefault(token.pos, _word(token, segments))
    return found


def _tokens(view: StepView, start: int, stop: int) -> Iterable[TokenRecord]:
    """Yield the tokens of a span, those of the branch itself before those of its parents."""
    for branch, _, stop_step in view.owners:
        for token in view.source.reader.tokens(view.place.generation, branch, start, stop):
            if token.step is None or stop_step is None or token.step < stop_step:
                yield token


def _word(token: TokenRecord, segments: Sequence[Segment]) -> Word:
    text, invisible = shown(token.token, token.text, special=token.special)
    return Word(token.pos, text, band(token.segment, segments), token.special, invisible)
