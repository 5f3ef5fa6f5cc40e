"""The control server's training routes get their counts from the live debuggers."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flexinspect import DebugLevel, DiffusionModelDebugger, PyTorchDebugger, TrainingDebugger
from flexinspect.core.errors import UsageError
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import AnomalyCounts, DebuggerKind, live_counters


def counts(kind: DebuggerKind) -> AnomalyCounts:
    return live_counters(kind)[-1].counts()


def test_the_training_figures_are_those_of_the_newest_debugger() -> None:
    model, older = nn.Linear(2, 2), TrainingDebugger()
    newer = TrainingDebugger()
    older.monitor_training_step(model, math.nan, 0)
    for step in range(4):
        newer.monitor_training_step(model, math.inf if step == 2 else 0.5, step)
    summary = newer.get_training_summary()
    assert counts("training") == AnomalyCounts(
        total_anomalies=1,
        debug_history_length=5,
        total_steps=summary.total_steps,
        anomaly_steps=summary.anomaly_steps,
        loss_anomalies=summary.loss_anomalies,
    )
    assert (summary.total_steps, summary.loss_anomalies) == (4, 1)


def test_an_older_debugger_is_used_again_after_the_newer_is_deleted() -> None:
    gc.collect()
    model, older = nn.Linear(2, 2), TrainingDebugger()
    older.monitor_training_step(model, 0.5, 0)
    newer = TrainingDebugger()
    assert counts("training").total_steps == 0
    del newer
    gc.collect()
    assert counts("training").total_steps == 1
    del older
    gc.collect()
    assert live_counters("training") == []


def test_the_other_two_kinds_have_their_own_counts() -> None:
    general, diffusion = PyTorchDebugger(), DiffusionModelDebugger()
    general.analyze_tensor(torch.tensor([math.nan, math.inf]), "x")
    diffusion.monitor_diffusion_step(SimpleNamespace(unet=nn.Linear(1, 1)), 0, torch.ones(2))
    found = counts("general")
    assert (found.total_anomalies, found.debug_history_length) == (2, 3)
    found = counts("diffusion")
    assert (found.total_anomalies, found.debug_history_length) == (0, 1)


def test_clearing_and_levels_apply_to_all_live_debuggers() -> None:
    both = (PyTorchDebugger(), PyTorchDebugger())
    for debugger in both:
        debugger.analyze_tensor(torch.tensor([math.nan]), "x")
    control_protocols.clear()
    assert [debugger.get_debug_summary().total_anomalies for debugger in both] == [0, 0]
    control_protocols.set_level("extreme")
    assert [debugger.level for debugger in both] == [DebugLevel.EXTREME] * 2
    with pytest.raises(UsageError, match="the levels are basic, advanced, extreme"):
        control_protocols.set_level("loud")
