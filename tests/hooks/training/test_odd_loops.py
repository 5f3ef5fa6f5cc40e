"""Unusual training loops: what is counted, and what stays unknown."""

from __future__ import annotations

import math
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from flexinspect.panels.timeline import step_window
from flexinspect.panels.training_panel import TrainingData, step_facts
from flexinspect.records.step import StepRecord
from flexinspect.records.training_step import AnomalyOrigin, TrainingStepRecord
from flexinspect.rules.training.training_steps import TrainingRule
from flexinspect_hooks.training import (
    cost_governor,
    forward_passes,
    training_session,
    training_step_draft,
)
from flexinspect_hooks.training.gradient_statistics import learning_rates
from flexinspect_hooks.training.watch_training import TrainingWatch, watch_training
from flexinspect_hooks.training_debuggers import debug_functions

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers that return their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=(self.head(torch.tanh(self.body(x))) ** 2).mean())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.flextrace"


def steps_of(trace: TrainingWatch) -> list[TrainingStepRecord]:
    with trace.reader() as reader:
        return [*reader.training_steps(0).values()]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        model(X).loss.backward()
        optimizer.step()


def step_of(number: int, training: TrainingStepRecord) -> StepRecord:
    return StepRecord(0, number, "train", 0, 0, 0, 0.0, 100.0, 0.0, training=training)


def test_a_learning_rate_that_is_not_a_number_is_unknown(path: Path) -> None:
    model = Net()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 3)
    with trace.reader() as reader:
        step = reader.training_step(0, 2)
        assert step is not None
        points = reader.training_curve(0, 0, 3, 3)
        assert reader.findings() == []
    assert [point.rates for point in points.values()] == [(None,)] * 3
    data = TrainingData(step, {}, step_window(2, 0, 2, 3), points)
    assert ("learning rate", "unknown") in step_facts(data)
    assert learning_rates(SimpleNamespace(param_groups=[{}, {"lr": 2}]))[1] == 2.0
    assert debug_functions._format_rates((math.nan, 0.1)) == "unknown, 0.1"


def test_parameters_that_are_unfrozen_or_replaced_later_are_measured(path: Path) -> None:
    model = Net()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        loop(model, optimizer, 1)
        model.body.requires_grad_(True)
        loop(model, optimizer, 1)
        old = weakref.ref(model.head.weight)
        model.head = nn.Linear(8, 2)
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        optimizer.zero_grad()
        assert old() is not None
        loop(model, optimizer, 1)
        assert old() is None
    steps = steps_of(trace)
    assert [step.n_parameters for step in steps] == [2, 4, 4]
    assert [len(step.group_norms) for step in steps] == [1, 2, 2]
    assert all(ratio > 0 for step in steps for ratio in step.group_ratios)
    with trace.reader() as reader:
        events = [row.event for row in reader.events() if row.event.kind == "parameters-changed"]
    assert [event.step for event in events] == [1, 2]
    assert "4 parameters are trained from this step on; new groups: body." in events[0].text


def test_a_parameter_that_gets_another_memory_is_compared_with_itself(path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        loop(model, optimizer, 1)
        for one in model.parameters():
            one.data = one.data.clone()
        loop(model, optimizer, 1)
    assert all(ratio > 0 for ratio in steps_of(trace)[1].group_ratios)


@pytest.mark.parametrize(
    ("producer", "ending"),
    [
        (AnomalyOrigin("loss", ""), "; the loss is not finite."),
        (AnomalyOrigin("module", "head"), "; the output of module head is not finite."),
        (AnomalyOrigin("backward", "head.bias"), "; the gradient of head.bias is not finite."),
    ],
)
def test_steps_skipped_by_the_scaler_have_the_nonfinite_gradient_as_origin(
    producer: AnomalyOrigin, ending: str
) -> None:
    rule = TrainingRule()
    rule.on_generation_start(SimpleNamespace())  # type: ignore[arg-type]
    training = TrainingStepRecord(1.0, "reported", (), is_skipped=True, anomaly_origin=producer)
    findings = [finding for n in range(10) for finding in rule.on_step(step_of(n, training))]
    assert findings[-1].id == "training.scaler-skips"
    assert findings[-1].sentence.endswith(ending)


class Slow(torch.autograd.Function):
    """Changes nothing, and takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.02)
        return grad


class SlowNet(Net):
    """Takes 10 ms forward and 20 ms back."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(Slow.apply(x.requires_grad_()))


def test_several_forwards_before_one_backward_are_one_backward_pass(path: Path) -> None:
    model = SlowNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(2):
            torch.stack([model(X.clone()).loss for _ in range(3)]).sum().backward()
            optimizer.step()
    with trace.reader() as reader:
        for number, step in reader.training_steps(0).items():
            row = reader.step(0, number)
            assert row is not None
            assert step.n_backward == 1
            assert step.forward_ms >= 30
            assert step.backward_ms >= 60
            assert step.forward_ms + step.backward_ms <= row.wall_ms


def test_the_time_of_an_optimizer_is_without_the_passes_in_its_closure(path: Path) -> None:
    model = SlowNet()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X.clone()).loss
        loss.backward()
        return loss

    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        optimizer.step(closure)
    (step,) = steps_of(trace)
    assert step.n_backward >= 2
    assert step.backward_ms >= 20 * step.n_backward
    assert step.optimizer_ms < 20


