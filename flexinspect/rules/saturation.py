"""Scores that lie at their cap: c * tanh(score / c) tells scores apart only well below c."""

from __future__ import annotations

import math

import numpy as np

from flexinspect.records import StepRecord
from flexinspect.rules.newestrow import newest_row, open_keys
from flexinspect.rules.scene import Scene

AT_THE_CAP = 0.98
"""Share of the cap from which on scores are said to lie at it: tanh(2.3)."""


def capped_layers(step: StepRecord, scene: Scene) -> list[int]:
    """Return the layers in each of whose heads the newest row's scores lie at the cap.

    Over the n keys that a row sees, its largest score is at least lse - log(n) and its smallest at
    most that; so where this lies at the cap, on either side, the scores do.
    """
    row = newest_row(step)
    caps = [call.softcap for call in step.calls if call.softcap is not None]
    if row is None or not caps:
        return []
    n_keys = max(call.kv_len for call in step.calls)
    if float(np.abs(row.lse).max()) + math.log(n_keys) < AT_THE_CAP * min(caps):
        return []
    found = []
    for number, call in enumerate(step.calls):
        n_open = None if call.softcap is None else open_keys(step, scene, number)
        if call.softcap is None or n_open is None or n_open.min() < 2:
            continue
        level = np.abs(row.lse[number] - np.log(n_open))
        if level.min() >= AT_THE_CAP * call.softcap and level.max() < np.inf:
            found.append(call.layer)
    return found
