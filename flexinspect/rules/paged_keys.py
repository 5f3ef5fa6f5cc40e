"""Steps whose keys are in slots of a pool: what rules may read of their masks and lengths.

The columns of such a mask are slots, and which positions they hold is known to the program alone.
Rules about masks and caches take columns for positions, so they get a step without them; the audit
finds the slots from the keys, and judges the numbers.
"""

from __future__ import annotations

from msgspec.structs import replace

from flexinspect.records.step import UNKNOWN_PATH, StepRecord
from flexinspect.rules.context import RuleContext

PAGED_KEYS_EVENT = "paged-keys"
_SLOT_STREAM = "attention.slots"


def without_slots(step: StepRecord, context: RuleContext) -> StepRecord:
    """Return a step without masks and cached lengths if the generation's keys are in slots."""
    if step.events and any(event.kind == PAGED_KEYS_EVENT for event in step.events):
        context.has_paged_keys = True
    if not context.has_paged_keys:
        return step
    calls = tuple(
        replace(call, mask=None, causal=None, path=UNKNOWN_PATH, kv_len=step.kv_after)
        for call in step.calls
    )
    inputs = step.inputs and replace(step.inputs, cached_before=(), cached_after=())
    arrays = tuple(one for one in step.arrays if one.stream != _SLOT_STREAM)
    return replace(step, calls=calls, masks=(), inputs=inputs, arrays=arrays)
