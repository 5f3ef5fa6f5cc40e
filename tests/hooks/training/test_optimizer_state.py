"""The state of an optimizer that does not build up is named; optimizers of any kind are silent."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import capture
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.training.gradient_statistics import trainable
from flexinspect_hooks.training.state_checks import StateCheck
from flexinspect_hooks.training.watch_training import watch_training

FINDING = "training.optimizer-state"
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[[nn.Module, Any, int], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> Tensor:
    return functional.mse_loss(model(X), X.sum(1, keepdim=True))


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def found(
    folder: Path, model: nn.Module, optimizer: Any, body: Body = step, *, steps: int = 14
) -> list[Finding]:
    with watch_training(model, optimizer, out=folder / "a.flextrace", quiet=True) as trace:
        for number in range(steps):
            body(model, optimizer, number)
    ignored = ("training.loader-bound", "training.learning-rate")
    return [one for one in trace.findings() if one.id not in ignored]


def the_only(findings: list[Finding], check: str) -> Finding:
    (one,) = [one for one in findings if one.id == FINDING]
    assert one.evidence["check"] == check
    assert len([o for o in findings if o.severity is not Severity.NOTE]) <= 1
    return one


# -- a state that starts anew ----------------------------------------------------------------------


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, **options)


@pytest.mark.parametrize(
    "make", [momentum, adam, lambda m: adam(m, foreach=True), lambda m: adam(m, fused=True)]
)
def test_a_state_that_the_program_empties_before_each_step_is_named(
    tmp_path: Path, make: Callable[[nn.Module], Optimizer]
) -> None:
    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.state.clear()
        step(model, optimizer)

    model = network()
    one = the_only(found(tmp_path, model, make(model), body), "state-restarts")
    assert (one.severity, one.step) == (Severity.WARNING, 3)
    assert "for 0.weight" in one.sentence
    assert "is emptied before each of the steps 1 to 3" in one.sentence


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_checkpoint_that_is_loaded_in_the_loop_is_named(
    tmp_path: Path, make: Callable[[nn.Module], Optimizer]
) -> None:
    model = network()
    optimizer = make(model)
    step(model, optimizer)
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)

    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        step(model, optimizer)

    one = the_only(found(tmp_path, model, optimizer, body), "state-restarts")
    assert one.severity is Severity.WARNING
    assert (one.step or 99) <= 6
    assert "goes back" in one.sentence


def test_a_checkpoint_of_model_and_optimizer_in_the_loop_is_a_note(tmp_path: Path) -> None:
    """Short trainings that begin at the same weights, one step each, do the same."""
    model = network()
    optimizer = adam(model)
    step(model, optimizer)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        step(model, optimizer)

    findings = found(tmp_path, model, optimizer, body)
    assert the_only(findings, "state-restarts").severity is Severity.NOTE
    assert {one.severity for one in findings} == {Severity.NOTE}


def test_moments_that_the_program_sets_to_zero_in_place_are_named(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
        step(model, optimizer)

    model = network()
    one = the_only(found(tmp_path, model, momentum(model), body), "state-restarts")
    assert "is set to 0 before each of the steps" in one.sentence


def test_a_state_that_is_lost_once_is_a_note_with_the_step(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 11:
            optimizer.state.clear()
        step(model, optimizer)

    model = network()
    one = the_only(found(tmp_path, model, adam(model), body), "state-lost")
    assert (one.severity, one.step) == (Severity.NOTE, 12)
    assert "between the steps 10 and 11" in one.sentence


# -- a step that does not change the state ---------------------------------------------------------


class OwnAdam(Optimizer):
    """An Adam by hand; `fault` is what is wrong with it."""

    def __init__(self, parameters: Any, fault: str = "", **options: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99), **options})
        self.fault = fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self._update(one, self.state[one], group)

    def _update(self, one: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(one), "v": torch.zeros_like(one)}
            if self.fault == "in place, then out":
                state["exp_avg"], state["exp_avg_sq"] = state.pop("m"), state.pop("v")
        names = ("m", "v") if "m" in state else ("exp_avg", "exp_avg_sq")
        m, v = (state[name] for name in names)
        if self.fault != "counter" or not state["step"]:
            state["step"] += 1
        (a, b), grad = group["betas"], one.grad
        assert grad is not None
        if self.fault == "out of place":
            m, v = m * a + grad * (1 - a), v * b + grad.square() * (1 - b)
        elif self.fault == "in place, then out":
            m, v = m.mul_(a) + grad * (1 - a), v.mul_(b) + grad.square() * (1 - b)
        else:
            m.mul_(a).add_(grad, alpha=1 - a)
            v.mul_(b).add_(grad.square(), alpha=1 - b)
        n = state["step"]
        update = m / (1 - a**n) / ((v / (1 - b**n)).sqrt() + 1e-8)
        one.data.add_(update, alpha=-group["lr"]) if self.fault == "data" else one.sub_(
            update * group["lr"]
        )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("out of place", "change 0.weight, and leave m and v in the state as before"),
        ("in place, then out", "exp_avg and exp_avg_sq of 0.weight and 5 other parameters"),
    ],
)
def test_moments_that_never_receive_their_update_are_named(
    tmp_path: Path, fault: str, words: str
) -> None:
    model = network()
    one = the_only(found(tmp_path, model, OwnAdam(model.parameters(), fault)), "state-still")
    assert one.severity is Severity.WARNING
    assert words in one.sentence


def test_a_count_that_stands_still_is_named(tmp_path: Path) -> None:
    class Forgetful(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for state in self.state.values():
                state["step"].fill_(1.0)
            return result

    model = network()
    one = the_only(found(tmp_path, model, Forgetful(model.parameters())), "state-counter")
    assert (one.severity, one.step) == (Severity.WARNING, 3)
    assert "Forgetful counts step 1 for 0.weight" in one.sentence
    model = network()
    (tmp_path / "b").mkdir()
    own = found(tmp_path / "b", model, OwnAdam(model.parameters(), "counter"))
    assert the_only(own, "state-counter").severity is Severity.NOTE


@pytest.mark.parametrize("left", ["a group", "a parameter"])
def test_a_parameter_that_steps_leave_out_is_named(tmp_path: Path, left: str) -> None:
    model = network()
    last = [model[4].weight, model[4].bias] if left == "a group" else [model[2].weight]

    class Partial(torch.optim.Adam):
        n = 0

        def step(self, closure: Any = None) -> Any:
            self.n += 1
            grads = [one.grad for one in last]
            if self.n > 2:
                for one in last:
                    one.grad = None
            result = super().step(closure)
            for one, grad in zip(last, grads, strict=True):
                one.grad = grad
            return result

    rest = [one for one in model.parameters() if all(one is not other for other in last)]
    groups = [{"params": rest}, {"params": last}]
    optimizer = Partial(groups if left == "a group" else model.parameters())
    one = the_only(found(tmp_path, model, optimizer), "state-left")
    assert one.severity is Severity.WARNING
    assert f"leave {'4.weight' if left == 'a group' else '2.weight'} and" in one.sentence


# -- an optimizer that is made anew ----------------------------------------------------------------

LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), torch.randn(16, 4)
def step(optimizer):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
REMADE = """
for _ in range(8):
    step(torch.optim.Adam(model.parameters(), lr=1e-3))
