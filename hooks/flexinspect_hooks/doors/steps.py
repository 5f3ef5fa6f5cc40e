"""`TrainingDebugger`: one call per training step, and the figures of the run."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
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
    GradientFacts,
    SummaryCount,
    TrainingStepRecord,
    is_warming,
)
from flexinspect_hooks import given
from flexinspect_hooks.control.parts import Counts
from flexinspect_hooks.doors.base import HISTORY, Debugger, OnAnomaly, log
from flexinspect_hooks.doors.components import memory_of
from flexinspect_hooks.doors.general import gradient_troubles
from flexinspect_hooks.doors.profiling import FOLDER
from flexinspect_hooks.doors.results import (
    Anomaly,
    DebugSummary,
    StepInfo,
    TensorInfo,
    TrainingFigures,
)
from flexinspect_hooks.doors.saying import SwitchLog
from flexinspect_hooks.doors.switches import SwitchBoard, When, checked_board, common_board
from flexinspect_hooks.doors.tensors import gradient_infos, gradients_of, tensor_infos
from flexinspect_hooks.doors.windows import ProfilerWindows
from flexinspect_hooks.training.gradstats import Gradients
from flexinspect_hooks.training.optimizers import rates_of
from flexinspect_hooks.training.parameters import ParameterList

PROFILED_STEPS = 10
"""Steps in one window of the profiler switches."""
TURNS = 16
"""At EXTREME every weight is looked at once in so many steps, or in fewer where they are few."""
AT_LEAST = 4
"""Weights that are looked at in one step."""

Metric = Callable[[nn.Module, float, int], float]


class TrainingDebugger(Debugger):
    """Looks at each training step once its gradients are there, before the optimizer uses them.

    `switches` are its own board, or the one that all debuggers share. `explosion` and `vanishing`
    are the norms of one parameter's gradient beyond which a step is an anomaly. At all levels:
    loss, norms, NaN and Inf. From ADVANCED on: the largest gradient, memory, the norms of each
    parameter over time. EXTREME: figures of weights and gradients, a sixteenth of them at each step
    in turn and all of them at a step with an anomaly, and a line per step.
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
        self.switches = checked_board(switches) or common_board()
        self.says = SwitchLog(self.switches)
        self._windows = ProfilerWindows(self.switches, steps=PROFILED_STEPS, folder=profile_folder)
        self._explosion = given.limit(explosion, "explosion")
        self._vanishing = given.limit(vanishing, "vanishing")
        self._metrics: dict[str, Metric] = {}
        self._norms: deque[tuple[int, tuple[str, ...], array[float]]] = deque(
            maxlen=given.count(history, "history")
        )
        self._names: tuple[str, ...] = ()
        self._parameters = ParameterList()
        self._rates: tuple[float, ...] = ()
        self._low = 0.0  # below which a gradient vanishes in the step that is looked at
        self._turn = 0
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
        optimizer: Any = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
    ) -> StepInfo:
        """Look at a step: call it after `backward()`, and before `optimizer.step()`.

        With a gradient scaler call `scaler.unscale_(optimizer)` first; it and the dtype of
        `torch.autocast`, if the forward ran under it, are what the switch mixed_precision says. The
        step is counted in `get_training_summary`, its anomalies are logged and kept; gradients that
        are not finite are none where an enabled scaler will leave the step out, and with the
        `optimizer` small ones are none while its learning rate rises.

        Where the debugger itself fails, that is logged, and the training goes on. Raises
        `UsageError` for what is no model, no optimizer, no step's number, and for a loss that is
        not a single number.
        """
        value = given.number(loss, "The loss")
        given.module(model, "monitor_training_step")
        step = given.count(step, "step", 0)
        if optimizer is not None:
            given.optimizer(optimizer, "monitor_training_step")
        try:
            self._low = self._vanishing_now(optimizer)
            info = self._monitor(model, value, step, has_scaler=_is_on(scaler))
            self.says.around(step, model, scaler, autocast)
        except Exception as error:
            kind = type(error).__name__
            log.warning("Step %d could not be looked at: %s: %s", step, kind, error)
            return StepInfo(step, value, math.isnan(value), math.isinf(value), None)
        return info

    def _vanishing_now(self, optimizer: Any) -> float:
        """Return the norm below which a gradient vanishes in this step: 0 while a rate rises."""
        if optimizer is None:
            return self._vanishing
        before, self._rates = self._rates, rates_of(optimizer)
        return 0.0 if is_warming(before, self._rates) else self._vanishing

    def _monitor(self, model: nn.Module, value: float, step: int, *, has_scaler: bool) -> StepInfo:
        self._windows.boundary(step)
        gradients = gradients_of(self._parameters.of(model), self.level)
        odd = gradients.odd(self._explosion, self._low)
        # The scaler leaves such a step out; it finds its scale that way.
        is_skipped = has_scaler and gradients.is_sick
        record = self._record(value, len(gradients), odd, is_skipped=is_skipped)
        with self._lock:
            self._count.add(record)
        info = self._info(model, value, step, gradients, odd, is_skipped=is_skipped)
        self._remember(step, gradients)
        tensors = (*(info.parameters or {}).values(), *(info.gradients or {}).values())
        self._keep([info, *tensors], info.anomalies)
        self.says.gradients(step, model, gradients, (self._explosion, self._low))
        if self.level is DebugLevel.EXTREME:
            log.info("Step %d: loss %.6g, gradient norm %.4g", step, value, info.gradient_norm or 0)
        return info

    def add_metric(self, name: str, measure: Metric) -> None:
        """Measure something of your own each step: `measure(model, loss, step)` gives a number."""
        self._metrics[name] = given.function(measure, f"The metric {name}", "(model, loss, step)")

    def close(self) -> None:
        """End a profile that a switch began."""
        self._windows.close()

    # -- figures ---------------------------------------------------------------------------------

    def get_training_summary(self) -> TrainingFigures:
        """Return how many steps were wrong, and in what, since the debugger was made or cleared."""
        return TrainingFigures(**self._count.summary.as_dict())  # type: ignore[arg-type]

    def counts(self) -> Counts:
        """Return the counts that the control server gives out; may be called from any thread."""
        with self._lock:
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
        with self._lock:
            return replace(super().get_debug_summary(), total_anomalies=self._n_total())

    def _n_total(self) -> int:
        return self._count.summary.anomaly_steps + self._kinds["error"]

    def gradient_history(self, name: str | None = None) -> list[tuple[int, float]]:
        """Return (step, norm) of all gradients together, or of one parameter's (from ADVANCED on).

        As many steps as the history holds, the oldest first.
        """
        kept = tuple(self._norms)  # another thread may add to it or clear it
        if name is None:
            return [(step, norms[0]) for step, _, norms in kept]
        return [
            (step, norms[names.index(name) + 1]) for step, names, norms in kept if name in names
        ]

    def save_baseline(self, path: str | Path) -> None:
        """Write the summary to a JSON file, to compare a later run with.

        Raises `UsageError` where it cannot be written.
        """
        text = json.dumps(self.get_training_summary(), indent=1) + "\n"
        try:
            Path(path).write_text(text, "utf-8")
        except OSError as error:
            raise UsageError(f"The baseline {path} cannot be written: {error.strerror}.") from error

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
        self,
        model: nn.Module,
        loss: float,
        step: int,
        gradients: Gradients,
        odd: Sequence[GradientFacts],
        *,
        is_skipped: bool,
    ) -> StepInfo:
        anomalies = self._anomalies(loss, step, () if is_skipped else odd)
        weights, grads = self._looked_at(model, is_full=bool(anomalies))
        return StepInfo(
            step=step,
            loss=loss,
            has_nan=math.isnan(loss),
            has_inf=math.isinf(loss),
            gradient_norm=gradients.total if gradients else None,
            params_with_nan_grad=tuple(one.name for one in odd if one.n_nan),
            params_with_inf_grad=tuple(one.name for one in odd if one.n_inf),
            exploding=tuple(one.where for one in anomalies if one.kind == "explosion"),
            vanishing=tuple(one.where for one in anomalies if one.kind == "vanishing"),
            anomalies=tuple(anomalies),
            memory=memory_of(model) if self.level.includes(DebugLevel.ADVANCED) else None,
            parameters=weights,
            gradients=grads,
            metrics=self._measured(model, loss, step),
        )

    def _anomalies(
        self, loss: float, step: int, gradients: Sequence[GradientFacts]
    ) -> list[Anomaly]:
        found = []
        if not math.isfinite(loss):
            said = f"The loss is {loss} at step {step}."
            found.append(self._anomaly("loss", "loss", said, step=step))
        for one in gradients:
            for kind, said in gradient_troubles(one, self._explosion, self._low):
                found.append(self._anomaly(kind, one.name, said, step=step))
        return found

    def _looked_at(
        self, model: nn.Module, *, is_full: bool
    ) -> tuple[dict[str, TensorInfo] | None, dict[str, TensorInfo] | None]:
        """At EXTREME, return figures of weights and gradients: of some in turn, or of all."""
        if self.level is not DebugLevel.EXTREME:
            return None, None
        named = dict(model.named_parameters())
        if not is_full:
            count = max(AT_LEAST, math.ceil(len(named) / TURNS))
            names = list(named)[self._turn : self._turn + count]
            self._turn = self._turn + count if self._turn + count < len(named) else 0
            named = {name: named[name] for name in names}
        return tensor_infos(named, self.level), gradient_infos(named, self.level)

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

    def _remember(self, step: int, gradients: Gradients) -> None:
        norms = array("d", [gradients.total])
        names: tuple[str, ...] = ()
        if self.level.includes(DebugLevel.ADVANCED):
            norms.extend(gradients.norms)
            names = tuple(one.name for one in gradients.of)
            # One tuple for all steps that have the same parameters.
            self._names = names = self._names if names == self._names else names
        self._norms.append((step, names, norms))

    def _record(
        self, loss: float, n_parameters: int, odd: Sequence[GradientFacts], *, is_skipped: bool
    ) -> TrainingStepRecord:
        """Return a step as the engine counts it."""
        return TrainingStepRecord(
            loss=loss,
            loss_source=LOSS_TOLD,
            learning_rates=(),
            n_parameters=n_parameters,
            n_exploding=sum(one.explodes(self._explosion) for one in odd),
            n_vanishing=sum(one.is_matrix and one.vanishes(self._low) for one in odd),
            n_dead=sum(one.is_dead for one in odd),
            n_sick=sum(one.is_sick for one in odd),
            is_skipped=is_skipped,
        )


def _is_on(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())
