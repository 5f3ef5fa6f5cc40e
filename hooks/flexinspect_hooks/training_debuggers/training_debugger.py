"""`TrainingDebugger`: one call per training step, and the counts of the run."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, Unpack

import torch
from msgspec.structs import asdict, replace
from torch import Tensor, nn

import flexinspect_hooks.training_debuggers.base_debugger as base_debugger
import flexinspect_hooks.training_debuggers.debug_functions as debug_functions
import flexinspect_hooks.training_debuggers.measurements as measurements
from flexinspect.core.errors import UsageError
from flexinspect.core.parsing import parse_json
from flexinspect.records import training_step
from flexinspect.records.debug_switches import DebugLevel, DictDataclass
from flexinspect.records.training_step import LOSS_REPORTED, is_warming_up
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.control.control_protocols import AnomalyCounts
from flexinspect_hooks.training import gradient_statistics
from flexinspect_hooks.training.gradient_statistics import GradientLimits, learning_rates
from flexinspect_hooks.training_debuggers.base_debugger import Anomaly
from flexinspect_hooks.training_debuggers.debug_functions import SwitchBoard
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.measurements import TensorInfo
from flexinspect_hooks.training_debuggers.profiling import PROFILE_FOLDER, ProfilerWindows

ROTATION_STEPS = 16  # at EXTREME every weight is checked once in this many steps, or more
MIN_WEIGHTS_PER_STEP = 4  # the fewest weights that are checked in one step

Metric = Callable[[nn.Module, float, int], float]
Infos = dict[str, TensorInfo] | None


class StepInfo(DictDataclass):
    """One training step. `memory` is measured from ADVANCED on.

    `params_with_nan_grad` and `params_with_inf_grad` are the numbers of parameters that
    `nan_grad_params` and `inf_grad_params` name, as `exploding` and `vanishing` do. `memory` is as
    `profile_memory_usage` returns it; `parameters` and `gradients` are measurements of the weights
    that were checked in this step and of their gradients (EXTREME). `metrics` are the user's.
    """

    step: int
    loss: float
    has_nan: bool
    has_inf: bool
    gradient_norm: float | None
    params_with_nan_grad: int = 0
    params_with_inf_grad: int = 0
    nan_grad_params: tuple[str, ...] = ()
    inf_grad_params: tuple[str, ...] = ()
    exploding: tuple[str, ...] = ()
    vanishing: tuple[str, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    memory: dict[str, int] | None = None
    parameters: dict[str, TensorInfo] | None = None
    gradients: dict[str, TensorInfo] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_anomaly(self) -> bool:
        """Whether the step has an anomaly."""
        return bool(self.anomalies)


class TrainingFigures(DictDataclass):
    """How many monitored steps had which anomalies; all rates are relative to `total_steps`."""

    total_steps: int
    anomaly_steps: int
    gradient_explosions: int
    gradient_vanishing: int
    loss_anomalies: int
    anomaly_rate: float
    loss_anomaly_rate: float
    gradient_explosion_rate: float
    gradient_vanishing_rate: float


class TrainingDebugger(debug_functions.HasSwitches, base_debugger.BaseDebugger):
    """Checks each training step after its backward pass, before the optimizer uses the gradients.

    `switches` is its own board, by default the common one. A step is an anomaly if the norm of one
    parameter's gradient is above `explosion` or below `vanishing`. All levels check the loss,
    gradient norms, NaN and Inf. ADVANCED adds the largest gradient, memory, and the norms of each
    parameter over time. EXTREME adds measurements of weights and gradients (a sixteenth of them at
    each step in turn, all of them at a step with an anomaly), and a log line per step.
    """

    kind = "training"

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        switches: SwitchBoard | None = None,
        profile_folder: str | Path = PROFILE_FOLDER,
        **options: Unpack[base_debugger.BaseDebuggerOptions],
    ) -> None:
        if switches is not None and not isinstance(switches, SwitchBoard):
            raise UsageError(f"switches must be a SwitchBoard, not a {type(switches).__name__}.")
        self.switches = switches or debug_functions.common_board()
        self.switch_log = debug_functions.SwitchLog(self.switches)
        self._windows = ProfilerWindows(self.switches, folder=profile_folder)
        self._metrics: dict[str, Metric] = {}
        self._parameters = gradient_statistics.ParameterList()
        self._last_rates: tuple[float, ...] = ()
        self._next_weight = 0
        super().__init__(level, **options)

    def _reset(self) -> None:
        super()._reset()
        self._summary_count = training_step.TrainingSummaryCounter()
        self._norm_history: deque[tuple[int, tuple[str, ...], array[float]]]
        self._norm_history = deque(maxlen=self._history.maxlen)

    def monitor_training_step(
        self,
        model: nn.Module,
        loss: Tensor | float,
        step: int,
        *,
        optimizer: Any = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
    ) -> StepInfo:
        """Check a step: call it after `backward()` and before `optimizer.step()`.

        The step is counted in `get_training_summary`; its anomalies are logged and kept. An error
        in the debugger itself is logged, and the training continues.

        Args:
            optimizer: with it, small gradients are not anomalies while its learning rate rises.
            scaler: a gradient scaler; call `scaler.unscale_(optimizer)` first. Non-finite
                gradients are not anomalies if an enabled scaler will skip the step.
            autocast: the dtype of `torch.autocast`, for the switch mixed_precision.

        Raises `UsageError` for arguments of a wrong type, and for a loss that is not a single
        number.
        """
        value = argument_checks.check_number(loss, "The loss")
        argument_checks.check_module(model, "monitor_training_step")
        step = argument_checks.check_count(step, "step", 0)
        if optimizer is not None:
            argument_checks.check_optimizer(optimizer, "monitor_training_step")
        try:
            vanishing = self._vanishing
            if optimizer is not None:
                before, self._last_rates = self._last_rates, learning_rates(optimizer)
                vanishing = 0.0 if is_warming_up(before, self._last_rates) else vanishing
            limits = self._explosion, vanishing
            has_scaler = scaler is not None and bool(scaler.is_enabled())
            info = self._monitor(model, value, step, limits, has_scaler=has_scaler)
            self.switch_log.log_memory(step, f"Memory usage - Batch {step}", model)
            self.switch_log.log_precision(step, model, scaler, autocast)
            self.switch_log.log_placement(step, model)
        except Exception as error:
            log.warning("Step %d could not be checked: %s: %s", step, type(error).__name__, error)
            return StepInfo(step, value, math.isnan(value), math.isinf(value), None)
        return info

    def _monitor(
        self, model: nn.Module, value: float, step: int, limits: GradientLimits, *, has_scaler: bool
    ) -> StepInfo:
        self._windows.on_step(step)
        is_advanced = self.level.includes(DebugLevel.ADVANCED)
        trained = self._parameters.trainable_of(model)
        gradients = gradient_statistics.gradient_facts(trained, with_max=is_advanced)
        outliers = gradients.outliers(limits)
        # The scaler skips such a step; that is how it finds its scale.
        is_skipped = has_scaler and bool(gradients.counts)
        record = gradients.step_record(outliers, limits)
        with self._lock:
            known = {"loss": value, "loss_source": LOSS_REPORTED, "is_skipped": is_skipped}
            self._summary_count.add(replace(record, **known))
        anomalies = self._gradient_anomalies(() if is_skipped else outliers, limits, step=step)
        if not math.isfinite(value):
            sentence = f"The loss is {value} at step {step}."
            anomalies.insert(0, self._make_anomaly("loss", "loss", sentence, step=step))
        with_nan = tuple(one.name for one in outliers if one.n_nan)
        with_inf = tuple(one.name for one in outliers if one.n_inf)
        weights, grads = self._inspect_tensors(model, is_full=bool(anomalies))
        info = StepInfo(
            step=step,
            loss=value,
            has_nan=math.isnan(value),
            has_inf=math.isinf(value),
            gradient_norm=gradients.total if gradients.norms else None,
            params_with_nan_grad=len(with_nan),
            params_with_inf_grad=len(with_inf),
            nan_grad_params=with_nan,
            inf_grad_params=with_inf,
            exploding=tuple(one.where for one in anomalies if one.kind == "explosion"),
            vanishing=tuple(one.where for one in anomalies if one.kind == "vanishing"),
            anomalies=tuple(anomalies),
            memory=measurements.memory_of(model) if is_advanced else None,
            parameters=weights,
            gradients=grads,
            metrics=self._run_metrics(model, value, step),
        )
        self._store_norms(step, gradients)
        tensors = [*(weights or {}).values(), *(grads or {}).values()]
        self._record_analysis([info, *tensors], info.anomalies)
        self.switch_log.log_norms(step, gradients, limits)
        self.switch_log.log_backward(step, model, gradients)
        if self.level is DebugLevel.EXTREME:
            log.info("Step %d: loss %.6g, gradient norm %.4g", step, value, info.gradient_norm or 0)
        return info

    def add_metric(self, name: str, measure: Metric) -> None:
        """Measure your own value at each step: `measure(model, loss, step)` returns a number."""
        argument_checks.check_function(measure, f"The metric {name}", "(model, loss, step)")
        self._metrics[name] = measure

    def close(self) -> None:
        """End the open window of the profiler switches, and stop listening to torch."""
        self._windows.close()
        self._parameters.close()

    def get_training_summary(self) -> TrainingFigures:
        """How many steps had which anomalies since the debugger was created or cleared."""
        figures: Any = self._summary_count.summary.as_dict()
        return TrainingFigures(**figures)

    def counts(self) -> AnomalyCounts:
        """The counts for the control server; may be called from any thread."""
        with self._lock:
            summary = self._summary_count.summary
            n_anomalies = summary.anomaly_steps + self._kinds["error"]
            return replace(super().counts(), total_anomalies=n_anomalies, **asdict(summary))

    def gradient_history(self, name: str | None = None) -> list[tuple[int, float]]:
        """(step, norm) of all gradients, or of one parameter (from ADVANCED), oldest first."""
        history = tuple(self._norm_history)  # another thread may add to it or clear it
        if name is None:
            return [(step, norms[0]) for step, _, norms in history]
        known = (one for one in history if name in one[1])
        return [(step, norms[names.index(name) + 1]) for step, names, norms in known]

    def save_baseline(self, path: str | Path) -> None:
        """Write the summary to a JSON file, to compare later runs with it.

        Raises `UsageError` if the file cannot be written.
        """
        text = json.dumps(self.get_training_summary(), indent=1) + "\n"
        try:
            Path(path).write_text(text, "utf-8")
        except OSError as error:
            raise UsageError(f"The baseline {path} cannot be written: {error.strerror}.") from error

    def compare_with_baseline(self, path: str | Path, *, tolerance: float = 0.001) -> list[str]:
        """A sentence for each rate that is above the baseline by more than `tolerance`.

        Raises `UsageError` for a file that `save_baseline` did not write.
        """
        now = self.get_training_summary()
        rates = [name for name in now if name.endswith("_rate")]
        try:
            file = parse_json(Path(path).read_text("utf-8"))
            before = {name: float(file[name]) for name in rates}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a baseline: save_baseline writes one.") from error
        return [
            f"The {name.replace('_', ' ')} is {now[name]:.4g}, but was {before[name]:.4g}."
            for name in rates
            if now[name] > before[name] + tolerance
        ]

    def _inspect_tensors(self, model: nn.Module, *, is_full: bool) -> tuple[Infos, Infos]:
        """At EXTREME, measure weights and gradients: some of them in turn, or all of them."""
        if self.level is not DebugLevel.EXTREME:
            return None, None
        named = dict(model.named_parameters())
        if not is_full:
            count = max(MIN_WEIGHTS_PER_STEP, math.ceil(len(named) / ROTATION_STEPS))
            start, end = self._next_weight, self._next_weight + count
            self._next_weight = end if end < len(named) else 0
            named = dict([*named.items()][start:end])
        infos = measurements.tensor_infos(named, self.level)
        return infos, measurements.gradient_infos(named, self.level)

    def _run_metrics(self, model: nn.Module, loss: float, step: int) -> dict[str, float]:
        values = {}
        for name, measure in list(self._metrics.items()):
            try:
                values[name] = float(measure(model, loss, step))
            except Exception as error:
                del self._metrics[name]
                kind = type(error).__name__
                log.warning("The metric %s failed and is off: %s: %s", name, kind, error)
        return values

    def _store_norms(self, step: int, gradients: gradient_statistics.Gradients) -> None:
        norms = array("d", [gradients.total])
        names: tuple[str, ...] = ()
        if self.level.includes(DebugLevel.ADVANCED):
            norms.extend(gradients.norms)
            names = tuple(one.name for one in gradients.parameters)
            if self._norm_history and names == self._norm_history[-1][1]:
                names = self._norm_history[-1][1]  # one tuple for all steps with these parameters
        self._norm_history.append((step, names, norms))
