"""Makes records of the checks of attention calls: events, and the key slots without a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flexinspect.records.step import ArrayRecord
from flexinspect.rules.attention.repeated_kv_heads import KEYS_TILED_EVENT
from flexinspect_hooks.step_writer.mask_records import MaskFacts
from flexinspect_hooks.step_writer.step_draft import StepDraft
from flexinspect_hooks.step_writer.values import Values, with_prefix

RESCALED = "scores-rescaled"
BATCH_ROWS = "batch-rows"
SLOTS_STREAM = "attention.slots"

CallFields = Sequence[dict[str, Any]]
"""The fields of the `CallRecord` of each call; see `AttentionCall.record_fields`."""

REPEATS_PREFIX, SCALES_PREFIX = "repeats/", "scales/"
BATCH_PREFIX, SLOTS_PREFIX = "batchrows/", "slots/"
CLOSING_PREFIX = "batchclosing/"
PAGED_KEYS = "paged-keys"
PAGED_KEYS_VALUE = "pagedkeys"

_SCALE_TOLERANCE = 0.02
"""Largest relative deviation of a vector from a multiple of another, or of a scale from another."""


def record_user_call_checks(values: Values, calls: CallFields, draft: StepDraft) -> None:
    """Record what `put_user_call_checks` found."""
    repeats = with_prefix(values, REPEATS_PREFIX).items()
    if tiled := [calls[int(number)] for number, orders in repeats if orders[1] and not orders[0]]:
        layers = sorted({call["layer"] for call in tiled})
        text = f"The keys of layers {layers} were repeated as a whole, not head by head."
        draft.add_event(KEYS_TILED_EVENT, text, {"layers": layers, "q_heads": tiled[0]["q_heads"]})
    _record_scales(values, calls, draft)
    slots = with_prefix(values, SLOTS_PREFIX)
    if any(row[1] or row[3] for row in slots.values()):
        array = np.zeros((len(calls), 5), np.float32)
        array[[int(index) for index in slots]] = list(slots.values())
        draft.arrays.append(ArrayRecord(SLOTS_STREAM, array))


def _record_scales(values: Values, calls: CallFields, draft: StepDraft) -> None:
    """Record an event for the layers whose scores have another scale."""
    known = [row for rows in with_prefix(values, SCALES_PREFIX).values() for row in rows.tolist()]
    rescaled = [row for row in known if row[3] < _SCALE_TOLERANCE < abs(row[1] - 1)]
    if not rescaled:
        return
    first, factor, mod, _ = min(rescaled)
    layers = sorted({calls[int(number)]["layer"] for number, *_ in rescaled})
    text = f"The scores of layers {layers} are scaled by {factor:.4g} times what they asked for."
    data = {"layers": layers, "factor": factor, "scale": calls[int(first)]["scale"]}
    if abs(mod - 1) > _SCALE_TOLERANCE:
        data["score_mod"] = mod
    draft.add_event(RESCALED, text, data)


def record_batch_rows(
    values: Values, masks: Sequence[MaskFacts], draft: StepDraft, *, reports_equal: bool
) -> None:
    """Record an event for each mask whose batch rows differ, or are equal if `reports_equal`."""
    for mask in masks:
        rows = values.get(f"{BATCH_PREFIX}{mask.number}")
        if rows is None or not (reports_equal or rows[:, 0].any()):
            continue
        differ = np.flatnonzero(rows[:, 0]).tolist()
        made_for, batch = int(mask.batch), len(rows)
        data: dict[str, Any] = {"mask": mask.fingerprint, "made_for": made_for, "batch": batch}
        text = f"A mask is the same in all {batch} batch rows."
        if differ:
            text = f"A mask differs between {len(differ) + 1} of {batch} batch rows."
            data |= {
                "first": [differ[0], *(int(n) for n in rows[differ[0], 1:3])],
                "open": rows[:, 3].tolist(),
                "future": rows[:, 4].tolist(),
                "newest_from": rows[:, 5].tolist(),
            }
        data["differ"] = differ
        closing = values.get(f"{CLOSING_PREFIX}{mask.number}")
        if closing is not None and closing.any():
            data["closing"] = np.flatnonzero(closing).tolist()
        draft.add_event(BATCH_ROWS, text, data)


def record_paged_keys(values: Values, draft: StepDraft) -> None:
    """Record an event if keys are in slots."""
    found = values.get(PAGED_KEYS_VALUE)
    if found is not None and found.any():
        text = (
            "The keys of the cache are in slots of a pool, not in the order of positions: the "
            "columns of the recorded masks are slots."
        )
        draft.add_event(PAGED_KEYS, text, {})
