"""What a program changes in the weights of models that are made during a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord, GenerationRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.numerics.changed_weights import CHANGED_EVENT, ChangedWeightsRule
from flexinspect_hooks.changed_weights.made_weights import MadeWeights


@pytest.fixture
def made() -> Iterator[MadeWeights]:
    """The weights of the models that the test makes, as they were made."""
    weights = MadeWeights()
    stop = weights.watch()
    yield weights
    stop()


def misplaced_finding(data: Mapping[str, Any]) -> Finding:
    """Return the finding about an adapter in the wrong place from the data of its event."""
    step = StepRecord(0, 0, "prefill", 9, 0, 1, 0.0, 10.0, 0.1)
    step = replace(step, events=(EventRecord(CHANGED_EVENT, "", 0.0, data=dict(data)),))
    context, rule = RuleContext(), ChangedWeightsRule()
    context.start_generation(GenerationRecord(0, "s", "m", "c", (), ()))
    rule.on_generation_start(context)
    (finding,) = (one for one in rule.on_step(step) if one.id.startswith("weights.mis"))
    return finding
