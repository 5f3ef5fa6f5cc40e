"""Training steps: what went wrong first, where it came from, and what only carries it on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, ClassVar

from flexinspect.findings import Finding, Severity
from flexinspect.records import StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.scene import Scene
from flexinspect.rules.trainingkinds import (
    DEAD,
    EXPLOSION,
    GRADIENT,
    KINDS,
    LOADER,
    LOSS,
    OVERFLOW,
    RATE,
    SKIPS,
    SPIKE,
    VANISHING,
)
from flexinspect.rules.words import counted, printable
from flexinspect.trainingfacts import VANISHING as THRESHOLD
from flexinspect.trainingfacts import Producer, TrainingStepRecord

HIGH_RATE = 1.0
"""Learning rates above this are told of."""

LEARNED = 1e-3
"""A loss below this share of the first one needs no gradient any more."""

LOST = 1e-4
"""A gradient this small beside all of them together is lost on the way, not just small."""

DEAD_STEPS = 10
"""Steps for which a gradient must have been 0."""

WINDOW = 50
FEWEST = 20
"""Losses that a spike is compared with, and how many there must be."""

DEVIATIONS = 10.0
LOG_DEVIATIONS = 6.0
TIMES = 2.0
SHARE = 0.1
"""A spike is so many deviations and times above the median, and a share of the first losses.

Losses of small batches that have learned scatter over powers of ten: a spike stands out among
their logarithms too.
"""

SKIPS_IN_A_ROW = 5
SKIPS_AT_FIRST = 10
"""Steps left out in a row: later, and before the first that was done."""

WAITS = 30
WARM_UP = 5
WAIT_SHARE = 0.5
WAIT_MS = 5.0
OUTSIDE_MS = 30.0
"""Steps that are looked at for waiting, after the first few; from which share and time on it is.

