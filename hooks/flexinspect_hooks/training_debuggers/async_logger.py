"""`AsyncTrainingLogger`: logging and checks for training loops that run in asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Self

from torch import Tensor, nn

from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, DictDataclass, TrainingPhase
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training_debuggers.base_debugger import HISTORY
from flexinspect_hooks.training_debuggers.debug_functions import SwitchBoard
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.pytorch_debugger import PyTorchDebugger

Phase = TrainingPhase | str | None
Facts = Mapping[str, Any] | None


class TensorAnomalies(DictDataclass):
    """Whether a tensor has NaN or Inf."""

    name: str
    has_nan: bool
    has_inf: bool

    @property
    def is_anomaly(self) -> bool:
        """Whether it has either."""
        return self.has_nan or self.has_inf


class GradientAnomalies(DictDataclass):
    """The anomalies in the gradients of a model: two counts, and lists of names of parameters."""

    total_norm: float
    params_with_nan_grad: int
    params_with_inf_grad: int
    nan_grad_params: list[str]
    inf_grad_params: list[str]
    exploding: list[str]
    vanishing: list[str]

    @property
    def is_anomaly(self) -> bool:
        """Whether any list has an entry."""
        lists = (self.nan_grad_params, self.inf_grad_params, self.exploding, self.vanishing)
        return any(lists)


class TrainingProgress(DictDataclass):
    """The progress of a training; `share` and `remaining_s` are None without `total_steps`."""

    epoch: int
    step: int
    loss: float
    learning_rate: float | None
    elapsed_s: float
    share: float | None
    remaining_s: float | None


class LogEntry(DictDataclass):
    """One line of a training's log; `at` in seconds since the epoch."""

    at: float
    level: str
    text: str
    phase: str
    context: dict[str, Any] = field(default_factory=dict)


