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
from flexinspect.rules.cachekinds import EMPTY_SLOTS, KINDS, STALE_SLOTS
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, layers

STREAM = "attention.slots"
OPEN, EMPTY, EMPTY_WEIGHT, STALE, STALE_WEIGHT = range(5)
"""Columns: open keys; all-zero ones and their weight; others beyond the filled length and theirs.

Weights are means over heads.
"""

Slots = npt.NDArray[np.float32]


def slot_findings(scene: Scene, step: StepRecord) -> list[Finding]:
    """Return at most one finding about empty and one about stale slots of a step."""
    slots = next((one.array for one in step.arrays if one.stream == STREAM), None)
    if slots is None:
        return []
    found = []
    is_known = step.inputs is not None and bool(step.inputs.cached_after)
    for finding_id, column in ((EMPTY_SLOTS, EMPTY), (STALE_SLOTS, STALE)):
        rows = np.flatnonzero(slots[:, column] > 0)
        # Of keys that a program keeps by itself nobody knows how many are filled.
        if len(rows) and (is_known or finding_id == EMPTY_SLOTS):
            found.append(_finding(scene, step, slots, finding_id, column, rows))
    return found


def _finding(
    scene: Scene,
    step: StepRecord,
    slots: Slots,
    finding_id: str,
    column: int,
    rows: npt.NDArray[np.intp],
) -> Finding:
    which = sorted({step.calls[row].layer for row in rows})
    worst = int(rows[slots[rows, column + 1].argmax()])
    n_open, n_bad = int(slots[worst, OPEN]), int(slots[worst, column])
    weight = float(slots[worst, column + 1])
    filled = n_open - n_bad
    told = "empty slots" if finding_id == EMPTY_SLOTS else "slots with keys of an earlier text"
    n_layers = len({call.layer for call in step.calls})
    where = "" if scene.is_loose else f"{_title(layers(which, n_layers))}, step {step.step}: "
    most = "" if scene.is_loose or len(rows) == 1 else f" (layer {step.calls[worst].layer})"
    sentence = (
        f"{where}{counted(n_open, 'key')} allowed, {filled} filled: {_percent(weight)} of the "
        f"weight of {'this call' if scene.is_loose else 'this step'} sits on {told}{most}."
    )
    return Finding(
        id=finding_id,
        severity=KINDS[finding_id].severity,
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
            "weights": {step.calls[row].layer: _short(slots[row, column + 1]) for row in rows},
        },
        series=finding_id,
    )


def _percent(weight: float) -> str:
    return f"{weight:.0%}".replace("%", " %") if weight >= 0.01 else "less than 1 %"


def _short(weight: Sequence[float] | np.float32) -> float:
    return round(float(np.asarray(weight)), 4)


def _title(words: str) -> str:
    return words[0].upper() + words[1:]
