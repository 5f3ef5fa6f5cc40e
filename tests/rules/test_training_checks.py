"""The rule that turns failed checks of a training, and evaluation losses, into findings."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.rules.training.training_checks import FINDING_OF, TrainingChecksRule


def rule() -> TrainingChecksRule:
    made = TrainingChecksRule()
    generation = SimpleNamespace(generation=SimpleNamespace(generation=0))
    made.on_generation_start(generation)  # type: ignore[arg-type]
    return made


def step_of(number: int, loss: float, *events: EventRecord) -> StepRecord:
    training = TrainingStepRecord(loss, "output", ())
    return StepRecord(0, number, "train", 0, 0, 0, 0.0, 1.0, 0.0, training=training, events=events)


def evaluation(loss: float | None, n: int = 3) -> EventRecord:
    facts: dict[str, Any] = {"n": n, "n_in_evaluation_mode": n, "loss": loss}
    return EventRecord("evaluation", "", 0.0, 0, 0, facts)


def failed(check: str, **facts: Any) -> EventRecord:
    return EventRecord("training-check", "What is wrong", 0.0, 0, 0, {"check": check, **facts})


@pytest.mark.parametrize("check", FINDING_OF)
def test_each_check_is_a_finding_with_the_sentence_of_its_event(check: str) -> None:
    (found,) = rule().on_step(step_of(3, 1.0, failed(check, names=["a"])))
    assert isinstance(found, Finding)
    assert (found.id, found.step, found.sentence) == (FINDING_OF[check], 3, "What is wrong.")
    assert found.evidence["names"] == ["a"]


def test_what_may_be_meant_is_a_note() -> None:
    def severity(event: EventRecord) -> Severity:
        (found,) = rule().on_event(event)
        return found.severity

    assert severity(failed("optimizer-misses", is_whole_part=True)) is Severity.NOTE
    assert severity(failed("optimizer-misses", is_whole_part=False)) is Severity.WARNING
    assert severity(failed("optimizer-frozen")) is Severity.ERROR
    assert severity(failed("repeated-batch", n_workers=0)) is Severity.NOTE
    assert severity(failed("repeated-batch", n_workers=2)) is Severity.WARNING
    assert severity(failed("state-restarts", is_uncertain=True)) is Severity.NOTE
    assert severity(failed("state-restarts", is_uncertain=False)) is Severity.WARNING
    assert severity(failed("state-lost")) is Severity.NOTE


def test_a_check_of_a_later_version_is_passed_over() -> None:
    assert [*rule().on_event(failed("unheard-of"))] == []


@pytest.mark.parametrize(("loss", "is_found"), [(2000.5, False), (2001.0, True), (math.nan, True)])
def test_an_evaluation_is_judged_by_the_largest_training_loss(loss: float, is_found: bool) -> None:
    checks = rule()
    assert [*checks.on_step(step_of(0, 2.0005))] == []
    found = [*checks.on_step(step_of(1, 1e-9, evaluation(loss)))]
    assert [one.id for one in found] == ["training.evaluation-loss"] * is_found


def test_an_evaluation_before_the_first_step_is_judged_by_that_step() -> None:
    (found,) = rule().on_step(step_of(0, 2.3, evaluation(15e4)))
    assert "no training loss so far is above 2.3" in found.sentence


def test_nothing_is_said_without_a_loss_or_a_training_step() -> None:
    checks = rule()
    assert [*checks.on_event(evaluation(1e9))] == []
    assert [*checks.on_step(step_of(0, 1.0, evaluation(None)))] == []
    assert [*checks.on_step(StepRecord(0, 0, "decode", 0, 0, 0, 0.0, 1.0, 0.0))] == []