def test_a_model_that_returns_its_parameter_is_left_without_hooks(path: Path) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Parameter(torch.ones(()))

        def forward(self) -> Tensor:
            return self.loss

    model = Alone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            assert not model.loss._backward_hooks
    assert not model.loss._backward_hooks
    assert [step.loss for step in steps_of(trace)] == pytest.approx([1.0, 0.9])


@pytest.mark.parametrize(("device", "is_found"), [("cpu", True), ("cuda:0", False)])
def test_other_time_is_a_wait_for_data_only_without_other_work(device: str, is_found: bool) -> None:
    rule = TrainingRule()
    rule.on_generation_start(SimpleNamespace())  # type: ignore[arg-type]
    training = TrainingStepRecord(1.0, "reported", (), other_ms=90.0, device=device)
    findings = [finding for n in range(40) for finding in rule.on_step(step_of(n, training))]
    assert bool(findings) is is_found


def test_waiting_for_a_gpu_is_not_other_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.2))
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        assert trace._session is not None
        trace._session._device = torch.device("cuda")
        loop(model, optimizer, 1)
    (step,) = steps_of(trace)
    assert step.other_ms < 200


def test_a_step_waits_for_a_gpu_only_if_gradients_are_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_waits, read = 0, list[tuple[int, int]]()
    original = training_session.TrainingStepDraft.read

    def waits(device: torch.device) -> None:
        nonlocal n_waits
        n_waits += 1

    def noted(self: training_session.TrainingStepDraft) -> None:
        if any(isinstance(one, Tensor) for one in self.losses):
            read.append((self.number, n_waits))
        original(self)

    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    for module in (forward_passes, training_step_draft):
        monkeypatch.setattr(module, "is_remote", lambda tensor: True)
    monkeypatch.setattr(training_session.TrainingStepDraft, "read", noted)
    monkeypatch.setitem(
        cost_governor._LEVEL_INDEX, "basic", cost_governor.DETAIL_LEVELS.index(cost_governor.SPARSE)
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        assert trace._session is not None
        trace._session._device = torch.device("cuda")
        loop(model, optimizer, 66)
    # The gradients of steps 0 to 3 and 64 to 67 are measured, with four before the next wait; of
    # the others at most 16 wait to be written.
    assert [one for one in read if one[0] < 5] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]
    assert [one for one in read if one[0] > 62] == [(64, 5), (63, 5), (65, 6)]
    assert [step.loss_source for step in steps_of(trace)] == ["output"] * 66


def test_what_is_written_counts_once_as_cost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, spent = training_session.TrainingStepDraft.record, 0.0

    def slow(self: training_session.TrainingStepDraft) -> TrainingStepRecord:
        nonlocal spent
        started = time.perf_counter()
        time.sleep(0.2)
        spent += time.perf_counter() - started  # more than it asked for, on a busy machine
        return record(self)

    monkeypatch.setattr(training_session.TrainingStepDraft, "record", slow)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 4)
        cost = trace.cost
        assert 0.6 <= spent <= float(cost["total_s"])
        assert spent <= float(cost["capture_s"]) < 2 * spent  # as much if it counted twice


class Skipping(torch.optim.SGD):
    """Calls the step of its base class, as an optimizer that adds something does."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("once")
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_class_is_one_step(path: Path) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch then hooks the base class too
    model = Net()
    optimizer = Skipping(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 2)
        optimizer.fails = True
        with pytest.raises(RuntimeError, match="once"):
            loop(model, optimizer, 1)
        optimizer.fails = False
        loop(model, optimizer, 2)
    steps = steps_of(trace)
    assert len(steps) == 4
    assert all(step.has_loss and step.n_parameters == 4 for step in steps)
    with trace.reader() as reader:
        assert [*reader.training_steps(0)] == [0, 1, 2, 3]
