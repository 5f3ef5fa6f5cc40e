"""A callback that records the training of a `transformers.Trainer`."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import transformers

from flexinspect_hooks.training.watching import TrainingWatch, watch_training


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Records each call of `Trainer.train` into a trace, as `flexinspect.watch_training` does.

    `out`, `level` and `band` are those of `watch_training`; a second training by the same trainer
    gets a trace of its own only where `out` is None. `watch` is the handle of the last one.
    """

    def __init__(
        self, out: str | Path | None = None, *, level: str = "basic", band: float | None = None
    ) -> None:
        self.watch: TrainingWatch | None = None
        self._out, self._level, self._band = out, level, band
        self._is_open = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **rest: Any
    ) -> None:
        """Begin to record."""
        self._end(None)
        self.watch = watch_training(
            model, optimizer, out=self._out, level=self._level, band=self._band
        )
        self.watch.__enter__()
        self._is_open = True
        # A trainer tells no callback of an exception: the process ends the trace then.
        atexit.register(self._abandon)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End the trace."""
        self._end(None)

    def _abandon(self) -> None:
        self._end(RuntimeError("the training did not come to its end"))

    def _end(self, error: BaseException | None) -> None:
        if self.watch is None or not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._abandon)
        self.watch.__exit__(type(error) if error else None, error, None)
