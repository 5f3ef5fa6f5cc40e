"""Kernel options that promise something of the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.undeclared import blocks, generation, prefill

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.masks.kernel_options import KERNEL_OPTIONS_EVENT, KernelOptionsRule

CELLS = blocks(())


def with_options(step: StepRecord, **options: Any) -> StepRecord:
    layers = {"0": options, "1": options}
    event = EventRecord(KERNEL_OPTIONS_EVENT, "", 0.0, 0, 0, {"layers": layers})
    return replace(step, events=(event,))


def found(step: StepRecord) -> list[Finding]:
    context, rule = RuleContext(), KernelOptionsRule()
    context.start_generation(generation())
    rule.on_generation_start(context)
    context.add_step(step)
    return [*rule.on_step(step)]


def with_empty_rows() -> StepRecord:
    cells = CELLS.copy()
    cells[3:5] = False
    return prefill(cells)


def test_rows_that_are_promised_to_be_safe_are_empty() -> None:
    (finding,) = found(with_options(with_empty_rows(), ROWS_GUARANTEED_SAFE=True))
    assert (finding.id, finding.severity) == ("mask.option-promise", Severity.WARNING)
    assert "2 rows of its mask see no key (first: position 3)" in finding.sentence
    assert finding.layers == (0, 1)


def test_a_compiled_kernel_that_relies_on_the_promise_is_an_error() -> None:
    step = with_options(with_empty_rows(), ROWS_GUARANTEED_SAFE=True)
    calls = tuple(replace(call, path="flex compiled") for call in step.calls)
    (finding,) = found(replace(step, calls=calls))
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (prefill(CELLS), {"ROWS_GUARANTEED_SAFE": True}),
        (with_empty_rows(), {"ROWS_GUARANTEED_SAFE": False}),
        (with_empty_rows(), {"BLOCK_M": 64}),
    ],
)
def test_promises_that_are_kept_and_other_options_say_nothing(
    step: StepRecord, options: dict[str, Any]
) -> None:
    assert found(with_options(step, **options)) == []


@pytest.mark.parametrize(("blocks_of_row", "n"), [([1, 1, 0, 0], 0), ([1, 0, 0, 1], 1)])
def test_blocks_that_are_promised_to_be_contiguous(blocks_of_row: list[int], n: int) -> None:
    step = prefill(CELLS)
    partial = np.array([[blocks_of_row]], np.bool_)
    masks = tuple(replace(mask, partial=partial) for mask in step.masks)
    assert len(found(with_options(replace(step, masks=masks), BLOCKS_ARE_CONTIGUOUS=True))) == n
