"""Public functions that record a training run: `watch_training`, and a callback for `Trainer`."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import transformers
from msgspec.structs import asdict
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.analysis.summary import summarize_trace
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.rank_environment import rank_path
from flexinspect.core.text import escape_unprintable, print_message
from flexinspect.records.step import EventRecord
from flexinspect.records.training_step import TrainingSummary, TrainingSummaryCounter
from flexinspect.rules.numerics.out_of_memory import out_of_memory_finding
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.capture.rank_facts import current_rank
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.sessions.capture_session import check_level
from flexinspect_hooks.training.cost_governor import Governor
from flexinspect_hooks.training.training_session import TrainingSession
from flexinspect_hooks.user_code import watch_trace

T = TypeVar("T")
_active_callbacks: dict[int, TrainerCallback] = {}  # by the id of the model in training


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Records each call of `Trainer.train` into a trace, as `flexinspect.watch_training` does.

    `out`, `level` and `band` are those of `watch_training`. A second training by the same trainer
    gets its own trace only if `out` is None; one that starts again before its end (as with
    `auto_find_batch_size`) gets a numbered file. `watch` is the handle of the latest training. In
    a distributed training each rank writes its own trace, with "-rankN" in the name; only the first
    process of each machine prints the summary.
    """

    def __init__(
        self, out: str | Path | None = None, *, level: str = "basic", band: float | None = None
    ) -> None:
        Governor(check_level(level), band)  # to refuse wrong values here already
        self.watch: TrainingWatch | None = None
        self._out, self._level, self._band = out, level, band
        self._model_id: int | None = None  # `id` of the model that is being trained

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **rest: Any
    ) -> None:
        """Start recording; an interrupted training of the same model ends as failed."""
        is_again = self._model_id is not None
        if is_again:
            self._abandon()
        if id(model) in _active_callbacks:
            _active_callbacks[id(model)]._abandon()
        if is_again and self._out is not None:
            path = watch_trace.numbered_path(rank_path(Path(self._out), current_rank()))
        else:
            path = watch_trace.free_path(self._out, "training")
        self.watch = _training_watch(
            model,
            optimizer,
            path,
            level=self._level,
            band=self._band,
            quiet=not getattr(state, "is_local_process_zero", True),
        )
        self.watch.__enter__()
        self._model_id = id(model)  # the watch holds the model: no other gets its id meanwhile
        _active_callbacks[self._model_id] = self
        # A trainer does not report an exception to callbacks: then the trace ends at exit.
        atexit.register(self._abandon)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End the trace."""
        self._end(None)

    def _abandon(self) -> None:
        self._end(RuntimeError("the training did not finish"))

    def _end(self, error: BaseException | None) -> None:
        if self.watch is not None and self._model_id is not None:
            _active_callbacks.pop(self._model_id, None)
            self._model_id = None
            atexit.unregister(self._abandon)
            self.watch.__exit__(None, error, None)


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

    Args:
        model: the model; it needs at least one parameter that requires gradients.
        optimizer: its steps are the steps of the trace. Without one, each call of `step` ends one.
        out: the trace, a new file (default: training-DATE-TIME.flextrace). In a distributed run
            each rank writes its own, with "-rankN" in the name.
        level: how much is recorded: "basic", "advanced" or "extreme".
        band: the time that a step may take with capture, relative to one without, such as 1.02.
            Above it, detail is dropped and restored later, with an event each time.
        quiet: do not print the summary at the end.

    The loss of a step is the one that the model returns (`.loss`, `["loss"]`, or a scalar), else
    what the program calls `backward` on, unless `step(loss=...)` sets another.

    Raises `UsageError` for an unknown level, an existing file, or a model without trainable
    parameters.
    """
    path = watch_trace.free_path(out, "training")
    return _training_watch(model, optimizer, path, level=level, band=band, quiet=quiet)


def _training_watch(
    model: nn.Module,
    optimizer: Any,
    path: Path,
    *,
    level: str,
    band: float | None,
    quiet: bool = False,
) -> TrainingWatch:
    argument_checks.check_module(model, "watch_training")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("The model has no parameter that requires gradients.")
    return TrainingWatch(model, optimizer, path, Governor(check_level(level), band), quiet=quiet)


