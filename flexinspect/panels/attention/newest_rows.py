"""The attention of the newest row of each step, over positions, where a trace can give it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from flexinspect.masks.attention_row import Floats
from flexinspect.panels.attention.row_recompute import RowNotRecordedError, load_step_view
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.panel_source import Source


def load_newest_rows(
    source: Source,
    place: TracePlace,
    n_steps: int,
    report: Callable[[float], None] | None = None,
) -> list[Floats | None]:
    """Return the weights of each step's newest row for a place's layer and head, from step 0.

    An entry is float64 (positions,); it is None where queries or keys were not recorded, or where
    the recomputed row does not match what ran. `report` is called with the share of steps read.
    """
    rows: list[Floats | None] = []
    for step in range(n_steps):
        rows.append(_newest_row(source, replace(place, step=step)))
        if report is not None:
            report((step + 1) / n_steps)
    return rows


def _newest_row(source: Source, place: TracePlace) -> Floats | None:
    try:
        view = load_step_view(source, place)
        layers = [call.layer for call in view.calls]
        if place.layer not in layers:
            return None
        newest = view.step_row.kv_after - 1
        row = view.recompute_row(layers.index(place.layer), place.head, newest)
    except (Missing, RowNotRecordedError):
        return None
    if row.lse_check.is_failed or not np.isfinite(row.total):
        return None
    return np.concatenate([np.zeros(row.first_pos), row.weights])
