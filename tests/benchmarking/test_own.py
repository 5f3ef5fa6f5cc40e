"""The benchmark of a watched generation runs, on a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import ids, make_model

from benchmarks import own
from benchmarks.engine import time_generate

TOKENS = 6


@pytest.mark.parametrize("is_window", [False, True])
def test_a_watched_generation_is_timed_with_its_trace(is_window: bool) -> None:
    model = make_model("llama")
    prompt: Any = SimpleNamespace(ids=ids(12, seed=1))
    timed = own.Window(model, prompt, TOKENS) if is_window else time_generate
    run = own.WatchedRun(timed, model, prompt, "advanced", TOKENS)
    timing = run()
    assert len(timing.steps) > 0
    assert timing.written > 0
    assert timing.stated > 0  # the share that capture took
    assert run.bytes_per_step > 0
