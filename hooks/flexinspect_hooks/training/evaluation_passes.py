"""The forward passes of a training program that have no backward pass: how many, and their loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MAX_WAITING = 256  # losses on a device that are kept until they are read

Note = tuple[str, str, dict[str, Any]]  # kind, text and facts of an event


class EvaluationPasses:
    """Counts the passes since the last `take`, and sums the losses computed from them.

    The loss is the one that the model returns, or the result of a loss function of torch.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.n_losses_in_training_mode = 0
        """Losses without gradients since the last `take`, of the model in training mode."""
        self._is_in_training_mode = False
        self._n = self._n_evaluating = self._n_losses = 0
        self._sum = 0.0
        self._waiting: list[Tensor] = []
        self._expects_loss = False

    def add(self, loss: Tensor | float | None, *, is_evaluation: bool) -> None:
        """Count a pass; `is_evaluation` says that the model is in evaluation mode."""
        self._n += 1
        self._n_evaluating += is_evaluation
        self._expects_loss = loss is None
        self._is_in_training_mode = not is_evaluation
        if loss is not None:
            self._add_loss(loss)

    def on_training(self) -> None:
        """A forward pass with gradients begins: later losses are not of an evaluation."""
        self._expects_loss = False

    def on_loss(self, loss: Tensor) -> None:
        """Add a loss that was computed after a pass."""
        if self._expects_loss:
            self._add_loss(loss)

    def _add_loss(self, loss: Tensor | float) -> None:
        self._n_losses += 1
        self.n_losses_in_training_mode += self._is_in_training_mode
        is_remote = isinstance(loss, Tensor) and loss.device.type != "cpu"
        if isinstance(loss, Tensor) and is_remote and len(self._waiting) < MAX_WAITING:
            self._waiting.append(loss.detach().clone())
        else:
            self._sum += float(loss)

    def take(self) -> list[Note]:
        """The event of the passes since the last call; none without a pass."""
        if not self._n:
            return []
        self._sum += sum(map(float, self._waiting))
        facts = {"n": self._n, "n_in_evaluation_mode": self._n_evaluating}
        mode = "evaluation" if self._n_evaluating == self._n else "training"
        if 0 < self._n_evaluating < self._n:
            mode = "evaluation or training"
        passes = "forward pass" if self._n == 1 else "forward passes"
        text = f"{self._n} {passes} without a backward pass, with the model in {mode} mode"
        loss = None
        if self._n_losses:
            loss = self._sum / self._n_losses
            text += f"; mean loss {loss:.5g}"
        self._reset()
        return [("evaluation", f"{text}.", {**facts, "loss": loss})]
