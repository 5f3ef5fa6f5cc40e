"""The data of the attention panel: the grid of a measure, and the row of one head.

The grid and the segment attention were reduced during capture. The weights of single tokens are
recomputed from the stored queries and keys (see `row_recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import escape_unprintable, format_share
from flexinspect.drawing.plots import format_number
from flexinspect.drawing.token_cells import TokenCell
from flexinspect.masks import attention_row
from flexinspect.panels.attention import row_recompute
from flexinspect.panels.base import Missing, Request, TracePlace, import_hint
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_token_cells
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.trace.queries import lineage
from flexinspect.trace.query_results import ArrayInfo

ENTROPY, SINK = "entropy", "sink"
MAX_LISTED_KEYS = 512
"""Maximum keys of a row that has all its tokens; a longer one has those of the heaviest keys."""

NO_OPEN_KEY = "This row attends to no key: its output is zero."
_GROUPED_KINDS = {
    SegmentKind.BOS: "BOS",
    SegmentKind.SHARED: "shared",
    SegmentKind.SEPARATOR: "separators",
    SegmentKind.CUE: "cue",
    SegmentKind.GENERATED: "generated",
}
_NOT_READ = {_GROUPED_KINDS[kind] for kind in (SegmentKind.SEPARATOR, SegmentKind.GENERATED)}
"""Measures that do not make another one informative: most of the attention is on the prompt."""
_KIND_ORDER = (SegmentKind.PARAPHRASE, *_GROUPED_KINDS)


class AttentionOptions(Struct, frozen=True):
    """Options of the attention panel.

    `measure` is one of `AttentionGrid.measures`, any other value selects the first one. `row` is
    the q_idx of a row of the step whose queries are stored, None for the newest row.
    """

    measure: str = ""
    row: int | None = None


class AttentionGrid(Struct, frozen=True):
    """A measure of the newest row: `values` float64 (layers, heads), one LSE check per layer.

    `layers` are the layers of the grid's rows. `unit` is "nats" for the entropy, else "share".
    `is_single_part` says that another measure was chosen because the prompt is a single segment.
    """

    measure: str
    measures: tuple[str, ...]
    layers: tuple[int, ...]
    values: attention_row.Floats
    lse_checks: tuple[attention_row.LseCheck, ...]
    unit: str = "share"
    is_single_part: bool = False

    @property
    def failed_layers(self) -> list[int]:
        """The layers whose check failed."""
        checks = zip(self.layers, self.lse_checks, strict=True)
        return [layer for layer, check in checks if check.is_failed]

    def drawable_values(self) -> attention_row.Floats:
        """Return the values with NaN for layers whose check failed."""
        values = self.values.copy()
        values[[check.is_failed for check in self.lse_checks]] = np.nan
        return values


def format_value(value: float, unit: str) -> str:
    """Return a value of a grid with its unit: "0.1234" or "1.23 nats"."""
    return format_share(value) if unit == "share" else f"{format_number(value)} nats"


class AttentionData(Struct, frozen=True):
    """The grid of a step, and the row `q_idx` of one head of the layer in `grid_row`.

    `rows` are the q_idx that can be selected. `segment_attention` is float64 (segments,) of the
    row, None if there is none to show. `tokens` is None if the weights of tokens cannot be shown:
    then `missing_reason` says what is missing, or `mismatch` that they are not what ran. `cells`
    has at least the cells of its heaviest keys, by position.
    `newest_lse_check` is that of the newest row of the same head, the only check for older rows.
    """

    place: TracePlace
    grid: AttentionGrid
    grid_row: int
    head: int
    q_idx: int
    rows: range
    segments: tuple[Segment, ...]
    query: TokenCell | None
    segment_attention: attention_row.Floats | None
    segment_check: attention_row.LseCheck
    lse_check: attention_row.LseCheck = attention_row.UNCHECKED
    newest_lse_check: attention_row.LseCheck = attention_row.UNCHECKED
    tokens: row_recompute.TokenRow | None = None
    cells: Mapping[int, TokenCell] = {}
    missing_reason: str = ""
    mismatch: str = ""

    @property
    def is_newest(self) -> bool:
        """Whether the row is the newest one of the step."""
        return self.q_idx == self.rows[-1]

    @property
    def layer(self) -> int:
        """The layer of the row."""
        return self.grid.layers[self.grid_row]

    def segment_label(self, pos: int) -> str:
        """Return the label of a position's segment, "" outside of all."""
        return next((s.label for s in self.segments if s.start <= pos < s.stop), "")


