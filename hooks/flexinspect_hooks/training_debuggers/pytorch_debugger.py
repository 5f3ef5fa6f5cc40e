"""`PyTorchDebugger`, which checks tensors and models on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import flexinspect_hooks.training_debuggers.measurements as measurements
from flexinspect.records.debug_switches import DebugLevel, DictDataclass
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training.gradient_statistics import gradient_facts, trainable
from flexinspect_hooks.training_debuggers.base_debugger import Anomaly, BaseDebugger
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.measurements import TensorInfo
from flexinspect_hooks.training_debuggers.model_validation import ModelReport, model_report


class GradientInfo(DictDataclass):
    """The gradient of one parameter; `largest` (absolute) from ADVANCED on, `tensor` at EXTREME."""

    name: str
    norm: float
    has_nan: bool
    has_inf: bool
    explodes: bool
    vanishes: bool
    largest: float | None = None
    tensor: TensorInfo | None = None


class GradientAnalysis(dict[str, GradientInfo]):
    """The gradients by parameter name, for all parameters that have one."""

    def __init__(self, gradients: Mapping[str, GradientInfo], total_norm: float) -> None:
        super().__init__(gradients)
        self.total_norm = total_norm  # of all gradients; NaN or Inf if one is non-finite

    @property
    def params_with_nan_grad(self) -> int:
        """How many parameters have a gradient with NaN."""
        return len(self.nan_grad_params)

    @property
    def params_with_inf_grad(self) -> int:
        """How many parameters have a gradient with Inf."""
        return len(self.inf_grad_params)

    @property
    def nan_grad_params(self) -> list[str]:
        """Parameters whose gradient has NaN."""
        return [name for name, info in self.items() if info.has_nan]

    @property
    def inf_grad_params(self) -> list[str]:
        """Parameters whose gradient has Inf."""
        return [name for name, info in self.items() if info.has_inf]


class PyTorchDebugger(BaseDebugger):
    """Checks tensors and models on demand, counts anomalies, and keeps a bounded history.

    A gradient of one parameter with a norm above `explosion` or below `vanishing` is an anomaly:
    choose these limits per model.
    """

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
        argument_checks.check_tensor(tensor, "analyze_tensor")
        info = measurements.tensor_infos({name: tensor}, self.level)[name]
        wrong: dict[str, str] = {}
        if shape is not None and not _shape_matches(info.shape, shape):
            wrong["shape"] = f"has shape {info.shape}, but {tuple(shape)} is expected"
        if dtype is not None and tensor.dtype != dtype:
            expected = str(dtype).removeprefix("torch.")
            wrong["dtype"] = f"is {info.dtype}, but {expected} is expected"
        anomalies = self._nonfinite_anomalies(info, name)
        for kind, problem in wrong.items():
            anomalies.append(self._make_anomaly(kind, name, f"{name} {problem}.", tensor=info))
        self._record_analysis([info], anomalies)
        return info

    def analyze_model_parameters(self, model: nn.Module) -> dict[str, TensorInfo]:
        """Measure each parameter at this level, by name."""
        argument_checks.check_module(model, "analyze_model_parameters")
        infos = measurements.tensor_infos(dict(model.named_parameters()), self.level)
        found = (self._nonfinite_anomalies(info, info.name) for info in infos.values())
        self._record_analyses(infos, [*chain.from_iterable(found)])
        return infos

    def analyze_gradients(self, model: nn.Module) -> GradientAnalysis:
        """Measure each parameter's gradient, by name; parameters without one are left out."""
        argument_checks.check_module(model, "analyze_gradients")
        level, limits = self.level, (self._explosion, self._vanishing)
        trained, with_max = trainable(model), level.includes(DebugLevel.ADVANCED)
        gradients = gradient_facts(trained, with_max=with_max)
        tensors: dict[str, TensorInfo] = {}
        if level is DebugLevel.EXTREME:
            tensors = measurements.gradient_infos(dict(model.named_parameters()), level)
        infos = {
            one.name: GradientInfo(
                name=one.name,
                norm=one.norm,
                has_nan=one.n_nan > 0,
                has_inf=one.n_inf > 0,
                explodes=one.explodes(self._explosion),
                vanishes=one.is_matrix and one.vanishes(self._vanishing),
                largest=one.max,
                tensor=tensors.get(one.name),
            )
            for one in gradients.rows
        }
        anomalies = self._gradient_anomalies(gradients.outliers(limits), limits, tensors=tensors)
        self._record_analyses(infos, anomalies)
        return GradientAnalysis(infos, gradients.total)

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

    def profile_memory_usage(self, model: nn.Module) -> dict[str, int]:
        """Bytes of `parameters`, `gradients`, `buffers`, their `total`, and of the rest.

        `process` is the resident memory of this process, `system_used` that of all processes;
        `cuda_allocated` and `cuda_reserved` are 0 without CUDA.
        """
        argument_checks.check_module(model, "profile_memory_usage")
        return measurements.memory_of(model)

    def validate_model(self, model: nn.Module, *inputs: Any, **named_inputs: Any) -> ModelReport:
        """Check a model's weights and parts; with inputs, also run it once and check its output.

        The run has no gradients, and the model stays in its mode. An exception of the run is one
        of the problems, with the module that raised it; its stack is in the history.
        """
        argument_checks.check_module(model, "validate_model")
        report, error = model_report(model, inputs, named_inputs, self.level)
        self._record_problems("model", report.problems)
        if error is not None:
            self.report_error(error)
            problems = (*report.problems, measurements.describe_forward_error(error, model))
            report = replace(report, is_valid=False, problems=problems)
        return report

    def _check_norms(self, model: nn.Module, kind: str, threshold: float) -> list[str]:
        argument_checks.check_module(model, f"check_gradient_{kind}")
        argument_checks.check_limit(threshold, "threshold")
        gradients = gradient_facts(trainable(model), with_max=False).rows
        if kind == "explosion":
            side, names = "above", [one.name for one in gradients if one.explodes(threshold)]
        else:
            side, names = "below", [one.name for one in gradients if one.norm < threshold]
        sentence = f"Gradient {kind} in {{}}: its norm is {side} {threshold:g}."
        anomalies = [self._make_anomaly(kind, name, sentence.format(name)) for name in names]
        self._record_analysis([], anomalies)
        return names

    def _record_analyses(self, infos: Mapping[str, Any], anomalies: list[Anomaly]) -> None:
        """Count an analysis of many tensors; its history has all of them at EXTREME."""
        self._record_analysis(infos.values() if self.level is DebugLevel.EXTREME else (), anomalies)


def _shape_matches(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    same_rank = len(shape) == len(expected)
    return same_rank and all(size in (None, n) for n, size in zip(shape, expected, strict=True))


@contextmanager
def debug_context(
    level: DebugLevel | str = DebugLevel.BASIC, **options: Any
) -> Iterator[PyTorchDebugger]:
    """A `PyTorchDebugger` with these options for a block; its summary is logged at the end.

    From ADVANCED on, an exception inside is recorded with its full stack and raised again; at
    EXTREME the block also runs in autograd's anomaly mode.
    """
    debugger = PyTorchDebugger(level, **options)
    is_extreme = debugger.level is DebugLevel.EXTREME
    try:
        with debugger.autograd_anomaly_detection() if is_extreme else nullcontext():
            yield debugger
    except Exception as error:
        if debugger.level is DebugLevel.ADVANCED:
            debugger.report_error(error)
        raise
    finally:
        log.info("Debugging is over: %s", debugger.get_debug_summary())
