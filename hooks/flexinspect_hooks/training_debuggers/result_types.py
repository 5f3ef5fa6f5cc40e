"""The results of the debuggers: dataclasses that are also dicts (see `DictDataclass`).

Sizes are in bytes. A value that a level does not measure is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from flexinspect.records.debug_switches import DictDataclass


class TensorInfo(DictDataclass):
    """One tensor. `std`, `min` and `max` are measured from ADVANCED on, over finite values.

    `mean_value` is the mean of the finite values (NaN without any), `norm` the Euclidean norm.
    `first_bad` is the index of the first NaN or Inf (EXTREME).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    memory: int
    has_nan: bool
    has_inf: bool
    mean_value: float
    std: float | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    n_nan: int = 0
    n_inf: int = 0
    first_bad: tuple[int, ...] | None = None


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
        self.total_norm = total_norm
        """The norm of all gradients together; NaN or Inf if one of them is non-finite."""

    @property
    def params_with_nan_grad(self) -> list[str]:
        """Parameters whose gradient has NaN."""
        return [name for name, info in self.items() if info.has_nan]

    @property
    def params_with_inf_grad(self) -> list[str]:
        """Parameters whose gradient has Inf."""
        return [name for name, info in self.items() if info.has_inf]


class Anomaly(DictDataclass):
    """One anomaly: what, where, and what usually helps.

    `kind` is one of nan, inf, explosion, vanishing, loss, shape, dtype, model, jump, error.
    `tensor` has facts of the tensor, `stack` (at EXTREME, or of an error) is the program's stack.
    """

    kind: str
    where: str
    sentence: str
    step: int | None = None
    advice: tuple[str, ...] = ()
    tensor: TensorInfo | None = None
    stack: str = ""


class DebugSummary(DictDataclass):
    """The counts of a debugger since it was created or cleared.

    `total_anomalies` and `analyses` count all, `debug_history_length` only what is still kept.
    `anomaly_rate` is the share of the analyses with an anomaly. `alerts` are sentences on
    thresholds that were exceeded.
    """

    level: str
    total_anomalies: int
    debug_history_length: int
    analyses: int
    anomaly_rate: float
    anomalies_by_kind: dict[str, int] = field(default_factory=dict)
    alerts: tuple[str, ...] = ()


class ComponentInfo(DictDataclass):
    """One part of a model or of a pipeline."""

    name: str
    kind: str
    parameters: int
    trainable: int
    memory: int
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    has_nan: bool
    has_inf: bool


class ModelReport(DictDataclass):
    """Whether a model has problems: see `PyTorchDebugger.validate_model`."""

    is_valid: bool
    problems: tuple[str, ...]
    components: dict[str, ComponentInfo]
    memory: dict[str, int]
    output: tuple[TensorInfo, ...] = ()


class StepInfo(DictDataclass):
    """One training step. `memory` is measured from ADVANCED on.

    `params_*`, `exploding` and `vanishing` are names of parameters. `memory` is as
    `profile_memory_usage` returns it; `parameters` and `gradients` are measurements of the weights
    that were checked in this step and of their gradients (EXTREME). `metrics` are the user's.
    """

    step: int
    loss: float
    has_nan: bool
    has_inf: bool
    gradient_norm: float | None
    params_with_nan_grad: tuple[str, ...] = ()
    params_with_inf_grad: tuple[str, ...] = ()
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


class PipelineAnalysis(DictDataclass):
    """The components of a diffusion pipeline; `roles` has names of denoiser, text encoder, VAE."""

    total_parameters: int
    trainable_parameters: int
    memory: int
    components: dict[str, ComponentInfo]
    roles: dict[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()


class DiffusionStepInfo(DictDataclass):
    """One denoising step. `change` is the norm of the change relative to the latents before.

    `change` and `memory` are measured from ADVANCED on; `made_by` is the component whose output was
    the first with NaN or Inf since the last step, under `watching`.
    """

    step: int
    latents: TensorInfo
    change: float | None = None
    anomalies: tuple[Anomaly, ...] = ()
    memory: dict[str, int] | None = None
    made_by: str | None = None


class LogEntry(DictDataclass):
    """One line of a training's log; `at` in seconds since the epoch."""

    at: float
    level: str
    text: str
    phase: str
    context: dict[str, Any] = field(default_factory=dict)
