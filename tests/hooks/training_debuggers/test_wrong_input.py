"""Wrong input is refused in one sentence: what, where, and what is expected instead."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flexinspect import (
    AsyncTrainingLogger,
    DebugSwitches,
    DiffusionModelDebugger,
    PyTorchDebugger,
    TrainingDebugger,
    TrainingLoop,
    debug_context,
    debug_logging,
    enable_debugging,
    profile_model_performance,
)
from flexinspect.core.errors import UsageError

MODEL = nn.Linear(2, 2)
PAIR = torch.zeros(2)
PARTS = SimpleNamespace(unet=MODEL)


def loop(**options: Any) -> TrainingLoop:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    return TrainingLoop(MODEL, optimizer, nn.functional.mse_loss, **options)


def logger() -> AsyncTrainingLogger:
    return AsyncTrainingLogger(user_id="ada", model_name="tiny")


def progress(loss: Any) -> Any:
    return asyncio.run(logger().update_progress_async(epoch=0, step=0, loss=loss))


def step(**arguments: Any) -> Any:
    usual = {"model": MODEL, "loss": 1.0, "step": 0}
    return TrainingDebugger().monitor_training_step(**{**usual, **arguments})


WRONG: dict[str, Callable[[Any], Any]] = {
    "The debug level 'loud' is unknown; the levels are basic, advanced, extreme.": lambda _: (
        debug_context("loud").__enter__()
    ),
    "history must be 1 or more, and is 0.": lambda _: PyTorchDebugger(history=0),
    "history must be a whole number, and is 'all'.": lambda none: TrainingDebugger(
        history=none or "all"
    ),
    "alert_above must be a single number, and is 'high'.": lambda none: PyTorchDebugger(
        alert_above=none or "high"
    ),
    "explosion must be a number of 0 or more, and is -1.": lambda _: TrainingDebugger(explosion=-1),
    "vanishing must be a number of 0 or more, and is nan.": lambda _: PyTorchDebugger(
        vanishing=float("nan")
    ),
    "on_anomaly needs a function of an anomaly, not the int 3.": lambda none: PyTorchDebugger(
        on_anomaly=none or 3
    ),
    "switches must be a SwitchBoard, not a list.": lambda none: TrainingDebugger(
        switches=none or ["memory_usage"]
    ),
    "analyze_tensor needs a torch tensor, not an object of type list.": lambda none: (
        PyTorchDebugger().analyze_tensor(none or [1.0])
    ),
    "analyze_model_parameters needs a torch module, not None.": lambda none: (
        PyTorchDebugger().analyze_model_parameters(none)
    ),
    "analyze_gradients needs a torch module, not None.": lambda none: (
        PyTorchDebugger().analyze_gradients(none)
    ),
    "check_gradient_explosion needs a torch module, not None.": lambda none: (
        PyTorchDebugger().check_gradient_explosion(none)
    ),
    "threshold must be a single number, and is None.": lambda none: (
        PyTorchDebugger().check_gradient_vanishing(MODEL, none)
    ),
    "profile_memory_usage needs a torch module, not None.": lambda none: (
        PyTorchDebugger().profile_memory_usage(none)
    ),
    "validate_model needs a torch module, not None.": lambda none: PyTorchDebugger().validate_model(
        none
    ),
    "monitor_training_step needs a torch module, not None.": lambda none: step(model=none),
    "monitor_training_step needs a torch optimizer, not the float 0.1.": lambda _: step(
        optimizer=0.1
    ),
    "The loss must be a single number, and has shape (2,): reduce it.": lambda _: step(loss=PAIR),
    "The loss must be a single number, and is None.": lambda none: step(loss=none),
    "step must be a whole number, and is 'last'.": lambda _: step(step="last"),
    "The metric norm needs a function of (model, loss, step), not the int 1.": lambda none: (
        TrainingDebugger().add_metric("norm", none or 1)
    ),
    "The baseline /dev/null/x cannot be written: Not a directory.": lambda _: (
        TrainingDebugger().save_baseline("/dev/null/x")
    ),
    "Switches have names, and 3 is not a name.": lambda none: enable_debugging(none or 3),
    "monitor_diffusion_step needs a torch tensor, not None.": lambda none: (
        DiffusionModelDebugger().monitor_diffusion_step(PARTS, 0, none)
    ),
    "jump must be a single number, and is 'far'.": lambda none: DiffusionModelDebugger(
        jump=none or "far"
    ),
    "total_steps must be 1 or more, and is 0.": lambda _: logger().start_training(total_steps=0),
    "The loss must be a single number, and is 'low'.": lambda _: progress("low"),
    "log_error needs an exception; log_warning takes a text.": lambda none: logger().log_error(
        none or "boom"
    ),
    "context must be a dict, not an object of type str.": lambda none: logger().log_error(
        ValueError("boom"), context=none or "step 3"
    ),
    "TrainingLoop needs a torch module, not None.": lambda none: TrainingLoop(
        none, none, switches=DebugSwitches()
    ),
    "torch knows no device 'toaster'.": lambda _: loop(device="toaster"),
    "train_epoch needs a loader of batches, not None.": lambda none: loop().train_epoch(none),
    "evaluate_model needs a loader of batches, not None.": lambda none: loop().evaluate_model(none),
    "early_stopping.step needs a function of the newest loss, not None.": lambda _: (
        loop().train_epoch([(PAIR, PAIR)], None, 3)
    ),
    "step needs a function of a batch, not None.": lambda none: profile_model_performance(
        [PAIR] * 4, step=none
    ),
    "profile_model_performance needs a loader of batches, not None.": lambda none: (
        profile_model_performance(none, step=print)
    ),
    "level must be a whole number, and is 'loud'.": lambda none: debug_logging(
        level=none or "loud"
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_input_is_refused_in_one_sentence(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^{re.escape(sentence)}$"):
        WRONG[sentence](None)
