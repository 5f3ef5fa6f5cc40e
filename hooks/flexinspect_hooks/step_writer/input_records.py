"""Makes records of a step's inputs: batch size, position ids, cached keys of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexinspect.records.step import Array, ArrayRecord, InputsRecord
from flexinspect.rules.masks.mask_values import MASK_VALUES_EVENT
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import Values

_TABLES = ("ids", "positions", "mask", "seen")

Lengths = list[int | None]
"""Keys per layer; None for a layer whose length is a tensor, which goes through the buffer."""


class KeptInputs(NamedTuple):
    """What the writer thread gets; `positions` are those of a small table."""

    batch: int
    before: Lengths
    after: Lengths
    positions: list[list[int]] | None


class InputRecords:
    """Makes the record of a step's inputs, and arrays of the tables of a batch."""

    def record(self, step: StepFacts, kept: KeptInputs, values: Values, draft: StepDraft) -> None:
        """Write the step's `InputsRecord`, and the tables of a batch as arrays."""
        tables = {name: values.get(f"inputs.{name}") for name in _TABLES}
        if tables["mask"] is not None:
            if step.step == 0:  # once, where a loop without a cache passes one in each step
                _record_mask_values(tables["mask"], draft)
            tables["mask"] = tables["mask"] != 0
        if kept.positions is not None:
            tables["positions"] = np.asarray(kept.positions, np.int32)
        positions = tables["positions"]
        runs = () if positions is None or not len(positions) else _position_runs(positions[0])
        draft.inputs = InputsRecord(
            batch=kept.batch,
            positions=runs,
            cached_before=_merge_lengths(kept.before, values.get("inputs.before")),
            cached_after=_merge_lengths(kept.after, values.get("inputs.after")),
        )
        for name, table in tables.items():
            if table is not None and (name != "positions" or len(table) > 1):
                draft.arrays.append(ArrayRecord(f"inputs.{name}", table))


def _record_mask_values(mask: Array, draft: StepDraft) -> None:
    """Record an event if an attention mask (sequences, keys) has other values than 0 and 1."""
    if not mask.size or ((mask == 0) | (mask == 1)).all():
        return
    data = {
        "smallest": float(mask.min()),
        "largest": float(mask.max()),
        "distinct": len(np.unique(mask)),
        "counts": bool((mask == np.arange(mask.shape[1])).all()),
    }
    text = f"The attention mask has values from {data['smallest']:g} to {data['largest']:g}."
    draft.add_event(MASK_VALUES_EVENT, text, data)


def _merge_lengths(lengths: Sequence[int | None], tensors: Array | None) -> tuple[int, ...]:
    rest = iter(() if tensors is None else tensors.tolist())
    return tuple(next(rest) if length is None else length for length in lengths)


def _position_runs(ids: Array) -> tuple[tuple[int, int], ...]:
    """Return position ids (rows,) as runs (first, count) that increase by one."""
    if ids.size == 1:
        return ((int(ids[0]), 1),)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1]) != 1)
    stops = np.append(starts[1:], ids.size)
    return tuple(zip(ids[starts].tolist(), (stops - starts).tolist(), strict=True))
