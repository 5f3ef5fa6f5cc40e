"""Training loops that are not the usual one: what is counted of them, and what is not known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor

from flexinspect.panels.parts.curves import Span
from flexinspect.panels.training import TrainingData, facts_of
from flexinspect.trainingfacts import TrainingStepRecord
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