"""
NOT_REMADE = """
for _ in range(8):  # without a state, nothing is lost
    step(torch.optim.SGD(model.parameters(), lr=1e-3))
tasks = [torch.optim.Adam(model.parameters(), lr=1e-3) for _ in range(7)]
for _ in range(2):
    for optimizer in tasks:
        step(optimizer)
for number in range(7):  # an optimizer for each stage, with another rate
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 / (number + 1))
    step(optimizer)
    step(optimizer)
start = {name: one.clone() for name, one in model.state_dict().items()}
for _ in range(7):  # the first step of seven trainings
    model.load_state_dict(start)
    step(torch.optim.Adam(model.parameters(), lr=1e-3))
for _ in range(5):  # five trainings of three steps
    model.load_state_dict(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(optimizer)
"""
BY_EPOCH = """
for _ in range(6):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(optimizer)
"""


def _run(folder: Path, script: str) -> list[Finding]:
    file, out = folder / "train.py", folder / "t.flextrace"
    file.write_text(LOOP + script, "utf-8")
    done = capture(file, out)
    assert done.code == 0, done.err
    with open_trace(out) as reader:
        return reader.findings()


def test_an_optimizer_that_is_made_for_each_step_is_named_once(tmp_path: Path) -> None:
    one = the_only(_run(tmp_path, REMADE), "optimizer-remade")
    assert one.severity is Severity.WARNING
    assert "was made by a new Adam with the same parameters" in one.sentence


def test_an_optimizer_that_is_made_for_each_epoch_is_a_note(tmp_path: Path) -> None:
    one = the_only(_run(tmp_path, BY_EPOCH), "optimizer-remade")
    assert one.severity is Severity.NOTE
    assert "Adam is made anew after every 3 steps, with the same parameters and" in one.sentence


def test_several_optimizers_and_several_trainings_of_a_model_are_silent(tmp_path: Path) -> None:
    findings = _run(tmp_path, NOT_REMADE)
    assert [one for one in findings if one.id == FINDING] == []
    assert {one.severity for one in findings} <= {Severity.NOTE}


# -- programs without an error ---------------------------------------------------------------------


class Lion(Optimizer):
    """A count that it never needs stays 0, and a tensor that it only reads."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in (one for group in self.param_groups for one in group["params"]):
            if one.grad is None:
                continue
            state = self.state[one]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(one), "anchor": one.clone()}
            update = state["exp_avg"] * 0.9 + one.grad * 0.1
            one.sub_(update.sign() + 0.01 * (one - state["anchor"]), alpha=1e-3)
            state["exp_avg"].lerp_(one.grad, 0.01)


