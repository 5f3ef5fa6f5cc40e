"""The routes below /training-logs/debug report what runs in the process."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_training_debugger import run
from torch import nn

import flexinspect
from flexinspect import DebugLevel, PyTorchDebugger, TrainingDebugger
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import (
    AnomalyCounts,
    live_counters,
    register_counter,
    unregister_counter,
)


def test_a_run_of_a_thousand_steps_is_answered_with_the_published_figures() -> None:
    debugger = TrainingDebugger()
    run(debugger)
    answer = control_protocols.training_summary()
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
    short = control_protocols.debug_summary().training_debugger
    assert (short.total_anomalies, short.total_steps) == (5, 1000)
    assert (short.anomaly_rate, short.gradient_explosion_rate) == (0.005, 0.002)
    assert short.debug_history_length == len(debugger.history)
    control_protocols.clear()
    assert debugger.get_training_summary().total_steps == 0
    assert control_protocols.training_summary().total_steps == 0


def test_a_level_from_outside_reaches_every_debugger() -> None:
    training, general = TrainingDebugger(), PyTorchDebugger()
    control_protocols.set_level("advanced")
    assert (training.level, general.level) == (DebugLevel.ADVANCED, DebugLevel.ADVANCED)


def test_an_earlier_counter_counts_again_when_a_debugger_is_gone() -> None:
    class Fixed:
        def counts(self) -> AnomalyCounts:
            return AnomalyCounts(total_anomalies=7)

        def clear(self) -> None:
            """Nothing is counted here."""

    gc.collect()
    before = Fixed()
    register_counter("general", before)
    try:
        debugger = PyTorchDebugger()
        assert control_protocols.debug_summary().general_debugger.total_anomalies == 0
        del debugger
        gc.collect()
        assert live_counters("general") == [before]
        assert control_protocols.debug_summary().general_debugger.total_anomalies == 7
    finally:
        unregister_counter("general", before)


@pytest.mark.filterwarnings("ignore")
def test_a_watched_training_run_answers_too_and_after_its_end(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flexinspect.watch_training(
        model, optimizer, out=tmp_path / "run.flextrace", quiet=True
    ) as watch:
        control_protocols.set_level("extreme")
        assert watch.level == "extreme"
        for step in range(12):
            loss = model(torch.ones(1, 2)).sum() * (math.nan if step == 11 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    answer = control_protocols.training_summary()
    assert (answer.total_steps, answer.anomaly_steps, answer.loss_anomalies) == (12, 1, 1)
    control_protocols.clear()
    assert control_protocols.training_summary().total_steps == 0
    assert watch.summary.total_steps == 12
    with watch.reader() as reader:
        assert reader.training_steps(0)[0].detail == "extreme"


ASKS_ITSELF = """
import json, os, torch
from flexinspect import TrainingDebugger
from flexinspect.control.discovery import find_capture
from flexinspect.control.client import ControlClient
model = torch.nn.Linear(2, 2)
debugger = TrainingDebugger()
for step in range(4):
    debugger.monitor_training_step(model, float("nan") if step == 3 else 1.0, step)
client = ControlClient(find_capture(os.getpid()).address)
client.request("POST", "/training-logs/debug/level/extreme")
answer = client.request("GET", "/training-logs/debug/training/summary")
print(json.dumps([answer["total_steps"], answer["loss_anomaly_rate"], debugger.level]))
"""


def test_the_routes_work_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS_ITSELF)
    done = subprocess.run(
        [sys.executable, "-m", "flexinspect", "run", "--no-ui", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == [4, 0.25, "extreme"]
