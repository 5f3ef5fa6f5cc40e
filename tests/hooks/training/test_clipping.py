"""Norms from clipping: used instead of reading gradients, and only while they are correct."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.training import gradient_statistics, torch_calls
from flexinspect_hooks.training.torch_calls import CHECK_INTERVAL
from flexinspect_hooks.training.watch_training import watch_training

STEPS = CHECK_INTERVAL + 2
Change = Callable[[nn.Module, int], None]


def nothing(model: nn.Module, step: int) -> None:
    """Leave the gradients as clipping left them."""


def doubled(model: nn.Module, step: int) -> None:
    for one in gradients(model) if step == 5 else ():
        one.mul_(2)


def doubled_in_secret(model: nn.Module, step: int) -> None:
    for one in gradients(model):
        one.data.mul_(2)


def replaced(model: nn.Module, step: int) -> None:
    for one in model.parameters() if step == 5 else ():
        one.grad = torch.ones_like(one)


def set_nonfinite(model: nn.Module, step: int) -> None:
    if step == 5:
        gradients(model)[2][0, 0] = math.nan


def accumulated(model: nn.Module, step: int) -> None:
    if step == 5:
        model(torch.ones(4, 8)).sum().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


class Scaled:
    """Steps an optimizer through a scaler that the program forgot to ask for true gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


class Plain:
    """Steps an optimizer as it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def trained(
    path: Path, change: Change, way: type[Any] = Plain, limit: float = 0.1
) -> tuple[dict[int, TrainingStepRecord], list[float]]:
    """Return the steps as recorded, and the norms of the gradients that the optimizer got."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    runner, got = way(optimizer), list[float]()
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        optimizer.register_step_pre_hook(
            lambda *_: got.append(math.hypot(*(float(one.norm()) for one in gradients(model))))
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            runner.backward((model(torch.randn(32, 8)) ** 2).mean())
            clip_grad_norm_(model.parameters(), limit)
            change(model, step)
            runner.step()
    with trace.reader() as reader:
        return reader.training_steps(0), got


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients were read each time that any were."""
    found = list[int]()

    def count(name: str) -> None:
        read: Callable[[Any], Any] = getattr(gradient_statistics, name)

        def counted(tensors: Any) -> Any:
            found.append(len(tensors))
            return read(tensors)

        monkeypatch.setattr(gradient_statistics, name, counted)

    count("tensor_norms")
    count("stack_foreach_norms")
    return found


@pytest.mark.parametrize("limit", [0.1, 100.0], ids=["above", "below"])
def test_clipped_gradients_are_read_only_every_tenth_step(
    tmp_path: Path, readings: list[int], limit: float
) -> None:
    steps, got = trained(tmp_path / "a.flextrace", nothing, limit=limit)
    assert [steps[at].total_norm for at in range(STEPS)] == pytest.approx(got, rel=1e-5)
    assert readings == [4, 4]
    assert all(len(steps[at].group_norms) == 2 for at in steps)


@pytest.mark.parametrize("change", [doubled, doubled_in_secret, replaced, accumulated])
def test_gradients_that_changed_after_clipping_are_recorded_as_they_are(
    tmp_path: Path, change: Change
) -> None:
    steps, got = trained(tmp_path / "a.flextrace", change)
    assert [steps[at].total_norm for at in range(STEPS)] == pytest.approx(got, rel=1e-5)


def test_what_a_scaler_divides_after_clipping_is_recorded_as_divided(tmp_path: Path) -> None:
    steps, got = trained(tmp_path / "a.flextrace", nothing, Scaled)
    assert [steps[at].total_norm for at in range(STEPS)] == pytest.approx(got, rel=1e-5)


def test_a_nan_put_in_after_clipping_is_found_in_its_step(tmp_path: Path) -> None:
    steps, _ = trained(tmp_path / "a.flextrace", set_nonfinite)
    assert min(at for at in steps if steps[at].n_nonfinite) == 5
    producer = steps[5].anomaly_origin
    assert producer is not None
    assert (producer.kind, producer.name) == ("backward", "2.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_norm_from_clipping_is_bit_equal_while_observed(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = nn.Linear(3, 3)
    others = [nn.Parameter(torch.zeros(size, 7, dtype=dtype)) for size in (1, 33, 4096)]
    for one in others:
        one.grad = torch.randn(one.shape).to(dtype)
    mixed = [*others, nn.Parameter(torch.zeros(2))]
    mixed[-1].grad = torch.ones(2)
    kinds = [(others, 2.0), (others, 1.0), (mixed, 2), ([], 2.0), (others, math.inf)]
    before = [clip_grad_norm_(each, math.inf, kind) for each, kind in kinds]
    with watch_training(model, out=tmp_path / "a.flextrace", quiet=True):
        after = [clip_grad_norm_(each, math.inf, kind) for each, kind in kinds]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_a_torch_with_other_clipping_functions_is_supported_without_them(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_calls, "_CLIPPING", ("_get_total_norm", "gone_in_a_later_torch"))
    untouched = clip_grad._get_total_norm
    steps, got = trained(tmp_path / "a.flextrace", nothing)
    assert [steps[at].total_norm for at in range(STEPS)] == pytest.approx(got, rel=1e-5)
    assert len(readings) == STEPS
    assert clip_grad._get_total_norm is untouched


def test_norms_from_clipping_a_large_gradient_are_used() -> None:
    torch.manual_seed(0)
    grad = torch.randn(30_000_000) * 1e-3  # where torch's norms in float32 are off by 0.2 %
    before = torch_calls.measure_clipping([grad], 2.0, None)
    assert before is not None
    clipped = replace(before, max_norm=1e9, versions=[grad._version])
    source = torch_calls.NormSource()
    (checked,) = source.norms(0, clipped, [grad])
    grad.data.zero_()  # what torch does not count: the next step does not look
    assert source.norms(1, clipped, [grad]) == pytest.approx([checked])
