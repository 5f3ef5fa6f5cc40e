"""Findings of the checks that capture makes of a training, and of its evaluation losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

CHECK_EVENT, EVALUATION_EVENT = "training-check", "evaluation"
MIN_LOSS_RATIO = 1000.0
"""An evaluation loss this many times above the largest training loss is not of the same model."""

FINDING_OF: Mapping[str, str] = {
    "optimizer-frozen": "training.optimizer-parameters",
    "optimizer-stale": "training.optimizer-parameters",
    "optimizer-misses": "training.optimizer-parameters",
    "optimizer-twice": "training.optimizer-parameters",
    "unregistered": "training.optimizer-parameters",
    "no-gradients": "training.optimizer-parameters",
    "gradients-not-cleared": "training.gradients-not-cleared",
    "no-update": "training.no-update",
    "update-rounded": "training.no-update",
    "state-restarts": "training.optimizer-state",
    "state-lost": "training.optimizer-state",
    "state-still": "training.optimizer-state",
    "state-left": "training.optimizer-state",
    "state-counter": "training.optimizer-state",
    "optimizer-remade": "training.optimizer-state",
    "update-outlier": "training.update-outlier",
    "checkpoint-cuts": "training.cut-gradients",
    "lost-gradient": "training.lost-gradient",
    "changed-outside": "training.changed-outside",
    "frozen-trains": "training.frozen-trains",
    "frozen-gradients": "training.frozen-trains",
    "untied-weights": "training.untied-weights",
    "scheduler-first": "training.call-order",
    "clip-before-unscale": "training.call-order",
    "schedule-of-micro-batches": "training.call-order",
    "unequal-micro-batches": "training.micro-batch-means",
    "repeated-initialization": "training.repeated-initialization",
    "repeated-batch": "training.repeated-batch",
    "restarted-loader": "training.repeated-batch",
    "same-order": "training.repeated-batch",
    "same-data": "training.repeated-batch",
    "constant-inputs": "training.constant-inputs",
    "labels-out-of-range": "training.loss-inputs",
    "loss-of-scores": "training.loss-inputs",
    "loss-of-probabilities": "training.loss-inputs",
    "loss-of-sizes": "training.loss-inputs",
    "labels-ignored": "training.loss-inputs",
    "labels-shifted-twice": "training.label-shift",
    "padding-in-loss": "training.padding",
    "padding-attended": "training.padding",
    "rows-differ": "training.rows-differ",
    "dropout-in-evaluation": "training.dropout-in-evaluation",
    "mixed-modes": "training.wrong-mode",
    "trained-in-evaluation-mode": "training.wrong-mode",
    "evaluated-in-training-mode": "training.wrong-mode",
    "autocast-passed-over": "training.autocast-passed-over",
    "ranks-differ": "training.ranks-differ",
}
"""The finding of each check."""


class TrainingChecksRule(Rule):
    """Reports each check that failed, and evaluation losses far above the training losses."""

    name = "training_checks"
    needs = (imported.TRAINING,)
    findings = finding_kinds(*sorted({*FINDING_OF.values()}), "training.evaluation-loss")

    def reset(self) -> None:
        self._largest_loss: float | None = None

    def on_step(self, step: StepRecord) -> Findings:
        """Check the events of a training step."""
        training = step.training
        if training is None:
            return
        if training.has_loss and math.isfinite(training.loss):
            self._largest_loss = max(self._largest_loss or 0.0, abs(training.loss))
        for event in step.events:
            yield from self._check(step, event)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event after the last step."""
        yield from self._check(event, event)

    def _check(self, place: StepRecord | EventRecord, event: EventRecord) -> Findings:
        if event.kind == EVALUATION_EVENT:
            yield from self._check_evaluation(place, event)
        check = str(event.data.get("check", "")) if event.kind == CHECK_EVENT else ""
        if id_ := FINDING_OF.get(check):
            yield self.finding(
                place,
                id_,
                f"{printable(event.text)}.",
                evidence=event.data,
                severity=_severity(check, event.data),
                series=check,
            )

    def _check_evaluation(self, place: StepRecord | EventRecord, event: EventRecord) -> Findings:
        loss, largest = event.data.get("loss"), self._largest_loss
        if not isinstance(loss, (int, float)) or not largest:
            return
        if not event.data.get("n_in_evaluation_mode"):
            return
        if math.isfinite(loss) and abs(loss) <= MIN_LOSS_RATIO * largest:
            return
        after = f"step {place.step}" if place.step is not None else "the last step"
        sentence = (
            f"The evaluation loss at {after} is {loss:.4g}, and no training loss so far is above "
            f"{largest:.4g}: in evaluation mode the model computes something else."
        )
        evidence = {"loss": loss, "largest_training_loss": largest}
        id_ = "training.evaluation-loss"
        yield self.finding(place, id_, sentence, evidence=evidence, series="evaluation")


def _severity(check: str, facts: Mapping[str, Any]) -> Severity | None:
    """The severity of a failed check, None for that of its finding."""
    if check == "optimizer-misses":
        return Severity.NOTE if facts.get("is_whole_part") else Severity.WARNING
    if check == "labels-out-of-range":
        return Severity.ERROR
    if check in ("update-rounded", "optimizer-twice"):
        return Severity.WARNING
    if check == "state-lost" or facts.get("is_uncertain"):
        return Severity.NOTE
    if check == "repeated-batch" and int(facts.get("n_workers", 0)) < 2:
        return Severity.NOTE
    return None
