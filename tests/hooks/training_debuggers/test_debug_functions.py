"""Each of the thirteen switches changes only its own log lines, while a training runs."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flexinspect
from flexinspect import DebugSwitches, EarlyStopping, SwitchBoard, TrainingDebugger, TrainingLoop
from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import SWITCHES, short_name

NAMES = [
    "enable_autograd_anomaly",
    "enable_autograd_profiler",
    "enable_tensorboard_profiler",
    "debug_memory_usage",
    "debug_gradient_norms",
    "debug_forward_pass",
    "debug_backward_pass",
    "debug_device_placement",
    "debug_mixed_precision",
    "debug_data_loading",
    "debug_validation",
    "debug_early_stopping",
    "debug_lr_scheduling",
]


class Tiny(nn.Module):
    """Takes ids and mask by name and answers with a loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 6)
        self.classifier = nn.Linear(6, 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        weights = attention_mask.unsqueeze(-1).float()
        logits = self.classifier((self.embed(input_ids) * weights).sum(1) / weights.sum(1))
        loss = nn.functional.cross_entropy(logits, labels)
        return type("Output", (), {"loss": loss, "logits": logits})()


def tokenizer(texts: list[str], **options: Any) -> dict[str, Any]:
    assert options == {"padding": True, "truncation": True, "return_tensors": "pt"}
    rows = [[ord(c) % 39 + 1 for c in text] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def made(switches: Any = None, **options: Any) -> TrainingLoop:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return TrainingLoop(
        model,
        optimizer,
        scheduler=scheduler,
        tokenizer=tokenizer,
        switches=switches or DebugSwitches(),
        **options,
    )


def train(loop: Any, epochs: int = 2) -> Any:
    """Make a dataset, train, validate, and ask early stopping: every switch has its place."""
    texts = [f"text {number} {'good' if number % 2 else 'bad'}" for number in range(20)]
    data = loop.create_training_dataset(texts, [n % 2 for n in range(20)], "reviews")
    train_loader = torch.utils.data.DataLoader(data.train, batch_size=8)
    val_loader = torch.utils.data.DataLoader(data.validation, batch_size=8)
    stopping = EarlyStopping(patience=2)
    return [loop.train_epoch(train_loader, val_loader, stopping) for _ in range(epochs)]


SAID = {
    "autograd_anomaly": [
        "Autograd anomaly detection is on: every backward pass is slower, for small models ",
        "Debugging tools: autograd anomaly detection is on",
    ],
    "autograd_profiler": ["Profiler - "],
    "tensorboard_profiler": ["Profiler - "],
    "memory_usage": ["Memory usage: Allocated ", "Memory usage - Batch "],
    "gradient_norms": ["Gradient norms - Batch "],
    "forward_pass": ["Forward pass debugging - Batch "],
    "backward_pass": ["Backward pass debugging - Batch "],
    "device_placement": ["Device placement: ", "Device placement - Batch "],
    "mixed_precision": ["Mixed precision - Batch "],
    "data_loading": ["Data loading - dataset reviews", "Data loading - Batch "],
    "validation": ["Validation debugging: "],
    "early_stopping": ["Early stopping debugging: "],
    "lr_scheduling": ["LR scheduling debugging: "],
}


def test_the_switches_have_the_specified_names_and_are_off() -> None:
    assert list(SWITCHES) == NAMES
    assert SwitchBoard().get_debugging_status() == dict.fromkeys(NAMES, False)
    assert list(SAID) == [short_name(name) for name in NAMES]


def test_nothing_is_logged_with_all_switches_off(lines: pytest.LogCaptureFixture) -> None:
    train(made())
    assert lines.messages == []


@pytest.mark.parametrize("name", SAID)
def test_a_switch_logs_only_its_own_lines(
    name: str, lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    board = SwitchBoard()
    board.enable_debugging([name])
    train(made(board, profile_folder=tmp_path))
    board.disable_debugging()
    for start in SAID[name]:
        assert any(line.startswith(start) for line in lines.messages), start
    assert [line for line in lines.messages if not line.startswith(tuple(SAID[name]))] == []


@pytest.mark.parametrize("name", SAID)
def test_a_switch_takes_effect_while_the_training_runs_and_ends_with_it(
    name: str, lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    loop = made(profile_folder=tmp_path)
    train(loop)
    assert lines.messages == []
    loop.enable_debugging([name])
    train(loop)
    messages = list(lines.messages)
    assert any(line.startswith(tuple(SAID[name])) for line in messages)
    loop.disable_debugging()
    lines.clear()
    train(loop)
    assert lines.messages == []


def test_without_names_all_switches_are_set(tmp_path: Path) -> None:
    board = SwitchBoard()
    board.enable_debugging()
    assert board.get_debugging_status() == dict.fromkeys(NAMES, True)
    assert torch.is_anomaly_enabled()
    train(made(board, profile_folder=tmp_path))
    board.disable_debugging()
    assert board.get_debugging_status() == dict.fromkeys(NAMES, False)
    assert not torch.is_anomaly_enabled()


def test_short_and_full_names_set_the_same_switches() -> None:
    board = SwitchBoard()
    board.enable_debugging(["memory_usage", "debug_gradient_norms"])
    assert [name for name, on in board.get_debugging_status().items() if on] == [
        "debug_memory_usage",
        "debug_gradient_norms",
    ]
    board.enable_debugging("autograd_profiler")
    board.disable_debugging(["debug_memory_usage"])
    assert [name for name, on in board.get_debugging_status().items() if on] == [
        "enable_autograd_profiler",
        "debug_gradient_norms",
    ]


def test_an_unknown_name_is_refused_with_the_list_and_sets_nothing() -> None:
    board = SwitchBoard()
    with pytest.raises(UsageError) as caught:
        board.enable_debugging(["memory_usage", "speed"])
    assert caught.value.message == (
        "No switch is called 'speed'; the switches are autograd_anomaly, autograd_profiler, "
        "tensorboard_profiler, memory_usage, gradient_norms, forward_pass, backward_pass, "
        "device_placement, mixed_precision, data_loading, validation, early_stopping, "
        "lr_scheduling."
    )
    assert not any(board.get_debugging_status().values())


def test_the_functions_of_the_package_set_the_common_board(
    lines: pytest.LogCaptureFixture,
) -> None:
    debugger, model = TrainingDebugger(), nn.Linear(2, 2)
    flexinspect.enable_debugging(["memory_usage"])
    assert flexinspect.get_debugging_status()["debug_memory_usage"]
    assert debugger.get_debugging_status() == flexinspect.get_debugging_status()
    debugger.monitor_training_step(model, 0.5, 0)
    assert [line.split(":")[0] for line in lines.messages] == ["Memory usage - Batch 0"]
    flexinspect.disable_debugging()
    debugger.monitor_training_step(model, 0.5, 1)
    assert len(lines.messages) == 1


def test_the_section_of_the_settings_sets_the_common_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.training_debuggers import debug_functions

    (tmp_path / "flexinspect.toml").write_text(
        "[debugging]\nvalidation = true\n[debugging.production]\nmemory_usage = true\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(debug_functions, "_common_boards", [])
    assert flexinspect.get_debugging_status() == {
        **dict.fromkeys(NAMES, False),
        "debug_validation": True,
    }
    status = flexinspect.board_of_settings("production").get_debugging_status()
    assert [name for name, on in status.items() if on] == ["debug_memory_usage"]
    with pytest.raises(UsageError, match=r"no \[debugging.test\] \(profiles: production\)"):
        flexinspect.board_of_settings("test")


def test_a_condition_selects_the_steps_in_which_a_switch_acts(
    lines: pytest.LogCaptureFixture,
) -> None:
    board = SwitchBoard()
    board.enable_debugging(["memory_usage"], when=lambda step: step % 10 == 0)
    debugger, model = TrainingDebugger(switches=board), nn.Linear(2, 2)
    for step in range(25):
        debugger.monitor_training_step(model, 0.5, step)
    assert [line.split(":")[0] for line in lines.messages] == [
        f"Memory usage - Batch {step}" for step in (0, 10, 20)
    ]
    board.enable_debugging(["memory_usage"])  # without a condition: in every step again
    debugger.monitor_training_step(model, 0.5, 25)
    assert len(lines.messages) == 4


def test_a_switch_that_fails_is_turned_off_and_the_training_continues(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.training_debuggers import debug_functions

    def broken(model: nn.Module) -> None:
        raise OSError("no counters here")

    monkeypatch.setattr(debug_functions, "memory_of", broken)
    loop = made(DebugSwitches(debug_memory_usage=True, debug_gradient_norms=True))
    epochs = train(loop)
    assert [epoch.batches for epoch in epochs] == [2, 2]
    status = loop.get_debugging_status()
    assert (status["debug_memory_usage"], status["debug_gradient_norms"]) == (False, True)
    message = "The switch memory_usage failed and is off: OSError: no counters here"
    assert lines.messages.count(message) == 1


def test_training_is_bit_equal_with_all_switches(tmp_path: Path) -> None:
    plain, watched = made(), made(SwitchBoard(), profile_folder=tmp_path)
    watched.enable_debugging()
    assert train(plain) == train(watched)
    watched.disable_debugging()
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


# -- the text of the lines ------------------------------------------------------------------------


def log_records(
    name: str, lines: pytest.LogCaptureFixture, **options: Any
) -> list[logging.LogRecord]:
    loop = made(SwitchBoard(), **options)
    loop.enable_debugging([name])
    train(loop)
    loop.disable_debugging()
    return lines.records


def test_the_forward_pass_logs_shapes_loss_and_device(lines: pytest.LogCaptureFixture) -> None:
    first = log_records("forward_pass", lines)[0]
    assert first.getMessage().startswith(
        "Forward pass debugging - Batch 0: input shape (8, 12), attention-mask shape (8, 12), "
        "labels shape (8,), output shape (8, 2), device cpu, loss 0.8"
    )
    assert first.levelno == logging.DEBUG
    assert first.facts["input shape"] == (8, 12)  # type: ignore[attr-defined]


def test_memory_logs_allocated_and_reserved(lines: pytest.LogCaptureFixture) -> None:
    record = log_records("memory_usage", lines)[0]
    assert record.getMessage().startswith("Memory usage - Batch 0: Allocated 0.0 MB, Reserved ")
    assert record.facts["process"] > 50 * 2**20  # type: ignore[attr-defined]
    assert record.facts["parameters"] == (40 * 6 + 14) * 4  # type: ignore[attr-defined]


def test_a_nonfinite_gradient_is_a_warning_that_names_the_parameter(
    lines: pytest.LogCaptureFixture, classifier: nn.Module
) -> None:
    board = SwitchBoard()
    board.enable_debugging(["gradient_norms"])
    debugger = TrainingDebugger(switches=board)
    classifier(torch.ones(1, 4)).sum().backward()
    classifier.classifier.weight.grad[0, 0] = math.nan
    classifier.first.weight.grad *= 1e4
    debugger.monitor_training_step(classifier, 0.5, 0)
    warnings = {r.getMessage() for r in lines.records if r.levelno == logging.WARNING}
    assert "NaN/Inf gradient detected in classifier.weight: nan" in warnings
    assert any(line.startswith("Gradient explosion in first.weight: norm ") for line in warnings)
    assert lines.messages[-1].startswith("Gradient norms - Batch 0: total nan, ")


def test_the_backward_pass_logs_gradients_and_updates(lines: pytest.LogCaptureFixture) -> None:
    texts = [record.getMessage() for record in log_records("backward_pass", lines)]
    assert texts[:2] == [
        "Backward pass debugging - Batch 0: 3 of 3 parameters have gradients, 0 with NaN or Inf",
        (
            "Backward pass debugging - Batch 1: 3 of 3 parameters have gradients, "
            "3 of 3 updated since the last, 0 with NaN or Inf"
        ),
    ]


def test_devices_are_logged_at_the_start_and_when_they_change(
    lines: pytest.LogCaptureFixture,
) -> None:
    board = SwitchBoard()
    board.enable_debugging(["device_placement"])
    train(made(board))
    assert [line[:48] for line in lines.messages] == [
        "Device placement: 3 parameters on cpu; CUDA is n",
        "Device placement - Batch 0: 3 parameters on cpu;",
    ]


def test_mixed_precision_logs_scaler_and_autocast(lines: pytest.LogCaptureFixture) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    records = log_records("mixed_precision", lines, scaler=scaler, autocast=torch.bfloat16)
    assert records[0].getMessage() == (
        "Mixed precision - Batch 0: GradScaler at 1024.0, autocast bfloat16"
    )
    lines.clear()
    assert log_records("mixed_precision", lines)[0].getMessage() == (
        "Mixed precision - Batch 0: no scaler, autocast off"
    )


def test_data_loading_logs_the_splits_and_each_wait(lines: pytest.LogCaptureFixture) -> None:
    texts = [record.getMessage() for record in log_records("data_loading", lines)]
    assert texts[0] == (
        "Data loading - dataset reviews: 20 samples, train 16 (80%), validation 2 (10%), "
        "test 2 (10%), classes 2, tokens 12"
    )
    assert texts[1].startswith("Data loading - Batch 0: 8 samples after ")
    assert "ms, input (8, 12)" in texts[1]


def test_validation_logs_samples_batches_loss_and_memory(lines: pytest.LogCaptureFixture) -> None:
    text = log_records("validation", lines)[0].getMessage()
    assert text.startswith("Validation debugging: 2 samples in 1 batches, loss 0.")
    assert "memory Allocated " in text


def test_early_stopping_logs_value_patience_and_decision(lines: pytest.LogCaptureFixture) -> None:
    loop = made(SwitchBoard())
    loop.enable_debugging(["early_stopping"])
    stopping = EarlyStopping(patience=2, best=0.0)
    data = loop.create_training_dataset(["a", "b", "c", "d"], [0, 1, 0, 1], ratios=(0.5, 0.5, 0))
    loader = torch.utils.data.DataLoader(data.train, batch_size=2)
    epochs = [loop.train_epoch(loader, None, stopping) for _ in range(2)]
    assert [epoch.stops for epoch in epochs] == [False, True]
    assert [line.split(", ", 1)[1] for line in lines.messages] == [
        "best 0, waited 1, patience 2: go on",
        "best 0, waited 2, patience 2: stop",
    ]


def test_lr_scheduling_logs_type_change_and_condition(lines: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in log_records("lr_scheduling", lines)] == [
        "LR scheduling debugging: StepLR, each epoch, 0.05 (was 0.1)",
        "LR scheduling debugging: StepLR, each epoch, 0.025 (was 0.05)",
    ]


def test_the_profiler_switch_names_operators_and_the_other_exports(
    lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (record, *_) = log_records("autograd_profiler", lines, profile_folder=tmp_path)
    costs = {cost.name: cost for cost in record.facts["operators"]}  # type: ignore[attr-defined]
    assert costs["aten::addmm"].place.partition("(")[0].endswith(".py")
    assert not costs["aten::addmm"].place.startswith(("torch/", "flexinspect_hooks/"))
    assert " (in " in record.getMessage()
    assert list(tmp_path.iterdir()) == []
    lines.clear()
    (record, *_) = log_records("tensorboard_profiler", lines, profile_folder=tmp_path)
    assert record.getMessage().endswith(f"exported to {tmp_path}")
    assert [path.name.endswith(".pt.trace.json") for path in tmp_path.iterdir()] == [True]


def test_an_export_has_what_the_plugin_of_tensorboard_shows(
    lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The plug-in needs step events and device facts; its views need stacks, shapes and memory."""
    (record, *_) = log_records("tensorboard_profiler", lines, profile_folder=tmp_path)
    assert "FLOPs, exported to" in record.getMessage()
    (file, *_) = sorted(tmp_path.iterdir())
    trace = json.loads(file.read_text("utf-8"))
    assert "deviceProperties" in trace
    events = trace["traceEvents"]
    steps = {one["name"] for one in events if str(one.get("name")).startswith("ProfilerStep#")}
    assert {"ProfilerStep#0", "ProfilerStep#1"} <= steps
    products = [one for one in events if one.get("name") == "aten::addmm"]
    batch, width, classes = 8, 6, 2
    assert products[0]["args"]["flops"] == 2 * batch * width * classes
    assert products[0]["args"]["Input Dims"][1] == [batch, width]
    frames = [one["name"] for one in events if one.get("cat") == "python_function"]
    assert any("test_debug_functions.py" in name and "forward" in name for name in frames)
    assert any(one.get("name") == "[memory]" for one in events)
    total = sum(one["args"].get("flops", 0) for one in events if isinstance(one.get("args"), dict))
    assert total == record.facts["flops"]  # type: ignore[attr-defined]


def test_profiling_pauses_for_five_times_the_time_to_read_a_window(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect_hooks.training_debuggers import profiling

    seconds = iter(range(1000))  # each look at the clock is a second later
    clock = SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(profiling, "time", clock)
    board = SwitchBoard()
    board.enable_debugging(["autograd_profiler"])
    windows = profiling.ProfilerWindows(board, steps=3, folder="")
    counts = []
    for step in range(12):
        windows.on_step(step)
        counts.append(len(lines.messages))
    # Ended at second 2, after a second; step 7 is looked at in second 7, and begins the next.
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2]


def test_a_window_ends_with_its_switch(lines: pytest.LogCaptureFixture) -> None:
    board = SwitchBoard()
    board.enable_debugging(["autograd_profiler"])
    debugger, model = TrainingDebugger(switches=board), nn.Linear(2, 2)
    for step in range(4):
        debugger.monitor_training_step(model, 0.5, step)
    assert lines.messages == []
    board.disable_debugging()
    debugger.monitor_training_step(model, 0.5, 4)
    assert [line.split(":")[0] for line in lines.messages] == ["Profiler - 4 steps"]


def test_anomaly_mode_names_the_operation_of_a_bad_step(lines: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(
        model, optimizer, lambda out, y: (out * 0).sqrt().sum() * 0, switches=SwitchBoard()
    )
    loop.enable_debugging(["autograd_anomaly"])
    with (
        pytest.warns(UserWarning, match="SqrtBackward0"),
        pytest.raises(RuntimeError, match="SqrtBackward0"),
    ):
        loop.train_epoch([(torch.ones(1, 2), torch.ones(1))])
    loop.disable_debugging()
