"""Slots of an allocated cache that the newest row sees although they hold nothing of this text.

What is told rests on the stream `attention.slots`, which capture writes only where such slots have
a part in the softmax: each number in it is counted or summed from the keys and weights of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding
from flexinspect.records import StepRecord
from flexinspect.rules.cachekinds import CACHE_KINDS, EMPTY_SLOTS, STALE_SLOTS
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers, plural

SLOT_STREAM = "attention.slots"
OPEN_COLUMN, EMPTY_COLUMN, EMPTY_WEIGHT_COLUMN, STALE_COLUMN, STALE_WEIGHT_COLUMN = range(5)
"""Columns: open keys; all-zero ones and their weight; others beyond the filled length and theirs.

Weights are means over heads.
"""

SlotTable = npt.NDArray[np.float32]


def check_slots(context: RuleContext, step: StepRecord) -> list[Finding]:
    """Return at most one finding about empty and one about stale slots of a step."""
    slots = next((one.array for one in step.arrays if one.stream == SLOT_STREAM), None)
    if slots is None:
        return []
    found = []
    is_known = step.inputs is not None and bool(step.inputs.cached_after)
    for finding_id, column in ((EMPTY_SLOTS, EMPTY_COLUMN), (STALE_SLOTS, STALE_COLUMN)):
        rows = np.flatnonzero(slots[:, column] > 0)
        # Of keys that a program keeps by itself nobody knows how many are filled.
        if len(rows) and (is_known or finding_id == EMPTY_SLOTS):
            found.append(_slot_finding(context, step, slots, finding_id, column, rows))
    return found


def _slot_finding(
    context: RuleContext,
    step: StepRecord,
    slots: SlotTable,
    finding_id: str,
    column: int,
    rows: npt.NDArray[np.intp],
) -> Finding:
    which = sorted({step.calls[row].layer for row in rows})
    worst = int(rows[slots[rows, column + 1].argmax()])
    n_open, n_bad = int(slots[worst, OPEN_COLUMN]), int(slots[worst, column])
    weight = float(slots[worst, column + 1])
    filled = n_open - n_bad
    told = "empty slots" if finding_id == EMPTY_SLOTS else "slots with keys of an earlier text"
    n_layers = len({call.layer for call in step.calls})
    where = (
        ""
        if context.is_standalone
        else f"{_capitalize_first(format_layers(which, n_layers))}, step {step.step}: "
    )
    most = "" if context.is_standalone or len(rows) == 1 else f" (layer {step.calls[worst].layer})"
    sentence = (
        f"{where}{plural(n_open, 'key')} allowed, {filled} filled: {_format_percent(weight)} of the "
        f"weight of {'this call' if context.is_standalone else 'this step'} sits on {told}{most}."
    )
    return Finding(
        id=finding_id,
        severity=CACHE_KINDS[finding_id].severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=which[0],
        layers=tuple(which) if len(which) > 1 else (),
        evidence={
            "allowed": n_open,
            "filled": filled,
            "slots": n_bad,
            "weight": round(weight, 4),
            "weights": {
                step.calls[row].layer: _round_weight(slots[row, column + 1]) for row in rows
            },
        },
        series=finding_id,
    )


def _format_percent(weight: float) -> str:
    return f"{weight:.0%}".replace("%", " %") if weight >= 0.01 else "less than 1 %"


def _round_weight(weight: Sequence[float] | np.float32) -> float:
    return round(float(np.asarray(weight)), 4)


def _capitalize_first(words: str) -> str:
    return words[0].upper() + words[1:]