def load_attention(source: Source, request: Request[AttentionOptions]) -> AttentionData:
    """Read the attention of a step. Raises `Missing`."""
    view = row_recompute.load_step_view(source, request.place)
    by_segment = view.load_array("attention.mass")
    shape = () if by_segment is None else by_segment.shape
    if by_segment is None or len(shape) != 3 or 0 in shape or shape[0] != len(view.calls):
        raise Missing(
            f"Step {view.step_row.step} has no recorded attention.",
            import_hint(
                source, "Record with --level advanced (by segment) or --level extreme (by token)."
            ),
        )
    infos = source.reader.arrays(view.place.generation, view.step_row.step, view.branch)
    segments = _load_segments(view, shape[2])
    layers = [call.layer for call in view.calls]
    grid_row = layers.index(view.place.layer) if view.place.layer in layers else 0
    head = min(max(view.place.head, 0), shape[1] - 1)
    newest = view.step_row.kv_after - 1
    is_stored = any(info.stream == "q" and info.layer == layers[grid_row] for info in infos)
    rows = range(view.step_row.kv_before if is_stored else newest, newest + 1)
    chosen = request.options.row
    q_idx = chosen if chosen is not None and chosen in rows else newest
    check = attention_row.recorded_check(view.calls[grid_row])
    is_shown = q_idx == newest and not check.is_failed
    data = AttentionData(
        place=view.place,
        grid=_load_grid(view, by_segment, segments, infos, request.options.measure),
        grid_row=grid_row,
        head=head,
        q_idx=q_idx,
        rows=rows,
        segments=segments,
        query=load_token_cells(source, view.place, segments, [q_idx]).get(q_idx),
        segment_attention=by_segment[grid_row, head].astype(float) if is_shown else None,
        segment_check=check,
    )
    return _load_token_row(view, data)


def _load_segments(view: row_recompute.StepView, n_segments: int) -> tuple[Segment, ...]:
    """Return the segments of the branch, or of an ancestor, that match the recorded attention."""
    reader, generation = view.source.reader, view.place.generation
    family = (branch for branch, _, _ in lineage(reader, generation, view.place.branch))
    for branch in dict.fromkeys((view.branch, *family, 0)):
        segments = reader.segments(generation, branch)
        if len(segments) == n_segments:
            return tuple(replace(s, label=escape_unprintable(s.label)) for s in segments)
    kind = SegmentKind.PARAPHRASE
    return tuple(Segment(0, 0, f"segment {i + 1}", kind, i) for i in range(n_segments))


# -- the grid -------------------------------------------------------------------------------------


def _load_grid(
    view: row_recompute.StepView,
    segment_attention: npt.NDArray[np.floating],
    segments: Sequence[Segment],
    infos: Sequence[ArrayInfo],
    chosen: str,
) -> AttentionGrid:
    groups = measure_groups(segments)
    streams = {info.stream for info in infos}
    one_token = [i for i, s in enumerate(segments) if s.start == 0 and len(s) == 1]
    is_stored = {"q", "k", "attention.lse"} <= streams and view.step_row.q_len == 1
    measures = [*groups, *[ENTROPY] * ("attention.entropy" in streams)]
    measures += [SINK] if one_token or is_stored else []
    parts = [name for name in groups if name not in _NOT_READ]
    # The share of a single part is 1 for every head.
    default = next((one for one in (SINK, ENTROPY) if one in measures), measures[0])
    default = measures[0] if len(parts) > 1 else default
    measure = chosen if chosen in measures else default
    is_single_part = len(parts) < 2 and chosen not in measures
    gates = tuple(map(attention_row.recorded_check, view.calls))
    values: npt.NDArray[np.floating] | None
    if measure == ENTROPY:
        values = view.load_array("attention.entropy")
    elif measure == SINK and not one_token:
        values = view.first_token_weights()
        # The capture's checks are of sums that were not computed with these weights.
        gates = (attention_row.UNCHECKED,) * len(gates)
    else:
        numbers = one_token if measure == SINK else groups[measure]
        values = segment_attention[:, :, numbers].sum(axis=2)
    if values is None or values.shape != segment_attention.shape[:2]:
        values = np.full(segment_attention.shape[:2], np.nan)
    unit = "nats" if measure == ENTROPY else "share"
    layers = tuple(call.layer for call in view.calls)
    return AttentionGrid(
        measure, tuple(measures), layers, values.astype(np.float64), gates, unit, is_single_part
    )


