"""The routes below /training-logs/debug answer from what runs in the process."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from test_training_debugger import run
from torch import nn

import flexinspect
from flexinspect import DebugLevel, PyTorchDebugger, TrainingDebugger
from flexinspect_hooks.control import summaries
from flexinspect_hooks.control.parts import Counts, provide, provided, withdraw


def test_a_run_of_a_thousand_steps_is_answered_with_the_published_figures() -> None:
    debugger = TrainingDebugger()
    run(debugger)
    answer = summaries.training_summary()
    assert (answer.total_steps, answer.anomaly_steps) == (1000, 5)
    assert (answer.gradient_explosions, answer.gradient_vanishing) == (2, 1)
    assert answer.loss_anomalies == 3
    rates = (
        answer.anomaly_rate,
        answer.gradient_explosion_rate,
        answer.loss_anomaly_rate,
        answer.gradient_vanishing_rate,
    )
    assert rates == (0.005, 0.002, 0.003, 0.001)
    short = summaries.debug_summary().training_debugger
    assert (short.total_anomalies, short.total_steps) == (5, 1000)
    assert (short.anomaly_rate, short.gradient_explosion_rate) == (0.005, 0.002)
    assert short.debug_history_length == len(debugger.history)
    summaries.clear()
    assert debugger.get_training_summary().total_steps == 0
    assert summaries.training_summary().total_steps == 0


def test_a_level_from_outside_reaches_every_debugger() -> None:
    training, general = TrainingDebugger(), PyTorchDebugger()
    summaries.set_level("advanced")
    assert (training.level, general.level) == (DebugLevel.ADVANCED, DebugLevel.ADVANCED)


def test_who_counted_before_counts_again_when_a_debugger_is_gone() -> None:
    class Fixed:
        def counts(self) -> Counts:
            return Counts(total_anomalies=7)

        def clear(self) -> None:
            """Nothing is counted here."""

    gc.collect()
    before = Fixed()
    provide("general", before)
    try:
        debugger = PyTorchDebugger()
        assert summaries.debug_summary().general_debugger.total_anomalies == 0
        del debugger
        gc.collect()
        assert provided("general") is before
        assert summaries.debug_summary().general_debugger.total_anomalies == 7
    finally:
        withdraw("general", before)


@pytest.mark.filterwarnings("ignore")
def test_a_watched_training_run_answers_too_and_after_its_end(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flexinspect.watch_training(
        model, optimizer, out=tmp_path / "run.flextrace", quiet=True
    ) as watch:
        for step in range(12):
            loss = model(torch.ones(1, 2)).sum() * (math.nan if step == 11 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    answer = summaries.training_summary()
    assert (answer.total_steps, answer.anomaly_steps, answer.loss_anomalies) == (12, 1, 1)
    summaries.clear()
    assert summaries.training_summary().total_steps == 0
    assert watch.summary.total_steps == 12
