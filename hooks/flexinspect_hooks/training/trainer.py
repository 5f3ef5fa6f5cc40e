"""A callback that records the training of a `transformers.Trainer`."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import transformers

from flexinspect_hooks.session import check_level
from flexinspect_hooks.training.governor import Governor
from flexinspect_hooks.training.watching import TrainingWatch, watch_training

_active_callbacks: dict[int, TrainerCallback] = {}
"""The callbacks whose training is on, by the id of its model."""


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Records each call of `Trainer.train` into a trace, as `flexinspect.watch_training` does.

    `out`, `level` and `band` are those of `watch_training`; a second training by the same trainer
    gets a trace of its own only where `out` is None, and one that begins again before its end (as
    with `auto_find_batch_size`) a numbered one. `watch` is the handle of the last one. Of several
    processes only the first records: `watch` stays None in the others.
    """

    def __init__(
        self, out: str | Path | None = None, *, level: str = "basic", band: float | None = None
    ) -> None:
        Governor(check_level(level), band)  # what is wrong with them is told now
        self.watch: TrainingWatch | None = None
        self._out, self._level, self._band = out, level, band
        self._is_open = False
        self._model_id = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **rest: Any
    ) -> None:
        """Begin to record; a training of the same model that was interrupted ends as failed."""
        if not getattr(state, "is_world_process_zero", True):
            return
        out = self._out
        if self._is_open:
            self._abandon()
            out = _numbered_path(self._out)
        if id(model) in _active_callbacks:
            _active_callbacks[id(model)]._abandon()
        self.watch = watch_training(model, optimizer, out=out, level=self._level, band=self._band)
        self.watch.__enter__()
        self._is_open = True
        self._model_id = id(model)  # the watch holds the model: no other gets its id meanwhile
        _active_callbacks[self._model_id] = self
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
        _active_callbacks.pop(self._model_id, None)
        atexit.unregister(self._abandon)
        self.watch.__exit__(type(error) if error else None, error, None)


def _numbered_path(out: str | Path | None) -> Path | None:
    """Return a free name like `out`."""
    if out is None:
        return None
    first = path = Path(out)
    number = 2
    while path.exists():
        path, number = first.with_name(f"{first.stem}-{number}{first.suffix}"), number + 1
    return path
