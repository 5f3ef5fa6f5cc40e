"""Generations of one prompt that differ because of sampling, not because of rounding."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.traces import sample_generation, sample_step

from flexinspect.records.finding import Finding
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.text.same_prompt import SamePromptRule


def second(parted: StepRecord) -> list[Finding]:
    """Return the findings of a second generation whose step 2 is `parted`."""
    context, rule = RuleContext(), SamePromptRule()
    found: list[Finding] = []
    for number in (0, 1):
        context.start_generation(sample_generation(number))
        rule.on_generation_start(context)
        for step in range(4):
            is_last = number == 1 and step == 2
            rule.on_step(replace(parted if is_last else sample_step(step), generation=number))
        found = [*rule.on_generation_end()]
    return found


def step_2(chosen: int, *, moved: float = 0.0, order: slice = slice(None)) -> StepRecord:
    step = sample_step(2)
    assert step.logits is not None
    listed = tuple(replace(one, logit=one.logit + moved) for one in step.logits.candidates)
    return replace(step, logits=replace(step.logits, chosen_id=chosen, candidates=listed[order]))


def test_a_model_of_another_shape_is_no_twin() -> None:
    context, rule = RuleContext(), SamePromptRule()
    for number in (0, 1):
        context.start_generation(sample_generation(number))
        rule.on_generation_start(context)
        step = step_2(99, moved=0.5)
        if number:
            step = replace(step, layer_stats=step.layer_stats[:-1])
        rule.on_step(replace(step, generation=number, step=0))
    assert [*rule.on_generation_end()] == []


def test_another_token_from_the_same_logits_is_not_reported() -> None:
    assert second(step_2(99)) == []


@pytest.mark.parametrize(
    ("moved", "name"), [(1e-5, "same-prompt.same"), (0.01, "same-prompt.rounding")]
)
def test_a_sampled_token_with_other_logits_is_reported_as_sampled(moved: float, name: str) -> None:
    (finding,) = second(step_2(99, moved=moved))
    assert finding.id == name
    assert "; step 2 samples another token, although the best one is the same" in finding.sentence
    assert "margin" not in finding.sentence


def test_another_best_token_is_rounding() -> None:
    (finding,) = second(step_2(51, moved=0.01, order=slice(None, None, -1)))
    assert finding.id == "same-prompt.rounding"
    assert "step 2 chooses another token, with margins of" in finding.sentence
