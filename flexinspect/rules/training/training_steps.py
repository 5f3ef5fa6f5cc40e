"""Checks training steps: loss, gradients, learning rate, gradient scaler and data loading.

`TRAINING_KINDS` are the finding kinds of the family `training`, `TrainingRule` makes the findings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, ClassVar

from flexinspect.core.text import plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import StepRecord
from flexinspect.records.training_step import VANISHING_NORM as THRESHOLD
from flexinspect.records.training_step import AnomalyOrigin, TrainingStepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds

LOSS_NAN = "training.loss-nan"
LOSS_SPIKE = "training.loss-spike"
GRADIENT_EXPLOSION = "training.explosion"
GRADIENT_VANISHING = "training.vanishing"
DEAD_PARAMETERS = "training.dead-parameters"
LEARNING_RATE = "training.learning-rate"
NAN_GRADIENT = "training.nan-gradient"
FP16_OVERFLOW = "training.fp16-overflow"
SCALER_SKIPS = "training.scaler-skips"
LOADER_BOUND = "training.loader-bound"

MAX_LEARNING_RATE = 1.0
"""Learning rates above this are reported."""

LEARNED_SHARE = 1e-3
"""Below this share of the first loss, small gradients are expected."""

VANISHED_SHARE = 1e-4
"""Below this share of the total norm, a gradient has vanished and is not just small."""

MIN_DEAD_STEPS = 10
"""Steps in which a gradient must be 0."""

LOSS_WINDOW = 50
MIN_LOSSES = 20
"""Losses that a spike is compared with, and their smallest number."""

MIN_DEVIATIONS = 10.0
MIN_LOG_DEVIATIONS = 6.0
MIN_SPIKE_RATIO = 2.0
MIN_SPIKE_SHARE = 0.1
"""A spike exceeds the median by these deviations and ratio, and by a share of the first losses.

Small losses of small batches vary by powers of ten, so a spike must also stand out among their
logarithms.
"""

MAX_SKIPS = 5
MAX_INITIAL_SKIPS = 10
"""Consecutive skipped steps: later in a run, and before its first update."""

WAIT_WINDOW = 30
WARMUP_STEPS = 5
MIN_WAIT_SHARE = 0.5
MIN_WAIT_MS = 5.0
MIN_OUTSIDE_MS = 30.0
"""Steps that are compared after the warm-up; share and milliseconds from which waiting counts.

