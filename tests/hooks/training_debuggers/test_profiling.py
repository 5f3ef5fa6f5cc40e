"""`profile_model_performance`: the requested batches are profiled, exported and summarised."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect import DebugSwitches, TrainingLoop, profile_model_performance
from flexinspect.core.errors import UsageError

N_BATCH, N_IN, N_OUT = 16, 64, 32


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(N_IN, N_OUT, bias=False)


def batches(n: int) -> list[torch.Tensor]:
    return [torch.ones(N_BATCH, N_IN) for _ in range(n)]


def test_the_first_two_batches_are_not_profiled_and_the_next_are(
    model: nn.Module, tmp_path: Path
) -> None:
    seen = []
    summary = profile_model_performance(
        batches(30), 4, step=lambda batch: seen.append(model(batch)), folder=tmp_path
    )
    assert len(seen) == 1 + 1 + 4
    assert summary.batches == len(summary.batch_ms) == 4
    assert next(cost.calls for cost in summary.operators if cost.name == "aten::mm") == 4


def test_flops_are_those_of_the_products(model: nn.Module, tmp_path: Path) -> None:
    summary = profile_model_performance(batches(9), 5, step=model, folder=tmp_path)
    assert summary.flops == 5 * 2 * N_BATCH * N_IN * N_OUT
    assert summary["flops"] == summary.flops


def test_the_trace_is_exported_for_tensorboard_with_shapes(
    model: nn.Module, tmp_path: Path
) -> None:
    folder = tmp_path / "logs" / "profiler"
    summary = profile_model_performance(batches(9), 5, step=model, folder=folder)
    (file,) = summary.files
    assert Path(file).parent == folder
    assert file.endswith(".pt.trace.json")
    events = json.loads(Path(file).read_text("utf-8"))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == 5
    assert products[0]["args"]["Input Dims"] == [[N_BATCH, N_IN], [N_IN, N_OUT]]


def test_without_a_folder_nothing_is_written(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = profile_model_performance(batches(5), 1, step=model, folder=None)
    assert summary.files == ()
    assert list(tmp_path.iterdir()) == []


def test_operators_are_sorted_by_cost_with_shares_of_one(model: nn.Module) -> None:
    def step(batch: torch.Tensor) -> None:
        with torch.profiler.record_function("my part"):
            model(batch).sum().backward()

    summary = profile_model_performance(batches(9), 5, step=step, folder=None, scopes=["my part"])
    shares = [cost.share for cost in summary.operators]
    assert shares[:15] == sorted(shares[:15], reverse=True)
    assert 0.5 < sum(shares) <= 1.000001
    assert next(cost.calls for cost in summary.operators if cost.name == "my part") == 5
    assert not any(".py(" in cost.name for cost in summary.operators)
    assert summary.cpu_ms == pytest.approx(
        sum(cost.self_cpu_ms for cost in summary.operators) / sum(shares)
    )


def test_a_dominant_product_is_reported() -> None:
    model = nn.Linear(800, 800, bias=False)
    data = [torch.ones(800, 800) for _ in range(5)]
    summary = profile_model_performance(data, 3, step=model, folder=None)
    assert any(sentence.startswith("aten::mm takes ") for sentence in summary.advice)


def test_fewer_batches_than_asked_are_all_profiled(model: nn.Module) -> None:
    summary = profile_model_performance(batches(5), 10, step=model, folder=None)
    assert summary.batches == 3


@pytest.mark.parametrize(
    ("n", "num_batches", "message"),
    [(2, 10, "has 2 batches, but profiling needs at least 3"), (9, 0, "1 or more")],
)
def test_invalid_arguments_are_refused(
    model: nn.Module, n: int, num_batches: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        profile_model_performance(batches(n), num_batches, step=model, folder=None)


def test_a_folder_that_cannot_be_made_is_one_sentence(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be created"):
        profile_model_performance(batches(5), 1, step=model, folder=tmp_path / "file")


def test_the_loop_profiles_forward_and_backward_and_keeps_the_weights(
    model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop: Any = TrainingLoop(model, optimizer, nn.functional.mse_loss, switches=DebugSwitches())
    before = model.weight.detach().clone()
    data = [(batch, torch.zeros(N_BATCH, N_OUT)) for batch in batches(6)]
    summary = loop.profile_model_performance(data, num_batches=2, folder=tmp_path)
    assert summary.batches == 2
    assert any("Backward" in cost.name for cost in summary.operators)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_the_defaults_are_those_of_the_specification() -> None:
    for function in (profile_model_performance, TrainingLoop.profile_model_performance):
        parameters = inspect.signature(function).parameters
        assert parameters["num_batches"].default == 10
        assert parameters["folder"].default == "./logs/profiler"
    parameters = inspect.signature(profile_model_performance).parameters
    for name in ("record_shapes", "with_stack", "profile_memory", "with_flops"):
        assert parameters[name].default is True
