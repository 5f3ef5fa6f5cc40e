"""What must hold in any training is checked: a failure is named, and its clean twin is silent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flexinspect.records.finding import Finding, Severity
from flexinspect_hooks.training.batch_values import batch_values
from flexinspect_hooks.training.loss_checks import check_loss_inputs
from flexinspect_hooks.training.model_checks import check_rows, check_tied_weights
from flexinspect_hooks.training.watch_training import watch_training

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
Body = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Net(nn.Module):
    """Two layers with batch norm and dropout."""

    def __init__(self, *, always_drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.always_drops = always_drops

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        hidden = functional.dropout(hidden, 0.1, self.training or self.always_drops)
        out: Tensor = self.head(hidden)
        return out


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    functional.mse_loss(model(X), Y).backward()
    optimizer.step()


def found(
    path: Path, model: nn.Module, optimizer: Any = None, body: Body = step, *, steps: int = 4
) -> list[Finding]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with watch_training(model, optimizer, out=path / "a.flextrace", quiet=True) as trace:
        for number in range(steps):
            body(model, optimizer, number)
    return [one for one in trace.findings() if one.id != "training.loader-bound"]


def the_only(findings: list[Finding], id_: str) -> Finding:
    (one,) = findings
    assert one.id == id_
    return one


def test_a_healthy_loop_has_no_finding(tmp_path: Path) -> None:
    assert found(tmp_path, Net(), steps=20) == []


# -- the optimizer ---------------------------------------------------------------------------------


def test_an_optimizer_of_frozen_parameters_is_an_error(tmp_path: Path) -> None:
    model = Net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.first.parameters())
    one = the_only(found(tmp_path, model, optimizer), "training.optimizer-parameters")
    assert (one.severity, one.step) == (Severity.ERROR, 0)
    assert "first norm.weight, and no optimizer holds them" in one.sentence


def test_a_layer_that_was_replaced_is_missed_and_stale(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.head = nn.Linear(8, 1)
    one = the_only(found(tmp_path, model, optimizer), "training.optimizer-parameters")
    assert one.severity is Severity.ERROR
    assert "holds 2 parameters that the model no longer has" in one.sentence
    assert one.evidence["names"] == ["head.weight", "head.bias"]


def test_a_whole_part_that_no_optimizer_holds_is_a_note(tmp_path: Path) -> None:
    model = Net()
    one = the_only(
        found(tmp_path, model, torch.optim.SGD(model.head.parameters(), lr=0.01)),
        "training.optimizer-parameters",
    )
    assert one.severity is Severity.NOTE
    model = Net()
    weights = torch.optim.SGD([model.first.weight, model.norm.weight, model.head.weight], lr=0.01)
    (tmp_path / "b").mkdir()
    one = the_only(found(tmp_path / "b", model, weights), "training.optimizer-parameters")
    assert one.severity is Severity.WARNING
    assert one.evidence["names"] == ["first.bias", "norm.bias", "head.bias"]


def test_a_head_that_no_optimizer_holds_is_a_warning(tmp_path: Path) -> None:
    model = Net()
    others = [*model.first.parameters(), *model.norm.parameters()]
    one = the_only(
        found(tmp_path, model, torch.optim.SGD(others, lr=0.01)), "training.optimizer-parameters"
    )
    assert one.severity is Severity.WARNING
    assert one.evidence["names"] == ["head.weight", "head.bias"]
    assert "as if a head had been left out" in one.sentence


def test_two_optimizers_share_a_model(tmp_path: Path) -> None:
    model = Net()
    head = torch.optim.SGD(model.head.parameters(), lr=0.01)
    rest = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.01)

    def both(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        rest.zero_grad()
        step(model, optimizer, number)
        rest.step()

    assert found(tmp_path, model, head, both) == []


@pytest.mark.parametrize("way", ["none", "zero", "data", "by hand"])
def test_gradients_that_are_cleared_in_any_way_are_no_finding(tmp_path: Path, way: str) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for one in model.parameters():
            if way == "data" and one.grad is not None:
                one.grad.data.zero_()
            elif way == "by hand":
                one.grad = None
        if way in ("none", "zero"):
            optimizer.zero_grad(set_to_none=way == "none")
        for part in X.chunk(2):  # two backward passes of one step
            model(part).square().mean().backward()
        optimizer.step()

    assert found(tmp_path, Net(), body=body, steps=6) == []


def test_gradients_that_are_never_cleared_are_named_in_the_second_step(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        functional.mse_loss(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    one = the_only(found(tmp_path, Net(), body=body), "training.gradients-not-cleared")
    assert one.step == 1


class Idle(torch.optim.SGD):
    """Does nothing after its second step."""

    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        return None if self.n > 2 else super().step(closure)


class ThroughData(torch.optim.SGD):
    """Updates `.data`, whose version does not count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(one.grad.data, alpha=-0.01)


