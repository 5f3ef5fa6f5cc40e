"""Passes that are added up to one optimizer step, and outputs that are dropped layer by layer."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexinspect_hooks.training.forward_passes import StepPasses
from flexinspect_hooks.training.watch_training import watch_training


def test_a_step_keeps_the_device_and_autocast_of_the_passes_that_know_them() -> None:
    step = StepPasses()
    for one in (StepPasses(), StepPasses(device="cuda:0", autocast="bfloat16"), StepPasses()):
        step.add(one)
    assert (step.n_forward, step.device, step.autocast) == (3, "cuda:0", "bfloat16")


class Inner(nn.Module):
    """Returns what nobody else holds, so that only a watch can keep it alive."""

    def __init__(self, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.seen, self.fault = seen, 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = x.detach() * 1.0 + self.fault
        self.seen.append(weakref.ref(out))
        return out


class Layer(nn.Module):
    def __init__(self, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.inner, self.linear = Inner(seen), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) + self.inner(x).mean())


class Stack(nn.Module):
    """Two layers; counts the outputs of inner modules that live when the last one has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.layers = nn.ModuleList([Layer(self.seen), Layer(self.seen)])
        self.n_alive: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        self.n_alive.append(sum(one() is not None for one in self.seen))
        return x.square().mean()


def trained(path: Path, level: str, fault_at: int | None = None) -> tuple[Stack, Any]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(3, 4)
    with watch_training(model, optimizer, out=path, level=level, quiet=True) as trace:
        for number in range(4):
            if number == fault_at:
                layer: Any = model.layers[1]
                layer.inner.fault = math.nan
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    return model, trace


@pytest.mark.parametrize("level", ["advanced", "extreme"])
def test_outputs_of_a_layer_are_dropped_when_it_returns_finite_values(
    tmp_path: Path, level: str
) -> None:
    model, _ = trained(tmp_path / "a.flextrace", level)
    assert model.n_alive == [2, 0, 0, 0]  # the first step describes all outputs


def test_the_statistics_of_each_output_are_those_of_the_whole_forward(tmp_path: Path) -> None:
    _, trace = trained(tmp_path / "a.flextrace", "extreme")
    with trace.reader() as reader:
        found = [
            [(one.layer, one.module) for one in reader.layer_stats(0, step)] for step in (0, 2)
        ]
    assert found[0] == found[1]
    assert [name for _, name in found[1]] == [
        *("layers.0.linear", "layers.0.inner", "layers.1.linear", "layers.1.inner")
    ]


@pytest.mark.parametrize("level", ["advanced", "extreme"])
def test_the_first_output_that_is_not_finite_is_named_after_outputs_were_dropped(
    tmp_path: Path, level: str
) -> None:
    _, trace = trained(tmp_path / "a.flextrace", level, fault_at=2)
    with trace.reader() as reader:
        origin = reader.training_steps(0)[2].anomaly_origin
    assert origin is not None
    assert (origin.kind, origin.name) == ("module", "layers.1.inner")
