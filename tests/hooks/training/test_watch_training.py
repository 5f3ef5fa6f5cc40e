"""A watched training loop: the steps, their values, and that training is not changed."""

from __future__ import annotations

import copy
import gc
import io
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as clip

from flexinspect.core.errors import UsageError
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.training import measurement, training_session
from flexinspect_hooks.training.cost_governor import Governor
from flexinspect_hooks.training.watch_training import TrainingWatch, watch_training


class Net(nn.Module):
    """Two layers in a list and a head; returns its loss when it is given what to compare with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        out = self.head(x)
        return out if y is None else SimpleNamespace(loss=((out - y) ** 2).mean(), out=out)


X, Y = torch.randn(16, 8), torch.randn(16, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.flextrace"


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps_of(trace: TrainingWatch) -> dict[int, TrainingStepRecord]:
    with trace.reader() as reader:
        return reader.training_steps(0)


def loop(model: Net, optimizer: torch.optim.Optimizer, n: int, each: Callable[[], None]) -> None:
    torch.manual_seed(7)
    for _ in range(n):
        optimizer.zero_grad()
        model(X, Y).loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        each()


def test_the_steps_of_a_plain_loop_are_detected(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 5, lambda: None)
    steps = steps_of(trace)
    assert list(steps) == [0, 1, 2, 3, 4]
    first = steps[0]
    assert (first.loss_source, first.learning_rates, first.n_backward) == ("output", (0.01,), 1)
    assert first.n_parameters == 6
    assert first.device == "cpu"
    assert min(first.forward_ms, first.backward_ms, first.optimizer_ms) > 0
    with trace.reader() as reader:
        (run,) = reader.generations()
        row = reader.step(0, 4)
        assert run.declared["training"]["groups"] == ["layers.0", "layers.1", "head"]
        assert run.declared["training"]["placement"] == {"cpu": 153}
        assert (run.state, reader.state, reader.run()["training"]["total_steps"]) == (
            *("finished", "finished"),
            5,
        )
        assert row is not None
        assert row.phase == "train"
        memory = reader.memory(0, 2)
        assert memory is not None
        assert memory.model == 153 * 4
    assert len(first.group_norms) == 3


def test_losses_and_norms_are_those_of_the_program(path: Path) -> None:
    model = Net().eval()
    optimizer = adam(model)
    losses, norms = [], []
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(X, Y).loss
            loss.backward()
            losses.append(loss.item())
            norms.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
            optimizer.step()
    with trace.reader() as reader:
        for number, norm in enumerate(norms):
            step = reader.training_step(0, number)
            assert step is not None
            assert step.loss == pytest.approx(losses[number])
            assert step.total_norm == pytest.approx(math.hypot(*norm))
            found = {one.name: one.norm for one in reader.training_gradients(0, 0)}
        names = [name for name, _ in model.named_parameters()]
        assert [found[name] for name in names] == pytest.approx(norms[0])


@pytest.mark.parametrize("level", ["basic", "advanced", "extreme"])
def test_training_is_bit_equal_with_and_without(path: Path, level: str) -> None:
    plain, watched = Net(), Net()
    loop(plain, adam(plain), 12, lambda: None)
    optimizer = adam(watched)
    with watch_training(watched, optimizer, out=path, level=level, band=1.01, quiet=True):
        loop(watched, optimizer, 12, lambda: None)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def patched_places() -> tuple[object, ...]:
    places: tuple[Any, ...] = (clip_grad, torch.amp.GradScaler)
    keeps_state = "__getstate__" in vars(nn.Module)
    return places[0]._clip_grads_with_norm_, places[1].step, keeps_state


def test_nothing_is_left_behind(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    gc.collect()  # what listens in other tests
    before = (
        clip_grad._get_total_norm,
        clip_grad._clip_grads_with_norm_,
        torch.amp.GradScaler.step,
        "__getstate__" in vars(nn.Module),
        len(nn_module._global_parameter_registration_hooks),
    )
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True):
        loop(model, optimizer, 2, lambda: None)
    after = (
        clip_grad._get_total_norm,
        clip_grad._clip_grads_with_norm_,
        torch.amp.GradScaler.step,
        "__getstate__" in vars(nn.Module),
        len(nn_module._global_parameter_registration_hooks),
    )
    assert after == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_clipping_is_seen(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        model(X, Y * 50).loss.backward()
        before = float(clip(model.parameters(), 0.5))
        optimizer.step()
    (step,) = steps_of(trace).values()
    assert step.norm_before_clip == pytest.approx(before)
    assert before > 10
    assert step.max_norm == 0.5
    assert step.total_norm == pytest.approx(0.5, rel=1e-3)
    assert not step.is_explosion


def test_micro_batches_are_one_step(path: Path) -> None:
    model = Net().eval()
    optimizer = adam(model)
    losses = []
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for part in range(4):
            loss = model(X[part * 4 :][:4], Y[part * 4 :][:4]).loss
            (loss / 4).backward()
            losses.append(loss.item())
        optimizer.step()
    (step,) = steps_of(trace).values()
    assert step.n_backward == 4
    assert step.loss == pytest.approx(sum(losses) / 4)


@pytest.mark.parametrize("is_before", [False, True])
def test_a_reported_loss_belongs_to_its_step(path: Path, is_before: bool) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for number in range(4):
            model(X).mean().backward()
            if is_before:
                trace.step(loss=float(number))
            optimizer.step()
            if not is_before:
                trace.step(loss=torch.tensor(float(number)))
    assert [(s.loss, s.loss_source) for s in steps_of(trace).values()] == [
        (float(number), "reported") for number in range(4)
    ]


def test_without_an_optimizer_a_call_ends_a_step(path: Path) -> None:
    model = Net()
    with watch_training(model, out=path, quiet=True) as trace:
        for _ in range(3):
            loss = model(X, Y).loss
            loss.backward()
            trace.step(loss=loss)
            model.zero_grad()
        trace.step(loss=1.0)  # nothing ran since the last one
    steps = steps_of(trace)
    assert list(steps) == [0, 1, 2]
    assert all(step.total_norm for step in steps.values())


def test_validation_between_steps_does_not_belong_to_them(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        for _ in range(2):
            loop(model, optimizer, 1, lambda: None)
            with torch.no_grad():
                model(X, Y * 1e6)
    assert all(step.loss < 10 for step in steps_of(trace).values())


def test_an_optimizer_with_a_closure_is_measured_after_it(path: Path) -> None:
    model = Net().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X, Y).loss
        loss.backward()
        return loss

    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        optimizer.step(closure)
        optimizer.step(closure)
    steps = steps_of(trace)
    assert len(steps) == 2
    assert all(step.n_backward >= 3 and step.total_norm for step in steps.values())


def test_the_change_of_the_weights_is_recorded_by_group(path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X, Y).loss.backward()
    before = copy.deepcopy(model.state_dict())
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        optimizer.step()
    (step,) = steps_of(trace).values()
    change = [model.state_dict()[n] - before[n] for n in ("head.weight", "head.bias")]
    weights = [before[n] for n in ("head.weight", "head.bias")]
    ratio = (
        torch.cat([c.flatten() for c in change]).norm()
        / torch.cat([w.flatten() for w in weights]).norm()
    )
    assert step.group_ratios[2] == pytest.approx(float(ratio), rel=1e-4)


def test_extreme_keeps_statistics_of_every_module(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, level="extreme", quiet=True) as trace:
        loop(model, optimizer, 1, lambda: None)
    with trace.reader() as reader:
        names = [stat.module for stat in reader.layer_stats(0, 0)]
    assert names == ["layers.0", "drop", "layers.1", "drop", "head"]


def test_the_level_changes_while_running(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 1, lambda: None)
        trace.level = "advanced"
        loop(model, optimizer, 1, lambda: None)
    assert [step.detail for step in steps_of(trace).values()] == ["basic", "advanced"]


def test_only_modules_whose_outputs_a_level_keeps_have_hooks(path: Path) -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = nn.Sequential(nn.Sequential(layer))
    hooked = {}
    with watch_training(model, out=path, quiet=True) as trace:
        for trace.level in ("basic", "advanced", "basic"):
            model(torch.ones(1, 2)).sum().backward()
            inside = [name for name, one in model.named_modules() if name and one._forward_hooks]
            hooked[trace.level] = inside
            trace.step(1.0)
    assert hooked == {"basic": ["0.0"], "advanced": ["0.0", "0.0.0", "0.0.1"]}


def test_above_its_band_capture_reduces_detail_and_reports_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = Governor.on_step
    monkeypatch.setattr(Governor, "on_step", lambda self, own_s, wall_s: evaluate(self, 0.5, 1.0))
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, level="extreme", band=1.5) as trace:
        loop(model, optimizer, 60, lambda: None)
    steps = steps_of(trace)
    with trace.reader() as reader:
        events = [row.event for row in reader.events() if row.event.kind == "detail-reduced"]
    assert [event.data["detail"] for event in events] == [
        *("advanced", "basic", "screened", "sparse", "sparse")
    ]
    assert [event.step for event in events] == [11, 21, 31, 41, 51]
    assert "instead of everything" in events[0].text
    assert all(math.isfinite(step.loss) for step in steps.values())
    measured = [number for number, step in steps.items() if step.total_norm is not None]
    assert measured == [*range(36)]
    printed = capsys.readouterr().err
    assert (
        "Above the band of 50.0% detail was dropped 5 times, down to gradients of 4 of every 256 "
        "steps from then on." in printed
    )


def test_a_compiled_model_is_watched_from_outside(path: Path) -> None:
    model: Any = torch.compile(Net().eval(), backend="eager")
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, level="advanced", quiet=True) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            model(X, Y).loss.backward()
            optimizer.step()
    steps = steps_of(trace)
    assert [step.n_backward for step in steps.values()] == [1, 1]
    with trace.reader() as reader:
        assert "head.weight" in {one.name for one in reader.training_gradients(0, 0)}


def test_a_model_is_copied_and_saved_without_our_hooks(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        loop(model, optimizer, 1, lambda: None)
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        twin(X, Y).loss.backward()
        loop(model, optimizer, 1, lambda: None)
    assert [step.n_backward for step in steps_of(trace).values()] == [1, 1]


def test_a_capture_failure_ends_capture_and_not_the_training(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("ours")

    model = Net()
    optimizer = adam(model)
    before = model.head.weight.detach().clone()
    with watch_training(model, optimizer, out=path, quiet=True) as trace:
        monkeypatch.setattr(training_session.GradientMeter, "measure", fail)
        loop(model, optimizer, 2, lambda: None)
    assert not torch.equal(before, model.head.weight)
    with trace.reader() as reader:
        events = [row.event for row in reader.events()]
        assert [event.kind for event in events] == ["hook-disabled"]
        assert "RuntimeError: ours" in events[0].text


def test_the_programs_exception_propagates_and_ends_the_trace(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with pytest.raises(ZeroDivisionError):
        with watch_training(model, optimizer, out=path, quiet=True) as trace:
            loop(model, optimizer, 3, lambda: None)
            _ = 1 / 0
    with trace.reader() as reader:
        assert reader.state == "failed"
        assert len(reader.training_steps(0)) == 3
        assert "ZeroDivisionError" in reader.generation(0).stop_reason


def test_the_run_reports_its_cost(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path):
        loop(model, optimizer, 2, lambda: None)
    printed = capsys.readouterr().err
    assert re.search(
        r"2 training steps, 0 with anomalies; capture took .+ \(\d+\.\d\d ms a step\)", printed
    )


def test_the_end_of_a_run_prints_its_findings_and_how_to_open_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path) as trace:
        loop(model, optimizer, 2, lambda: trace.step(math.inf))
        assert "flexinspect open" not in str(trace)
    printed = capsys.readouterr().err.splitlines()
    assert printed[1].startswith("  error: The loss of step 0 is infinite: the model's outputs")
    assert printed[-1] == f"flexinspect open {path}"
    assert str(trace).splitlines()[1:] == printed[1:]


def test_invalid_arguments_of_watch_training_are_refused(path: Path) -> None:
    model = Net()
    with pytest.raises(UsageError, match="a torch module, not the int 3"):
        watch_training(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a torch optimizer, not an object of type str"):
        watch_training(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameter that requires gradients"):
        watch_training(Net().requires_grad_(False))
    with pytest.raises(UsageError, match=r"band is 0\.5"):
        watch_training(model, band=0.5)
    with pytest.raises(UsageError, match="level huge is unknown"):
        watch_training(model, level="huge")
    with watch_training(model, out=path.with_name("b.flextrace"), quiet=True) as trace:
        with pytest.raises(UsageError, match="The loss must be a single number, and is 'low'"):
            trace.step(loss="low")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="batches needs a loader of batches, not None"):
            trace.batches(None)  # type: ignore[arg-type]
    path.touch()
    with pytest.raises(UsageError, match="exists already"):
        watch_training(model, out=path)


def test_a_model_is_watched_once_at_a_time(tmp_path: Path) -> None:
    model = Net()
    with watch_training(model, out=tmp_path / "a.flextrace", quiet=True) as trace:
        with pytest.raises(UsageError, match="being watched already"):
            watch_training(model, out=tmp_path / "b.flextrace").__enter__()
    with pytest.raises(UsageError, match="This watch has ended"):
        trace.__enter__()


def test_a_loss_that_is_not_a_number_is_refused(path: Path) -> None:
    model = Net()
    with watch_training(model, adam(model), out=path, quiet=True) as watch:
        with pytest.raises(
            UsageError, match=r"The loss must be a single number, and has shape \(2,\)"
        ):
            watch.step(torch.ones(2))


def test_all_hooks_are_removed_if_the_last_step_cannot_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scaler_step = Net(), torch.amp.GradScaler.step
    optimizer = adam(model)

    def fails(self: Any) -> None:
        raise RuntimeError("no record")

    with watch_training(model, optimizer, out=path, quiet=True):
        model(X, Y).loss.backward()
        optimizer.step()
        monkeypatch.setattr(training_session.TrainingStepDraft, "record", fails)
    assert not model._forward_hooks
    assert torch.amp.GradScaler.step is scaler_step


def test_a_batch_that_the_program_skips_does_not_belong_to_the_next_step(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        for number in range(3):
            loss = model(X * math.nan if number == 1 else X, Y).loss
            optimizer.zero_grad()
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
    steps = steps_of(watch)
    assert len(steps) == 2
    assert all(math.isfinite(step.loss) and step.anomaly_origin is None for step in steps.values())


def test_a_loss_that_the_program_changes_in_place_is_kept_as_it_was(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        loss = model(X, Y).loss
        was = loss.item()
        loss /= 4
        loss.backward()
        optimizer.step()
    assert steps_of(watch)[0].loss == was


def test_a_forward_that_raises_keeps_no_references(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        with pytest.raises(RuntimeError):
            model(X, torch.ones(3, 5))
        assert watch._session is not None
        assert not watch._session._forwards._watches[0]._outputs
        model(X, Y).loss.backward()
        optimizer.step()
    assert steps_of(watch)[0].n_backward == 1


def test_a_model_compiled_in_place_is_watched_from_outside(path: Path) -> None:
    model = Net()
    model.compile(backend="eager")
    was = model._compiled_call_impl
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        model(X, Y).loss.backward()
        optimizer.step()
        assert not model._forward_hooks
    assert steps_of(watch)[0].n_backward == 1
    assert model._compiled_call_impl is was


def test_a_prediction_of_one_value_is_not_a_loss(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        (model(X[:1]) ** 2).mean().backward()
        optimizer.step()
    assert steps_of(watch)[0].loss_source == "backward"  # not the prediction itself


@pytest.mark.parametrize("shape", [(8, 512, 512), (3, 1 << 17), (1 << 18,), (512, 3, 3, 64)])
def test_the_sample_of_a_large_parameter_is_a_small_view_of_it(shape: tuple[int, ...]) -> None:
    values = torch.empty(shape)
    for one in (values, values.mT) if len(shape) > 1 else (values,):
        sample = measurement._sample_rows(one)
        assert measurement.MAX_SAMPLE / 4 < sample.numel() <= measurement.MAX_SAMPLE
        assert sample.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()


def test_waiting_for_the_device_is_not_a_cost_of_capture(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer = adam(model)
    slow = 0.2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(slow))
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        assert watch._session is not None
        watch._session._device = torch.device("cuda")
        model(X, Y).loss.backward()
        optimizer.step()
    assert 0 < watch.cost["capture_s"] < slow < watch.cost["total_s"]


def test_clipping_of_another_model_is_ignored(path: Path) -> None:
    model, other = Net(), Net()
    optimizer = adam(model)
    with watch_training(model, optimizer, out=path, quiet=True) as watch:
        other(X, Y).loss.backward()
        clip(other.parameters(), 0.5)
        model(X, Y).loss.backward()
        optimizer.step()
    assert steps_of(watch)[0].max_norm is None


def test_a_training_that_runs_out_of_memory_has_a_finding_with_advice(path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    with (
        pytest.raises(RuntimeError, match=r"allocate memory|not enough memory"),
        watch_training(model, optimizer, out=path, quiet=True) as trace,
    ):
        loop(model, optimizer, 2, lambda: None)
        torch.empty(1 << 45)
    (finding,) = [one for one in trace.findings() if one.id == "memory.exhausted"]
    assert "smaller batch" in finding.fix
