"""Calls between two steps, sizes of inputs and parameters are events where they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flexinspect.records.training_step import CALLS_EVENT, MAX_CALLS, PARAMETERS_EVENT
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.training.call_order import MAX_SIZE_CHANGES, CallOrder
from flexinspect_hooks.training.watch_training import watch_training

X, Y = torch.ones(4, 3), torch.ones(4, 1)


def events(path: Path, loop: Callable[[nn.Module, torch.optim.Optimizer], None]) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path / "a.flextrace", quiet=True):
        loop(model, optimizer)
    with open_trace(path / "a.flextrace") as reader:
        return [row.event for row in reader.events()]


def calls(found: list[Any]) -> dict[int, list[str]]:
    return {one.step: one.data["calls"] for one in found if one.kind == CALLS_EVENT}


def backward(model: nn.Module, rows: int = 4) -> None:
    functional.mse_loss(model(X[:rows]), Y[:rows]).backward()


def test_the_calls_of_a_step_are_recorded_in_order_and_only_where_they_change(
    tmp_path: Path,
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        for number in range(6):
            optimizer.zero_grad()
            backward(model)
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if number == 3:
                with torch.no_grad():
                    model(X)

    first = ["zero_grad", "forward", "backward", "clip_grad_norm_", "optimizer.step"]
    assert calls(events(tmp_path, loop)) == {
        0: first,
        1: ["scheduler.step", *first],
        4: ["scheduler.step", "evaluation", *first],
        5: ["scheduler.step", *first],
    }


def test_a_scaler_that_skips_a_step_and_clipping_before_it_unscales_are_seen(
    tmp_path: Path,
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(2):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(X), Y) * (float("inf") if number else 1.0)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    found = calls(events(tmp_path, loop))
    assert found[0][-3:] == ["clip_grad_norm_", "scaler.unscale_", "optimizer.step"]
    assert found[1][-3:] == ["clip_grad_norm_", "scaler.unscale_", "step skipped"]


def test_inputs_modes_and_repeated_batches_are_recorded(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one = torch.randn(2, 3)
        for (x,) in DataLoader(TensorDataset(torch.cat([one, one])), batch_size=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        model.eval()
        optimizer.zero_grad()
        backward(model, rows=3)
        optimizer.step()

    first, second, third = (o.data for o in events(tmp_path, loop) if o.kind == CALLS_EVENT)
    assert first["inputs"] == {"0": ["float32", 2, 3]}
    assert (first["repeated_batches"], second["repeated_batches"]) == (0, 1)
    assert (first["modes"], third["modes"]) == (["training"], ["evaluation"])
    assert third["inputs"] == {"0": ["float32", 3, 3]}


def test_parameters_are_described_with_the_group_that_trains_them(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model)
        optimizer.step()

    (one,) = (one for one in events(tmp_path, loop) if one.kind == PARAMETERS_EVENT)
    found = one.data["parameters"]
    assert found["0.weight"] == {"dtype": "float32", "size": [2, 3], "group": -1}
    assert found["0.bias"]["group"] is None
    assert found["1.weight"]["group"] == 0


def test_a_step_of_any_number_of_calls_is_bounded() -> None:
    order = CallOrder()
    for number in range(10 * MAX_CALLS):
        order.add("forward")
        order.add(f"call {number}")
    (_, _, facts), *_ = order.take()
    assert len(facts["calls"]) == MAX_CALLS


def test_sizes_that_always_change_are_no_longer_recorded() -> None:
    order, model = CallOrder(), nn.Linear(3, 1)
    notes = []
    for number in range(2 * MAX_SIZE_CHANGES):
        order.add_forward(model, (torch.empty(number + 1, 3),), {})
        order.add("optimizer.step")
        notes += order.take()
    assert MAX_SIZE_CHANGES < len(notes) < MAX_SIZE_CHANGES + 5
    assert "inputs" not in notes[-1][2]
