"""`TrainingDebugger`: a call per step, and the counts of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect import DebugLevel, TrainingDebugger
from flexinspect.core.errors import UsageError

FIGURES = [
    "total_steps",
    "anomaly_steps",
    "gradient_explosions",
    "gradient_vanishing",
    "loss_anomalies",
    "anomaly_rate",
    "loss_anomaly_rate",
    "gradient_explosion_rate",
    "gradient_vanishing_rate",
]


class Training:
    """A tiny regression that learns, and whose steps can be corrupted."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(8, 3)
        self.targets = self.inputs @ torch.randn(3, 2) + 0.5 * torch.randn(8, 2)

    def loss(self, scale: float = 1.0, plus: float = 0.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = ((self.model(self.inputs) - self.targets) ** 2).mean() * scale + plus
        loss.backward()
        return loss


CORRUPTED = {
    100: {"scale": math.nan},
    300: {"scale": math.nan},
    500: {"scale": 1e6, "plus": math.inf},  # an infinite loss whose gradients are finite, and huge
    700: {"scale": 1e6},
    900: {"scale": 1e-9},
}


def run(debugger: Any, steps: int = 1000) -> Training:
    training = Training()
    for step in range(steps):
        changes = CORRUPTED.get(step)
        loss = training.loss(**(changes or {}))
        debugger.monitor_training_step(training.model, loss, step)
        if changes is None:
            training.optimizer.step()
    return training


@pytest.mark.parametrize("level", list(DebugLevel))
def test_the_figures_of_a_run_of_a_thousand_steps(level: DebugLevel) -> None:
    debugger = TrainingDebugger(level, history=200)
    run(debugger)
    summary = debugger.get_training_summary()
    assert list(summary) == FIGURES
    assert summary == {
        "total_steps": 1000,
        "anomaly_steps": 5,
        "gradient_explosions": 2,
        "gradient_vanishing": 1,
        "loss_anomalies": 3,
        "anomaly_rate": 0.005,
        "loss_anomaly_rate": 0.003,
        "gradient_explosion_rate": 0.002,
        "gradient_vanishing_rate": 0.001,
    }
    assert summary.anomaly_rate == 0.005
    assert debugger.get_debug_summary().total_anomalies == 5
    assert debugger.get_debug_summary().anomaly_rate == 0.005
    assert json.loads(json.dumps(summary))["gradient_explosion_rate"] == 0.002


def test_the_anomalies_name_step_and_parameter() -> None:
    debugger = TrainingDebugger(DebugLevel.ADVANCED, history=5000)
    run(debugger)
    found = [(one.step, one.kind, one.where) for one in debugger.history if "kind" in one]
    assert found == [
        (100, "loss", "loss"),
        (100, "nan", "weight"),
        (100, "nan", "bias"),
        (300, "loss", "loss"),
        (300, "nan", "weight"),
        (300, "nan", "bias"),
        (500, "loss", "loss"),
        (500, "explosion", "weight"),
        (500, "explosion", "bias"),
        (700, "explosion", "weight"),
        (700, "explosion", "bias"),
        (900, "vanishing", "weight"),
    ]
    by_kind = debugger.get_debug_summary().anomalies_by_kind
    assert by_kind == {"loss": 3, "nan": 4, "explosion": 4, "vanishing": 1}


def test_a_correct_run_has_no_anomaly() -> None:
    debugger, training = TrainingDebugger(DebugLevel.ADVANCED), Training()
    for step in range(500):
        debugger.monitor_training_step(training.model, training.loss(), step)
        training.optimizer.step()
    assert debugger.get_training_summary().anomaly_steps == 0
    assert debugger.get_debug_summary().total_anomalies == 0


def test_training_is_bit_equal_with_monitoring() -> None:
    class Nothing:
        def monitor_training_step(self, *args: Any) -> None:
            """Do nothing."""

    monitored, plain = run(TrainingDebugger(DebugLevel.EXTREME), 300), run(Nothing(), 300)
    assert torch.equal(monitored.model.weight, plain.model.weight)
    assert torch.equal(monitored.model.bias, plain.model.bias)


def test_a_step_says_what_each_level_measures() -> None:
    training = Training()
    loss = training.loss()
    basic, advanced, extreme = (
        TrainingDebugger(level).monitor_training_step(training.model, loss, 7)
        for level in DebugLevel
    )
    norm = torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters()])  # type: ignore[misc]
    for info in (basic, advanced, extreme):
        assert (info.step, info.loss) == (7, pytest.approx(loss.item()))
        assert info.gradient_norm == pytest.approx(float(norm))
        assert not info.is_anomaly
    assert (basic.memory, basic.parameters) == (None, None)
    assert advanced.memory is not None
    assert advanced.memory["parameters"] == 8 * 4
    assert advanced.parameters is None
    assert list(extreme.parameters) == list(extreme.gradients) == ["weight", "bias"]
    gradient = training.model.weight.grad
    assert gradient is not None
    assert extreme.gradients["weight"].max == float(gradient.max())


