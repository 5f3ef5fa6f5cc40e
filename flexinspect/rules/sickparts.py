"""Which part of a layer made a NaN, as far as the attention of its newest row tells.

A layer's output is its input, its attention and its MLP added up. The scores of the newest row are
known by their log-sum-exp, its output by the gate that compares it with what was recomputed. So
queries and keys, values, and what comes after the attention can be told apart in that row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexinspect.records import CallRecord, LayerStatRecord, StepRecord
from flexinspect.rules.newestrow import NumberArray, count_open_keys, newest_row
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import plural

LARGEST_FLOAT16 = 65504


class LayerPart(NamedTuple):
    """A part of a layer, by a name for evidence, and what is said of it."""

    name: str
    description: str


def find_nonfinite_part(
    step: StepRecord, producer: LayerStatRecord, context: RuleContext, *, is_newest: bool
) -> LayerPart | None:
    """Return the part of the first sick layer, None where it cannot be told.

    `is_newest` says that the newest row of this layer's output is known to be sick: then an
    attention that is fine there means that what follows it is not.
    """
    number = next((n for n, call in enumerate(step.calls) if call.layer == producer.layer), None)
    lse = _call_lse(step, number)
    if number is None or lse is None:
        return None
    call = step.calls[number]
    sick = _score_part(step, call, lse, producer.layer, context)
    if sick is not None:
        return sick
    if call.gate is None:
        return None
    if call.gate != call.gate:
        return _value_part(step, number, context)
    if not is_newest:
        return None
    if call.gate_kind == "output":
        words = "the attention call of that row is finite, so it comes after it: the output "
        return LayerPart("after attention", f"{words}projection, the MLP or a norm")
    words = "the scores of that row are finite, so it comes from the values or after the attention"
    return LayerPart("after the scores", words)


def find_nonfinite_call(step: StepRecord, number: int, context: RuleContext) -> LayerPart | None:
    """Return what is sick in a call outside of a model, None when nothing is known to be.

    The compiled kernel skips closed blocks, so what recomputing finds in them says nothing of it.
    """
    call = step.calls[number]
    if call.gate is None or call.gate == call.gate or call.path == "flex compiled":
        return None
    lse = _call_lse(step, number)
    if lse is None:
        return None
    return _score_part(step, call, lse, None, context) or _value_part(step, number, context)


def find_nan_scores(step: StepRecord, number: int, context: RuleContext) -> LayerPart | None:
    """Return what is said of a call some of whose scores are NaN, None for any other."""
    call, lse = step.calls[number], _call_lse(step, number)
    if lse is None or not np.isnan(lse).any():
        return None
    return _score_part(step, call, lse, call.layer, context)


def _call_lse(step: StepRecord, number: int | None) -> NumberArray | None:
    row = newest_row(step)
    return None if row is None or number is None else row.lse[number]


def _score_part(
    step: StepRecord, call: CallRecord, lse: NumberArray, layer: int | None, context: RuleContext
) -> LayerPart | None:
    """Say that the scores are sick already, or that there are none as the row sees nothing."""
    if call.gate is None:
        return None
    if np.isneginf(lse).any():
        words = "its newest row sees no key, and a softmax over nothing is NaN"
        return LayerPart("row without keys", words) if call.gate != call.gate else None
    bad = ~np.isfinite(lse)
    is_beyond = bool((np.abs(lse[~bad]) > LARGEST_FLOAT16).any())
    if call.dtype == "float16" and call.gate != call.gate and is_beyond:
        words = f"its scores lie beyond the largest float16 ({LARGEST_FLOAT16}), in which softmax sees Inf"
        return LayerPart("scores", words)
    if not bad.any():
        return None
    n_sick = int(bad.sum())
    heads = "every head" if n_sick == len(lse) else f"{n_sick} of {plural(len(lse), 'head')}"
    if np.isposinf(lse).any():
        return LayerPart("scores", f"already the scores of its newest row are Inf, in {heads}")
    words = f"already the queries or keys of its newest row are not finite, in {heads}"
    if layer != 0 or n_sick < len(lse):
        return LayerPart("queries or keys", words)
    row = f" of {context.format_position(step.kv_after - 1)}" if step.q_len == 1 else "s"
    words += f", so look at the embedding{row} and the first norm"
    return LayerPart("embedding or first norm", words)


def _value_part(step: StepRecord, number: int, context: RuleContext) -> LayerPart:
    """Say that values are sick, and how many of them the mask closes to the newest row."""
    call = step.calls[number]
    words = "its scores are finite, so NaN is among the values that it adds up"
    n_open = count_open_keys(step, context, number)
    n_closed = 0 if n_open is None else call.kv_len - int(n_open.max())
    if n_closed:
        verb = "is" if n_closed == 1 else "are"
        words += f" ({plural(n_closed, 'key')} of {call.kv_len} {verb} closed to the newest row, "
        words += "but a weight of 0 does not keep NaN out: 0 times NaN is NaN)"
    return LayerPart("values", words)
