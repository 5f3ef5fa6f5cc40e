"""Small networks that are trained under a watch, and what is found in them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flexinspect.records.finding import Finding
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.training import forward_passes
from flexinspect_hooks.training.watch_training import watch_training

LossOf = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return linear layers of these widths, with `activation` between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def squares(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Return the mean square of what is missed."""
    return ((model(x) - y) ** 2).mean()


def trained(
    path: Path,
    model: nn.Module,
    *,
    rate: float = 0.05,
    steps: int = 12,
    loss_of: LossOf = squares,
    level: str = "basic",
) -> tuple[list[Finding], dict[int, TrainingStepRecord]]:
    """Train by gradient descent; return the findings, and the steps by number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    y = torch.sin(x.sum(1, keepdim=True))
    with watch_training(model, optimizer, out=path, level=level, quiet=True) as trace:
        for step in range(steps):
            loss = loss_of(model, x, y, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.step(loss=loss)
    with trace.reader() as reader:
        return reader.findings(), reader.training_steps(0)


def the(findings: list[Finding], id_: str) -> Finding:
    """Return the one finding of a kind."""
    (found,) = [one for one in findings if one.id == id_]
    return found


class Log(nn.Module):
    """The logarithm, of 0 too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what capture does on a device that one waits for be done here."""
    monkeypatch.setattr(forward_passes, "is_remote", lambda tensor: True)
