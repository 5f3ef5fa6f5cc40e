"""What a step says of the attention of its newest row: log-sum-exp, entropy, mass, open keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.records import StepRecord
from flexinspect.rules.scene import RuleContext

NumberArray = npt.NDArray[Any]

ROW_STREAMS = ("attention.mass", "attention.lse", "attention.entropy")


class NewestRow(NamedTuple):
    """The arrays of the newest row by call: mass (calls, heads, segments), the others without.

    A call whose row was not recomputed has NaN, and no gate in its record.
    """

    segment_attention: NumberArray
    lse: NumberArray
    entropy: NumberArray


def newest_row(step: StepRecord) -> NewestRow | None:
    """Return the arrays of a step, None where attention was not recorded."""
    found: dict[str, NumberArray] = {}
    for record in step.arrays:
        if record.stream in ROW_STREAMS:
            found[record.stream] = record.array
            if len(found) == len(ROW_STREAMS):
                arrays = NewestRow(*(found[stream] for stream in ROW_STREAMS))
                return arrays if len(arrays.lse) == len(step.calls) else None
    return None


def count_open_keys(step: StepRecord, context: RuleContext, call: int) -> NumberArray | None:
    """Return how many keys the newest row of a call may look at: (1,) or by head.

    None where that is not known, and where the row was meant to be closed and is averaged instead.
    """
    record = step.calls[call]
    if record.mask is None:
        return None
    mask = context.mask(record.mask)
    if mask is None or mask.cells is None:
        return None
    if mask.averaged is not None and mask.averaged[:, -1].any():
        return None
    counts: NumberArray = np.count_nonzero(mask.cells[:, -1], axis=-1)
    return counts
