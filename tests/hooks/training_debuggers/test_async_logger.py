"""`AsyncTrainingLogger`: the specified loop, and an event loop that is not blocked."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time

import pytest
import torch
from torch import nn

from flexinspect import AsyncTrainingLogger, TrainingPhase
from flexinspect.core.errors import UsageError
from flexinspect_hooks.training_debuggers import async_logger


def logger(**options: object) -> async_logger.AsyncTrainingLogger:
    made: async_logger.AsyncTrainingLogger = AsyncTrainingLogger(
        user_id="ada", model_name="tiny", **options
    )
    return made


def test_training_enables_anomaly_mode_and_its_end_restores_it() -> None:
    log = logger(enable_autograd_debug=True)
    assert (log.user_id, log.model_name, log.phase) == ("ada", "tiny", TrainingPhase.SETUP)
    assert not torch.is_anomaly_enabled()
    log.start_training(total_epochs=2, total_steps=10)
    assert torch.is_anomaly_enabled()
    assert log.phase is TrainingPhase.TRAINING
    log.finish_training()
    assert not torch.is_anomaly_enabled()
    assert log.phase is TrainingPhase.FINISHED


def test_anomaly_mode_is_off_by_default() -> None:
    log = logger()
    log.start_training(total_epochs=1, total_steps=1)
    assert not torch.is_anomaly_enabled()


async def test_nan_and_inf_of_a_tensor_are_reported() -> None:
    log = logger()
    for value, has_nan, has_inf in (
        (1.0, False, False),
        (math.nan, True, False),
        (math.inf, False, True),
    ):
        found = await log.check_tensor_anomalies_async(torch.tensor(value), "loss")
        assert (found["has_nan"], found["has_inf"]) == (has_nan, has_inf)
        assert found.is_anomaly == (has_nan or has_inf)


@pytest.mark.parametrize("name", ["nan_grad_params", "inf_grad_params", "exploding", "vanishing"])
def test_one_list_with_an_entry_is_an_anomaly(name: str) -> None:
    names = ("nan_grad_params", "inf_grad_params", "exploding", "vanishing")
    lists: dict[str, list[str]] = {each: [] for each in names}
    assert not async_logger.GradientAnomalies(1.0, 0, 0, **lists).is_anomaly
    lists[name] = ["0.weight"]
    assert async_logger.GradientAnomalies(1.0, 0, 0, **lists).is_anomaly


async def test_parameters_with_nonfinite_gradients_are_named() -> None:
    log, model = logger(), nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    found = await log.check_gradient_anomalies_async(model)
    assert (found["params_with_nan_grad"], found.is_anomaly) == (0, False)
    model.bias.grad[0] = math.nan  # type: ignore[index]
    model.weight.grad *= 1e6  # type: ignore[operator]
    found = await log.check_gradient_anomalies_async(model)
    assert found.params_with_nan_grad > 0
    assert (found["params_with_nan_grad"], found.nan_grad_params) == (1, ["bias"])
    assert (found["params_with_inf_grad"], found.inf_grad_params) == (0, [])
    assert found.exploding == ["weight"]


async def test_checks_run_in_a_thread_and_the_event_loop_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, seen = logger(), []
    real = log.debugger.analyze_tensor

    def slow(*args: object) -> object:
        seen.append(threading.current_thread())
        time.sleep(0.2)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(log.debugger, "analyze_tensor", slow)
    check = asyncio.create_task(log.check_tensor_anomalies_async(torch.ones(2), "x"))
    ticks = 0
    while not check.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks >= 2
    assert seen[0] is not threading.main_thread()


async def test_progress_has_share_and_remaining_time(lines: pytest.LogCaptureFixture) -> None:
    log = logger()
    log.start_training(total_epochs=2, total_steps=10)
    await asyncio.sleep(0.02)
    progress = await log.update_progress_async(epoch=0, step=4, loss=0.5, learning_rate=1e-3)
    assert progress.share == 0.5
    assert progress.remaining_s == pytest.approx(progress.elapsed_s)
    assert log.progress == (progress,)
    assert lines.messages[-1].startswith(
        "[ada · tiny · training] Epoch 0 of 2, step 4 of 10: loss 0.5, rate 0.001, "
    )


async def test_the_loss_is_waited_for_in_a_thread() -> None:
    taken_in: list[threading.Thread] = []

    class OnDevice:
        def __float__(self) -> float:
            taken_in.append(threading.current_thread())
            return 0.5

    log = logger()
    progress = await log.update_progress_async(epoch=0, step=0, loss=OnDevice())  # type: ignore[arg-type]
    assert progress.loss == 0.5
    assert threading.main_thread() not in taken_in
    with pytest.raises(UsageError, match="The loss must be a single number"):
        await log.update_progress_async(epoch=0, step=1, loss=torch.ones(2))
    assert log.progress == (progress,)


async def test_without_totals_share_and_remaining_time_are_none() -> None:
    progress = await logger().update_progress_async(epoch=0, step=4, loss=0.5)
    assert (progress.share, progress.remaining_s) == (None, None)


def test_warnings_and_errors_carry_phase_context_and_stack(lines: pytest.LogCaptureFixture) -> None:
    log = logger()
    log.start_training()
    assert log.log_warning("slow").phase == "training"
    assert log.log_warning("slow", TrainingPhase.VALIDATION).phase == "validation"
    try:
        raise ValueError("odd labels")
    except ValueError as error:
        entry = log.log_error(error, TrainingPhase.TRAINING, {"step": 3})
    assert (entry.level, entry.text) == ("ERROR", "ValueError: odd labels")
    assert entry.context["step"] == 3
    assert 'raise ValueError("odd labels")' in entry.context["stack"]
    assert lines.records[-1].levelno == logging.ERROR
    assert lines.messages[-1] == "[ada · tiny · training] ValueError: odd labels"
    assert log.debugger.get_debug_summary().total_anomalies == 1


async def test_entries_are_bounded() -> None:
    log = logger(history=5)
    for step in range(12):
        await log.update_progress_async(epoch=0, step=step, loss=1.0)
    assert (len(log.entries), len(log.progress)) == (5, 5)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="total_steps must be 1 or more, and is 0"):
        logger().start_training(total_epochs=1, total_steps=0)
    with pytest.raises(UsageError, match="'lunch' is unknown; the phases are setup, training"):
        logger().log_warning("x", "lunch")


async def test_the_specified_loop_skips_bad_losses_and_raises_what_is_raised(
    lines: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(1, 2), torch.full((1, 2), math.nan), torch.ones(1, 2), torch.ones(1, 3)]
    trained = []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        async with logger() as log:
            log.start_training(total_epochs=1, total_steps=len(batches))
            for step, batch in enumerate(batches):
                try:
                    loss = model(batch).pow(2).mean()
                    anomalies = await log.check_tensor_anomalies_async(loss, "loss")
                    if anomalies["has_nan"] or anomalies["has_inf"]:
                        log.log_warning(f"step {step} is skipped", TrainingPhase.TRAINING)
                        continue
                    optimizer.zero_grad()
                    loss.backward()
                    gradients = await log.check_gradient_anomalies_async(model)
                    assert gradients["params_with_nan_grad"] == 0
                    optimizer.step()
                    trained.append(step)
                    await log.update_progress_async(
                        epoch=0, step=step, loss=loss.item(), learning_rate=0.1
                    )
                except Exception as error:
                    log.log_error(error, TrainingPhase.TRAINING, {"step": step})
                    raise
    assert trained == [0, 2]
    assert [entry.text for entry in log.entries if entry.level == "WARNING"] == [
        "step 1 is skipped"
    ]
    assert log.phase is TrainingPhase.FINISHED
