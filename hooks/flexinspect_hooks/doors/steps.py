"""`TrainingDebugger`: one call per training step, and the figures of the run."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.debugging import DebugLevel
from flexinspect.errors import UsageError
from flexinspect.trainingfacts import (
    EXPLOSION,
    LOSS_TOLD,
    VANISHING,
    SummaryCount,
    TrainingStepRecord,
)
from flexinspect_hooks.control.parts import Counts
from flexinspect_hooks.doors.base import HISTORY, Debugger, OnAnomaly, log
from flexinspect_hooks.doors.components import memory_of
from flexinspect_hooks.doors.general import gradient_troubles
from flexinspect_hooks.doors.profiling import FOLDER
from flexinspect_hooks.doors.results import (
    Anomaly,
    DebugSummary,
    GradientAnalysis,
    StepInfo,
    TensorInfo,
    TrainingFigures,
)
from flexinspect_hooks.doors.saying import SwitchLog
from flexinspect_hooks.doors.switches import SwitchBoard, When, common_board
from flexinspect_hooks.doors.tensors import gradients_of, tensor_infos
from flexinspect_hooks.doors.windows import ProfilerWindows

PROFILED_STEPS = 10
"""Steps in one window of the profiler switches."""

Metric = Callable[[nn.Module, float, int], float]


class TrainingDebugger(Debugger):
    """Looks at each training step once its gradients are there, before the optimizer uses them.

    `switches` are its own board, or the one that all debuggers share. `explosion` and `vanishing`
    are the norms of one parameter's gradient beyond which a step is an anomaly. At all levels:
    loss, norms, NaN and Inf. From ADVANCED on: the largest gradient, memory, the norms of each
    parameter over time. EXTREME: figures of every weight and gradient, and a line per step.
    """

    kind = "training"

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = HISTORY,
        explosion: float = EXPLOSION,
        vanishing: float = VANISHING,
        alert_above: float = 0.1,
        on_anomaly: OnAnomaly | None = None,
        switches: SwitchBoard | None = None,
        profile_folder: str | Path = FOLDER,
    ) -> None:
        self.switches = switches or common_board()
        self.says = SwitchLog(self.switches, explosion, vanishing)
        self._windows = ProfilerWindows(self.switches, steps=PROFILED_STEPS, folder=profile_folder)
        self._explosion, self._vanishing = explosion, vanishing
        self._metrics: dict[str, Metric] = {}
        self._norms: deque[tuple[int, tuple[str, ...], array[float]]] = deque(maxlen=history)
        self._names: tuple[str, ...] = ()
        super().__init__(level, history=history, alert_above=alert_above, on_anomaly=on_anomaly)

    def _reset(self) -> None:
        self._count = SummaryCount()
        self._norms.clear()
        super()._reset()

    # -- the switches ----------------------------------------------------------------------------

    def enable_debugging(
        self, names: str | list[str] | None = None, *, when: When | None = None
    ) -> None:
        """Turn switches on, short names or full; without names all. See `SwitchBoard`."""
        self.switches.enable_debugging(names, when=when)

    def disable_debugging(self, names: str | list[str] | None = None) -> None:
        """Turn switches off; without names all."""
        self.switches.disable_debugging(names)

    def get_debugging_status(self) -> dict[str, bool]:
        """Return the thirteen switches by their full names."""
        return self.switches.get_debugging_status()

    # -- a step ----------------------------------------------------------------------------------

    def monitor_training_step(
        self,
        model: nn.Module,
        loss: Tensor | float,
        step: int,
        *,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
    ) -> StepInfo:
        """Look at a step: call it after `backward()`, and before `optimizer.step()`.

        With a gradient scaler call `scaler.unscale_(optimizer)` first; it and the dtype of
        `torch.autocast`, if the forward ran under it, are what the switch mixed_precision says. The
        step is counted in `get_training_summary`, its anomalies are logged and kept.
        """
        self._windows.boundary(step)
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        gradients = gradients_of(model, self.level, self._explosion, self._vanishing)
        self._count.add(_record(value, gradients))
        info = self._info(model, value, step, gradients)
        self._remember(step, gradients)
        self._keep([info, *self._tensors(info, gradients)], info.anomalies)
        self.says.gradients(step, model, gradients)
        self.says.around(step, model, scaler, autocast)
        if self.level is DebugLevel.EXTREME:
            log.info("Step %d: loss %.6g, gradient norm %.4g", step, value, gradients.total_norm)
        return info

    def add_metric(self, name: str, measure: Metric) -> None:
        """Measure something of your own each step: `measure(model, loss, step)` gives a number."""
        self._metrics[name] = measure

    def close(self) -> None:
        """End a profile that a switch began."""
        self._windows.close()

    # -- figures ---------------------------------------------------------------------------------

    def get_training_summary(self) -> TrainingFigures:
        """Return how many steps were wrong, and in what, since the debugger was made or cleared."""
        return TrainingFigures(**self._count.summary.as_dict())  # type: ignore[arg-type]

    def counts(self) -> Counts:
        """Return the counts that the control server gives out; may be called from any thread."""
        summary = self._count.summary
        return replace(
            super().counts(),
            total_anomalies=self._n_total(),
            total_steps=summary.total_steps,
            anomaly_steps=summary.anomaly_steps,
            gradient_explosions=summary.gradient_explosions,
            gradient_vanishing=summary.gradient_vanishing,
            loss_anomalies=summary.loss_anomalies,
        )

    def get_debug_summary(self) -> DebugSummary:
        """Return the counts; `total_anomalies` counts steps with any, and reported errors."""
        return replace(super().get_debug_summary(), total_anomalies=self._n_total())

    def _n_total(self) -> int:
        return self._count.summary.anomaly_steps + self._kinds["error"]

    def gradient_history(self, name: str | None = None) -> list[tuple[int, float]]:
        """Return (step, norm) of all gradients together, or of one parameter's (from ADVANCED on).

        As many steps as the history holds, the oldest first.
        """
        if name is None:
            return [(step, norms[0]) for step, _, norms in self._norms]
        return [
            (step, norms[names.index(name) + 1])
            for step, names, norms in self._norms
            if name in names
        ]

    def save_baseline(self, path: str | Path) -> None:
        """Write the summary to a JSON file, to compare a later run with."""
        Path(path).write_text(json.dumps(self.get_training_summary(), indent=1) + "\n", "utf-8")

    def compare_with_baseline(self, path: str | Path, *, tolerance: float = 0.001) -> list[str]:
        """Return a sentence for each rate that is above the baseline's by more than `tolerance`.

        Raises `UsageError` for a file that `save_baseline` did not write.
        """
        try:
            before = json.loads(Path(path).read_text("utf-8"))
            rates = {
                each.name: float(before[each.name])
                for each in fields(TrainingFigures)
                if each.name.endswith("_rate")
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no baseline: save_baseline writes one.") from error
        now = self.get_training_summary()
        return [
            f"The {name.replace('_', ' ')} is {now[name]:.4g}, and was {rate:.4g}."
            for name, rate in rates.items()
            if now[name] > rate + tolerance
        ]

    # -- parts -----------------------------------------------------------------------------------

    def _info(
        self, model: nn.Module, loss: float, step: int, gradients: GradientAnalysis
    ) -> StepInfo:
        is_advanced = self.level.includes(DebugLevel.ADVANCED)
        is_extreme = self.level is DebugLevel.EXTREME
        weights = dict(model.named_parameters()) if is_extreme else {}
        parameters = tensor_infos(weights, self.level)
        return StepInfo(
            step=step,
            loss=loss,
            has_nan=math.isnan(loss),
            has_inf=math.isinf(loss),
            gradient_norm=gradients.total_norm if gradients else None,
            params_with_nan_grad=tuple(gradients.params_with_nan_grad),
            params_with_inf_grad=tuple(gradients.params_with_inf_grad),
            exploding=tuple(name for name, one in gradients.items() if one.explodes),
            vanishing=tuple(name for name, one in gradients.items() if one.vanishes),
            anomalies=tuple(self._anomalies(loss, step, gradients)),
            memory=memory_of(model) if is_advanced else None,
            parameters=parameters if is_extreme else None,
            metrics=self._measured(model, loss, step),
        )

    def _anomalies(self, loss: float, step: int, gradients: GradientAnalysis) -> list[Anomaly]:
        found = []
        if not math.isfinite(loss):
            said = f"The loss is {loss} at step {step}."
            found.append(self._anomaly("loss", "loss", said, step=step))
        for name, info in gradients.items():
            for kind, said in gradient_troubles(info, self._explosion, self._vanishing):
                found.append(self._anomaly(kind, name, said, step=step, tensor=info.tensor))
        return found

    def _measured(self, model: nn.Module, loss: float, step: int) -> dict[str, float]:
        found = {}
        for name, measure in list(self._metrics.items()):
            try:
                found[name] = float(measure(model, loss, step))
            except Exception as error:
                del self._metrics[name]
                kind = type(error).__name__
                log.warning("The metric %s failed and is off: %s: %s", name, kind, error)
        return found

    def _remember(self, step: int, gradients: GradientAnalysis) -> None:
        norms = array("d", [gradients.total_norm])
        names: tuple[str, ...] = ()
        if self.level.includes(DebugLevel.ADVANCED):
            norms.extend(info.norm for info in gradients.values())
            names = tuple(gradients)
            # One tuple for all steps that have the same parameters.
            self._names = names = self._names if names == self._names else names
        self._norms.append((step, names, norms))

    def _tensors(self, info: StepInfo, gradients: GradientAnalysis) -> list[TensorInfo]:
        if info.parameters is None:
            return []
        grads = [one.tensor for one in gradients.values() if one.tensor is not None]
        return [*info.parameters.values(), *grads]


def _record(loss: float, gradients: GradientAnalysis) -> TrainingStepRecord:
    """Return a step as the engine counts it."""
    found = gradients.values()
    return TrainingStepRecord(
        loss=loss,
        loss_source=LOSS_TOLD,
        learning_rates=(),
        total_norm=gradients.total_norm,
        n_parameters=len(gradients),
        n_exploding=sum(info.explodes for info in found),
        n_vanishing=sum(info.vanishes for info in found),
        n_sick=sum(info.has_nan or info.has_inf for info in found),
    )
