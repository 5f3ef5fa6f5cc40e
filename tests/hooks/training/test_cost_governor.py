"""The governor: detail is dropped above the band, reported, and restored."""

from __future__ import annotations

import pytest

from flexinspect_hooks.training.cost_governor import RECOVERY_STEPS, WINDOW, Governor


def changes_after(governor: Governor, cost: float, steps: int) -> list[tuple[str, str]]:
    changes = [governor.on_step(cost, 1.0 + cost) for _ in range(steps)]
    return [change for change in changes if change is not None]


def test_without_a_band_nothing_changes() -> None:
    governor = Governor("extreme", None)
    assert changes_after(governor, 0.9, 100) == []
    assert governor.detail.name == "extreme"


def test_within_the_band_nothing_changes() -> None:
    governor = Governor("advanced", 1.02)
    assert changes_after(governor, 0.019, 300) == []


def test_above_the_band_detail_is_reduced_step_by_step_and_reported() -> None:
    governor = Governor("extreme", 1.02)
    changes = changes_after(governor, 0.05, WINDOW)
    assert [kind for kind, _ in changes] == ["detail-reduced"]
    assert (
        "took 5.0% of what the last 10 steps took without it, above the band of 2.0%"
        in changes[0][1]
    )
    assert "instead of everything" in changes[0][1]
    changes_after(governor, 0.05, 5 * WINDOW)
    assert governor.detail.period == 256
    assert (
        changes_after(governor, 0.05, 2 * (WINDOW + RECOVERY_STEPS)) == []
    )  # there is no less, and it is no calm
    assert governor.detail.period == 256


def test_one_expensive_step_among_long_ones_changes_nothing() -> None:
    governor = Governor("advanced", 1.02)
    assert governor.on_step(0.001, 0.002) is None
    assert changes_after(governor, 0.01, 100) == []


def test_the_summary_reports_how_often_and_what_was_dropped() -> None:
    governor = Governor("extreme", 1.02)
    assert governor.summary() == ""
    changes_after(governor, 0.05, 2 * WINDOW)
    assert governor.summary() == (
        "Above the band of 2.0% detail was dropped 2 times, down to gradients by group and the "
        "layers' outputs from then on."
    )
    changes_after(governor, 0.001, WINDOW + RECOVERY_STEPS)
    assert governor.summary().endswith(
        "the layers' outputs for a time, now gradients of every parameter and every module's "
        "output."
    )


def test_detail_is_restored_after_cheap_steps_and_less_often_if_it_was_too_expensive() -> None:
    governor = Governor("advanced", 1.02)
    changes_after(governor, 0.05, WINDOW)
    assert governor.detail.name == "basic"
    back = changes_after(governor, 0.001, WINDOW + RECOVERY_STEPS)
    assert [kind for kind, _ in back] == ["detail-restored"]
    assert governor.detail.name == "advanced"
    changes_after(governor, 0.05, WINDOW)
    assert changes_after(governor, 0.001, WINDOW + RECOVERY_STEPS) == []
    assert [kind for kind, _ in changes_after(governor, 0.001, RECOVERY_STEPS)] == [
        "detail-restored"
    ]


def test_it_never_goes_above_the_level() -> None:
    governor = Governor("basic", 1.02)
    assert changes_after(governor, 0.0, 500) == []


def test_basic_measures_some_steps_while_all_of_them_cost_more_than_two_per_cent() -> None:
    governor = Governor("basic", None)
    assert changes_after(governor, 0.019, 100) == []
    ((kind, text),) = changes_after(governor, 0.05, 10 * WINDOW)
    assert kind == "detail-reduced"
    assert "above the band of 2.0%: from now on gradients of 4 of every 32 steps" in text
    measured = [step for step in range(32, 96) if governor.detail.measures(step)]
    assert measured == [32, 33, 34, 35, 64, 65, 66, 67]
    changes_after(governor, 0.001, WINDOW + RECOVERY_STEPS)
    assert governor.detail.name == "basic"
    governor.set_level("advanced")
    assert changes_after(governor, 0.5, 100) == []


@pytest.mark.parametrize(("level", "name"), [("basic", "basic"), ("extreme", "extreme")])
def test_setting_a_level_starts_again(level: str, name: str) -> None:
    governor = Governor("advanced", 1.02)
    changes_after(governor, 0.5, 3 * WINDOW)
    governor.set_level(level)
    assert governor.detail.name == name