def test_extreme_checks_weights_in_turn_and_all_of_them_at_an_anomaly() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    debugger = TrainingDebugger(DebugLevel.EXTREME)
    infos = [debugger.monitor_training_step(model, 0.5, step) for step in range(10)]
    assert [len(info.parameters) for info in infos] == [4] * 10
    names = [name for name, _ in model.named_parameters()]
    assert [name for info in infos for name in info.parameters] == names * 2
    bad = debugger.monitor_training_step(model, math.nan, 10)
    assert list(bad.parameters) == names


def test_a_corrupted_step_names_its_parameters() -> None:
    training, debugger = Training(), TrainingDebugger()
    info = debugger.monitor_training_step(training.model, training.loss(scale=math.nan), 0)
    assert (info.has_nan, info.has_inf) == (True, False)
    assert info.nan_grad_params == ("weight", "bias")
    assert info["params_with_nan_grad"] == 2
    info = debugger.monitor_training_step(training.model, training.loss(scale=1e6), 1)
    assert info.exploding == ("weight", "bias")
    info = debugger.monitor_training_step(training.model, training.loss(scale=1e-9), 2)
    assert info.vanishing == ("weight",)


def test_thresholds_are_chosen_per_model() -> None:
    training = Training()
    loss = training.loss()
    strict = TrainingDebugger(explosion=1e-3).monitor_training_step(training.model, loss, 0)
    assert strict.exploding == ("weight", "bias")
    strict = TrainingDebugger(vanishing=1e3).monitor_training_step(training.model, loss, 0)
    assert strict.vanishing == ("weight",)


def test_norms_are_kept_over_steps_and_by_parameter() -> None:
    training, debugger = Training(), TrainingDebugger(DebugLevel.ADVANCED, history=20)
    norms = []
    for step in range(30):
        loss = training.loss()
        norms.append(float(training.model.weight.grad.norm()))  # type: ignore[union-attr]
        debugger.monitor_training_step(training.model, loss, step)
        training.optimizer.step()
    history = debugger.gradient_history("weight")
    assert [step for step, _ in history] == list(range(10, 30))
    assert [norm for _, norm in history] == pytest.approx(norms[10:])
    assert len(debugger.gradient_history()) == 20
    assert debugger.gradient_history("absent") == []


def test_histories_are_bounded_at_every_level() -> None:
    for level in DebugLevel:
        debugger, training = TrainingDebugger(level, history=10), Training()
        for step in range(25):
            debugger.monitor_training_step(training.model, training.loss(), step)
        assert len(debugger.history) == 10
        assert len(debugger.gradient_history()) == 10


def test_clearing_counts_steps_from_zero() -> None:
    training, debugger = Training(), TrainingDebugger()
    debugger.monitor_training_step(training.model, training.loss(scale=math.nan), 0)
    debugger.clear_debug_history()
    assert debugger.get_training_summary().total_steps == 0
    assert debugger.get_training_summary().anomaly_rate == 0.0
    assert debugger.gradient_history() == []