def test_an_optimizer_that_does_nothing_is_named(tmp_path: Path) -> None:
    model = Net()
    one = the_only(found(tmp_path, model, Idle(model.parameters(), lr=0.01)), "training.no-update")
    assert one.step == 3
    assert "Step 3 of Idle changed none" in one.sentence


@pytest.mark.parametrize("rate", [0.01, 0.0])
def test_updates_that_versions_do_not_show_are_seen(tmp_path: Path, rate: float) -> None:
    model = Net()
    kind = ThroughData if rate else Idle
    assert found(tmp_path, model, kind(model.parameters(), lr=rate), steps=6) == []


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_an_optimizer_that_holds_a_parameter_twice_is_named(tmp_path: Path) -> None:
    model = Net()
    twice = [*model.parameters(), model.head.weight]
    one = the_only(
        found(tmp_path, model, torch.optim.SGD(twice, lr=0.01)), "training.optimizer-parameters"
    )
    assert (one.severity, one.evidence["names"]) == (Severity.WARNING, ["head.weight"])


@pytest.mark.parametrize("at", [0, 3])
def test_weights_that_something_else_changes_between_two_steps_are_a_note(
    tmp_path: Path, at: int
) -> None:
    model = Net()

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == at:
            nn.init.ones_(model.head.weight)
        step(model, optimizer, number)

    found_here = found(tmp_path, model, body=body, steps=5)
    if at == 0:
        assert found_here == []  # before the first step weights may be loaded
        return
    one = the_only(found_here, "training.changed-outside")
    assert (one.severity, one.step, one.evidence["names"]) == (Severity.NOTE, 3, ["head.weight"])


@pytest.mark.parametrize("is_held_twice", [False, True])
def test_the_objects_of_the_process_are_searched_once_however_often_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held_twice: bool
) -> None:
    model, n_searches = Net(), list[int]()
    other = torch.optim.SGD(model.parameters(), lr=0.001) if is_held_twice else None
    search = gc.get_objects

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        step(model, optimizer, number)
        with torch.no_grad():
            for one in model.parameters():
                one.clamp_(-0.5, 0.5)
        if number == 0:  # the checks before the first step look for other optimizers, too
            monkeypatch.setattr(gc, "get_objects", lambda of: n_searches.append(1) or search(of))

    found_here = found(tmp_path, model, body=body, steps=12)
    assert len(n_searches) == 1
    assert [one.id for one in found_here] == ["training.changed-outside"] * (other is None)


# -- a step ----------------------------------------------------------------------------------------