If the loader is not watched, only the time outside all other work is known (`MIN_OUTSIDE_MS`). It
includes a few switches of the interpreter lock (5 ms each).
"""


class TrainingRule(Rule):
    """Checks each optimizer step; one finding of each kind, at its first step."""

    name: ClassVar[str] = "trainingsteps"
    findings = finding_kinds(
        *(LOSS_NAN, LOSS_SPIKE, GRADIENT_EXPLOSION, GRADIENT_VANISHING, DEAD_PARAMETERS),
        *(LEARNING_RATE, NAN_GRADIENT, FP16_OVERFLOW, SCALER_SKIPS, LOADER_BOUND),
    )

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW)
        self._first_losses: list[float] = []
        self._zero_since: dict[str, int] = {}
        self._first_explosion: tuple[int, str] | None = None
        self._n_skipped = self._n_done = 0
        self._waits: deque[tuple[float, float]] = deque(maxlen=WAIT_WINDOW)
        self._is_measured = False

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the state of a run."""
        super().on_generation_start(context)
        self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Check a training step."""
        training = step.training
        if training is None:
            return ()
        found = [
            self._check_learning_rate(step, training),
            self._check_nonfinite(step, training),
            self._check_explosion(step, training),
            self._check_vanishing(step, training),
            self._check_loss_spike(step, training),
            self._check_scaler(step, training),
            self._check_loader(step, training),
            *self._check_dead_parameters(step, training),
        ]
        return [finding for finding in found if finding is not None]

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        evidence: Mapping[str, Any],
        severity: Severity | None = None,
        series: str = "",
    ) -> Finding:
        """A finding that is merged with those of its kind at other steps."""
        series = series or finding_id
        return self.finding(
            step, finding_id, sentence, severity=severity, evidence=evidence, series=series
        )

    # -- NaN and Inf -----------------------------------------------------------------------------

    def _check_nonfinite(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer = training.anomaly_origin
        if producer is not None and producer.kind == "module" and producer.detail == "float16":
            return self._overflow_finding(step, producer)
        if training.is_loss_anomaly:
            return self._loss_finding(step, training)
        if producer is None or training.is_skipped:
            return None
        if producer.kind in ("input", "weights", "module", "loss") and not training.has_loss:
            return self._loss_finding(step, training)
        if producer.kind == "backward":
            return self._gradient_finding(step, training, producer)
        return None

    def _overflow_finding(self, step: StepRecord, producer: AnomalyOrigin) -> Finding:
        others = _describe_carriers(producer, "module")
        sentence = (
            f"The float16 output of {printable(producer.name)} is not finite in step {step.step}: "
            "it may have overflowed (largest value 65504); its weights are "
            f"finite{others}."
        )
        return self._finding(step, FP16_OVERFLOW, sentence, _producer_evidence(producer))

    def _loss_finding(self, step: StepRecord, training: TrainingStepRecord) -> Finding:
        producer = training.anomaly_origin or AnomalyOrigin("loss", "")
        what = "NaN" if math.isnan(training.loss) else "infinite"
        subject = f"The loss of step {step.step} is {what}"
        if not training.has_loss:
            subject = f"The output of the model in step {step.step} is not finite"
        sentence = (
            f"{subject}: {_describe_origin(producer)}{self._describe_history(step, training)}."
        )
        rates = [*training.learning_rates]
        evidence = {**_producer_evidence(producer), "loss": training.loss, "learning_rates": rates}
        return self._finding(step, LOSS_NAN, sentence, evidence)

    def _describe_history(self, step: StepRecord, training: TrainingStepRecord) -> str:
        history = ""
        if self._first_explosion is not None and self._first_explosion[0] < step.step:
            number, name = self._first_explosion
            history = f"; gradients explode from step {number} on, first {printable(name)}"
        high = _highest_rate(training)
        return history + (f"; the learning rate is {high:g}" if high > MAX_LEARNING_RATE else "")

    def _gradient_finding(
        self, step: StepRecord, training: TrainingStepRecord, producer: AnomalyOrigin
    ) -> Finding:
        loss = (
            f"the loss {training.loss:.4g} is finite"
            if training.has_loss
            else "the loss was not reported"
        )
        arrives = ", but the incoming gradient is not" if "arrives" in producer.detail else ""
        sentence = (
            f"The gradient of {printable(producer.name)} is not finite in step {step.step} "
            f"({printable(producer.detail.partition(';')[0])}), the first on the way back from the "
            f"loss; {loss}{arrives}{_describe_carriers(producer, 'parameter')}."
        )
        return self._finding(step, NAN_GRADIENT, sentence, _producer_evidence(producer))

    # -- size ------------------------------------------------------------------------------------

    def _check_explosion(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer = training.anomaly_origin
        if producer is None or producer.kind != "explosion" or training.is_skipped:
            return None
        self._first_explosion = self._first_explosion or (step.step, producer.name)
        clipped = f" after clipping to {training.max_norm:g}" if training.max_norm else ""
        sentence = (
            f"The gradient of {printable(producer.name)} explodes in step {step.step}: its norm is "
            f"{producer.detail}{clipped}, above 10; the first on the way back from the loss"
            f"{_describe_carriers(producer, 'parameter')}."
        )
        return self._finding(step, GRADIENT_EXPLOSION, sentence, _producer_evidence(producer))

    def _check_vanishing(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer, total = training.anomaly_origin, training.total_norm
        if producer is None or producer.kind != "vanishing" or total is None:
            return None
        if training.is_skipped:
            return None
        least = float(producer.detail)
        first = self._first_losses[0] if self._first_losses else math.nan
        if training.has_loss and training.loss < LEARNED_SHARE * first:
            return None
        if least > VANISHED_SHARE * total and total > 10 * THRESHOLD:
            return None
        also = plural(producer.n_affected, "other parameter")
        sentence = (
            f"The gradient of {printable(producer.name)} vanishes in step {step.step}: its norm is "
            f"{producer.detail}, below 1e-6, of {total:.3g} in total"
            + (f"; also that of {also}." if producer.n_affected else ".")
        )
        return self._finding(step, GRADIENT_VANISHING, sentence, _producer_evidence(producer))

    def _check_dead_parameters(
        self, step: StepRecord, training: TrainingStepRecord
    ) -> list[Finding]:
        found = [self._check_unreached(step)]
        if training.gradients and not training.is_skipped:
            now = {one.name for one in training.gradients if one.is_dead}
            self._zero_since = {name: self._zero_since.get(name, step.step) for name in sorted(now)}
            dead = [
                n for n, since in self._zero_since.items() if step.step - since >= MIN_DEAD_STEPS
            ]
            if dead:
                found.append(self._dead_finding(step, dead))
        return [finding for finding in found if finding is not None]

    def _dead_finding(self, step: StepRecord, names: Sequence[str]) -> Finding:
        since = min(self._zero_since[name] for name in names)
        others = plural(len(names) - 1, "other parameter") if len(names) > 1 else ""
        sentence = (
            f"The gradient of {printable(names[0])} is exactly 0 in all recorded steps from step "
            f"{since} to {step.step}" + (f", and so is that of {others}." if others else ".")
        )
        return self._finding(
            step, DEAD_PARAMETERS, sentence, {"names": [*names[:100]], "n": len(names)}
        )

    def _check_unreached(self, step: StepRecord) -> Finding | None:
        event = next(
            (one for one in step.events if one.kind == "parameters-without-gradient"), None
        )
        if event is None:
            return None
        names, n = list(event.data.get("names", [])), int(event.data.get("n", 0))
        sentence = (
            f"{plural(n, 'trainable parameter')} get no gradient in step {step.step}, first "
            f"{printable(str(names[0]))}: the loss does not depend on them."
        )
        evidence = {"names": names, "n": n}
        return self._finding(step, DEAD_PARAMETERS, sentence, evidence, Severity.NOTE, "unreached")

    # -- losses and rates ------------------------------------------------------------------------

    def _check_learning_rate(
        self, step: StepRecord, training: TrainingStepRecord
    ) -> Finding | None:
        high = _highest_rate(training)
        if high <= MAX_LEARNING_RATE:
            return None
        sentence = f"The learning rate of step {step.step} is {high:g}, above 1.0."
        return self._finding(
            step, LEARNING_RATE, sentence, {"learning_rates": [*training.learning_rates]}
        )

    def _check_loss_spike(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        loss = training.loss
        if not training.has_loss or not math.isfinite(loss):
            return None
        before = [*self._losses]
        self._losses.append(loss)
        if len(self._first_losses) < MIN_LOSSES:
            self._first_losses.append(loss)
        if len(before) < MIN_LOSSES or not is_spike(loss, before, median(self._first_losses)):
            return None
        middle = median(before)
        sentence = (
            f"The loss jumps to {loss:.4g} in step {step.step}; the median of the {len(before)} "
            f"losses before is {middle:.4g}."
        )
        return self._finding(step, LOSS_SPIKE, sentence, {"loss": loss, "median": middle})

    # -- scaler and loader -----------------------------------------------------------------------

    def _check_scaler(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if not training.is_skipped:
            self._n_skipped, self._n_done = 0, self._n_done + 1
            return None
        self._n_skipped += 1
        if self._n_skipped < (MAX_SKIPS if self._n_done else MAX_INITIAL_SKIPS):
            return None
        producer = training.anomaly_origin
        scale = "" if training.scale is None else f", the scale has fallen to {training.scale:g}"
        named = "" if producer is None else _describe_nonfinite(producer)
        sentence = (
            f"The gradient scaler has skipped {self._n_skipped} consecutive steps up to step "
            f"{step.step}{scale}{named}."
        )
        return self._finding(
            step, SCALER_SKIPS, sentence, {"in_a_row": self._n_skipped, "scale": training.scale}
        )

    def _check_loader(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if step.step < WARMUP_STEPS:
            return None
        is_measured = training.data_ms is not None
        if not is_measured and training.device not in ("", "cpu"):
            return None  # kernels run asynchronously, so the device works in the remaining time
        wait = training.data_ms if training.data_ms is not None else training.other_ms
        self._waits.append((wait, step.wall_ms))
        if len(self._waits) < WAIT_WINDOW:
            return None
        typical = median(wait for wait, _ in self._waits)
        share = median(wait / wall for wait, wall in self._waits if wall > 0)
        if typical < (MIN_WAIT_MS if is_measured else MIN_OUTSIDE_MS) or share < MIN_WAIT_SHARE:
            return None
        where = "for its loader" if is_measured else "outside forward, backward and optimizer"
        sentence = (
            f"Training waits {where} {typical:.0f} ms of each step, {share:.0%} of its time "
            f"(medians of {WAIT_WINDOW} steps up to step {step.step})."
        )
        severity = Severity.WARNING if is_measured else Severity.NOTE
        evidence = {"ms": typical, "share": share, "mean_ms": fmean(w for w, _ in self._waits)}
        return self._finding(step, LOADER_BOUND, sentence, evidence, severity)


def _describe_origin(producer: AnomalyOrigin) -> str:
    """Where non-finite values come from, and how many modules propagate them."""
    name, carried = printable(producer.name), _describe_carriers(producer, "module")
    if producer.kind == "input":
        return "the input batch is already not finite"
    if producer.kind == "weights":
        return f"the weights {name} are not finite before the step{carried}"
    if producer.kind == "module":
        where = "the output of the model" if name == "(output)" else f"the output of {name}"
        dtype, _, weights = producer.detail.partition("; ")
        weights = printable(weights) or "whose weights are finite"
        return f"it first appears in {where} ({printable(dtype)}), {weights}{carried}"
    return (
        "the model's outputs are finite, so the loss function produces it (a logarithm of 0, a "
        "square that overflows)"
    )


def _describe_nonfinite(producer: AnomalyOrigin) -> str:
    """What is not finite, as the end of a sentence; "" if everything is."""
    name = printable(producer.name)
    words = {
        "input": "the batch is",
        "weights": f"the weights {name} are",
        "module": "the output of the model is"
        if producer.name == "(output)"
        else f"the output of {name} is",
        "loss": "the loss is",
        "backward": f"the gradient of {name} is",
    }
    return f"; {words[producer.kind]} not finite" if producer.kind in words else ""


def _highest_rate(training: TrainingStepRecord) -> float:
    known = (rate for rate in training.learning_rates if not math.isnan(rate))
    return max(known, default=0.0)


def _describe_carriers(producer: AnomalyOrigin, what: str) -> str:
    if not producer.n_affected:
        return ""
    return f"; propagated by {plural(producer.n_affected, f'other {what}')}"


def is_spike(loss: float, before: Sequence[float], first: float) -> bool:
    """Whether a loss stands out from those `before`; `first` is the median of the first losses."""
    middle = median(before)
    least = max(
        middle + MIN_DEVIATIONS * _robust_deviation(before),
        MIN_SPIKE_RATIO * abs(middle),
        MIN_SPIKE_SHARE * abs(first),
    )
    if loss <= least or min(before) <= 0:
        return loss > least
    logs = [math.log(one) for one in before]
    return math.log(loss) > median(logs) + MIN_LOG_DEVIATIONS * _robust_deviation(logs)


def _robust_deviation(values: Sequence[float]) -> float:
    """The standard deviation, estimated from the median absolute deviation."""
    middle = median(values)
    return 1.4826 * median(abs(one - middle) for one in values)


def _producer_evidence(producer: AnomalyOrigin) -> dict[str, Any]:
    return {
        "anomaly_origin": producer.kind,
        "name": producer.name,
        "carriers": producer.n_affected,
        "detail": producer.detail,
    }