class TrainingWatch(watch_trace.WatchedTrace[TrainingSession]):
    """The handle of a watched training run: a context manager, with cost and summary so far."""

    _watched: ClassVar[set[int]] = set()
    _function = "watch_training"
    _messages = ("This watch has ended.", "The training of this model is being watched already.")
    _facts: ClassVar[Mapping[str, Any]] = {"watch_training": True}

    def __init__(
        self, model: nn.Module, optimizer: Any, path: Path, governor: Governor, *, quiet: bool
    ) -> None:
        super().__init__(model, path, governor.level)
        self._optimizer = _unwrap_optimizer(optimizer)
        self._governor, self._quiet = governor, quiet
        self._last_cost: dict[str, float | int] = {}
        self._last_summary = TrainingSummary()

    def _begin(self, writer: TraceWriter) -> TrainingSession:
        session = TrainingSession(self._model, self._optimizer, writer, self._governor)
        try:
            session.begin()
        except BaseException:
            session.end("failed")
            raise
        # The control server reports the counts of this run, not those of an earlier one.
        _newest_counts[:] = [TrainingCounts(session.summary, self)]
        control_protocols.register_counter("training", _newest_counts[0])
        return session

    def _end_calls(
        self, session: TrainingSession, state: str, error: BaseException | None
    ) -> list[Callable[[], object]]:
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        event = EventRecord("error", reason, time.time(), 0)
        finding, writer = out_of_memory_finding(event), self._writer
        calls: list[Callable[[], object]] = [lambda: session.end(state, reason)]
        if finding is not None and writer is not None:
            calls.append(lambda: writer.write_findings([finding]))
        return calls

    def step(self, loss: float | Tensor | None = None) -> None:
        """Set the loss of a step, once for each step of the optimizer, before or after it.

        Without an optimizer, this ends the step: call it before gradients are cleared.
        Raises `UsageError` for a loss that is not a single number.
        """
        if self._session is not None:
            self._session.set_loss(loss)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield batches, and time the wait for each. Raises `UsageError` if not iterable."""
        argument_checks.check_batches(loader, "batches")
        return iter(loader) if self._session is None else self._session.batches(loader)

    @property
    def cost(self) -> dict[str, float | int]:
        """The cost of capture so far: seconds, and their `ratio` to the time without capture."""
        return self._last_cost if self._session is None else self._session.cost()

    @property
    def summary(self) -> TrainingSummary:
        """How many steps had anomalies so far; the newest step is not counted yet."""
        return self._last_summary if self._session is None else self._session.summary.summary

    def __str__(self) -> str:
        summary, cost = self.summary, self.cost
        path = escape_unprintable(str(self.path))
        if not summary.total_steps:
            return f"No step is recorded yet; the trace will be {path}."
        ratio, each = float(cost["ratio"]), float(cost["capture_s"]) / summary.total_steps * 1e3
        dropped = f"{text} " if (text := self._governor.summary()) else ""
        share = f"{ratio:.2%} of the time without it" if ratio < 1 else "longer than training"
        text = f"{summary.total_steps} training steps, {summary.anomaly_steps} with anomalies; "
        text += f"capture took {share} ({each:.2f} ms a step). {dropped}Trace: {path}"
        return "\n".join([text, *self._closing_lines()])

    def _closing_lines(self) -> list[str]:
        """Return the findings and the command that opens the trace, once it has ended."""
        if self._session is not None:
            return []
        try:
            with self.reader() as reader:
                return summarize_trace(reader, self.path).closing_lines()
        except TraceError as error:
            return [error.sentence()]

    def _conclude(self, session: TrainingSession, writer: TraceWriter, **facts: Any) -> None:
        self._last_cost, self._last_summary = session.cost(), session.summary.summary
        super()._conclude(session, writer, training=self._last_summary.as_dict(), **facts)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if not self._quiet:
            print_message(str(self))


def _unwrap_optimizer(optimizer: Any) -> Optimizer | None:
    """The optimizer that does the steps, which may be inside a wrapper such as accelerate's."""
    if optimizer is None:
        return None
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        found = argument_checks.describe_type(optimizer)
        hint = "Without one, call step(loss=...) once for each step."
        raise UsageError(f"watch_training needs a torch optimizer, not {found}.", hint=hint)
    return optimizer


class TrainingCounts(control_protocols.BaselineCounter):
    """Counts the steps of a run from its start or the last `clear` on, also after its end."""

    def __init__(self, count: TrainingSummaryCounter, run: TrainingWatch) -> None:
        super().__init__()
        self._count, self._run = count, weakref.ref(run)

    def _read(self) -> control_protocols.AnomalyCounts:
        now = self._count.summary  # a step with an anomaly counts once; the history has every step
        history = {"total_anomalies": now.anomaly_steps, "debug_history_length": now.total_steps}
        return control_protocols.AnomalyCounts(**asdict(now), **history)

    @property
    def level(self) -> str:
        """How much is recorded from the next step on; "" after the run is deleted."""
        run = self._run()
        return "" if run is None else run.level

    @level.setter
    def level(self, level: str) -> None:
        if (run := self._run()) is not None:
            run.level = level


_newest_counts: list[TrainingCounts] = []  # of the newest run, also after its end
