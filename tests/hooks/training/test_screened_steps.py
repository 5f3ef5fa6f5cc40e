"""Level basic on steps too short for its cost: what it still finds in each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexinspect.records.finding import Finding
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.training.cost_governor import Governor
from flexinspect_hooks.training.gradient_screen import GradientScreen
from flexinspect_hooks.training.gradient_statistics import NamedParameter, trainable
from flexinspect_hooks.training.watch_training import watch_training

LossOf = Callable[[nn.Module], Tensor]
Body = Callable[[int, nn.Module, torch.optim.Optimizer], None]
MEASURED = [*range(12), *range(32, 36), *range(64, 68)]
"""Steps of 80: all while the cost is not known, and then the first four of every 32."""


@pytest.fixture(autouse=True)
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let capture cost a third of each step, however fast the machine is."""
    original = Governor.on_step
    monkeypatch.setattr(Governor, "on_step", lambda self, own, wall: original(self, 0.25, 1.0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


X, Y = torch.randn(16, 8), torch.randn(16, 1)


def squares(model: nn.Module) -> Tensor:
    return ((model(X) - Y) ** 2).mean()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf = squares) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def exploding(model: nn.Module) -> Tensor:
    return squares(model) * 1e6


def without_derivative(model: Any) -> Tensor:
    """The loss is finite, but the square root of 0 has no finite derivative."""
    return squares(model) + (model[0].weight * 0).sum().sqrt()


def record(
    folder: Path, body: Body, n: int = 80
) -> tuple[dict[int, TrainingStepRecord], list[Finding]]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch_training(model, optimizer, out=folder / "a.flextrace", quiet=True) as trace:
        for number in range(n):
            body(number, model, optimizer)
    with trace.reader() as reader:
        return reader.training_steps(0), reader.findings()


def measured(steps: dict[int, TrainingStepRecord]) -> list[int]:
    return [number for number, step in steps.items() if step.total_norm is not None]


def test_a_healthy_training_is_measured_in_four_of_every_32_steps(tmp_path: Path) -> None:
    steps, findings = record(tmp_path, lambda number, *of: update(*of))
    assert measured(steps) == MEASURED
    assert all(math.isfinite(step.loss) for step in steps.values())
    assert {step.detail for step in steps.values()} == {"basic", "screened"}
    assert findings == []


@pytest.mark.parametrize(
    ("loss_of", "finding"),
    [(exploding, "training.explosion"), (without_derivative, "training.nan-gradient")],
)
def test_gradients_that_stand_out_are_measured_at_once(
    tmp_path: Path, loss_of: LossOf, finding: str
) -> None:
    def body(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = [one.detach().clone() for one in model.parameters()]
        update(model, optimizer, loss_of if number == 50 else squares)
        if number == 50:  # the weights stay, so that only this step shows it
            optimizer.state.clear()
            with torch.no_grad():
                for one, value in zip(model.parameters(), before, strict=True):
                    one.copy_(value)

    steps, findings = record(tmp_path, body)
    assert measured(steps) == sorted([*MEASURED, *range(50, 54)])
    assert finding in [one.id for one in findings if one.step == 50]


def test_a_state_that_is_emptied_between_measured_steps_is_found(tmp_path: Path) -> None:
    def body(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 50:
            optimizer.state.clear()
        update(model, optimizer)

    _, (found,) = record(tmp_path, body)
    assert found.id == "training.optimizer-state"
    assert "between the steps 49 and 50" in found.sentence


def test_an_optimizer_that_steps_without_its_state_is_found(tmp_path: Path) -> None:
    def body(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number >= 40:
            optimizer.state.clear()
        update(model, optimizer)

    _, findings = record(tmp_path, body)
    (found,) = [one for one in findings if one.id == "training.optimizer-state"]
    assert "before each of the steps 40 to 42" in found.sentence


def test_weights_that_the_program_changes_from_outside_are_found_in_the_next_pair(
    tmp_path: Path,
) -> None:
    def body(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        update(model, optimizer)
        if number >= 40:
            with torch.no_grad():
                for one in model.parameters():
                    one.mul_(0.999)

    _, (found,) = record(tmp_path, body)
    assert found.id == "training.changed-outside"
    assert "between steps 64 and 65" in found.sentence


def parameters(*gradients: Tensor) -> list[NamedParameter]:
    found = []
    for number, gradient in enumerate(gradients):
        one = nn.Parameter(torch.zeros_like(gradient))
        one.grad = gradient
        found.append(NamedParameter(f"p{number}", one, "", one.dim() > 1))
    return found


def test_a_screen_compares_a_norm_with_those_before() -> None:
    screen, steady = GradientScreen(), parameters(torch.ones(4, 4), torch.ones(4))
    assert [screen.is_suspicious(steady, step) for step in range(6)] == [False] * 6
    larger = parameters(torch.full((4, 4), 9.0), torch.ones(4))
    assert not screen.is_suspicious(larger, 6)
    assert screen.is_suspicious(parameters(torch.full((4, 4), 1000.0), torch.ones(4)), 7)
    assert screen.is_suspicious(parameters(torch.ones(4, 4), torch.full((4,), math.inf)), 8)


def test_a_screen_reads_gradients_of_any_layout_in_memory() -> None:
    screen = GradientScreen()
    for step in range(6):
        assert not screen.is_suspicious(parameters(torch.ones(2, 3, 4, 4)), step)
    strided = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert not strided.is_contiguous()
    assert not screen.is_suspicious(parameters(strided), 6)
    assert screen.is_suspicious(parameters(strided * math.nan), 7)
    assert screen.is_suspicious(parameters(torch.full((5,), math.nan, dtype=torch.float64)), 8)


@pytest.mark.parametrize(
    "gradient",
    [torch.eye(4).to_sparse(), torch.ones(4, dtype=torch.complex64), torch.ones(0)],
    ids=["sparse", "complex", "empty"],
)
def test_a_screen_passes_over_gradients_that_it_cannot_read(gradient: Tensor) -> None:
    named: list[Any] = parameters(gradient)
    assert not GradientScreen().is_suspicious(named, 0)
    assert not GradientScreen().is_suspicious(trainable(network()), 0)  # none has a gradient