Of a loader that is not watched nothing is known but the time outside of all else, in which a few
turns of the interpreter lock lie too (5 ms each).
"""


class TrainingRule(Rule):
    """Looks at each optimizer step; one finding for each kind of trouble, at its first step."""

    name: ClassVar[str] = "trainingsteps"
    findings: ClassVar[Mapping[str, FindingKind]] = KINDS

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._first_losses: list[float] = []
        self._dead: dict[str, int] = {}
        self._exploded: tuple[int, str] | None = None
        self._skips = self._done = 0
        self._waits: deque[tuple[float, float]] = deque(maxlen=WAITS)
        self._is_measured = False

    def begin(self, scene: Scene) -> None:
        """Begin with no step seen."""
        super().begin(scene)
        self._forget()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong in a training step."""
        training = step.training
        if training is None:
            return ()
        found = [
            self._rate(step, training),
            self._numbers(step, training),
            self._explosion(step, training),
            self._vanishing(step, training),
            self._spike(step, training),
            self._scaler(step, training),
            self._loader(step, training),
            *self._dead_ones(step, training),
        ]
        return [finding for finding in found if finding is not None]

    # -- NaN and Inf -----------------------------------------------------------------------------

    def _numbers(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer = training.producer
        if producer is not None and producer.kind == "module" and producer.detail == "float16":
            return self._overflow(step, producer)
        if training.is_loss_anomaly:
            return self._sick_loss(step, training)
        if producer is None or training.is_skipped:
            return None
        if producer.kind in ("input", "weights", "module", "loss") and not training.has_loss:
            return self._sick_loss(step, training)
        if producer.kind == "backward":
            return self._sick_gradient(step, training, producer)
        return None

    def _overflow(self, step: StepRecord, producer: Producer) -> Finding:
        others = _carried(producer, "module")
        sentence = (
            f"The output of {printable(producer.name)}, which is float16, is not finite in step "
            f"{step.step}: it may have left the range (largest value 65504); its weights are "
            f"finite{others}."
        )
        return _finding(step, OVERFLOW, sentence, _evidence(producer))

    def _sick_loss(self, step: StepRecord, training: TrainingStepRecord) -> Finding:
        producer = training.producer or Producer("loss", "")
        what = "NaN" if math.isnan(training.loss) else "infinite"
        subject = f"The loss of step {step.step} is {what}"
        if not training.has_loss:
            subject = f"What the model returns in step {step.step} is not finite"
        sentence = f"{subject}: {_origin(producer)}{self._before(step, training)}."
        rates = [*training.learning_rates]
        evidence = {**_evidence(producer), "loss": training.loss, "learning_rates": rates}
        return _finding(step, LOSS, sentence, evidence)

    def _before(self, step: StepRecord, training: TrainingStepRecord) -> str:
        said = ""
        if self._exploded is not None and self._exploded[0] < step.step:
            number, name = self._exploded
            said = f"; gradients explode from step {number} on, first {printable(name)}"
        high = _highest_rate(training)
        return said + (f"; the learning rate is {high:g}" if high > HIGH_RATE else "")

    def _sick_gradient(
        self, step: StepRecord, training: TrainingStepRecord, producer: Producer
    ) -> Finding:
        loss = f"the loss {training.loss:.4g} is finite" if training.has_loss else "no loss is told"
        arrives = ", but what arrives from the loss is not" if "arrives" in producer.detail else ""
        sentence = (
            f"The gradient of {printable(producer.name)} is not finite in step {step.step} "
            f"({printable(producer.detail.partition(';')[0])}), the first on the way back from the "
            f"loss; {loss}{arrives}{_carried(producer, 'parameter')}."
        )
        return _finding(step, GRADIENT, sentence, _evidence(producer))

    # -- size ------------------------------------------------------------------------------------

    def _explosion(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer = training.producer
        if producer is None or producer.kind != "explosion" or training.is_skipped:
            return None
        self._exploded = self._exploded or (step.step, producer.name)
        clipped = f" after clipping to {training.max_norm:g}" if training.max_norm else ""
        sentence = (
            f"The gradient of {printable(producer.name)} explodes in step {step.step}: its norm is "
            f"{producer.detail}{clipped}, above 10; the first on the way back from the loss"
            f"{_carried(producer, 'parameter')}."
        )
        return _finding(step, EXPLOSION, sentence, _evidence(producer))

    def _vanishing(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        producer, total = training.producer, training.total_norm
        if producer is None or producer.kind != "vanishing" or total is None:
            return None
        if training.is_skipped:
            return None
        least = float(producer.detail)
        first = self._first_losses[0] if self._first_losses else math.nan
        if training.has_loss and training.loss < LEARNED * first:
            return None
        if least > LOST * total and total > 10 * THRESHOLD:
            return None
        also = counted(producer.n_carriers, "other parameter")
        sentence = (
            f"The gradient of {printable(producer.name)} vanishes in step {step.step}: its norm is "
            f"{producer.detail}, below 1e-6, of {total:.3g} in all"
            + (f"; of {also} too." if producer.n_carriers else ".")
        )
        return _finding(step, VANISHING, sentence, _evidence(producer))

    def _dead_ones(self, step: StepRecord, training: TrainingStepRecord) -> list[Finding]:
        found = [self._unreached(step)]
        if training.gradients and not training.is_skipped:
            now = {one.name for one in training.gradients if one.is_dead}
            self._dead = {name: self._dead.get(name, step.step) for name in sorted(now)}
            long = [n for n, since in self._dead.items() if step.step - since >= DEAD_STEPS]
            if long:
                found.append(self._dead_for_long(step, long))
        return [finding for finding in found if finding is not None]

    def _dead_for_long(self, step: StepRecord, names: Sequence[str]) -> Finding:
        since = min(self._dead[name] for name in names)
        others = counted(len(names) - 1, "other parameter") if len(names) > 1 else ""
        sentence = (
            f"The gradient of {printable(names[0])} is exactly 0 wherever it was looked at from "
            f"step {since} to {step.step}" + (f", and so is that of {others}." if others else ".")
        )
        return _finding(step, DEAD, sentence, {"names": [*names[:100]], "n": len(names)})

    def _unreached(self, step: StepRecord) -> Finding | None:
        event = next((one for one in step.events if one.kind == "unreached"), None)
        if event is None:
            return None
        names, n = list(event.data.get("names", [])), int(event.data.get("n", 0))
        sentence = (
            f"{counted(n, 'trainable parameter')} get no gradient in step {step.step}, first "
            f"{printable(str(names[0]))}: nothing that the loss is made of uses them."
        )
        evidence = {"names": names, "n": n}
        return _finding(step, DEAD, sentence, evidence, Severity.NOTE, "unreached")

    # -- losses and rates ------------------------------------------------------------------------

    def _rate(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        high = _highest_rate(training)
        if high <= HIGH_RATE:
            return None
        sentence = f"The learning rate of step {step.step} is {high:g}, above 1.0."
        return _finding(step, RATE, sentence, {"learning_rates": [*training.learning_rates]})

    def _spike(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        loss = training.loss
        if not training.has_loss or not math.isfinite(loss):
            return None
        before = [*self._losses]
        self._losses.append(loss)
        if len(self._first_losses) < FEWEST:
            self._first_losses.append(loss)
        if len(before) < FEWEST or not is_spike(loss, before, median(self._first_losses)):
            return None
        middle = median(before)
        sentence = (
            f"The loss jumps to {loss:.4g} in step {step.step}, where the median of the "
            f"{len(before)} before it is {middle:.4g}."
        )
        return _finding(step, SPIKE, sentence, {"loss": loss, "median": middle})

    # -- scaler and loader -----------------------------------------------------------------------

    def _scaler(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if not training.is_skipped:
            self._skips, self._done = 0, self._done + 1
            return None
        self._skips += 1
        if self._skips < (SKIPS_IN_A_ROW if self._done else SKIPS_AT_FIRST):
            return None
        producer = training.producer
        scale = "" if training.scale is None else f", the scale has fallen to {training.scale:g}"
        named = "" if producer is None else _sick_part(producer)
        sentence = (
            f"The gradient scaler has left out {self._skips} steps in a row up to step "
            f"{step.step}{scale}{named}."
        )
        return _finding(step, SKIPS, sentence, {"in_a_row": self._skips, "scale": training.scale})

    def _loader(self, step: StepRecord, training: TrainingStepRecord) -> Finding | None:
        if step.step < WARM_UP:
            return None
        is_measured = training.data_ms is not None
        if not is_measured and training.device not in ("", "cpu"):
            return None  # passes are only launched in their time: the device works in the rest
        wait = training.data_ms if training.data_ms is not None else training.other_ms
        self._waits.append((wait, step.wall_ms))
        if len(self._waits) < WAITS:
            return None
        typical = median(wait for wait, _ in self._waits)
        share = median(wait / wall for wait, wall in self._waits if wall > 0)
        if typical < (WAIT_MS if is_measured else OUTSIDE_MS) or share < WAIT_SHARE:
            return None
        where = "for its loader" if is_measured else "outside of forward, backward and optimizer"
        sentence = (
            f"Training waits {where} {typical:.0f} ms of each step, {share:.0%} of its time "
            f"(medians of {WAITS} steps up to step {step.step})."
        )
        severity = Severity.WARNING if is_measured else Severity.NOTE
        evidence = {"ms": typical, "share": share, "mean_ms": fmean(w for w, _ in self._waits)}
        return _finding(step, LOADER, sentence, evidence, severity)


RULE: type[Rule] = TrainingRule


def _origin(producer: Producer) -> str:
    """Return where numbers that are not finite come from, and who carries them on."""
    name, carried = printable(producer.name), _carried(producer, "module")
    if producer.kind == "input":
        return "the batch that it was fed is not finite already"
    if producer.kind == "weights":
        return f"the weights {name} are not finite before the step{carried}"
    if producer.kind == "module":
        where = "what the model returns" if name == "(output)" else f"the output of {name}"
        dtype, _, weights = producer.detail.partition("; ")
        weights = printable(weights) or "whose weights are finite"
        return f"it first appears in {where} ({printable(dtype)}), {weights}{carried}"
    return (
        "the model's outputs are finite, so the loss itself makes it (a logarithm of 0, a square "
        "that overflows)"
    )


def _sick_part(producer: Producer) -> str:
    """Return what is not finite, as the end of a sentence; nothing where all is."""
    name = printable(producer.name)
    words = {
        "input": "the batch is",
        "weights": f"the weights {name} are",
        "module": "what the model returns is"
        if producer.name == "(output)"
        else f"the output of {name} is",
        "loss": "the loss is",
        "backward": f"the gradient of {name} is",
    }
    return f"; {words[producer.kind]} not finite" if producer.kind in words else ""


def _highest_rate(training: TrainingStepRecord) -> float:
    known = (rate for rate in training.learning_rates if not math.isnan(rate))
    return max(known, default=0.0)


def _carried(producer: Producer, what: str) -> str:
    if not producer.n_carriers:
        return ""
    return f"; carried on by {counted(producer.n_carriers, f'other {what}')}"


def is_spike(loss: float, before: Sequence[float], first: float) -> bool:
    """Say whether a loss stands out among those before it; `first` is that of the first ones."""
    middle = median(before)
    least = max(middle + DEVIATIONS * _deviation(before), TIMES * abs(middle), SHARE * abs(first))
    if loss <= least or min(before) <= 0:
        return loss > least
    logs = [math.log(one) for one in before]
    return math.log(loss) > median(logs) + LOG_DEVIATIONS * _deviation(logs)


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation as the median of the distances from the median tells it."""
    middle = median(values)
    return 1.4826 * median(abs(one - middle) for one in values)


def _evidence(producer: Producer) -> dict[str, Any]:
    return {
        "producer": producer.kind,
        "name": producer.name,
        "carriers": producer.n_carriers,
        "detail": producer.detail,
    }


def _finding(
    step: StepRecord,
    finding_id: str,
    sentence: str,
    evidence: Mapping[str, Any],
    severity: Severity | None = None,
    series: str = "",
) -> Finding:
    return Finding(
        finding_id,
        severity or KINDS[finding_id].severity,
        sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        evidence=evidence,
        series=series or finding_id,
    )
