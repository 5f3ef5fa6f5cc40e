"""Small networks with training problems: the first bad step, parameter and origin are found."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from support.nets import Log, mlp, squares, the, trained
from torch import Tensor, nn

from flexinspect.records.finding import Severity
from flexinspect.rules.training.training_steps import is_spike
from flexinspect_hooks.training.watch_training import watch_training


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.flextrace"


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_a_bad_learning_rate_explodes_first_and_then_is_nan(path: Path, level: str) -> None:
    model = mlp(8, 16, 1, activation=nn.ReLU)
    found, steps = trained(path, model, rate=30.0, level=level)
    first = next(n for n, step in steps.items() if step.n_exploding)
    explosion = the(found, "training.explosion")
    assert (explosion.step, explosion.evidence["name"]) == (first, "2.bias")
    first_nonfinite = next(n for n, step in steps.items() if not math.isfinite(step.loss))
    loss = the(found, "training.loss-nan")
    assert loss.step == first_nonfinite > first
    assert loss.times == len(steps) - first_nonfinite
    assert f"gradients explode from step {first} on, first 2.bias" in loss.sentence
    assert the(found, "training.learning-rate").severity is Severity.NOTE


def test_a_bad_initialisation_explodes_in_the_first_step(path: Path) -> None:
    model = mlp(8, 16, 16, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    found, _ = trained(path, model, rate=1e-3, steps=2)
    finding = the(found, "training.explosion")
    assert finding.step == 0
    assert finding.evidence["name"].startswith("4.")
    assert finding.evidence["carriers"] > 0


def test_an_explosion_of_the_only_step_is_found_at_the_end(path: Path) -> None:
    model = mlp(8, 16, 16, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    found, _ = trained(path, model, rate=1e-3, steps=1)
    assert the(found, "training.explosion").step == 0


def test_large_gradients_of_a_large_loss_that_falls_are_no_finding(path: Path) -> None:
    def sum_of_squares(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return 1e5 * (model(x) - y).square().sum()

    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-10)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for step in range(12):
            optimizer.zero_grad()
            sum_of_squares(model, x, y, step).backward()
            optimizer.step()
    assert [one for one in trace.findings() if one.id.startswith("training.")] == []
    assert trace.summary.anomaly_steps == trace.summary.gradient_explosions == 0


def test_weights_that_are_nan_from_the_start_are_the_producer(path: Path) -> None:
    model = mlp(8, 16, 16, 1)
    with torch.no_grad():
        model[2].weight[3, 4] = math.nan
    found, _ = trained(path, model, steps=2)
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.evidence["anomaly_origin"]) == (0, "weights")
    assert finding.evidence["name"] == "2.weight"
    assert "the weights 2.weight are not finite before the step" in finding.sentence


def test_a_signal_lost_on_the_way_back_vanishes(path: Path) -> None:
    model = mlp(8, *([16] * 14), 1, activation=nn.Sigmoid)
    found, steps = trained(path, model, steps=3)
    finding = the(found, "training.vanishing")
    assert finding.step == 0
    assert finding.evidence["name"] == "0.weight"
    assert float(finding.evidence["detail"]) < 1e-6
    assert steps[0].n_vanishing == finding.evidence["carriers"] + 1


def test_a_log_of_zero_within_the_model_is_named(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), Log(), nn.Linear(4, 1))
    found, _ = trained(path, model, steps=2)
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.evidence["anomaly_origin"]) == (0, "module")
    assert (finding.evidence["name"], finding.evidence["carriers"]) == ("2", 1)


def log_of_zero(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    out = model(x)
    return -(torch.relu(out) if step == 4 else torch.sigmoid(out)).log().mean()


def test_a_log_of_zero_in_the_loss_is_distinguished_from_the_model(path: Path) -> None:
    found, _ = trained(path, mlp(8, 16, 1), steps=5, loss_of=log_of_zero)
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.evidence["anomaly_origin"]) == (4, "loss")
    assert "the loss function produces it" in finding.sentence


def test_a_gradient_that_is_nan_under_a_finite_loss_is_named(path: Path) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        out = model(x)
        extra = (out * 0.0).sum().abs().sqrt() if step == 3 else 0.0
        return ((out - y) ** 2).mean() + extra

    found, steps = trained(path, mlp(8, 16, 1), steps=4, loss_of=loss_of)
    finding = the(found, "training.nan-gradient")
    assert finding.step == 3
    assert math.isfinite(steps[3].loss)
    assert finding.evidence["name"] == "2.bias"
    assert finding.evidence["carriers"] == 3
    assert "the incoming gradient is not" in finding.sentence


def test_a_loss_that_is_nan_through_the_weights_follows_from_the_gradient_before(
    path: Path,
) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        out = model(x)
        extra = (out * 0.0).sum().abs().sqrt() if step == 3 else 0.0
        return ((out - y) ** 2).mean() + extra

    found, _ = trained(path, mlp(8, 16, 1), steps=6, loss_of=loss_of)
    assert the(found, "training.nan-gradient").severity is Severity.ERROR
    finding = the(found, "training.loss-nan")
    assert (finding.step, finding.severity) == (4, Severity.NOTE)
    assert finding.sentence.endswith("This follows from training.nan-gradient of step 3.")
    assert finding.fix == "Fix training.nan-gradient: the update of step 3 broke the weights."


def test_an_output_beyond_float16_names_its_module(path: Path) -> None:
    model = mlp(8, 16, 16, 1, activation=nn.ReLU).half()
    with torch.no_grad():
        model[2].weight.fill_(6000.0)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return model((x * 20).half()).float().mean()

    found, _ = trained(path, model, steps=1, loss_of=loss_of)
    finding = the(found, "training.fp16-overflow")
    assert (finding.step, finding.evidence["name"]) == (0, "2")
    assert "may have overflowed" in finding.sentence  # 0 / 0 looks the same
    assert not [one for one in found if one.id == "training.loss-nan"]


def test_an_unused_unit_is_reported(path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 1), "spare": nn.Linear(8, 1)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    found, _ = trained(path, model, steps=2)
    finding = the(found, "training.dead-parameters")
    assert finding.severity is Severity.NOTE
    assert finding.evidence["names"] == ["spare.weight", "spare.bias"]


def test_units_that_never_fire_are_dead(path: Path) -> None:
    model = mlp(8, 16, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    found, _ = trained(path, model, steps=12)
    finding = the(found, "training.dead-parameters")
    assert finding.evidence["names"] == ["0.bias", "0.weight", "2.weight"]
    assert finding.step == 10


def test_a_jump_of_the_loss_is_a_spike(path: Path) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return squares(model, x, y + (100 if step == 30 else 0), step)

    found, steps = trained(path, mlp(8, 16, 1), steps=31, loss_of=loss_of, rate=1e-3)
    finding = the(found, "training.loss-spike")
    assert finding.step == 30
    assert finding.evidence["loss"] == steps[30].loss > 1000


def test_widely_scattered_losses_of_small_batches_are_not_spikes() -> None:
    scattered = [0.01 * 10 ** (step % 7 / 3) for step in range(50)]
    assert not is_spike(10.0, scattered, first=0.7)
    assert is_spike(1e6, scattered, first=0.7)
    assert is_spike(0.3, [0.01 + step % 7 / 1e4 for step in range(50)], first=0.7)
    assert is_spike(50.0, [step % 7 - 3.0 for step in range(50)], first=0.7)


@pytest.mark.parametrize("level", ["basic", "extreme"])
def test_a_correct_run_of_500_steps_has_no_finding(path: Path, level: str) -> None:
    found, steps = trained(path, mlp(8, 32, 32, 1), steps=500, level=level)
    assert found == []
    assert len(steps) == 500
    assert steps[499].loss < steps[0].loss / 2
    assert not any(step.is_anomaly for step in steps.values())


def test_small_batches_with_momentum_and_warm_up_have_no_finding(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 20, 1.0))
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(150):
            labels = torch.randint(0, 2, (8,))
            images = torch.randn(8, 1, 12, 12) + labels.view(-1, 1, 1, 1) / 2
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            trace.step(loss=loss)
    assert trace.findings() == []


def test_a_scaler_that_never_steps_is_reported(path: Path) -> None:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x = torch.randn(4, 8)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for step in range(8):
            loss = (model(x) ** 2).mean() * (1.0 if step < 2 else 1e37)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.step(loss=loss)
    with trace.reader() as reader:
        found, steps = reader.findings(), reader.training_steps(0)
    assert [steps[n].is_skipped for n in range(8)] == [False, False, *[True] * 6]
    assert (steps[0].scale, steps[7].scale) == (65536.0, 65536.0 / 2**5)
    finding = the(found, "training.scaler-skips")
    assert (finding.step, finding.evidence["in_a_row"]) == (6, 5)
    assert steps[6].anomaly_origin is not None
    assert steps[6].anomaly_origin.name in finding.sentence
    assert not [one for one in found if one.id == "training.nan-gradient"]


def test_waiting_for_the_loader_is_reported(path: Path) -> None:
    def loader() -> Any:
        for _ in range(40):
            Event().wait(0.012)
            yield torch.randn(4, 8)

    model = mlp(8, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for x in trace.batches(loader()):
            loss = (model(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.step(loss=loss)
    finding = the(trace.findings(), "training.loader-bound")
    assert finding.severity is Severity.WARNING
    assert finding.evidence["ms"] >= 12
    with trace.reader() as reader:
        waits = [step.data_ms for step in reader.training_steps(0).values()]
    assert len(waits) == 40
    assert all(wait is not None and wait >= 10 for wait in waits)


class Adapter(nn.Module):
    """A product of two small matrices, of which the second begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, 8) * 0.01)
        self.up = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("rises", [True, False])
def test_an_adapter_that_begins_at_zero_vanishes_only_once_the_rate_has_risen(
    path: Path, rises: bool
) -> None:
    torch.manual_seed(0)
    model = Adapter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 100 if rises else 1e-3)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            warm_up.step()
    found = [one.id for one in trace.findings()]
    assert ("training.vanishing" in found) is not rises
    assert (trace.summary.gradient_vanishing == 0) is rises
