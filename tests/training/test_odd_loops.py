"""Training loops that are not the usual one: what is counted of them, and what is not known."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from flexinspect.panels.parts.curves import Span
from flexinspect.panels.training import TrainingData, facts_of
from flexinspect.records import StepRecord
from flexinspect.rules.trainingsteps import TrainingRule
from flexinspect.trainingfacts import Producer, TrainingStepRecord
from flexinspect_hooks.training.rates import rates_of
from flexinspect_hooks.training.watching import TrainingWatch, watch_training

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


def test_a_learning_rate_that_the_optimizer_does_not_tell_is_unknown(path: Path) -> None:
    model = Net()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 3)
    with trace.reader() as reader:
        step = reader.training_step(0, 2)
        assert step is not None
        points = reader.training_curve(0, 0, 3, 3)
        assert reader.findings() == []
    assert [point.rate for point in points.values()] == [None] * 3
    data = TrainingData(step, {}, Span(0, 2, 2, 3, 1), points)
    assert ("learning rate", "unknown") in facts_of(data)
    assert rates_of(SimpleNamespace(param_groups=[{}, {"lr": 2}]))[1] == 2.0


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
        told = [row.event for row in reader.events() if row.event.kind == "parameters"]
    assert [event.step for event in told] == [1, 2]
    assert "4 parameters are trained from this step on; new groups: body." in told[0].text


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
    ("producer", "words"),
    [
        (Producer("loss", ""), "; the loss is not finite."),
        (Producer("module", "head"), "; the output of head is not finite."),
        (Producer("backward", "head.bias"), "; the gradient of head.bias is not finite."),
    ],
)
def test_steps_left_out_by_the_scaler_are_laid_to_what_is_not_finite(
    producer: Producer, words: str
) -> None:
    rule = TrainingRule()
    training = TrainingStepRecord(1.0, "told", (), is_skipped=True, producer=producer)
    said = [
        finding
        for n in range(10)
        for finding in rule.look(
            StepRecord(0, n, "train", 0, 0, 0, 0.0, 1.0, 0.0, training=training)
        )
    ]
    assert said[-1].id == "training.scaler-skips"
    assert said[-1].sentence.endswith(words)