class Anchored(torch.optim.SGD):
    """Keeps initial weights in the state, which stay as they are."""

    def step(self, closure: Any = None) -> Any:
        for one in self.param_groups[0]["params"]:
            self.state[one].setdefault("anchor", one.detach().clone())
        return super().step(closure)


class Accumulating(torch.optim.Adam):
    """Steps with every third call only."""

    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        return super().step(closure) if self.n % 3 == 0 else None


class Replacing(OwnAdam):
    """Stores new tensors in place of the old ones."""

    def _update(self, one: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._update(one, state, group)
        state |= {name: state[name].clone() for name in ("m", "v")}


class Unversioned(Optimizer):
    """Writes parameters and moments through `.data`, as kernels of other packages do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in (one for group in self.param_groups for one in group["params"]):
            state = self.state[one]
            if not state:
                state["exp_avg"] = torch.zeros_like(one)
            state["exp_avg"].data.lerp_(one.grad, 0.1)
            one.data.add_(state["exp_avg"].sign(), alpha=-1e-3)


CLEAN: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "momentum": momentum,
    "foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, foreach=True),
    "dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=1.0),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, foreach=False),
    "no-first-moment": lambda m: torch.optim.Adam(m.parameters(), betas=(0.0, 0.9)),
    "rate-0": lambda m: torch.optim.Adam(m.parameters(), lr=0.0),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.1),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-4),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "own": lambda m: OwnAdam(m.parameters()),
    "through-data": lambda m: OwnAdam(m.parameters(), "data"),
    "unversioned": lambda m: Unversioned(m.parameters()),
    "replacing": lambda m: Replacing(m.parameters()),
    "lion": lambda m: Lion(m.parameters()),
    "anchored": lambda m: Anchored(m.parameters(), lr=0.01),
    "two-groups": lambda m: torch.optim.SGD(
        [
            {"params": m[0].parameters(), "momentum": 0.9},
            {"params": [*m[2].parameters(), *m[4].parameters()]},
        ],
        lr=0.01,
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_an_optimizer_that_works_is_silent(tmp_path: Path, name: str) -> None:
    model = network()
    assert found(tmp_path, model, CLEAN[name](model)) == []


def closure_step(model: nn.Module, optimizer: Any, number: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)


def freezes(model: nn.Module, optimizer: Any, number: int) -> None:
    model[0].requires_grad_(number < 5 or number > 8)
    step(model, optimizer)


def offloads(model: nn.Module, optimizer: Any, number: int) -> None:
    """Moves the moments away and back, as to a CPU, so that each step sees new tensors."""
    for state in optimizer.state.values():
        state |= {name: value.clone() for name, value in state.items()}
    step(model, optimizer)


def saves(model: nn.Module, optimizer: Any, number: int) -> None:
    """Loads its own state, as a framework does that converts it."""
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer)


def skips(model: nn.Module, optimizer: Any, number: int) -> None:
    """A gradient scaler skips some steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model) * (float("inf") if number in (4, 5, 6) else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def unrolls(model: nn.Module, optimizer: Any, number: int) -> None:
    """Looks two steps ahead, and takes them back, as an unrolled GAN does."""
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    step(model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


BODIES = [closure_step, freezes, offloads, saves, skips, unrolls]


@pytest.mark.parametrize("make", [momentum, adam, lambda m: adam(m, fused=True)])
@pytest.mark.parametrize("body", BODIES)
def test_a_loop_that_does_something_between_steps_is_silent(
    tmp_path: Path, body: Body, make: Callable[[nn.Module], Any]
) -> None:
    model = network()
    findings = found(tmp_path, model, make(model), body)
    assert [one for one in findings if one.id == FINDING] == []


def test_closures_of_a_quasi_newton_method_are_silent(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    assert found(tmp_path, model, optimizer, closure_step, steps=10) == []


def test_muon_of_the_matrices_alone_is_silent(tmp_path: Path) -> None:
    model = network()
    matrices = [one for one in model.parameters() if one.dim() == 2]
    findings = found(tmp_path, model, torch.optim.Muon(matrices))
    assert {one.id for one in findings} == {"training.optimizer-parameters"}  # the biases


@pytest.mark.parametrize("faulty", [False, True])
def test_a_compiled_step_is_recorded_and_judged(tmp_path: Path, faulty: bool) -> None:
    model = network()
    optimizer = adam(model)
    compiled = torch.compile(optimizer.step, backend="eager")

    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        if faulty:
            optimizer.state.clear()
        compiled()

    findings = found(tmp_path, model, optimizer, body)
    assert [one.id for one in findings] == [FINDING] * faulty
    with open_trace(tmp_path / "a.flextrace") as reader:
        assert len(reader.training_steps(0)) == 14


def test_sparse_gradients_and_rows_without_one_are_silent(tmp_path: Path) -> None:
    for sparse in (False, True):
        model = nn.Embedding(200, 4, sparse=sparse)
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam

        def body(model: nn.Module, optimizer: Any, number: int) -> None:
            optimizer.zero_grad()
            model(torch.tensor([number, number + 1])).square().sum().backward()
            optimizer.step()

        (folder := tmp_path / str(sparse)).mkdir()
        assert found(folder, model, kind(model.parameters()), body) == []


def test_calls_that_accumulate_are_none_of_this_finding(tmp_path: Path) -> None:
    model = network()
    findings = found(tmp_path, model, Accumulating(model.parameters()), steps=20)
    assert [one for one in findings if one.id == FINDING] == []


def test_an_optimizer_that_steps_rarely_is_silent(tmp_path: Path) -> None:
    model = network()
    head = torch.optim.Adam(model[4].parameters())

    def body(model: nn.Module, optimizer: Any, number: int) -> None:
        step(model, optimizer)
        if number % 5 == 4:
            head.step()

    body_optimizer = torch.optim.Adam([*model[0].parameters(), *model[2].parameters()])
    assert found(tmp_path, model, body_optimizer, body, steps=20) == []
    (tmp_path / "head").mkdir()

    def rarely(model: nn.Module, optimizer: Any, number: int) -> None:
        step(model, body_optimizer)
        if number % 5 == 4:
            optimizer.step()

    assert found(tmp_path / "head", model, head, rarely, steps=60) == []


def test_a_momentum_that_arrives_at_its_limit_is_silent() -> None:
    """A constant gradient; the values of the buffer stay, and versions do not show an update."""
    weight = nn.Parameter(torch.ones(4))
    holder = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(holder.parameters(), lr=1e-3, momentum=0.5)
    check, named = StateCheck(optimizer), trainable(holder)
    failures = []
    for number in range(520):
        weight.grad = torch.ones(4)
        check.before_step()
        if number < 60:
            optimizer.step()
        else:  # as a kernel would that torch does not know
            weight.data.sub_(2e-3)
        failures += check.after_step(number, named, is_skipped=False)
    assert failures == []


def test_a_look_keeps_no_state_alive_and_makes_none() -> None:
    model = network()
    optimizer = adam(model)
    check, named = StateCheck(optimizer), trainable(model)
    check.before_step()
    loss_of(model).backward()
    assert check.after_step(0, named, is_skipped=False) == []
    assert len(optimizer.state) == 0
    for number in range(1, 4):
        check.before_step()
        optimizer.step()
        check.after_step(number, named, is_skipped=False)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    reference = weakref.ref(moment)
    del moment
    optimizer.state.clear()
    assert reference() is None
