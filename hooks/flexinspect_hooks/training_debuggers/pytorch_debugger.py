"""`PyTorchDebugger`: checks of tensors, parameters, gradients and memory on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.debug_switches import DebugLevel
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM, ParameterGradient
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training.parameters import trainable
from flexinspect_hooks.training_debuggers.components import (
    component_infos,
    memory_of,
    nonfinite_problems,
    tensors_in,
    weight_problems,
)
from flexinspect_hooks.training_debuggers.debugger_base import (
    DEFAULT_HISTORY,
    BaseDebugger,
    OnAnomaly,
    log,
)
from flexinspect_hooks.training_debuggers.result_types import (
    Anomaly,
    GradientAnalysis,
    ModelReport,
    TensorInfo,
)
from flexinspect_hooks.training_debuggers.tensor_checks import (
    gradient_analysis,
    gradients_of,
    tensor_info,
    tensor_infos,
)


class PyTorchDebugger(BaseDebugger):
    """Checks tensors and models on demand, counts anomalies, and keeps a bounded history.

    A gradient of one parameter with a norm above `explosion` or below `vanishing` is an anomaly:
    choose these limits per model.
    """

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = DEFAULT_HISTORY,
        explosion: float = EXPLODING_NORM,
        vanishing: float = VANISHING_NORM,
        alert_above: float = 0.1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        self._explosion = argument_checks.check_limit(explosion, "explosion")
        self._vanishing = argument_checks.check_limit(vanishing, "vanishing")
        super().__init__(level, history=history, alert_above=alert_above, on_anomaly=on_anomaly)

    # -- tensors ---------------------------------------------------------------------------------

    def analyze_tensor(
        self,
        tensor: Tensor,
        name: str = "tensor",
        *,
        shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> TensorInfo:
        """Measure a tensor at this level, and count NaN, Inf and wrong shapes or dtypes.

        `shape` (None is any size) and `dtype` are the expected ones.
        """
        info = tensor_info(argument_checks.check_tensor(tensor, "analyze_tensor"), name, self.level)
        anomalies = [
            *self._nonfinite_anomalies(info, name),
            *self._check_shape_and_dtype(info, tensor, shape, dtype),
        ]
        self._record_analysis([info], anomalies)
        return info

    def analyze_model_parameters(self, model: nn.Module) -> dict[str, TensorInfo]:
        """Measure each parameter at this level, by name."""
        argument_checks.check_module(model, "analyze_model_parameters")
        infos = tensor_infos(dict(model.named_parameters()), self.level)
        self._record_analysis(
            self._history_entries(infos),
            [bad for info in infos.values() for bad in self._nonfinite_anomalies(info, info.name)],
        )
        return infos

    def analyze_gradients(self, model: nn.Module) -> GradientAnalysis:
        """Measure each parameter's gradient, by name; parameters without one are left out."""
        level, limits = self.level, (self._explosion, self._vanishing)
        argument_checks.check_module(model, "analyze_gradients")
        gradients = gradients_of(trainable(model), level)
        analysis = gradient_analysis(model, gradients, level, *limits)
        anomalies = [
            self._make_anomaly(kind, one.name, sentence, tensor=analysis[one.name].tensor)
            for one in gradients.outliers(*limits)
            for kind, sentence in gradient_problems(one, *limits)
        ]
        self._record_analysis(self._history_entries(analysis), anomalies)
        return analysis

    def check_gradient_explosion(
        self, model: nn.Module, threshold: float = EXPLODING_NORM
    ) -> list[str]:
        """The parameters whose gradient norm is above the threshold.

        Gradients with Inf or NaN are not included: see `analyze_gradients`.
        """
        return self._check_norms(model, "explosion", threshold)

    def check_gradient_vanishing(
        self, model: nn.Module, threshold: float = VANISHING_NORM
    ) -> list[str]:
        """The parameters whose gradient norm is below the threshold, including 0."""
        return self._check_norms(model, "vanishing", threshold)

    # -- models ----------------------------------------------------------------------------------

    def profile_memory_usage(self, model: nn.Module) -> dict[str, int]:
        """Bytes of `parameters`, `gradients`, `buffers`, their `total`, and of the rest.

        `process` is the resident memory of this process, `system_used` that of all processes;
        `cuda_allocated` and `cuda_reserved` are 0 without CUDA.
        """
        return memory_of(argument_checks.check_module(model, "profile_memory_usage"))

    def validate_model(self, model: nn.Module, *inputs: Any, **named_inputs: Any) -> ModelReport:
        """Check a model's weights and parts; with inputs, also run it once and check its output.

        The run has no gradients, and the model stays in its mode.
        """
        parts = component_infos(argument_checks.check_module(model, "validate_model"))
        output: tuple[TensorInfo, ...] = ()
        if inputs or named_inputs:
            with torch.no_grad():
                tensors = tensors_in(model(*inputs, **named_inputs))
                named = {f"output {number}": one for number, one in enumerate(tensors)}
            output = tuple(tensor_infos(named, self.level).values())
        problems = (*weight_problems(parts.values()), *nonfinite_problems(output, ""))
        self._record_problems("model", problems)
        return ModelReport(not problems, problems, parts, memory_of(model), output)

    # -- anomalies -------------------------------------------------------------------------------

    def _check_shape_and_dtype(
        self,
        info: TensorInfo,
        tensor: Tensor,
        shape: Sequence[int | None] | None,
        dtype: torch.dtype | None,
    ) -> Iterator[Anomaly]:
        if shape is not None and not _shape_matches(info.shape, shape):
            sentence = f"{info.name} has shape {info.shape}, but {tuple(shape)} is expected."
            yield self._make_anomaly("shape", info.name, sentence, tensor=info)
        if dtype is not None and tensor.dtype != dtype:
            expected = str(dtype).removeprefix("torch.")
            sentence = f"{info.name} is {info.dtype}, but {expected} is expected."
            yield self._make_anomaly("dtype", info.name, sentence, tensor=info)

    def _check_norms(self, model: nn.Module, kind: str, threshold: float) -> list[str]:
        """The parameters whose norm is above ("explosion") or below ("vanishing") a threshold."""
        argument_checks.check_module(model, f"check_gradient_{kind}")
        argument_checks.check_limit(threshold, "threshold")
        gradients = gradients_of(trainable(model), DebugLevel.BASIC).rows
        if kind == "explosion":
            side, names = "above", [one.name for one in gradients if one.explodes(threshold)]
        else:
            side, names = "below", [one.name for one in gradients if one.norm < threshold]
        sentence = f"Gradient {kind} in {{}}: its norm is {side} {threshold:g}."
        self._record_analysis(
            [], [self._make_anomaly(kind, name, sentence.format(name)) for name in names]
        )
        return names

    def _history_entries(self, infos: Any) -> list[Any]:
        """The entries of an analysis of many tensors for the history: all of them at EXTREME."""
        return list(infos.values()) if self.level is DebugLevel.EXTREME else []


