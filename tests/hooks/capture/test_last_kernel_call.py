"""The note of the kernel call that runs: its place, its lengths, what it captured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexinspect.trace.file.side_files import take_last_call
from flexinspect_hooks.capture import last_kernel_call

ONE, OTHER = torch.ones(2), torch.zeros(2)
QUERY, KEY = torch.empty(1, 2, 3, 4), torch.empty(1, 2, 9, 4)


def none_captured(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score


def one_captured(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + ONE[q]


def two_captured(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + ONE[q] * OTHER[kv]


def in_closure(value: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + value[q]


@pytest.mark.parametrize(
    ("score_mod", "text"),
    [
        (none_captured, "score_mod"),
        (one_captured, "score_mod with captured tensor"),
        (in_closure(ONE), "score_mod with captured tensor"),
        (two_captured, "score_mod with 2 captured tensors"),
    ],
)
def test_a_note_names_place_lengths_and_captured_tensors(
    tmp_path: Path, score_mod: Any, text: str
) -> None:
    trace = tmp_path / "t.flextrace"
    last_kernel_call.start_recording_calls(trace)
    try:
        last_kernel_call.begin_kernel_call((0, 5, 1), QUERY, KEY, score_mod, None)
        running = take_last_call(trace)
    finally:
        last_kernel_call.stop_recording_calls()
    assert running is not None
    assert running.description == f"flex (compiled, {text})"
    assert (running.is_running, running.generation, running.step, running.layer) == (True, 0, 5, 1)
    assert (running.q_len, running.kv_len) == (3, 9)


def test_a_call_that_returned_is_not_running_and_the_end_removes_the_note(tmp_path: Path) -> None:
    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    trace = tmp_path / "t.flextrace"
    last_kernel_call.start_recording_calls(trace)
    try:
        mask = SimpleNamespace(mask_mod=causal)
        last_kernel_call.begin_kernel_call((0, 5, 1), QUERY, KEY, None, mask)
        last_kernel_call.end_kernel_call()
        returned = take_last_call(trace)
        assert returned is not None
        assert not returned.is_running
        assert returned.description.startswith("flex (compiled, mask_mod ")
        assert returned.description.endswith("causal)")
        last_kernel_call.begin_kernel_call((0, 5, 2), QUERY, KEY, None, mask)
    finally:
        last_kernel_call.stop_recording_calls()
    assert list(tmp_path.iterdir()) == []
    last_kernel_call.begin_kernel_call((0, 5, 3), QUERY, KEY, None, None)
    assert take_last_call(trace) is None
