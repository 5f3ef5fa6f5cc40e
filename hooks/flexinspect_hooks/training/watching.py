"""`flexinspect.watch_training`: a training loop, unchanged, recorded into a trace."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect import __version__
from flexinspect.errors import FlexInspectError, TraceWriteError, UsageError
from flexinspect.findings import Finding
from flexinspect.provenance import git_state
from flexinspect.text import visible
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.writer import TraceWriter
from flexinspect.trainingfacts import TrainingSummary
from flexinspect_hooks import given
from flexinspect_hooks.modelfacts import model_facts
from flexinspect_hooks.program import state_of
from flexinspect_hooks.session import check_level
from flexinspect_hooks.training.counting import answer_from
from flexinspect_hooks.training.governor import Governor
from flexinspect_hooks.training.session import TrainingSession

T = TypeVar("T")

_watched: set[int] = set()
"""Models whose training is being watched, by id."""


def watch_training(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    out: str | Path | None = None,
    level: str = "basic",
    band: float | None = None,
    quiet: bool = False,
) -> TrainingWatch:
    """Record the training of `model` by `optimizer` while the `with` block runs.

    A step is one step of the optimizer; without one, each call of `step` ends one. The loss is the
    one that the model returns (`.loss`, `["loss"]`, or a scalar), unless `step(loss=...)` tells
    another. `out` is the trace, which must not exist (default: training-DATE-TIME.flextrace).
    `band` is what a step may take with capture over what it takes without, such as 1.02: above it,
    detail is dropped and comes back later, with an event each time. `quiet` leaves the line about
    the cost at the end out.

    Raises `UsageError` for what cannot be: an unknown level, a file in the way, no parameters.
    """
    given.module(model, "watch_training")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("The model has no parameter that gradients are wanted for.")
    path = _free_path() if out is None else Path(out)
    if path.exists():
        raise UsageError(f"{path} exists already.", hint="Choose another out, or remove it.")
    governor = Governor(check_level(level), band)
    return TrainingWatch(model, _bare(optimizer), path, governor, level=level, quiet=quiet)


class TrainingWatch:
    """The handle of a watched training run: a context manager, and what is known so far."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        path: Path,
        governor: Governor,
        *,
        level: str,
        quiet: bool,
    ) -> None:
        self.path = path.absolute()
        self._model, self._optimizer = model, optimizer
        self._governor, self._level, self._quiet = governor, level, quiet
        self._session: TrainingSession | None = None
        self._writer: TraceWriter | None = None
        self._last_cost: dict[str, float | int] = {}
        self._last_summary = TrainingSummary()

    # -- while training --------------------------------------------------------------------------

    def __enter__(self) -> TrainingWatch:
        if self._writer is not None:
            raise UsageError("This watch is over.", hint="Call flexinspect.watch_training again.")
        if id(self._model) in _watched:
            raise UsageError("The training of this model is being watched already.")
        try:
            writer = TraceWriter.create(self.path, _manifest(self._model, self._level))
        except TraceWriteError as error:
            raise UsageError(error.message, hint=error.hint) from error
        session = TrainingSession(self._model, self._optimizer, writer, self._governor)
        try:
            session.enter()
        except BaseException:
            session.leave("failed")
            writer.close("failed")
            writer.discard()
            raise
        self._writer, self._session = writer, session
        answer_from(session.summary, self)
        _watched.add(id(self._model))
        if writer.note:
            self._say(writer.note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, writer = self._session, self._writer
        assert session is not None
        assert writer is not None
        _watched.discard(id(self._model))
        self._session, state = None, state_of(error)
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        # Whatever fails here must not take the place of the user's own exception.
        for step in (
            lambda: session.leave(state, reason),
            lambda: self._conclude(session, writer),
            lambda: writer.close(state),
        ):
            self._quietly(step)

    def step(self, loss: float | Tensor | None = None) -> None:
        """Tell the loss of a step, once for each step of the optimizer, before or after it.

        Where no optimizer was given, this ends the step: call it before gradients are cleared.
        Raises `UsageError` for a loss that is not a single number.
        """
        if self._session is not None:
            self._session.tell(loss)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, and time how long training waits for each.

        Raises `UsageError` for what has no batches.
        """
        given.batches(loader, "batches")
        return iter(loader) if self._session is None else self._session.batches(loader)

    @property
    def level(self) -> str:
        """How much is recorded, from the next step on."""
        return self._level

    @level.setter
    def level(self, level: str) -> None:
        self._level = check_level(level)
        if self._session is not None:
            self._session.set_level(level)

    # -- what is known ---------------------------------------------------------------------------

    @property
    def cost(self) -> dict[str, float | int]:
        """What capture took so far: seconds, and their `ratio` to the time without capture."""
        return self._last_cost if self._session is None else self._session.cost()

    @property
    def summary(self) -> TrainingSummary:
        """How many steps were wrong so far, all but the newest."""
        return self._last_summary if self._session is None else self._session.summary.summary

    def reader(self) -> TraceReader:
        """Open the trace for reading; close it when done. Raises `TraceError` before the block."""
        if self._session is not None:
            self._session.recorder.drain()
        writer = self._writer
        is_elsewhere = writer is not None and self._session is not None
        return open_trace(writer.recording_path if writer and is_elsewhere else self.path)

    def findings(self) -> list[Finding]:
        """Return what the rules have found so far, all but in the newest step."""
        if self._writer is None:
            return []
        with self.reader() as reader:
            return reader.findings()

    def __str__(self) -> str:
        summary, cost = self.summary, self.cost
        if not summary.total_steps:
            return f"No step is recorded yet; the trace will be {visible(str(self.path))}."
        ratio, each = float(cost["ratio"]), float(cost["capture_s"]) / summary.total_steps * 1e3
        share = f"{ratio:.2%} of the time without it" if ratio < 1 else "longer than training"
        return (
            f"{summary.total_steps} training steps, {summary.anomaly_steps} of them wrong; "
            f"capture took {share} ({each:.2f} ms a step). Trace: {visible(str(self.path))}"
        )

    # -- the end ---------------------------------------------------------------------------------

    def _conclude(self, session: TrainingSession, writer: TraceWriter) -> None:
        self._last_cost, self._last_summary = session.cost(), session.summary.summary
        if session.recorder.failure is not None:
            self._say(session.recorder.failure.sentence())
        with suppress(TraceWriteError):
            writer.update_run(cost=self._last_cost, training=self._last_summary.as_dict())
        if not self._quiet:
            self._say(str(self))

    def _quietly(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            what = error.sentence() if isinstance(error, FlexInspectError) else f"{error!r}"
            self._say(f"the trace could not be ended properly: {what}")

    def _say(self, text: str) -> None:
        print(f"flexinspect: {text}", file=sys.stderr)


def _bare(optimizer: Any) -> Optimizer | None:
    """Return the optimizer that does the steps: the one inside of a wrapper such as accelerate's.

    Raises `UsageError` for what is none.
    """
    if optimizer is None:
        return None
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"watch_training needs a torch optimizer, not {given.kind_of(optimizer)}.",
            hint="Without one, call step(loss=...) once for each step.",
        )
    return optimizer


def _free_path() -> Path:
    name = time.strftime("training-%Y%m%d-%H%M%S")
    path, number = Path(f"{name}.flextrace"), 2
    while path.exists():
        path, number = Path(f"{name}-{number}.flextrace"), number + 1
    return path


def _manifest(model: nn.Module, level: str) -> dict[str, Any]:
    return {
        "flexinspect": __version__,
        "argv": list(sys.argv),
        "cwd": str(Path.cwd()),
        "pid": os.getpid(),
        "started_at": time.time(),
        "watch_training": True,
        "model": model_facts(model),
        "level": level,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "flexinspect": __version__,
            "torch": torch.__version__,
        },
        "host": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "git": git_state(Path.cwd()),
    }