def test_a_gradient_that_is_lost_in_one_step_is_named(tmp_path: Path) -> None:
    model = Net()
    lost = False
    model.first.bias.requires_grad_(True)
    model.head.bias.register_hook(lambda grad: torch.zeros_like(grad) if lost else grad)

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        nonlocal lost
        lost = number == 3
        step(model, optimizer, number)

    one = the_only(found(tmp_path, model, body=body, steps=5), "training.lost-gradient")
    assert (one.step, one.evidence["names"]) == (3, ["head.bias"])


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_before_the_optimizer_is_named(tmp_path: Path) -> None:
    for first in (True, False):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def body(
            model: nn.Module,
            optimizer: torch.optim.Optimizer,
            number: int,
            scheduler: Any = scheduler,
            first: bool = first,
        ) -> None:
            if first:
                scheduler.step()
            step(model, optimizer, number)
            if not first:
                scheduler.step()

        folder = tmp_path / str(first)
        folder.mkdir()
        ids = [one.id for one in found(folder, model, optimizer, body)]
        assert ids == ["training.call-order"] * first


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_before_unscaling_is_named(tmp_path: Path, unscales: bool) -> None:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(functional.mse_loss(model(X), Y)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    ids = [one.id for one in found(tmp_path, Net(), body=body)]
    assert ids == ["training.call-order"] * (not unscales)


# -- modes -----------------------------------------------------------------------------------------


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model.eval()
    with torch.no_grad():
        functional.mse_loss(model(X), Y)
    model.train()
    step(model, optimizer, number)


def test_dropout_in_evaluation_names_its_module(tmp_path: Path) -> None:
    assert found(tmp_path, Net(), body=evaluated) == []
    (tmp_path / "b").mkdir()
    model = nn.Sequential(nn.Linear(8, 8), Net(always_drops=True))
    one = the_only(found(tmp_path / "b", model, body=evaluated), "training.dropout-in-evaluation")
    assert "but 1 (Net) calls dropout with p = 0.1: it does not look at its mode" in one.sentence
    assert functional.dropout.__module__ == "torch.nn.functional"
    assert not hasattr(functional.dropout, "__wrapped__")


def test_a_batch_norm_in_training_mode_is_named(tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.eval()
        model.norm.train()
        with torch.no_grad():
            model(X)
        model.train()
        step(model, optimizer, number)

    one = the_only(found(tmp_path, Net(), body=body), "training.wrong-mode")
    assert "1 batch norm in training mode, first norm" in one.sentence


def test_a_model_that_stays_in_evaluation_mode_is_named(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        step(model, optimizer, number)
        if number == 1:
            model.eval()

    one = the_only(found(tmp_path, Net(), body=body), "training.wrong-mode")
    assert one.step == 2
    (tmp_path / "b").mkdir()
    assert found(tmp_path / "b", Net().eval()) == []


def test_evaluations_are_events_with_their_loss(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch_training(model, optimizer, out=tmp_path / "a.flextrace", quiet=True) as trace:
        for number in range(3):
            step(model, optimizer, number)
        model.eval()
        with torch.no_grad():
            losses = [functional.mse_loss(model(part), torch.ones(4, 1)) for part in X.chunk(4)]
    with trace.reader() as reader:
        (event,) = [row.event for row in reader.events() if row.event.kind == "evaluation"]
    assert (event.data["n"], event.data["n_in_evaluation_mode"]) == (4, 4)
    assert event.data["loss"] == pytest.approx(float(torch.stack(losses).mean()))


def test_an_evaluation_loss_far_above_the_training_is_named(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.eval()
        with torch.no_grad():
            functional.mse_loss(model(X) * (1e4 if number == 2 else 1), Y)
        model.train()
        step(model, optimizer, number)

    one = the_only(found(tmp_path, Net(), body=body), "training.evaluation-loss")
    assert one.step == 2


# -- models and batches ----------------------------------------------------------------------------


def test_frozen_stages_that_train_are_named(tmp_path: Path) -> None:
    model: Any = Net()
    model.frozen_stages = 1
    one = the_only(found(tmp_path, model), "training.frozen-trains")
    assert "frozen_stages = 1" in one.sentence
    model.first.requires_grad_(False)
    (tmp_path / "b").mkdir()
    held = [one for one in model.parameters() if one.requires_grad]
    assert found(tmp_path / "b", model, torch.optim.SGD(held, lr=0.01)) == []


def test_autocast_that_passes_over_a_layer_is_named(tmp_path: Path) -> None:
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X).float().square().mean()
        loss.backward()
        optimizer.step()

    for kind in (Wide, nn.Linear):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 1))
        folder = tmp_path / kind.__name__
        folder.mkdir()
        findings = found(folder, model, body=body)
        assert [one.evidence["names"] for one in findings] == [["2"]] * (kind is Wide)


def test_a_misspelt_attribute_freezes_nothing(tmp_path: Path) -> None:
    model = Net()
    for one in model.first.parameters():
        one.require_grad = False  # type: ignore[attr-defined]
    finding = the_only(found(tmp_path, model), "training.frozen-trains")
    assert "first.weight has an attribute require_grad = False" in finding.sentence


@pytest.mark.parametrize("clears", [True, False])
def test_frozen_parameters_that_keep_a_gradient_are_named(tmp_path: Path, clears: bool) -> None:
    def freeze(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 2:
            model.head.requires_grad_(False)
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = None if clears or one.requires_grad else one.grad
        functional.mse_loss(model(X), Y).backward()
        optimizer.step()

    findings = found(tmp_path, Net(), body=freeze)
    assert [one.id for one in findings] == ["training.frozen-trains"] * (not clears)
    assert all("2 parameters of the optimizer were frozen" in one.sentence for one in findings)


@pytest.mark.parametrize("is_detached", [True, False])
def test_an_optimizer_that_gets_no_gradient_is_named(tmp_path: Path, is_detached: bool) -> None:
    def detached(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(X), Y)
        if is_detached or number < 1:  # one step without a gradient silences schedulers
            loss = loss.detach().requires_grad_()
        loss.backward()
        optimizer.step()

    ids = [one.id for one in found(tmp_path, Net(), body=detached)]
    assert ids == ["training.optimizer-parameters"] * is_detached


@pytest.mark.parametrize("is_once", [True, False])
def test_an_iterator_that_is_made_in_the_loop_is_named(tmp_path: Path, is_once: bool) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    other = DataLoader(TensorDataset(X + 1, Y), batch_size=4)
    batches = iter(loader)

    def restart(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = next(batches) if is_once else next(iter(loader))
        if is_once:
            next(iter(other))  # as a look at samples does
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    findings = found(tmp_path, Net(), body=restart)
    assert [one.id for one in findings] == ["training.repeated-batch"] * (not is_once)
    assert all((one.severity, one.step) == (Severity.WARNING, 2) for one in findings)


@pytest.mark.parametrize("evaluates", [True, False])
def test_losses_of_an_evaluation_in_training_mode_are_named(
    tmp_path: Path, evaluates: bool
) -> None:
    def validate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        step(model, optimizer, number)
        with torch.no_grad():
            model.train(not evaluates)
            for _ in range(2):
                functional.mse_loss(model(X), Y)
            model.train()

    ids = [one.id for one in found(tmp_path, Net(), body=validate)]
    assert ids == ["training.wrong-mode"] * (not evaluates)


@pytest.mark.parametrize("value", [0.0, None])
def test_constant_inputs_are_named(tmp_path: Path, value: float | None) -> None:
    x = X if value is None else torch.full_like(X, value)

    def constant(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(x), Y).backward()
        optimizer.step()

    ids = {one.id for one in found(tmp_path, Net(), body=constant)}
    assert ("training.constant-inputs" in ids) == (value is not None)


SCORES = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 0, 1, -100])


@pytest.mark.parametrize(
    ("name", "args", "check"),
    [
        ("cross_entropy", (SCORES, LABELS), None),
        ("cross_entropy", (SCORES, torch.full((6,), -100)), None),
        ("cross_entropy", (SCORES, SCORES.softmax(1)), None),
        ("cross_entropy", (torch.zeros(6, 3), LABELS), None),
        ("cross_entropy", (SCORES.log_softmax(1), LABELS), None),
        ("cross_entropy", (SCORES.softmax(1), LABELS), "loss-of-probabilities"),
        ("cross_entropy", (SCORES.softmax(0), LABELS), "loss-of-probabilities"),
        ("cross_entropy", (SCORES, LABELS + 1), "labels-out-of-range"),
        ("nll_loss", (SCORES.log_softmax(1), LABELS), None),
        ("nll_loss", (SCORES, LABELS), "loss-of-scores"),
        ("binary_cross_entropy_with_logits", (SCORES, SCORES.sigmoid()), None),
        ("binary_cross_entropy_with_logits", (SCORES, SCORES.abs() + 1), "labels-out-of-range"),
        ("mse_loss", (SCORES, SCORES), None),
        ("mse_loss", (SCORES, torch.tensor(1.0)), None),
        ("mse_loss", (SCORES[:, :1], SCORES[:, 0]), "loss-of-sizes"),
    ],
)
def test_arguments_of_losses_are_checked(name: str, args: Any, check: str | None) -> None:
    failures = check_loss_inputs(name, args, {})
    assert [one for one, _, _ in failures] == ([] if check is None else [check])


def test_rows_of_named_inputs_are_compared() -> None:
    ids, images = torch.zeros(1, 5, dtype=torch.long), torch.zeros(50, 3, 4, 4)
    ((check, text, _),) = check_rows({"input_ids": ids, "pixel_values": images})
    assert check == "rows-differ"
    assert "input_ids 1, pixel_values 50" in text
    assert check_rows({"input_ids": ids.expand(50, 5), "pixel_values": images, "x": 3}) == []


def test_embeddings_that_came_apart_are_named() -> None:
    class Tied(nn.Module):
        config = type("Config", (), {"tie_word_embeddings": True})()

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
            self.last.weight = self.first.weight

        def get_input_embeddings(self) -> nn.Module:
            return self.first

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    model = Tied()
    assert check_tied_weights(model) == []
    model.last.weight = nn.Parameter(model.first.weight.detach().clone())
    assert [one[0] for one in check_tied_weights(model)] == ["untied-weights"]


def test_equal_batches_have_equal_keys_unless_their_values_tell_nothing() -> None:
    batch = (torch.randn(4, 3), torch.arange(4))
    values, is_telling = batch_values(batch)
    assert is_telling
    assert values == batch_values([one.clone() for one in batch])[0]
    assert values != batch_values((batch[0] + 1e-3, batch[1]))[0]
    for unclear in (torch.zeros(4, 3), torch.arange(4), {"x": torch.randn(1, 3)}):
        assert not batch_values(unclear)[1]
