"""A fast run is followed with a small share of a core, a slow one without delay."""

from __future__ import annotations

import pytest

from flexinspect.tui.follow_pace import AT_LATEST_S, EVERY_S, SHARE, FollowPace


class Clock:
    """The CPU time of a process that does not exist."""

    now = 3.0

    def __call__(self) -> float:
        return self.now


def test_what_costs_nothing_is_looked_at_often() -> None:
    pace = FollowPace(Clock())
    assert [pace.pause_s() for _ in range(3)] == [EVERY_S] * 3


@pytest.mark.parametrize("frame_s", [0.002, 0.012, 0.03])
def test_frames_take_their_share_of_a_core_and_no_more(frame_s: float) -> None:
    clock = Clock()
    pace, wall = FollowPace(clock), 0.0
    for _ in range(50):
        clock.now += frame_s
        wall += frame_s + pace.pause_s()
    assert 50 * frame_s / wall < SHARE


def test_a_slow_frame_does_not_stop_the_run_from_being_shown() -> None:
    clock = Clock()
    pace = FollowPace(clock)
    clock.now += 10
    assert pace.pause_s() == AT_LATEST_S
    assert pace.pause_s() == EVERY_S
