"""The writer is woken for the longest operation of a forward, while it is done in time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexinspect_hooks.capture.write_window import _CLOSED_FOR, _MOST_LATE, WriteWindow


class QueuedSteps(SimpleNamespace):
    """A recorder whose writer is done within the operation, or not."""

    def __init__(self, *, has_core: bool = True, is_behind: bool = True) -> None:
        super().__init__(has_core=has_core, is_behind=is_behind, n_wakes=0)

    def wake(self) -> None:
        self.n_wakes += 1


def forward(window: WriteWindow, recorder: QueuedSteps, *, in_time: bool) -> bool:
    """Open and close the window; a step is queued before, and written within if `in_time`."""
    recorder.is_behind = True
    window.open()
    recorder.is_behind = not in_time
    return window.close()


def test_the_writer_is_woken_at_every_forward_while_it_is_in_time() -> None:
    recorder = QueuedSteps()
    window = WriteWindow(recorder)
    assert all(forward(window, recorder, in_time=True) for _ in range(2 * _CLOSED_FOR))
    assert recorder.n_wakes == 2 * _CLOSED_FOR


def test_a_writer_that_is_late_several_times_is_left_alone_for_a_while() -> None:
    recorder = QueuedSteps()
    window = WriteWindow(recorder)
    assert not any(forward(window, recorder, in_time=False) for _ in range(_MOST_LATE))
    assert not any(forward(window, recorder, in_time=True) for _ in range(_CLOSED_FOR))
    assert recorder.n_wakes == _MOST_LATE
    assert forward(window, recorder, in_time=True)
    assert recorder.n_wakes == _MOST_LATE + 1


def test_single_late_writes_do_not_close_the_window() -> None:
    recorder = QueuedSteps()
    window = WriteWindow(recorder)
    for number in range(10 * _MOST_LATE):
        forward(window, recorder, in_time=number % _MOST_LATE == 0)
    assert recorder.n_wakes == 10 * _MOST_LATE


@pytest.mark.parametrize(("has_core", "is_behind"), [(False, True), (True, False)])
def test_the_writer_is_not_woken_without_a_core_or_without_a_step(
    has_core: bool, is_behind: bool
) -> None:
    recorder = QueuedSteps(has_core=has_core, is_behind=is_behind)
    window = WriteWindow(recorder)
    window.open()
    assert not window.close()
    assert recorder.n_wakes == 0


def test_a_window_that_a_failed_forward_left_open_is_closed_by_the_next_forward() -> None:
    recorder = QueuedSteps()
    window = WriteWindow(recorder)
    window.open()
    recorder.is_behind = False
    window.open()
    assert window.close()
    assert not window.close()
