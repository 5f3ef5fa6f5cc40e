"""Checks training steps: loss, gradients, learning rate, gradient scaler and data loading."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import StepRecord
from flexinspect.records.training_step import (
    MODEL_OUTPUT,
    AnomalyOrigin,
    TrainingStepRecord,
    is_only_large,
)
from flexinspect.records.training_step import VANISHING_NORM as THRESHOLD
from flexinspect.rules.engine import Findings, Rule, as_consequence, finding_kinds

CARRIED = ("weights", "module")  # kinds of origins that modules pass on
MAX_LEARNING_RATE = 1.0  # learning rates above this are reported
LEARNED_SHARE = 1e-3  # below this share of the first loss, small gradients are expected
VANISHED_SHARE = 1e-4  # below this share of the total norm, a gradient is not just small
MIN_DEAD_STEPS = 10  # steps in which a gradient must be 0
LOSS_WINDOW = 50  # losses that a spike is compared with
MIN_LOSSES = 20  # fewest losses that a spike is compared with
MIN_DEVIATIONS = 10.0
MIN_LOG_DEVIATIONS = 6.0
MIN_SPIKE_RATIO = 2.0
MIN_SPIKE_SHARE = 0.1
"""A spike exceeds the median by these deviations and ratio, and by a share of the first losses.
Losses of small batches vary by powers of ten, so it must also stand out among their logarithms."""

MAX_SKIPS = 5  # consecutive skipped steps after the first update of a run
MAX_INITIAL_SKIPS = 10  # consecutive skipped steps before the first update
WAIT_WINDOW = 30
WARMUP_STEPS = 5
MIN_WAIT_SHARE = 0.5
MIN_WAIT_MS = 5.0
MIN_OUTSIDE_MS = 30.0
"""Steps that are compared after the warm-up; share and milliseconds from which waiting counts.
If the loader is not watched, only the time outside all other work is known (`MIN_OUTSIDE_MS`), with
a few switches of the interpreter lock (5 ms each)."""


class TrainingRule(Rule):
    """Checks each optimizer step; one finding of each kind, at its first step."""

    name = "training_steps"
    needs = (imported.TRAINING,)
    findings = finding_kinds(
        *("training.dead-parameters", "training.explosion", "training.fp16-overflow"),
        *("training.learning-rate", "training.loader-bound", "training.loss-nan"),
        *("training.loss-spike", "training.nan-gradient", "training.scaler-skips"),
        "training.vanishing",
    )

    def reset(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW)
        self._first_losses: list[float] = []
        self._zero_since: dict[str, int] = {}
        self._first_explosion: tuple[int, str] | None = None
        self._waiting: tuple[Finding, TrainingStepRecord] | None = None
        """An explosion of the first step, until the loss after it is known."""
        self._first_nonfinite: tuple[int, str] | None = None
        self._n_skipped = self._n_done = 0
        self._waits: deque[tuple[float, float]] = deque(maxlen=WAIT_WINDOW)

    def on_step(self, step: StepRecord) -> Findings:
        """Check a training step."""
        checks = (
            *(self._check_rate, self._check_nonfinite, self._check_explosion),
            *(self._check_vanishing, self._check_loss_spike, self._check_scaler),
            *(self._check_loader, self._check_unreached, self._check_dead),
        )
        if step.training is not None:
            yield from self._take_waiting(step.training)
            yield from filter(None, [check(step, step.training) for check in checks])

    def on_generation_end(self) -> Findings:
        """Report an explosion of the only step."""
        return self._take_waiting(None)

    def _take_waiting(self, now: TrainingStepRecord | None) -> Findings:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if now is not None and is_only_large(waiting[1], now):
            self._first_explosion = None
        else:
            yield waiting[0]

    def _finding(
        self, step: StepRecord, id_: str, sentence: str, evidence: Mapping[str, Any], **options: Any
    ) -> Finding:
        """A finding that is merged with those of its kind at other steps."""
        options = {"series": id_, **options}
        return self.finding(step, id_, f"{sentence}.", evidence=evidence, **options)

    def _check_nonfinite(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        """Check for NaN and Inf; those of weights follow from the first finding about others."""
        found, origin = self._find_nonfinite(step, training), training.anomaly_origin
        if found is None:
            return None
        self._first_nonfinite = self._first_nonfinite or (step.step, found.id)
        number, cause = self._first_nonfinite
        if cause == found.id or origin is None or origin.kind != "weights":
            return found
        follows = as_consequence(found, cause, f" of step {number}")
        return replace(follows, fix=f"Fix {cause}: the update of step {number} broke the weights.")

    def _find_nonfinite(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        origin = training.anomaly_origin or AnomalyOrigin("", "")
        evidence, kind = _origin_evidence(origin), origin.kind
        if kind == "module" and origin.detail == "float16":
            sentence = (
                f"The float16 output of {_name_module(origin)} is not finite in step "
                f"{step.step}: it may have overflowed (largest value 65504); its weights are "
                f"finite{_describe_carriers(origin, 'module')}"
            )
            return self._finding(step, "training.fp16-overflow", sentence, evidence)
        has_bad_output = kind in ("input", "weights", "module", "loss") and not training.has_loss
        if training.is_loss_anomaly or (has_bad_output and not training.is_skipped):
            return self._loss_finding(step, training, origin if kind else AnomalyOrigin("loss", ""))
        if kind != "backward" or training.is_skipped:
            return None
        loss = "the loss was not reported"
        if training.has_loss:
            loss = f"the loss {training.loss:.4g} is finite"
        arrives = ", but the incoming gradient is not" if "arrives" in origin.detail else ""
        sentence = (
            f"The gradient of {printable(origin.name)} is not finite in step {step.step} "
            f"({printable(origin.detail.partition(';')[0])}), the first in the backward pass; "
            f"{loss}{arrives}{_describe_carriers(origin, 'parameter')}"
        )
        return self._finding(step, "training.nan-gradient", sentence, evidence)

    def _loss_finding(
        self, step: StepRecord, training: TrainingStepRecord, origin: AnomalyOrigin
    ) -> Finding:
        what = "NaN" if math.isnan(training.loss) else "infinite"
        subject = f"The loss of step {step.step} is {what}"
        if not training.has_loss:
            subject = f"The output of the model in step {step.step} is not finite"
        history = ""
        if self._first_explosion is not None and self._first_explosion[0] < step.step:
            number, name = self._first_explosion
            history = f"; gradients explode from step {number} on, first {printable(name)}"
        high = _highest_rate(training)
        history += f"; the learning rate is {high:g}" if high > MAX_LEARNING_RATE else ""
        rates = [*training.learning_rates]
        evidence = {**_origin_evidence(origin), "loss": training.loss, "learning_rates": rates}
        carriers = _describe_carriers(origin, "module") if origin.kind in CARRIED else ""
        sentence = f"{subject}: {_describe_origin(origin)}{history}{carriers}"
        return self._finding(step, "training.loss-nan", sentence, evidence)

    def _check_explosion(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        origin = training.anomaly_origin
        if origin is None or origin.kind != "explosion" or training.is_skipped:
            return None
        self._first_explosion = self._first_explosion or (step.step, origin.name)
        clipped = f" after clipping to {training.max_norm:g}" if training.max_norm else ""
        norm, _, reason = origin.detail.partition("; ")
        sentence = (
            f"The gradient of {printable(origin.name)} explodes in step {step.step}: its norm is "
            f"{norm}{clipped}, the first in the backward pass; {reason or 'above 10'}"
            f"{_describe_carriers(origin, 'parameter')}"
        )
        found = self._finding(step, "training.explosion", sentence, _origin_evidence(origin))
        if step.step > 0 or not training.has_loss or training.is_loss_anomaly:
            return found
        self._waiting = found, training
        return None

    def _check_vanishing(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        origin, total = training.anomaly_origin, training.total_norm
        if origin is None or origin.kind != "vanishing" or total is None or training.is_skipped:
            return None
        first = self._first_losses[0] if self._first_losses else math.nan
        has_learned = training.has_loss and training.loss < LEARNED_SHARE * first
        is_large = float(origin.detail) > VANISHED_SHARE * total and total > 10 * THRESHOLD
        if has_learned or is_large:
            return None
        others = plural(origin.n_affected, "other parameter")
        also = f"; also that of {others}" if origin.n_affected else ""
        sentence = (
            f"The gradient of {printable(origin.name)} vanishes in step {step.step}: its norm is "
            f"{origin.detail}, below 1e-6, of {total:.3g} in total{also}"
        )
        return self._finding(step, "training.vanishing", sentence, _origin_evidence(origin))

    def _check_dead(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if not training.gradients or training.is_skipped:
            return None
        now = sorted({one.name for one in training.gradients if one.is_dead})
        self._zero_since = {name: self._zero_since.get(name, step.step) for name in now}
        names = [n for n, since in self._zero_since.items() if step.step - since >= MIN_DEAD_STEPS]
        if not names:
            return None
        since = min(self._zero_since[name] for name in names)
        others = plural(len(names) - 1, "other parameter")
        also = f", and so is that of {others}" if len(names) > 1 else ""
        sentence = (
            f"The gradient of {printable(names[0])} is exactly 0 in all recorded steps from step "
            f"{since} to {step.step}{also}"
        )
        evidence = {"names": names[:100], "n": len(names)}
        return self._finding(step, "training.dead-parameters", sentence, evidence)

    def _check_unreached(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        facts = [one.data for one in step.events if one.kind == "parameters-without-gradient"]
        if not facts:
            return None
        names, n = list(facts[0].get("names", [])), int(facts[0].get("n", 0))
        sentence = (
            f"{plural(n, 'trainable parameter')} get no gradient in step {step.step}, first "
            f"{printable(str(names[0]))}: the loss does not depend on them"
        )
        evidence: dict[str, Any] = {"names": names, "n": n}
        id_, severity = "training.dead-parameters", Severity.NOTE
        return self._finding(step, id_, sentence, evidence, severity=severity, series="unreached")

    def _check_rate(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        high = _highest_rate(training)
        if high <= MAX_LEARNING_RATE:
            return None
        sentence = f"The learning rate of step {step.step} is {high:g}, above 1.0"
        evidence = {"learning_rates": [*training.learning_rates]}
        return self._finding(step, "training.learning-rate", sentence, evidence)

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
            f"losses before is {middle:.4g}"
        )
        evidence = {"loss": loss, "median": middle}
        return self._finding(step, "training.loss-spike", sentence, evidence)

    def _check_scaler(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if not training.is_skipped:
            self._n_skipped, self._n_done = 0, self._n_done + 1
            return None
        self._n_skipped += 1
        if self._n_skipped < (MAX_SKIPS if self._n_done else MAX_INITIAL_SKIPS):
            return None
        origin = training.anomaly_origin or AnomalyOrigin("", "")
        verb, what = "are" if origin.kind == "weights" else "is", _name_nonfinite(origin)
        scale = "" if training.scale is None else f", the scale has fallen to {training.scale:g}"
        sentence = (
            f"The gradient scaler has skipped {self._n_skipped} consecutive steps up to step "
            f"{step.step}{scale}{f'; {what} {verb} not finite' if what else ''}"
        )
        evidence = {"in_a_row": self._n_skipped, "scale": training.scale}
        return self._finding(step, "training.scaler-skips", sentence, evidence)

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
            f"(medians of {WAIT_WINDOW} steps up to step {step.step})"
        )
        severity = Severity.WARNING if is_measured else Severity.NOTE
        evidence = {"ms": typical, "share": share, "mean_ms": fmean(w for w, _ in self._waits)}
        return self._finding(step, "training.loader-bound", sentence, evidence, severity=severity)


def _name_nonfinite(origin: AnomalyOrigin) -> str:
    """What is not finite; "" if everything is."""
    name = printable(origin.name)
    names = {"input": "the batch", "weights": f"the weights {name}", "loss": "the loss"}
    names["module"] = f"the output of {_name_module(origin)}"
    names["backward"] = f"the gradient of {name}"
    return names.get(origin.kind, "")


def _name_module(origin: AnomalyOrigin) -> str:
    """The name of a module with its class, where the trace has it."""
    if origin.name == MODEL_OUTPUT:
        return "the model"
    class_name = f" ({printable(origin.module)})" if origin.module else ""
    return f"module {printable(origin.name)}{class_name}"


def _describe_origin(origin: AnomalyOrigin) -> str:
    """Where non-finite values come from."""
    if origin.kind == "input":
        return "the input batch is already not finite"
    if origin.kind == "weights":
        return f"{_name_nonfinite(origin)} are not finite before the step"
    if origin.kind == "module":
        dtype, _, weights = origin.detail.partition("; ")
        weights = printable(weights) or "its weights are finite"
        first = f"{_name_module(origin)} is the first whose output is not finite"
        if origin.name == MODEL_OUTPUT:
            owner = f"{printable(origin.module) or 'the model'}'s own forward"
            first = f"{owner} made the first NaN or Inf; the outputs of its modules were finite"
        return f"{first} ({printable(dtype)}); {weights}"
    return (
        "the model's outputs are finite, so the loss function produces it (a logarithm of 0, a "
        "square that overflows, a mean over no label)"
    )


def _describe_carriers(origin: AnomalyOrigin, what: str) -> str:
    """How many others pass it on, as a sentence of its own; "" for none."""
    verb = "passes" if origin.n_affected == 1 else "pass"
    others = plural(origin.n_affected, f"other {what}")
    return f". {others} {verb} it on" if origin.n_affected else ""


def _origin_evidence(origin: AnomalyOrigin) -> dict[str, Any]:
    names = {"anomaly_origin": origin.kind, "name": origin.name}
    return {**names, "carriers": origin.n_affected, "detail": origin.detail}


def _highest_rate(training: TrainingStepRecord) -> float:
    return max((rate for rate in training.learning_rates if not math.isnan(rate)), default=0.0)


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
