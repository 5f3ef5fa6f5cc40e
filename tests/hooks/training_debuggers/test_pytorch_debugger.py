"""`PyTorchDebugger` and `debug_context`: tensors, parameters, gradients, memory, history."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect import DebugLevel, PyTorchDebugger, debug_context
from flexinspect_hooks.control.control_protocols import AnomalyCounts


def with_gradients(model: nn.Module, scale: float = 1.0) -> nn.Module:
    model.zero_grad()
    (model(torch.ones(3, 4)).sum() * scale).backward()
    return model


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(DebugLevel))
@pytest.mark.parametrize(
    ("values", "has_nan", "has_inf"),
    [
        ([1.0, 2.0, 6.0], False, False),
        ([1.0, math.nan], True, False),
        ([1.0, math.inf], False, True),
        ([math.nan, -math.inf], True, True),
        ([3e38, 3e38], False, False),  # its norm overflows, its values do not
    ],
)
def test_nan_and_inf_are_found_at_every_level(
    level: DebugLevel, values: list[float], has_nan: bool, has_inf: bool
) -> None:
    info = PyTorchDebugger(level).analyze_tensor(torch.tensor(values), "x")
    assert (info.has_nan, info.has_inf) == (has_nan, has_inf)
    assert (info["has_nan"], info["has_inf"]) == (has_nan, has_inf)


@pytest.mark.parametrize("level", [DebugLevel.ADVANCED, DebugLevel.EXTREME])
def test_the_fields_of_a_tensor_are_those_of_torch(level: DebugLevel) -> None:
    tensor = torch.randn(3, 5, dtype=torch.float64)
    info = PyTorchDebugger(level).analyze_tensor(tensor, "my tensor")
    assert info.name == "my tensor"
    assert info.mean_value == pytest.approx(tensor.mean().item())
    assert info.std == pytest.approx(float(tensor.std(correction=0)))
    assert (info.min, info.max) == (float(tensor.min()), float(tensor.max()))
    assert (info.shape, info.dtype, info.memory) == ((3, 5), "float64", 3 * 5 * 8)


def test_basic_gives_the_mean_and_leaves_the_spread_to_advanced() -> None:
    tensor = torch.tensor([1.0, 2.0, 6.0])
    info = PyTorchDebugger(DebugLevel.BASIC).analyze_tensor(tensor, "x")
    assert info.mean_value == pytest.approx(3.0)
    assert (info.std, info.min, info.max) == (None, None, None)


def test_extreme_reports_the_first_bad_value_and_the_stack() -> None:
    tensor = torch.ones(2, 3)
    tensor[1, 0] = math.nan
    for level in DebugLevel:
        debugger = PyTorchDebugger(level)
        info = debugger.analyze_tensor(tensor, "x")
        (anomaly,) = [one for one in debugger.history if "kind" in one]
        is_extreme = level is DebugLevel.EXTREME
        assert info.first_bad == ((1, 0) if is_extreme else None)
        assert ("test_extreme_reports" in anomaly.stack) == is_extreme


@pytest.mark.parametrize("level", list(DebugLevel))
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, 2, 6]),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.zeros(0),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
    ],
    ids=["int", "bool", "scalar", "empty", "bfloat16", "complex", "sparse"],
)
def test_any_tensor_can_be_analyzed(level: DebugLevel, tensor: torch.Tensor) -> None:
    debugger = PyTorchDebugger(level)
    info = debugger.analyze_tensor(tensor, "x")
    assert info.shape == tuple(tensor.shape)
    assert debugger.get_debug_summary().total_anomalies == 0


def test_an_unexpected_shape_or_dtype_is_an_anomaly() -> None:
    debugger = PyTorchDebugger()
    tensor = torch.zeros(2, 3)
    debugger.analyze_tensor(tensor, "x", shape=(2, None), dtype=torch.float32)
    assert debugger.get_debug_summary().total_anomalies == 0
    debugger.analyze_tensor(tensor, "x", shape=(3, None), dtype=torch.float16)
    assert debugger.get_debug_summary().anomalies_by_kind == {"shape": 1, "dtype": 1}
    sentences = [one.sentence for one in debugger.history if "kind" in one]
    assert sentences == [
        "x has shape (2, 3), but (3, None) is expected.",
        "x is float32, but float16 is expected.",
    ]


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(DebugLevel))
def test_the_parameters_of_a_model_come_by_name(level: DebugLevel, classifier: nn.Module) -> None:
    with torch.no_grad():
        classifier.classifier.bias[0] = math.nan
    debugger = PyTorchDebugger(level)
    infos = debugger.analyze_model_parameters(classifier)
    assert list(infos) == [name for name, _ in classifier.named_parameters()]
    assert [name for name, info in infos.items() if info.has_nan] == ["classifier.bias"]
    weight = classifier.first.weight
    assert infos["first.weight"].mean_value == pytest.approx(
        weight.detach().mean().item(), abs=1e-6
    )
    assert debugger.get_debug_summary().total_anomalies == 1


@pytest.mark.parametrize("level", list(DebugLevel))
def test_gradients_come_by_name_with_the_norm_of_torch(
    level: DebugLevel, classifier: nn.Module
) -> None:
    found = PyTorchDebugger(level).analyze_gradients(with_gradients(classifier))
    for name, parameter in classifier.named_parameters():
        assert parameter.grad is not None
        assert found[name].norm == pytest.approx(float(parameter.grad.norm()))
        assert (found[name].largest is None) == (level is DebugLevel.BASIC)
        assert (found[name].tensor is not None) == (level is DebugLevel.EXTREME)
    total = torch.nn.utils.get_total_norm([p.grad for p in classifier.parameters()])  # type: ignore[misc]
    assert found.total_norm == pytest.approx(float(total))


def test_a_parameter_without_gradient_is_left_out(classifier: nn.Module) -> None:
    classifier.first.requires_grad_(False)
    found = PyTorchDebugger().analyze_gradients(with_gradients(classifier))
    assert list(found) == ["classifier.weight", "classifier.bias"]


def test_parameters_with_nonfinite_gradients_are_named(classifier: nn.Module) -> None:
    with_gradients(classifier)
    classifier.first.weight.grad[0, 0] = math.nan
    classifier.classifier.bias.grad[1] = math.inf
    found = PyTorchDebugger().analyze_gradients(classifier)
    assert found.nan_grad_params == ["first.weight"]
    assert found.inf_grad_params == ["classifier.bias"]
    assert (found.params_with_nan_grad, found.params_with_inf_grad) == (1, 1)


def test_explosion_is_a_norm_above_ten_by_default(classifier: nn.Module) -> None:
    debugger = PyTorchDebugger(DebugLevel.ADVANCED)
    for parameter, norm in zip(classifier.parameters(), (9.9, 10.1, 99.0, 0.0), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = norm
    assert debugger.check_gradient_explosion(classifier) == ["first.bias", "classifier.weight"]
    assert debugger.check_gradient_explosion(classifier, threshold=50.0) == ["classifier.weight"]
    assert debugger.check_gradient_explosion(classifier, threshold=100.0) == []


def test_vanishing_is_a_norm_below_a_millionth_by_default(classifier: nn.Module) -> None:
    debugger = PyTorchDebugger(DebugLevel.ADVANCED)
    for parameter, norm in zip(classifier.parameters(), (1.1e-6, 0.9e-6, 1.0, 0.0), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = norm
    assert debugger.check_gradient_vanishing(classifier) == ["first.bias", "classifier.bias"]
    assert debugger.check_gradient_vanishing(classifier, threshold=1e-9) == ["classifier.bias"]


def test_memory_is_the_bytes_of_parameters_gradients_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    memory = PyTorchDebugger().profile_memory_usage(model)
    assert isinstance(memory, dict)
    n_bytes = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert (memory["parameters"], memory["gradients"], memory["buffers"]) == (n_bytes, 0, buffers)
    model(torch.ones(4, 3)).sum().backward()
    memory = PyTorchDebugger().profile_memory_usage(model)
    assert memory["gradients"] == n_bytes
    assert memory["total"] == 2 * n_bytes + buffers
    assert memory["process"] > memory["total"]


def test_a_correct_model_is_valid_and_its_parts_are_listed(classifier: nn.Module) -> None:
    report = PyTorchDebugger(DebugLevel.ADVANCED).validate_model(classifier, torch.ones(3, 4))
    assert (report.is_valid, report.problems) == (True, ())
    assert {name: part.parameters for name, part in report.components.items()} == {
        "first": 40,
        "act": 0,
        "classifier": 18,
    }
    assert [one.shape for one in report.output] == [(3, 2)]
    assert report.memory["parameters"] == 58 * 4


def test_a_model_is_not_valid_for_weights_dtypes_and_outputs(classifier: nn.Module) -> None:
    classifier.classifier.double()
    with torch.no_grad():
        classifier.first.bias[0] = math.inf
    debugger = PyTorchDebugger()
    report = debugger.validate_model(classifier)
    assert not report.is_valid
    assert report.problems == (
        "Inf in the weights of first.",
        "The weights are of several dtypes: float32, float64.",
    )
    classifier.float()
    with torch.no_grad():
        classifier.first.bias[0] = math.nan
    report = debugger.validate_model(classifier, torch.ones(1, 4))
    assert report.problems == ("NaN in the weights of first.", "NaN in the output 0.")
    assert debugger.get_debug_summary().total_anomalies == 4


def test_what_the_forward_pass_raises_is_a_problem_with_its_module(classifier: nn.Module) -> None:
    debugger = PyTorchDebugger()
    report = debugger.validate_model(classifier, torch.ones(1, 5))
    assert not report.is_valid
    (problem,) = report.problems
    assert problem.startswith("The forward pass failed in first (Linear): RuntimeError: mat1 and ")
    assert "cannot be multiplied (1x5 and 4x8)." in problem
    assert report.output == ()
    assert "Traceback" in debugger.history[-1].stack
    assert debugger.get_debug_summary().total_anomalies == 1
    report = debugger.validate_model(classifier, x=torch.ones(1, 4))
    assert report.problems[0].startswith("The forward pass failed: TypeError: ")


def test_an_interrupt_of_the_forward_pass_is_no_problem_of_the_model(
    classifier: nn.Module,
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    classifier.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        PyTorchDebugger().validate_model(classifier, torch.ones(1, 4))


# -- summary and history --------------------------------------------------------------------------


def test_the_summary_counts_all_and_clearing_starts_again() -> None:
    debugger = PyTorchDebugger(DebugLevel.ADVANCED)
    for value in (1.0, math.nan, math.inf, 2.0):
        debugger.analyze_tensor(torch.tensor([value]), "x")
    summary = debugger.get_debug_summary()
    assert isinstance(summary, dict)
    assert summary["total_anomalies"] == summary.total_anomalies == 2
    assert summary["debug_history_length"] == len(debugger.history) == 6
    assert summary["analyses"] == 4
    assert summary["anomaly_rate"] == 0.5
    assert summary["anomalies_by_kind"] == {"nan": 1, "inf": 1}
    assert summary["level"] == "advanced"
    assert json.loads(json.dumps(summary))["total_anomalies"] == 2
    debugger.clear_debug_history()
    assert debugger.get_debug_summary().total_anomalies == 0
    assert debugger.get_debug_summary().debug_history_length == 0
    assert debugger.history == ()


def test_the_history_is_bounded_and_the_counts_are_not() -> None:
    debugger = PyTorchDebugger(history=5)
    for _ in range(20):
        debugger.analyze_tensor(torch.tensor([math.nan]), "x")
    assert len(debugger.history) == debugger.get_debug_summary().debug_history_length == 5
    assert debugger.get_debug_summary().total_anomalies == 20


def test_the_log_names_ten_anomalies_of_an_analysis_and_counts_the_others(
    lines: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    debugger = PyTorchDebugger(DebugLevel.EXTREME)
    debugger.analyze_model_parameters(model)
    assert len(lines.messages) == 11
    assert lines.messages[-1] == "… and 14 more anomalies of the same step"
    assert debugger.get_debug_summary().total_anomalies == 24
    stacks = {one.stack for one in debugger.history if "kind" in one}
    assert len(stacks) == 1
    assert "training_debuggers/pytorch_debugger.py" not in stacks.pop()


def test_only_extreme_keeps_each_tensor_of_a_model(classifier: nn.Module) -> None:
    kept = {}
    for level in DebugLevel:
        debugger = PyTorchDebugger(level)
        debugger.analyze_model_parameters(classifier)
        kept[level.value] = len(debugger.history)
    assert kept == {"basic": 0, "advanced": 0, "extreme": 4}


def test_a_level_can_be_changed_while_running() -> None:
    debugger = PyTorchDebugger(DebugLevel.BASIC)
    assert debugger.analyze_tensor(torch.ones(2), "x").std is None
    debugger.level = "advanced"
    assert debugger.level is DebugLevel.ADVANCED
    assert debugger.analyze_tensor(torch.ones(2), "x").std == 0.0


def test_an_anomaly_has_advice_and_calls_on_anomaly() -> None:
    anomalies: list[Any] = []
    debugger = PyTorchDebugger(on_anomaly=anomalies.append)
    debugger.analyze_tensor(torch.tensor([math.nan]), "loss")
    (anomaly,) = anomalies
    assert (anomaly.kind, anomaly.where) == ("nan", "loss")
    assert anomaly.sentence == "NaN in loss (1 values, 1)."
    assert any("learning rate" in one for one in anomaly.advice)


def test_a_callback_that_fails_is_logged_and_breaks_nothing(
    lines: pytest.LogCaptureFixture,
) -> None:
    debugger = PyTorchDebugger(on_anomaly=lambda anomaly: 1 / 0)
    debugger.analyze_tensor(torch.tensor([math.nan]), "x")
    assert "on_anomaly failed: ZeroDivisionError: division by zero" in lines.messages


def test_clearing_from_another_thread_during_an_analysis_is_safe() -> None:
    def clear(_: object) -> None:
        server = threading.Thread(target=debugger.clear_debug_history)
        server.start()
        server.join(5)
        assert not server.is_alive(), "the lock is held while a callback runs"

    debugger = PyTorchDebugger(on_anomaly=clear)
    debugger.analyze_tensor(torch.tensor([math.nan]), "x")
    assert debugger.counts() == AnomalyCounts()
    debugger.analyze_tensor(torch.tensor([1.0]), "x")
    assert debugger.counts() == AnomalyCounts(debug_history_length=1, total_steps=1)


def test_a_clearing_waits_until_an_analysis_is_counted() -> None:
    debugger = PyTorchDebugger()
    server = threading.Thread(target=debugger.clear_debug_history)

    def entries() -> Iterator[str]:
        server.start()
        server.join(0.05)
        yield "waits" if server.is_alive() else "is cleared"
        seen.append(debugger.counts())

    seen: list[AnomalyCounts] = []
    debugger._record_analysis(entries(), [])
    server.join(5)
    assert [one.total_steps for one in seen] == [1]
    assert debugger.counts() == AnomalyCounts()


def test_a_high_rate_of_anomalies_is_reported_once(lines: pytest.LogCaptureFixture) -> None:
    debugger = PyTorchDebugger(alert_above=0.2)
    for number in range(30):
        debugger.analyze_tensor(torch.tensor([math.nan if number % 2 else 1.0]), "x")
    (alert,) = debugger.get_debug_summary().alerts
    assert alert.startswith("High anomaly rate: 50.0% of 10 analyses, above 20.0%.")
    assert sum("High anomaly rate" in line for line in lines.messages) == 1


# -- context managers -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_anomaly_detection_names_the_operation_and_is_off_afterwards() -> None:
    debugger = PyTorchDebugger(DebugLevel.ADVANCED)
    bad = torch.tensor([0.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="SqrtBackward0"), debugger.autograd_anomaly_detection():
        assert torch.is_anomaly_enabled()
        (torch.sqrt(bad) * 0).sum().backward()
    assert not torch.is_anomaly_enabled()
    (report,) = debugger.history
    assert report.kind == "error"
    assert "SqrtBackward0" in report.sentence
    assert "test_anomaly_detection_names" in report.stack
    assert debugger.get_debug_summary().total_anomalies == 1


def test_anomaly_detection_leaves_the_mode_that_was_on_on() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with PyTorchDebugger().autograd_anomaly_detection():
            assert torch.is_anomaly_check_nan_enabled()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()


@pytest.mark.parametrize("level", list(DebugLevel))
def test_the_context_yields_a_debugger_and_logs_its_summary(
    level: DebugLevel, lines: pytest.LogCaptureFixture
) -> None:
    with debug_context(level) as debugger:
        assert debugger.level is level
        assert torch.is_anomaly_enabled() == (level is DebugLevel.EXTREME)
        debugger.analyze_tensor(torch.tensor([math.nan]), "x")
    assert not torch.is_anomaly_enabled()
    assert lines.records[-1].levelno == logging.INFO
    assert "total_anomalies=1" in lines.messages[-1]


@pytest.mark.parametrize("level", list(DebugLevel))
def test_the_context_raises_again_and_records_from_advanced_on(level: DebugLevel) -> None:
    with pytest.raises(ValueError, match="mine"), debug_context(level) as debugger:
        raise ValueError("mine")
    reports = [one for one in debugger.history if one.kind == "error"]
    assert len(reports) == (0 if level is DebugLevel.BASIC else 1)
    assert all('raise ValueError("mine")' in one.stack for one in reports)


def test_the_debugger_changes_neither_weights_nor_gradients(classifier: nn.Module) -> None:
    with_gradients(classifier)
    before = [(p.detach().clone(), p.grad.clone()) for p in classifier.parameters()]  # type: ignore[union-attr]
    debugger = PyTorchDebugger(DebugLevel.EXTREME)
    debugger.analyze_model_parameters(classifier)
    debugger.analyze_gradients(classifier)
    debugger.validate_model(classifier, torch.ones(1, 4))
    for parameter, (value, gradient) in zip(classifier.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