def gradient_problems(
    facts: ParameterGradient, explosion: float, vanishing: float
) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each problem of a gradient; only those of matrices can vanish."""
    name, norm = facts.name, facts.norm
    if facts.has_nonfinite:
        value = "nan" if facts.n_nan else "inf"
        yield value, f"NaN/Inf gradient detected in {name}: {value}"
    if facts.explodes(explosion):
        yield "explosion", f"Gradient explosion in {name}: norm {norm:.4g} above {explosion:g}."
    if facts.is_matrix and facts.vanishes(vanishing):
        yield "vanishing", f"Gradient vanishing in {name}: norm {norm:.4g} below {vanishing:g}."


def _shape_matches(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        size is None or size == actual for actual, size in zip(shape, expected, strict=True)
    )


@contextmanager
def debug_context(
    level: DebugLevel | str = DebugLevel.BASIC, **options: Any
) -> Iterator[PyTorchDebugger]:
    """A `PyTorchDebugger` with these options for a block; its summary is logged at the end.

    From ADVANCED on, an exception inside is recorded with its full stack and raised again; at
    EXTREME the block also runs in autograd's anomaly mode.
    """
    debugger = PyTorchDebugger(level, **options)
    try:
        if debugger.level is DebugLevel.EXTREME:
            with debugger.autograd_anomaly_detection():
                yield debugger
        else:
            yield debugger
    except Exception as error:
        if debugger.level is DebugLevel.ADVANCED:
            debugger.report_error(error)
        raise
    finally:
        log.info("Debugging is over: %s", debugger.get_debug_summary())
