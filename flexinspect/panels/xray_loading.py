"""Loads the X-ray of a token: the cells of its row or column, and the attention of its row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import plural
from flexinspect.drawing.token_cells import display_text
from flexinspect.masks.attention_row import UNCHECKED, Floats, LseCheck, worst_check
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN, UNKNOWN
from flexinspect.panels.attention.attention_data import (
    NO_OPEN_KEY,
    describe_mismatch,
)
from flexinspect.panels.attention.row_recompute import (
    NOT_FINITE,
    RowNotRecordedError,
    StepView,
    load_step_view,
)
from flexinspect.panels.base import TracePlace
from flexinspect.panels.mask import cell_states
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import TokenWindow, load_token_cells
from flexinspect.panels.xray import Direction, RowWeights, State, WeightsOf, XRay
from flexinspect.records.step import TokenRecord

_STATES: Mapping[int, State] = {
    OPEN: "open",
    CLOSED: "closed",
    LEAKED: "leaked",
    LOST: "lost",
    UNKNOWN: "unknown",
}
N_HEAVIEST = 10
MAX_MEAN_BYTES = 1 << 30
"""Maximum bytes of keys, as float32, that are read for the mean of all layers."""

ONLY_SEES = "Attention weights are those of the tokens that a token sees."


def load_xray(
    source: Source,
    place: TracePlace,
    window: TokenWindow,
    direction: Direction,
    weights: WeightsOf = "off",
) -> XRay | None:
    """Return the X-ray of the place's token, None without recorded cells of its row.

    A token that was selected by its position has the row of this position; a token that the step
    chose has the newest row of the step, which predicted it. Raises `TraceError`.
    """
    view = cell_states.load_mask_view(source, place)
    if view is None:
        return None
    rows = view.rows_of_step(place.step)
    newest = rows[-1] if rows else None
    row = newest if place.pos is None else cell_states.find_row(view, place.pos)
    if row is None:
        return None
    pos = int(view.positions[row])
    if direction == "sees":
        states = cell_states.row_states(view, row)[window.start : window.stop]
        positions = range(window.start, window.start + len(states))
        n_open, n_keys = view.row_count(row), max(pos + 1, view.row_count(row))
    else:
        is_near = (view.positions >= window.start) & (view.positions < window.stop)
        inside = is_near.nonzero()[0].tolist()
        near = range(inside[0], inside[-1] + 1) if inside else range(0)
        states = cell_states.column_states(view, pos, near)
        positions = view.positions[near.start : near.stop].tolist()
        n_open, n_keys = sum(_STATES[s] in ("open", "leaked") for s in states.tolist()), len(near)
    token = window.token(pos)
    found = XRay(
        direction,
        pos,
        "" if token is None else _name(token),
        {at: _STATES[state] for at, state in zip(positions, states.tolist(), strict=True)},
        n_open,
        n_keys,
    )
    if weights == "off":
        return found
    if direction != "sees":
        return replace(found, weights=RowWeights(reason=ONLY_SEES))
    step = view.part_of(row).step_at(row).step
    return replace(found, weights=load_weights(source, place, window, step, pos, weights))


def _name(token: TokenRecord) -> str:
    text, _ = display_text(token.token, token.text, special=token.special)
    return text.strip() or text


class _MeanRow(Struct, frozen=True):
    """The mean row of some heads, float64 (keys,), and the worst check of their newest rows.

    Without weights, `why_not` says why.
    """

    weights: Floats
    check: LseCheck
    why_not: RowWeights | None = None


def load_weights(
    source: Source, place: TracePlace, window: TokenWindow, step: int, pos: int, of: WeightsOf
) -> RowWeights:
    """Return the weights of row `pos`, which step `step` computed. Raises `TraceError`."""
    view = load_step_view(source, replace(place, step=step))
    try:
        name, heads = _choose_heads(view, of)
        key = ("xray.weights", place.generation, place.branch, step, pos, *heads.items())
        row = source.get_or_create(key, lambda: _mean_row(view, heads, pos))
    except RowNotRecordedError as error:
        return RowWeights(reason=str(error))
    if row.why_not is not None:
        return row.why_not
    heaviest = np.argsort(-row.weights, kind="stable")[:N_HEAVIEST].tolist()
    cells = load_token_cells(source, place, window.segments, heaviest)
    texts = {at: cells[at].text if at in cells else "?" for at in heaviest}
    own = row.weights[window.start : window.stop].tolist()
    check = row.check.describe()
    return RowWeights(
        name,
        check if pos == view.step_row.kv_after - 1 else f"newest row: {check}",
        # The mean may sum to less than 1: a head without an open key has no weights.
        float(row.weights.sum()) / int(np.count_nonzero(row.weights)),
        dict(enumerate(own, window.start)),
        [(at, text, float(row.weights[at])) for at, text in texts.items() if row.weights[at]],
    )


def _mean_row(view: StepView, heads: Mapping[int, range], pos: int) -> _MeanRow:
    """Return the mean of row `pos` over the heads of each call; only the newest row has a check."""
    newest_pos = view.step_row.kv_after - 1
    total: Floats = np.zeros(newest_pos + 1)
    checks: list[LseCheck] = []
    for index, own in heads.items():
        newest = view.recompute_rows(index, own, newest_pos)
        rows = newest if pos == newest_pos else view.recompute_rows(index, own, pos)
        for head, row, checked in zip(own, rows, newest, strict=True):
            of = f"layer {view.calls[index].layer}, head {head}"
            if not np.isfinite((row.total, checked.total)).all():
                return _MeanRow(total, UNCHECKED, RowWeights(of, reason=NOT_FINITE))
            if checked.lse_check.is_failed:
                mismatch = RowWeights(of, reason=describe_mismatch(checked), is_mismatch=True)
                return _MeanRow(total, checked.lse_check, mismatch)
            total[row.first_pos : row.first_pos + len(row.weights)] += row.weights
            checks.append(checked.lse_check)
    why_not = None if total.any() else RowWeights(reason=NO_OPEN_KEY)
    return _MeanRow(total / len(checks), worst_check(checks), why_not)


def _choose_heads(view: StepView, of: WeightsOf) -> tuple[str, dict[int, range]]:
    """Return the name of the chosen heads, and those of each call by its index."""
    place = view.place
    here = [index for index, call in enumerate(view.calls) if call.layer == place.layer][:1]
    if of == "mean":
        stored = view.stored_layers()
        every = [index for index, call in enumerate(view.calls) if call.layer in stored]
        calls = [view.calls[index] for index in every]
        size = sum(call.kv_heads * call.head_dim for call in calls) * view.step_row.kv_after * 4
        if size > MAX_MEAN_BYTES:
            raise RowNotRecordedError(
                f"The mean of {len(every)} layers needs {size >> 20} MiB of keys, more than the "
                f"limit of {MAX_MEAN_BYTES >> 20} MiB; that of one layer needs less."
            )
        here = every or here  # without stored layers, this one gives the reason
    heads = {index: range(view.calls[index].q_heads) for index in here}
    n_heads = sum(map(len, heads.values()))
    if not n_heads:
        raise RowNotRecordedError(f"Step {view.step_row.step} has no call of layer {place.layer}.")
    if of == "head":
        head = min(max(place.head, 0), n_heads - 1)
        return f"layer {place.layer}, head {head}", {here[0]: range(head, head + 1)}
    layers = f"layer {place.layer}" if of == "layer" else plural(len(here), "layer")
    return f"{layers}, mean of {n_heads} heads", heads