def test_extreme_logs_every_step(lines: pytest.LogCaptureFixture) -> None:
    training = Training()
    for level in DebugLevel:
        TrainingDebugger(level).monitor_training_step(training.model, training.loss(), 3)
    (line,) = lines.messages
    assert line.startswith("Step 3: loss ")


def test_a_user_metric_is_measured_until_it_fails(lines: pytest.LogCaptureFixture) -> None:
    training, debugger = Training(), TrainingDebugger()
    debugger.add_metric("weight", lambda model, loss, step: float(model.weight.abs().max()))
    debugger.add_metric("fails", lambda model, loss, step: 1 / step)
    info = debugger.monitor_training_step(training.model, training.loss(), 0)
    assert info.metrics == {"weight": pytest.approx(float(training.model.weight.abs().max()))}
    assert lines.messages == [
        "The metric fails failed and is off: ZeroDivisionError: division by zero"
    ]


def test_a_later_run_is_compared_with_a_baseline(tmp_path: Path) -> None:
    training, reference = Training(), TrainingDebugger()
    for step in range(10):
        reference.monitor_training_step(training.model, training.loss(), step)
    reference.save_baseline(tmp_path / "good.json")
    assert reference.compare_with_baseline(tmp_path / "good.json") == []
    anomalous = TrainingDebugger()
    for step in range(10):
        scale = math.nan if step == 4 else 1.0
        anomalous.monitor_training_step(training.model, training.loss(scale), step)
    assert anomalous.compare_with_baseline(tmp_path / "good.json") == [
        "The anomaly rate is 0.1, but was 0.",
        "The loss anomaly rate is 0.1, but was 0.",
    ]
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a baseline"):
        anomalous.compare_with_baseline(tmp_path / "bad.json")


def test_a_step_without_gradients_is_a_step() -> None:
    debugger = TrainingDebugger(DebugLevel.EXTREME)
    info = debugger.monitor_training_step(nn.Linear(2, 2), 0.5, 0)
    assert info.gradient_norm is None
    assert debugger.get_training_summary().total_steps == 1


def test_a_debugger_failure_is_logged_and_the_training_continues(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.training_debuggers import training_debugger

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no norms here")

    training, debugger = Training(), TrainingDebugger()
    with monkeypatch.context() as patch:
        patch.setattr(training_debugger.gradient_statistics, "gradient_facts", broken)
        info = debugger.monitor_training_step(training.model, training.loss(), 3)
    assert (info.step, info.gradient_norm) == (3, None)
    assert lines.messages == ["Step 3 could not be checked: RuntimeError: no norms here"]
    assert debugger.monitor_training_step(training.model, training.loss(), 4).gradient_norm > 0


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    with pytest.raises(UsageError, match=r"single number, and has shape \(2,\)"):
        TrainingDebugger().monitor_training_step(nn.Linear(1, 1), torch.ones(2), 0)


def test_gradients_of_a_step_that_the_scaler_will_skip_are_not_an_anomaly() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = math.inf
    debugger = TrainingDebugger()
    scaler = torch.amp.GradScaler("cpu")
    assert not debugger.monitor_training_step(model, 1.0, 0, scaler=scaler).anomalies
    assert debugger.get_training_summary()["anomaly_steps"] == 0
    assert debugger.monitor_training_step(model, 1.0, 1).anomalies
    assert debugger.get_training_summary()["anomaly_steps"] == 1


def test_small_gradients_are_not_anomalies_while_the_learning_rate_rises() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    debugger = TrainingDebugger()
    found = []
    for step, rate in enumerate((0.0, 0.1, 0.2, 0.2)):
        optimizer.param_groups[0]["lr"] = rate
        model.weight.grad = torch.full((2, 3), 1e-8)
        info = debugger.monitor_training_step(model, 1.0, step, optimizer=optimizer)
        found.append(info.vanishing)
    assert found == [("weight",), (), (), ("weight",)]
    assert debugger.get_training_summary().gradient_vanishing == 2
    assert debugger.monitor_training_step(model, 1.0, 4).vanishing == ("weight",)
