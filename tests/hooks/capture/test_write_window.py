"""The writer is woken for the longest operation of a forward, while it is done in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect_hooks.capture.write_window import _CLOSED_FOR, _MOST_LATE, QUIET_EVERY, WriteWindow


class QueuedSteps(SimpleNamespace):
    """A recorder with a step in its queue."""

    def __init__(
        self, *, has_core: bool = True, is_behind: bool = True, is_asleep: bool = True
    ) -> None:
        super().__init__(has_core=has_core, is_behind=is_behind, is_asleep=is_asleep, n_wakes=0)

    def wake(self) -> None:
        self.n_wakes += 1


def forward(window: WriteWindow, recorder: QueuedSteps, *, in_time: bool) -> bool:
    """Open and close the window; a step is queued before, and written within if `in_time`."""
    recorder.is_behind = True
    window.open()
    recorder.is_behind = not in_time
    return window.close()


def test_the_writer_is_woken_at_all_forwards_but_each_sixteenth_while_it_is_in_time() -> None:
    recorder = QueuedSteps()
    window = WriteWindow(recorder)
    woken = [forward(window, recorder, in_time=True) for _ in range(3 * QUIET_EVERY)]
    assert woken == ([True] * (QUIET_EVERY - 1) + [False]) * 3
    assert recorder.n_wakes == 3 * (QUIET_EVERY - 1)


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
    n = 10 * QUIET_EVERY
    for number in range(n):
        forward(window, recorder, in_time=number % 2 == 0)
    assert recorder.n_wakes == n - n // QUIET_EVERY


@pytest.mark.parametrize("missing", ["has_core", "is_behind", "is_asleep"])
def test_the_writer_is_not_woken_without_a_core_or_a_step_nor_while_it_works(missing: str) -> None:
    recorder = QueuedSteps(**{missing: False})
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


@pytest.mark.parametrize(
    ("is_open", "device", "n_wakes"), [(True, "cpu", 1), (False, "cpu", 0), (True, "meta", 0)]
)
def test_the_window_opens_when_the_output_embeddings_are_called_in_a_step_on_a_cpu(
    is_open: bool, device: str, n_wakes: int
) -> None:
    recorder, head = QueuedSteps(), nn.Linear(4, 9, device=device)
    context: Any = SimpleNamespace(is_open=is_open, layers_s=0.0)
    remove = WriteWindow(recorder).install(head, context)
    head(torch.ones(1, 4, device=device))
    assert recorder.n_wakes == n_wakes
    assert (context.layers_s > 0) == bool(n_wakes)
    remove()
    head(torch.ones(1, 4, device=device))
    assert recorder.n_wakes == n_wakes
    assert not head._forward_pre_hooks


def test_a_compiled_graph_has_no_window() -> None:
    recorder, head = QueuedSteps(), nn.Linear(4, 9)
    context: Any = SimpleNamespace(is_open=True, layers_s=0.0)
    WriteWindow(recorder).install(head, context)
    torch.compile(head, backend="eager", fullgraph=True)(torch.ones(1, 4))
    assert recorder.n_wakes == 0
