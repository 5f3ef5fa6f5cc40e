"""Scores that lie at their cap: c * tanh(score / c) tells scores apart only well below c."""

from __future__ import annotations

import numpy as np

from flexinspect.records import StepRecord
from flexinspect.rules.newestrow import count_open_keys, newest_row
from flexinspect.rules.scene import RuleContext

CAP_SHARE = 0.98
"""Share of the cap from which on scores are said to lie at it: tanh(2.3)."""


def find_capped_layers(step: StepRecord, context: RuleContext) -> list[int]:
    """Return the layers in each of whose heads the keys looked at have scores at the cap.

    The mean score of a row, weighted by its attention, is its log-sum-exp minus its entropy.
    """
    row = newest_row(step)
    caps = [call.softcap or np.inf for call in step.calls]
    if row is None:
        return []
    level = np.abs(row.lse - row.entropy).min(axis=1)
    found = []
    for number in np.flatnonzero(level >= CAP_SHARE * np.array(caps)).tolist():
        n_open = count_open_keys(step, context, number)
        if n_open is not None and n_open.min() > 1 and level[number] < np.inf:
            found.append(step.calls[number].layer)
    return found
