"""Records of gradients and training steps, without torch.

Norms are Euclidean. None means that a value was not measured, NaN that it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import gt

from msgspec import Struct, field

EXPLODING_NORM = 10.0
"""A parameter whose gradient norm is above this explodes, if its step is one that explodes."""

VANISHING_NORM = 1e-6
"""A parameter whose gradient norm is below this (and not 0) vanishes."""

CALLS_EVENT = "step-calls"
"""Event of a step whose calls, modes or inputs differ from those of the step before."""
PARAMETERS_EVENT = "parameters"
"""Event that describes the parameters of a training, in its first step and after changes."""
MAX_CALLS = 64  # of a step that are recorded
MAX_UNIT = 4  # calls that may repeat together

LARGE_RISE = 2.0  # of the loss after the first step, from which its large gradients explode

LOSS_FROM_BACKWARD = "backward"
LOSS_FROM_OUTPUT = "output"
LOSS_REPORTED = "reported"


class ParameterGradient(Struct, frozen=True):
    """The gradient of one parameter as the optimizer gets it: after unscaling and clipping.

    `max` is the largest absolute value (None when not measured), `group` the layer or module that
    the parameter belongs to.
    """

    name: str
    norm: float
    max: float | None = None
    n_nan: int = 0
    n_inf: int = 0
    group: str = ""
    is_matrix: bool = True

    @property
    def has_nonfinite(self) -> bool:
        """Whether a value is not finite."""
        return self.n_nan > 0 or self.n_inf > 0

    @property
    def is_dead(self) -> bool:
        """Whether every value is exactly 0."""
        return self.norm == 0.0

    def explodes(self, threshold: float = EXPLODING_NORM) -> bool:
        """Whether the norm is finite and above the threshold."""
        return not self.has_nonfinite and self.norm > threshold

    def vanishes(self, threshold: float = VANISHING_NORM) -> bool:
        """Whether the norm is below the threshold and not 0."""
        return 0.0 < self.norm < threshold


MODEL_OUTPUT = "(output)"
"""The name of an origin that is the output of the whole model, after finite outputs of modules."""


class AnomalyOrigin(Struct, frozen=True):
    """Where an anomaly of a step came from, as far as the step shows.

    `kind` is "input" (the batch had NaN or Inf), "weights" (they had, before the step), "module"
    (the first one with non-finite output), "loss" (computed from finite outputs), "backward" (all
    values were finite until the backward pass), "explosion" or "vanishing" (of finite gradients).
    `name` is the module or parameter, `module` the class of a module, `n_affected` the number of
    others that only propagate it.
    """

    kind: str
    name: str
    n_affected: int = 0
    detail: str = ""
    module: str = ""


class TrainingStepRecord(Struct, frozen=True):
    """One optimizer step: its loss, its gradients, and its time.

    `loss_source` is "reported" (by the user), "output" (the `.loss` of the model's output),
    "backward" (what the program called `backward` on, without the scale of a `GradScaler`), both
    the mean over micro-batches, or empty when the loss is unknown, and `loss` NaN. A
    learning rate that the optimizer does not show is NaN. `total_norm` is the norm of the gradients
    that the optimizer received, `norm_before_clip` the norm before `clip_grad_norm_`, and
    `max_norm` its limit; each is None when not observed. `group_norms` are in the order of the
    run's groups; `group_ratios` are the norm of each group's update over the norm of its weights,
    from a sample of rows for large parameters. `gradients` are the recorded ones; the counts are of
    all parameters (`n_nonfinite`: with NaN or Inf in the gradient). `data_ms` is the time in the
    watched loader, `other_ms` the time outside of forward, backward, optimizer and loader (and of
    our wait for a GPU, where a pass takes only the time to launch it). `detail` is how much was
    measured.
    """

    loss: float
    loss_source: str
    learning_rates: tuple[float, ...]
    total_norm: float | None = None
    norm_before_clip: float | None = None
    max_norm: float | None = None
    n_parameters: int = 0
    n_exploding: int = 0
    n_vanishing: int = 0
    n_dead: int = 0
    n_nonfinite: int = 0
    group_norms: tuple[float, ...] = ()
    group_ratios: tuple[float, ...] = ()
    gradients: tuple[ParameterGradient, ...] = ()
    anomaly_origin: AnomalyOrigin | None = None
    n_backward: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    data_ms: float | None = None
    other_ms: float = 0.0
    scale: float | None = None
    is_skipped: bool = False
    device: str = ""
    autocast: str = ""
    detail: str = ""

    @property
    def has_loss(self) -> bool:
        """Whether the loss is known, finite or not."""
        return bool(self.loss_source)

    @property
    def is_loss_anomaly(self) -> bool:
        """Whether the loss is known and not finite."""
        return self.has_loss and not math.isfinite(self.loss)

    @property
    def is_explosion(self) -> bool:
        """Whether a parameter's gradient explodes, in a step that was not skipped."""
        return self.n_exploding > 0 and not self.is_skipped

    @property
    def is_vanishing(self) -> bool:
        """Whether a matrix's gradient vanishes, in a step that was not skipped."""
        return self.n_vanishing > 0 and not self.is_skipped

    @property
    def is_anomaly(self) -> bool:
        """Whether this step has any anomaly: loss, explosion, vanishing, NaN or Inf.

        Gradients of a step that the scaler skipped do not count: it finds its scale that way.
        """
        has_nonfinite = self.n_nonfinite > 0 and not self.is_skipped
        return self.is_loss_anomaly or self.is_explosion or self.is_vanishing or has_nonfinite


class TrainingSummary(Struct, frozen=True):
    """The number of training steps with anomalies, by kind. All figures count steps.

    `anomaly_steps` counts a trouble once: the first step with an anomaly of one kind and origin,
    but not the steps in which it only goes on, or has broken the weights.
    """

    total_steps: int = 0
    anomaly_steps: int = 0
    gradient_explosions: int = 0
    gradient_vanishing: int = 0
    loss_anomalies: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """Return counts, and rates relative to `total_steps`, by their published names."""
        counts = {name: getattr(self, name) for name in TrainingSummary.__struct_fields__}
        n_steps = self.total_steps or 1
        return counts | {rate: counts[count] / n_steps for rate, count in _RATES.items()}


_FINITE = ("explosion", "vanishing")  # kinds of origins of finite gradients
_RATES = {
    "anomaly_rate": "anomaly_steps",
    "loss_anomaly_rate": "loss_anomalies",
    "gradient_explosion_rate": "gradient_explosions",
    "gradient_vanishing_rate": "gradient_vanishing",
}


class TrainingSummaryCounter(Struct):
    """Counts steps one by one, without keeping them."""

    summary: TrainingSummary = field(default_factory=TrainingSummary)
    _origins: set[tuple[str, str]] = field(default_factory=set)
    _first: TrainingStepRecord | None = None
    _last_kind: str = ""

    def add(self, step: TrainingStepRecord) -> None:
        """Count one step."""
        if self._first is None:
            self._first = step
        elif self.summary.total_steps == 1 and is_only_large(self._first, step):
            self.summary, self._origins = TrainingSummary(total_steps=1), set()
        before, is_new = self.summary, step.is_anomaly and self._is_new(step.anomaly_origin)
        self.summary = TrainingSummary(
            total_steps=before.total_steps + 1,
            anomaly_steps=before.anomaly_steps + is_new,
            gradient_explosions=before.gradient_explosions + step.is_explosion,
            gradient_vanishing=before.gradient_vanishing + step.is_vanishing,
            loss_anomalies=before.loss_anomalies + step.is_loss_anomaly,
        )
        self._last_kind = step.anomaly_origin.kind if step.anomaly_origin is not None else ""

    def _is_new(self, origin: AnomalyOrigin | None) -> bool:
        """Whether an anomaly is another trouble than those before.

        Weights that are not finite follow from the first value that was not. An explosion that goes
        on may reach other parameters first.
        """
        if origin is None:
            return True
        goes_on = origin.kind == self._last_kind and origin.kind in _FINITE
        follows = origin.kind == "weights" and any(k not in _FINITE for k, _ in self._origins)
        is_new = (origin.kind, origin.name) not in self._origins and not (goes_on or follows)
        self._origins.add((origin.kind, origin.name))
        return is_new


def is_only_large(first: TrainingStepRecord, second: TrainingStepRecord) -> bool:
    """Whether the first step's gradients, which seemed to explode, only have a large scale.

    The first step has no history. If the loss after it is finite and not far above, its gradients
    are as large as a loss of that scale makes them.
    """
    origin = first.anomaly_origin
    is_candidate = origin is not None and origin.kind == "explosion" and not first.is_loss_anomaly
    is_known = first.has_loss and second.has_loss and not second.is_anomaly
    limit = first.loss + (LARGE_RISE - 1) * abs(first.loss)
    return is_candidate and is_known and second.loss <= limit


def collapse_repeats(calls: list[str]) -> None:
    """Remove the last calls if they are the same as those just before, up to four together."""
    for unit in range(1, MAX_UNIT + 1):
        if len(calls) >= 2 * unit and calls[-unit:] == calls[-2 * unit : -unit]:
            del calls[-unit:]
            return


def is_warming_up(before: Sequence[float], now: Sequence[float]) -> bool:
    """Tell whether a learning rate rises; gradients behind a gate that starts at 0 start small."""
    return any(map(gt, now, before))


def group_of(name: str) -> str:
    """Return the group of a parameter: its numbered layer, else its module.

    `model.layers.3.mlp.up.weight` belongs to `model.layers.3`, `lm_head.weight` to `lm_head`, and
    a parameter of the model itself to `(model)`.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or "(model)"


def combined_norm(norms: Sequence[float]) -> float:
    """Return the norm of norms; NaN or Inf if one is non-finite."""
    if all(map(math.isfinite, norms)):
        return math.hypot(*norms)
    return math.nan if any(map(math.isnan, norms)) else math.inf
