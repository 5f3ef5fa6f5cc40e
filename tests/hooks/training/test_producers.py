"""The origin of NaN and Inf: the batch, weights, a module or the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.nets import Log, mlp, on_an_accelerator, squares, the, trained
from torch import Tensor, nn

from flexinspect_hooks.training import forward_passes
from flexinspect_hooks.training.watch_training import watch_training


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.flextrace"


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_on_an_accelerator_the_producer_is_found_when_the_step_is_measured(
    path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_accelerator(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), Log(), nn.Linear(4, 1))
    found, _ = trained(path, model, steps=2, level=level)
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.evidence["anomaly_origin"], finding.evidence["name"]) == (
        *(0, "module"),
        "2",
    )
    assert finding.sentence == (
        "The loss of step 0 is NaN: module 2 (Log) is the first whose output is not finite "
        "(float32); its weights are finite. 1 other module passes it on."
    )
    nonfinite = mlp(8, 16, 16, 1)
    with torch.no_grad():
        nonfinite[2].weight[3, 4] = math.nan
    found, _ = trained(path.with_name("b.flextrace"), nonfinite, steps=2, level=level)
    assert the(found, "training.loss-nan").evidence["name"] == "2.weight"


def test_on_an_accelerator_large_values_and_empty_outputs_are_not_anomalies(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_accelerator(monkeypatch)

    class Large(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1e30, x[:0]

    class First(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return x[0] * 1e-30

    model = nn.Sequential(nn.Linear(8, 8), Large(), First(), Log(), nn.Linear(8, 1))
    found, _ = trained(path, model, steps=1)
    assert the(found, "training.loss-nan").evidence["name"] == "3"


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_weights_that_the_update_made_nan_are_not_the_origin(
    path: Path, has_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LogLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * 0).log()

    on_an_accelerator(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), LogLinear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 8)

    def closure() -> float:
        loss = model(x).mean()
        loss.backward()
        return loss.item()

    with watch_training(model, optimizer if has_optimizer else None, out=path, quiet=True) as trace:
        trace.step(loss=optimizer.step(closure))
    finding = the(trace.findings(), "training.loss-nan")
    assert (finding.evidence["anomaly_origin"], finding.evidence["name"]) == ("module", "1")
    assert "(float32); its weights were looked at only after the update" in finding.sentence


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("has_loss", [False, True])
def test_every_output_is_checked_before_the_loss_is_named(
    path: Path, remote: bool, has_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            wide = self.head(x).repeat(1, 10_000)
            corrupted = wide.index_fill(1, torch.tensor([39_999]), math.nan)
            return {
                "first": wide,
                **({"loss": corrupted.mean()} if has_loss else {}),
                "last": corrupted,
            }

    if remote:
        on_an_accelerator(monkeypatch)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return model(x)["last"].mean()

    found, _ = trained(path, Pair(), steps=1, loss_of=loss_of)
    finding = the(found, "training.loss-nan")
    assert (finding.evidence["anomaly_origin"], finding.evidence["name"]) == ("module", "(output)")
    made = "Pair's own forward made the first NaN or Inf; the outputs of its modules were finite"
    assert f"{made} (float32); its weights are finite" in finding.sentence


class Masked(nn.Module):
    """Sets values to -inf that softmax then turns into 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), -math.inf)


def test_on_an_accelerator_a_mask_within_the_model_is_not_an_anomaly(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_accelerator(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), Masked(), nn.Softmax(-1), nn.Linear(8, 1))
    found, _ = trained(path, model, steps=2, level="advanced")
    assert not found


@pytest.mark.parametrize("remote", [False, True])
def test_a_nan_batch_has_the_batch_as_origin(
    path: Path, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remote:
        on_an_accelerator(monkeypatch)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return squares(model, x * math.nan if step == 2 else x, y, step)

    found, _ = trained(path, mlp(8, 16, 1), steps=3, loss_of=loss_of)
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.evidence["anomaly_origin"]) == (2, "input")


@pytest.mark.parametrize(("value", "kind"), [(0.0, "module"), (math.nan, "input")])
def test_a_float_mask_is_not_an_anomaly_of_the_batch(path: Path, value: float, kind: str) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), Log()])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.layers[1](-self.layers[0](x).abs())
            return torch.softmax(x @ x.T + mask, -1) @ x

    mask = nn.Transformer.generate_square_subsequent_mask(32)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return (model(x + value, mask) - y).square().mean()

    found, _ = trained(path, Attends(), steps=1, loss_of=loss_of)
    assert the(found, "training.loss-nan").evidence["anomaly_origin"] == kind


def test_statistics_that_wait_for_a_device_are_those_read_at_once() -> None:
    nonfinite = torch.tensor([1.0, math.nan, -math.inf, math.inf]).half()
    outs = [
        torch.randn(5, 7),
        nonfinite,
        torch.zeros(0),
        torch.randn(9).double(),
        torch.ones(3).long(),
    ]
    kept = [(str(number), nn.Identity(), (out,)) for number, out in enumerate(outs)]
    pending = forward_passes.pending_stats(kept, torch.device("cpu"))
    assert pending is not None
    there, here = pending(), forward_passes.output_stats(kept)
    assert [(one.layer, one.module, one.n_nan, one.n_inf) for one in there] == [
        *((0, "0", 0, 0), (1, "1", 1, 2), (2, "2", 0, 0), (3, "3", 0, 0))
    ]
    assert [there[0], there[3]] == [here[0], here[3]]
    assert (here[1].n_nan, here[1].n_inf, there[2].norm) == (1, 2, 0.0)
    assert all(math.isnan(one.max) for one in there[1:3])


def test_on_an_accelerator_a_forward_reads_nothing_at_any_level(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_an_accelerator(monkeypatch)
    read: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__"):
        was = getattr(Tensor, name)
        seen = lambda one, name=name, was=was: read.append(name) or was(one)  # noqa: E731
        monkeypatch.setattr(Tensor, name, seen)
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        read.clear()
        loss = model(torch.ones(4, 8)).mean()
        assert not read
        loss.backward()
        optimizer.step()
        assert "tolist" in read
    with trace.reader() as reader:
        assert [one.module for one in reader.layer_stats(0, 0)] == ["0", "1", "2"]


def test_nonfinite_weights_of_a_compiled_model_have_its_own_names(path: Path) -> None:
    model = mlp(8, 4, 1)
    with torch.no_grad():
        model[2].weight[0, 1] = math.nan
    compiled = torch.compile(model, backend="eager")
    found, _ = trained(path, compiled, steps=1)
    finding = the(found, "training.loss-nan")
    assert (finding.evidence["anomaly_origin"], finding.evidence["name"]) == ("weights", "2.weight")
