"""What several backward passes of one step can do wrong: their weights, and the schedule."""

from __future__ import annotations

import math
import weakref
from typing import Any

from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.training.loss_checks import ClassLoss
from flexinspect_hooks.training.model_checks import Failure

MIN_RATIO = 1.5  # of the numbers of labels of two micro-batches
WEIGHT_TOLERANCE = 1e-3  # relative difference of weights that are equal but for rounding


class MicroBatch(Struct, frozen=True):
    """A backward pass: the labels of its mean loss, and the factor of that loss."""

    n_labels: int
    weight: float


class MeansCheck:
    """Finds micro-batches whose means over labels are added, however many labels they have.

    A mean over all labels of the step weights each micro-batch by its number of labels. Only losses
    with ignored labels count: the last batch of an epoch may have fewer rows.
    """

    def __init__(self) -> None:
        self._losses: list[ClassLoss] = []
        self._batches: list[MicroBatch | None] = []
        self._has_ignored = False

    def on_class_loss(self, loss: ClassLoss) -> None:
        """A loss of classes was computed."""
        self._losses.append(loss)

    def on_backward(self, loss: Tensor) -> None:
        """A backward pass begins with a loss, before it was scaled."""
        losses, self._losses = self._losses, []
        one = losses[0] if len(losses) == 1 else None
        if one is None or not one.is_mean or not one.n_labels or not one.value:
            self._batches.append(None)
            return
        self._has_ignored |= one.n_labels < one.target.numel()
        self._batches.append(MicroBatch(one.n_labels, float(loss.detach()) / one.value))

    def end_step(self, number: int) -> list[Failure]:
        """A step has ended; returns what was found in it."""
        batches, has_ignored = self._batches, self._has_ignored
        self.__init__()  # type: ignore[misc]
        known = [one for one in batches if one is not None]
        if not has_ignored or len(known) < 2 or len(known) < len(batches):
            return []
        least, most = (f(one.n_labels for one in known) for f in (min, max))
        weight = known[0].weight
        if most < MIN_RATIO * least or not all(
            math.isclose(one.weight, weight, rel_tol=WEIGHT_TOLERANCE) for one in known
        ):
            return []
        text = f"Step {number} adds the mean losses of {len(known)} micro-batches, which have "
        text += f"{least} to {most} labels: a label of the smallest counts {most / least:.3g} "
        text += "times as much as one of the largest, unlike in one batch of all"
        return [("unequal-micro-batches", text, {"least": least, "most": most})]


class ScheduleCheck:
    """Finds a scheduler that is called once for each backward pass, in steps of several."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}

    def on_step(self, scheduler: Any) -> None:
        """The program called the `step` of a scheduler."""
        known, n = self._counts.get(id(scheduler), (None, 0))
        if known is None or known() is not scheduler:
            known, n = weakref.ref(scheduler), 0
        self._counts[id(scheduler)] = known, n + 1

    def end_step(self, number: int, n_backward: int) -> list[Failure]:
        """A step of so many backward passes has ended; returns what was found in it."""
        counts, self._counts = self._counts, {}
        # Before the first step, a schedule is set to where an earlier run ended.
        if number == 0 or n_backward < 2:
            return []
        each = (known() for known, n in counts.values() if n == n_backward)
        name = next((type(one).__name__ for one in each if one is not None), "")
        if not name:
            return []
        text = f"{name}.step() is called {n_backward} times in step {number}, once for each "
        text += "backward pass: if its schedule counts steps of the optimizer, it ends "
        text += f"{n_backward} times too soon"
        return [("schedule-of-micro-batches", text, {"n": n_backward, "scheduler": name})]