def measure_groups(segments: Sequence[Segment]) -> dict[str, list[int]]:
    """Return the measures of segment attention, each with the numbers of its segments, in order.

    Every paraphrase is a measure of its own; segments of other kinds are grouped by kind.
    """
    groups: dict[str, list[int]] = {}
    for kind in _KIND_ORDER:
        for index, segment in enumerate(segments):
            if segment.kind is kind:
                groups.setdefault(_GROUPED_KINDS.get(kind, segment.label), []).append(index)
    return groups


def attention_shares(data: AttentionData, most: int) -> list[tuple[str, int, float]]:
    """Return (label, segment number, attention) of all segments, or by kind if they are too many.

    At most `most`: of more kinds, those with the most attention. The number is -1 for separators.
    """
    segment_attention = [] if data.segment_attention is None else data.segment_attention.tolist()
    pairs = enumerate(zip(data.segments, segment_attention, strict=False))
    every = [
        (segment.label, -1 if segment.kind is SegmentKind.SEPARATOR else index, value)
        for index, (segment, value) in pairs
    ]
    if len(every) <= most:
        return every
    kinds = [
        (name, every[at[0]][1], sum(segment_attention[i] for i in at))
        for name, at in measure_groups(data.segments).items()
    ]
    if len(kinds) <= most:
        return kinds
    return sorted(kinds, key=lambda part: -part[2])[: max(most, 0)]


# -- the row --------------------------------------------------------------------------------------


def _load_token_row(view: row_recompute.StepView, data: AttentionData) -> AttentionData:
    try:
        recompute = partial(view.recompute_row, data.grid_row, data.head)
        newest = recompute(data.rows[-1])
        row = newest if data.is_newest else recompute(data.q_idx)
    except row_recompute.RowNotRecordedError as error:
        return replace(data, missing_reason=str(error))
    check = newest.lse_check
    data = replace(data, newest_lse_check=check, lse_check=row.lse_check)
    if not np.isfinite((newest.total, row.total)).all():
        return replace(data, missing_reason=row_recompute.NOT_FINITE)
    if check.is_failed:
        grid = data.grid
        if not any(own.is_checked for own in grid.lse_checks):
            # Values without checks of their own were computed in the same way as the row's.
            grid = replace(grid, lse_checks=(check,) * len(grid.lse_checks))
        return replace(data, mismatch=describe_mismatch(newest), grid=grid)
    n_keys = len(row.weights)
    keys = range(n_keys) if n_keys <= MAX_LISTED_KEYS else row.heaviest.tolist()
    positions = [row.first_pos + key for key in keys]
    cells = load_token_cells(view.source, view.place, data.segments, positions)
    data = replace(data, tokens=row, cells=cells)
    if data.segment_attention is not None or not any(map(len, data.segments)):
        return data
    segment_attention = attention_row.attention_by_segment(
        row.weights, data.segments, row.first_pos
    )
    return replace(data, segment_attention=segment_attention, segment_check=row.lse_check)


def describe_mismatch(newest: row_recompute.TokenRow) -> str:
    """Return the sentence for a newest row whose check failed."""
    value = newest.lse_check.value
    if newest.lse_check.kind == "output":
        return (
            f"This is not what ran: the recomputed output or attention of the row is off by "
            f"{value:.2g}; up to {newest.lse_check.tolerance:g} is rounding."
        )
    return (
        f"This is not what ran: recomputed from the stored queries and keys under the recorded "
        f"mask, the weights of the newest row sum to {newest.total:.4g} instead of 1 "
        f"(off by {value:.2g}). A softcap or a score_mod, which a trace does not record, can also "
        f"cause this."
    )