class AsyncTrainingLogger:
    """Logs and checks one training; blocking work runs in a thread, beside the event loop.

    Other tasks run during a check: await it before you change the tensor or the gradients. Entries
    go to the standard log, and the newest `history` of them are kept. Use it in an `async with`
    block, or call `finish_training`.
    """

    def __init__(
        self,
        *,
        user_id: str | int,
        model_name: str,
        enable_autograd_debug: bool = False,
        level: DebugLevel | str = DebugLevel.BASIC,
        history: int = HISTORY,
    ) -> None:
        self.user_id, self.model_name = user_id, model_name
        self.debugger = PyTorchDebugger(level, history=history)
        self.phase = TrainingPhase.SETUP
        self._enable_autograd_debug = enable_autograd_debug
        self._board = SwitchBoard()
        self._entries: deque[LogEntry] = deque(maxlen=history)
        self._progress: deque[TrainingProgress] = deque(maxlen=history)
        self._started_at = time.monotonic()
        self._total_epochs: int | None = None
        self._total_steps: int | None = None

    def start_training(
        self, total_epochs: int | None = None, total_steps: int | None = None
    ) -> None:
        """Start the clock, and autograd's anomaly mode with `enable_autograd_debug`.

        Raises `UsageError` for a total below 1.
        """
        for name, total in (("total_epochs", total_epochs), ("total_steps", total_steps)):
            if total is not None:
                argument_checks.check_count(total, name)
        self._total_epochs, self._total_steps = total_epochs, total_steps
        self._started_at = time.monotonic()
        self.phase = TrainingPhase.TRAINING
        if self._enable_autograd_debug:
            self._board.enable_debugging(["autograd_anomaly"])
        self._log(logging.INFO, f"Training starts: {total_epochs} epochs, {total_steps} steps")

    def finish_training(self) -> None:
        """Log the end, and restore autograd's anomaly mode."""
        self._board.disable_debugging()
        self.phase = TrainingPhase.FINISHED
        n_anomalies = self.debugger.get_debug_summary().total_anomalies
        self._log(logging.INFO, f"Training is over: {n_anomalies} anomalies")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.finish_training()

    async def check_tensor_anomalies_async(
        self, tensor: Tensor, name: str = "tensor"
    ) -> TensorAnomalies:
        """Check whether a tensor, such as the loss, has NaN or Inf."""
        info = await asyncio.to_thread(self.debugger.analyze_tensor, tensor, name)
        return TensorAnomalies(name, info.has_nan, info.has_inf)

    async def check_gradient_anomalies_async(self, model: nn.Module) -> GradientAnomalies:
        """Find the parameters whose gradient has NaN or Inf, explodes or vanishes."""
        analysis = await asyncio.to_thread(self.debugger.analyze_gradients, model)
        with_nan, with_inf = analysis.nan_grad_params, analysis.inf_grad_params
        exploding = [name for name, info in analysis.items() if info.explodes]
        vanishing = [name for name, info in analysis.items() if info.vanishes]
        return GradientAnomalies(
            total_norm=analysis.total_norm,
            params_with_nan_grad=len(with_nan),
            params_with_inf_grad=len(with_inf),
            nan_grad_params=with_nan,
            inf_grad_params=with_inf,
            exploding=exploding,
            vanishing=vanishing,
        )

    async def update_progress_async(
        self, *, epoch: int, step: int, loss: Tensor | float, learning_rate: float | None = None
    ) -> TrainingProgress:
        """Log the progress; a thread waits for a loss on a GPU and writes the log.

        Raises `UsageError` for a loss that is not a single number.
        """
        elapsed = time.monotonic() - self._started_at
        value = await asyncio.to_thread(argument_checks.check_number, loss, "The loss")
        share = min((step + 1) / self._total_steps, 1.0) if self._total_steps else None
        left = elapsed * (1 - share) / share if share else None
        progress = TrainingProgress(epoch, step, value, learning_rate, elapsed, share, left)
        of = f" of {self._total_steps}" if self._total_steps else ""
        epochs = f" of {self._total_epochs}" if self._total_epochs else ""
        rate = "" if learning_rate is None else f", rate {learning_rate:.4g}"
        remaining = "" if left is None else f", {left:.0f} s left"
        text = f"Epoch {epoch}{epochs}, step {step}{of}: loss {value:.6g}{rate}{remaining}"
        await asyncio.to_thread(self._log, logging.DEBUG, text, facts=progress)
        self._progress.append(progress)
        return progress

    def log_warning(self, text: str, phase: Phase = None) -> LogEntry:
        """Log a warning; `phase` defaults to the current one."""
        return self._log(logging.WARNING, text, phase)

    def log_error(
        self, error: BaseException, phase: Phase = None, context: Facts = None
    ) -> LogEntry:
        """Log an exception with its full stack and the facts in `context`.

        Raises `UsageError` if `error` is not an exception, or `context` is not a dict.
        """
        if not isinstance(error, BaseException):
            raise UsageError("log_error needs an exception; log_warning takes a text.")
        if not isinstance(context or {}, Mapping):
            raise UsageError(
                f"context must be a dict, not {argument_checks.describe_type(context)}."
            )
        anomaly = self.debugger.report_error(error)
        facts = {**(context or {}), "stack": anomaly.stack}
        return self._log(logging.ERROR, anomaly.sentence, phase, facts)

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The entries in the history, the oldest first."""
        return tuple(self._entries)

    @property
    def progress(self) -> tuple[TrainingProgress, ...]:
        """The progress at each update in the history, the oldest first."""
        return tuple(self._progress)

    def _log(self, level: int, text: str, phase: Phase = None, facts: Facts = None) -> LogEntry:
        try:
            current = TrainingPhase(self.phase if phase is None else phase)
        except ValueError:
            known = ", ".join(TrainingPhase)
            raise UsageError(f"The phase {phase!r} is unknown; the phases are {known}.") from None
        name = logging.getLevelName(level)
        entry = LogEntry(time.time(), name, text, current.value, dict(facts or {}))
        self._entries.append(entry)
        prefix = f"[{self.user_id} · {self.model_name} · {current.value}]"
        log.log(level, "%s %s", prefix, text, extra={"facts": entry})
        return entry
