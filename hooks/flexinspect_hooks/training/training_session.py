"""The session that records a training run: finds its steps, and sends each to the writer thread.

A step ends when the optimizer's step does (or a `GradScaler` skips it). It then waits for its loss,
which the program may report afterwards, and is written when the next step begins.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.control.messages import StepRef
from flexinspect.records import imported, training_step
from flexinspect.records.collectives import ALL_WEIGHTS_STREAM, WEIGHTS_STREAM
from flexinspect.records.step import EventRecord, GenerationEnd
from flexinspect.rules.engine import RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.collective_log import CollectiveLog, observe_collectives
from flexinspect_hooks.capture.hook import built_in_rules
from flexinspect_hooks.capture.rank_facts import current_rank
from flexinspect_hooks.capture.recorder import N_IMMEDIATE_STEPS, FinishedStep, Recorder
from flexinspect_hooks.control.step_barrier import StepBarrier, pass_barrier
from flexinspect_hooks.observers.memory_hook import StepMemory
from flexinspect_hooks.python_internals.threads import available_cores
from flexinspect_hooks.python_internals.torch_private import (
    active_data_parallel,
    hide_from_compiler,
    hide_hooks,
    optimizer_step_depth,
)
from flexinspect_hooks.training import torch_calls
from flexinspect_hooks.training.call_order import CallOrder, parameter_note
from flexinspect_hooks.training.cost_governor import MEASURED_IN_SUCCESSION, Governor
from flexinspect_hooks.training.evaluation_passes import EvaluationPasses
from flexinspect_hooks.training.forward_passes import ForwardWatch, ModuleOutputs
from flexinspect_hooks.training.gradient_screen import GradientScreen
from flexinspect_hooks.training.gradient_statistics import learning_rates
from flexinspect_hooks.training.live_ranks import LiveRanks
from flexinspect_hooks.training.loop_calls import LoadedBatch
from flexinspect_hooks.training.loss_checks import ClassLoss
from flexinspect_hooks.training.measurement import GradientMeter
from flexinspect_hooks.training.model_checks import Failure
from flexinspect_hooks.training.model_parts import ModelParts
from flexinspect_hooks.training.step_checks import EVENT, N_FIRST_STEPS, StepChecks
from flexinspect_hooks.training.torch_calls import ClippingNorms
from flexinspect_hooks.training.training_step_draft import (
    Loss,
    TrainingRecords,
    TrainingStepDraft,
    training_generation,
)

T = TypeVar("T")
RECORD_KINDS = (imported.TRAINING, imported.EVENTS, imported.MEMORY, imported.STATISTICS)
N_TOGETHER, MAX_DELAY_S = 8, 0.5  # light steps that are written together, and how late at most
MAX_UNWRITTEN_STEPS = 16  # that may wait until something waits for the device anyway
LINGER_S = 0.5  # delay of a commit: a training step takes longer than a decode step


class SharedRun(NamedTuple):
    """What a session shares with others of its trace: the recorder, and its own generation."""

    recorder: Recorder
    generation: int
    model: str


class TrainingSession:
    """Records the steps of `optimizer`; without one, each call of `set_loss` ends a step.

    With `shared` it is one of several sessions of a trace, whose recorder others start and stop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sink: TraceWriter,
        governor: Governor,
        shared: SharedRun | None = None,
    ) -> None:
        self._shared = shared
        self.recorder = Recorder(sink, linger_s=LINGER_S) if shared is None else shared.recorder
        self._generation = 0 if shared is None else shared.generation
        self.summary = training_step.TrainingSummaryCounter()
        self.own_s = self.total_s = 0.0
        self._optimizer = optimizer
        self._governor = governor
        self._meter, self._screen = GradientMeter(model), GradientScreen()
        self._measured_until = 0
        self._current = TrainingStepDraft()
        self._forwards = ModelParts(model, self._watch_part)
        self._evaluations = EvaluationPasses()
        self._checks = StepChecks(self._meter, optimizer)
        self._on_backward = self._guarded(self._checks.on_backward)
        self._order = CallOrder()
        self._ranks = LiveRanks(model, self._generation, lambda: self._meter.groups)
        self._records = TrainingRecords(self._ranks)
        self._device = next(model.parameters()).device
        self._memory = StepMemory(model)
        self._read_memory = functools.partial(self._memory.read, self._device)
        self._hooks = ExitStack()
        self._awaiting_loss: TrainingStepDraft | None = None
        self._unwritten: deque[TrainingStepDraft] = deque()
        self._reported_loss: Loss | None = None
        self._clip_norms: ClippingNorms | None = None
        self._rates_before: tuple[float, ...] = ()
        self._step_started: float | None = None
        self._step_own_s = self._writer_s = self._passes_before_s = 0.0
        self._scaler_step: int | None = None
        self._collectives = CollectiveLog() if current_rank() is not None else None
        self._is_off = False
        self.is_paused: Callable[[], bool] = lambda: False
        """Whether forward passes belong to something else now, such as a call of `generate`."""
        self.on_step_end: Callable[[int, int], object] | None = None
        """Called with the generation and number of each step that ends."""
        self.barrier = StepBarrier()
        """Where the first forward pass of a step waits; by default no command ever reaches it."""
        self._let_through = -1  # the step whose first forward pass has passed the barrier

    def begin(self) -> None:
        """Install all hooks and begin the generation that represents the run."""
        rules, off = built_in_rules()
        if self._shared is None:
            self.recorder.has_core = not self._cores_are_taken()
            self.recorder.start()
        for name, sentence in off.items():
            self._event("rule-disabled", f"{name}: {sentence}")
        name = "" if self._shared is None else self._shared.model
        generation = training_generation(self._meter, self._optimizer, self._generation, name)
        self.recorder.begin_generation(generation)
        self.recorder.begin_rules(generation, RuleRunner(rules, holds=RECORD_KINDS))
        self._forwards.install()
        self._apply_detail()
        self._meter.learn_order()
        if self._optimizer is not None:
            hooks = map(self._guarded, (self._before_optimizer, self._after_optimizer))
            before, after = map(hide_from_compiler, hooks)
            self._hooks.enter_context(self._optimizer.register_step_pre_hook(before))
            self._hooks.enter_context(self._optimizer.register_step_post_hook(after))
        self._hooks.callback(self._checks.on_forward_end)
        self._hooks.enter_context(torch_calls.observe_training(self))
        if self._collectives is not None:
            self._hooks.enter_context(observe_collectives(self._collectives))
            self._collectives.watch_reducer(self._forwards.model)
        self._hooks.callback(hide_hooks())
        self._hooks.callback(self._memory.close)

    def end(self, state: str, reason: str = "") -> None:
        """Write the remaining steps, end the generation, and remove all hooks, also on errors."""
        try:
            self._flush()
            self._write()
        except Exception as error:
            self._switch_off(error)
        try:
            self._checks.on_evaluated(self._evaluations.n_losses_in_training_mode)
            self._checks.on_end()
            for kind, text, facts in (*self._checks.take(), *self._evaluations.take()):
                self._event(kind, text, facts)
            self.recorder.put(self._finish_ranks)
            answer = f"{self.summary.summary.total_steps} steps"
            end = GenerationEnd(self._generation, state, answer, (), reason, time.time())
            self.recorder.put(end)
            if self._shared is None:
                self.recorder.stop()
        finally:
            self._uninstall()

    def _finish_ranks(self) -> EventRecord | None:
        found = self._ranks.finish()
        if found is None:
            return None
        text, facts = found
        place = (self._generation, facts["first_step"])
        return EventRecord(EVENT, text, time.time(), *place, facts)

    def discard(self) -> None:
        """Remove all hooks and write nothing, in a forked child."""
        self._is_off = True
        self._uninstall()

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that the program calls."""
        return self._forwards.parts

    def add_part(self, part: nn.Module, name: str, first_name: str) -> None:
        """Watch another module that the same optimizer trains."""
        self._forwards.add(part, name, first_name)
        self._meter.model = self._forwards.model
        self._meter.refresh()
        self._meter.learn_order()

    def _watch_part(self, part: nn.Module, prefix: str) -> ForwardWatch:
        return ForwardWatch(
            part, passes=self._current, listener=self, guarded=self._guarded, prefix=prefix
        )

    def _uninstall(self) -> None:
        self._forwards.remove()
        self._meter.release()
        self._hooks.close()

    @property
    def level(self) -> str:
        """How much is measured, from the next step on, unless the cost is above the band."""
        return self._governor.level

    @level.setter
    def level(self, level: str) -> None:
        self._governor.set_level(level)
        self._apply_detail()

    def cost(self) -> dict[str, float | int]:
        """The cost of capture; `writer_s` counts only if torch uses every core."""
        spent = self.own_s + (self.recorder.writer_s if self._cores_are_taken() else 0.0)
        return {
            "capture_s": round(self.own_s, 6),
            "writer_s": round(self.recorder.writer_s, 6),
            "total_s": round(self.total_s, 6),
            "ratio": round(spent / max(self.total_s - spent, 1e-9), 5),
            "steps": self.recorder.n_steps,
        }

    def _cores_are_taken(self) -> bool:
        return self._device.type == "cpu" and torch.get_num_threads() >= available_cores()

    def set_loss(self, loss: Loss | None) -> None:
        """Set the loss of the step that just ended, or else of the current one."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach().clone()  # the program may change it later
        elif loss is not None:
            loss = argument_checks.check_number(loss, "The loss")
        if self._optimizer is None:
            self._reported_loss = loss
            self._guarded(self._end_manual_step)()
        elif self._awaiting_loss is not None and self._awaiting_loss.reported_loss is None:
            self._awaiting_loss.reported_loss = loss
        else:
            self._reported_loss = loss

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, and time how long each takes."""
        source = iter(loader)
        while True:
            started = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                waited = time.perf_counter() - started
                self._current.data_s = (self._current.data_s or 0.0) + waited
                if self._step_started is None:
                    self._step_started = started
            yield batch

    def _end_manual_step(self) -> None:
        if self._forwards.has_forward:
            started = time.perf_counter()
            self._flush()
            self._current.is_updated = True  # the program may have updated the weights itself
            self._measure()
            self._end_step(started)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        if optimizer_step_depth(optimizer) > 1:
            return  # a `step` that calls `super().step()` is one step
        now = self._current
        self._flush()
        now.learning_rates = learning_rates(optimizer)
        if not _has_closure(args, kwargs):
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None:
                self._synchronize()
            now.is_skipped = found_inf is not None and bool(found_inf)
            scale = getattr(optimizer, "grad_scale", None)
            # A fused optimizer divides by the loss scale itself.
            self._measure(1.0 if scale is None else float(scale))
        if now.is_measured and self._governor.detail.compares_weights(now.number):
            self._meter.copy_weights()
        self._checks.before_step(is_measured=now.is_measured)
        self._passes_before_s = self._passes_s()
        now.optimizer_started = time.perf_counter()
        self._step_own_s += now.optimizer_started - started

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        started = time.perf_counter()
        if optimizer_step_depth(optimizer) > 1:
            return
        if self._current.optimizer_started is not None:
            inside = self._passes_s() - self._passes_before_s  # a closure runs forward and backward
            self._current.optimizer_s = max(started - self._current.optimizer_started - inside, 0.0)
        if _has_closure(args, kwargs):
            self._current.is_updated = True
            self._measure()
        if self._meter.has_copies:
            self._synchronize()
        self._current.group_ratios = self._meter.measure_change()
        if (changes := self._meter.changes) is not None:
            self._checks.on_changes(self._current.number, changes)
        self._end_step(started)

    def _passes_s(self) -> float:
        return self._current.forward_s + self._current.backward_s + self._forwards.own_s

    def on_clipped(
        self, clipped: Sequence[Tensor], before: Tensor, limit: float, norms: ClippingNorms | None
    ) -> None:
        """Gradients were clipped; those of other models are ignored."""
        if not self._meter.parameter_ids.isdisjoint(map(id, clipped)):
            self._current.norm_before_clip, self._current.max_norm = before.detach(), limit
            self._clip_norms = norms
            self._checks.on_clipped()
            self._order.add("clip_grad_norm_")

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        if optimizer is self._optimizer and scaler.is_enabled():
            self._current.scale = float(scaler.get_scale())
            self._clip_norms = None  # the scaler may divide gradients without a new tensor version
            self._scaler_step = self._current.number

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """It has called the optimizer, or skipped the step: then no step began since."""
        if optimizer is self._optimizer and self._scaler_step == self._current.number:
            self._scaler_step = None
            self._guarded(self._on_skipped_step)(optimizer)

    def on_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """The gradients of an optimizer were unscaled."""
        if optimizer is self._optimizer:
            self._checks.on_unscaled()
            self._order.add("scaler.unscale_")

    def on_cleared(self, owner: Any) -> None:
        """Backward passes whose gradients are cleared do not belong to the step."""
        now = self._current
        if not self._is_own(owner):
            return
        self._order.add("zero_grad")
        if now.n_backward and now.optimizer_started is None:
            now.drop_backward()

    def _is_own(self, owner: Any) -> bool:
        if isinstance(owner, nn.Module):
            one = next(iter(owner.parameters()), None)
            return one is not None and id(one) in self._meter.parameter_ids
        return owner is self._optimizer

    def on_loss(self, loss: Tensor) -> None:
        """A loss function returned a loss without a gradient."""
        self._evaluations.on_loss(loss)

    def on_loss_inputs(self, failures: Sequence[Failure]) -> None:
        """A loss function was called with arguments that are wrong."""
        self._checks.report(failures)

    def report(self, failures: Sequence[Failure]) -> None:
        """Report failed checks that are none of this training alone."""
        self._checks.report(failures)

    def on_class_loss(self, describe: Callable[[], ClassLoss | None]) -> None:
        """A loss of classes with gradients was computed; it is described in the first steps."""
        number = self._current.number
        if number >= N_FIRST_STEPS or self._is_off or not self._forwards.has_forward:
            return
        try:
            loss = describe()
        except Exception:
            return  # values that cannot be read, as under vmap
        if loss is not None:
            self._guarded(self._checks.on_class_loss)(loss)

    def on_backward(self, loss: Tensor) -> None:
        """The program calls `backward` on a loss."""
        if self._forwards.has_forward:
            self._on_backward(loss, self._current.number)

    def on_cut_checkpoint(self, function: Any) -> None:
        """A reentrant checkpoint runs, of which no input requires gradients."""
        self._guarded(self._checks.on_cut_checkpoint)(function, self._current.number)

    def on_scheduler(self, optimizer: Any, scheduler: Any, *, is_first: bool) -> None:
        """A scheduler made a step."""
        if optimizer is self._optimizer:
            self._order.add("scheduler.step")
            self._checks.on_scheduler(scheduler, self._current.number, is_first=is_first)

    def on_batch(self, batch: LoadedBatch) -> None:
        """A `DataLoader` returned a batch."""
        if not self._is_off:
            self._current.data_s = (self._current.data_s or 0.0) + batch.wait_s
            if self._step_started is None:
                self._step_started = time.perf_counter() - batch.wait_s
            self._checks.on_batch(batch)
            if batch.earlier is not None:
                self._order.add_repeated_batch()

    def _on_skipped_step(self, optimizer: Optimizer) -> None:
        started = time.perf_counter()
        self._flush()
        self._current.learning_rates = learning_rates(optimizer)
        self._current.is_skipped = True
        self._measure()
        self._end_step(started)

    def on_forward_begin(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """A forward pass begins. Raises `KeyboardInterrupt` if the run has to stop."""
        now = self._current
        self._evaluations.on_training()
        self._checks.on_forward(model, args, kwargs, now.number)
        self._order.add_forward(model, args, kwargs)
        if self._step_started is None:
            self._step_started = time.perf_counter()
        self._clip_norms = None  # do not keep gradients alive that the program may drop
        if self._collectives is not None and (parallel := active_data_parallel()) is not None:
            self._collectives.watch_reducer(parallel)  # of a Trainer, whose model is inside it
        self._flush()
        if self._let_through != now.number:  # not again for a part of another model's step
            self._let_through = now.number
            waited_s = pass_barrier(self.barrier, StepRef(self._generation, step=now.number - 1))
            self._step_started += waited_s
            self._step_own_s -= waited_s  # it is a part of `own_s` of the forward passes

    def on_evaluation_begin(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """A forward pass without a backward pass begins."""
        self._checks.on_evaluation(model, args, kwargs)
        if not self.is_paused():
            self._order.add("evaluation")

    def on_backward_pass(self) -> None:
        """A backward pass begins."""
        self._order.add("backward")
        self._checks.on_backward_pass(is_measured=self._current.is_measured)

    def on_backward_pass_end(self) -> None:
        """A backward pass has ended."""
        if self._current.is_measured:
            self._checks.on_backward_pass_end()

    def on_outputs(self, outputs: ModuleOutputs) -> None:
        """A forward pass has returned, and its modules have returned `outputs`."""
        if self._current.number == 0:
            self._order.add_outputs(outputs)

    def on_forward_end(self) -> None:
        """A forward pass has ended."""
        self._checks.on_forward_end()

    def on_evaluation(self, model: nn.Module, loss: Tensor | float | None) -> None:
        """A forward pass without a backward pass has ended."""
        if not self.is_paused():
            self._evaluations.add(loss, is_evaluation=not model.training)

    def _measure(self, scale: float = 1.0) -> None:
        now, detail = self._current, self._governor.detail
        self._forwards.count_pending()
        is_rising = training_step.is_warming_up(self._rates_before, now.learning_rates)
        if not now.is_skipped:
            self._rates_before = now.learning_rates
        norms, self._clip_norms = self._clip_norms, None
        if not now.is_measured and not self._is_suspicious(now):
            return
        if (change := self._meter.refresh()) is not None:
            now.notes.append(("parameters-changed", change, {"groups": [*self._meter.groups]}))
        if change is not None or now.number == 0:
            facts = {"outputs": self._order.output_dtypes}
            now.notes.append(parameter_note(self._meter.model, self._optimizer, facts))
        self._synchronize()
        # Read the results of the device, before the optimizer gives it more work.
        now.reported_loss, self._reported_loss = self._reported_loss, None
        now.read()
        self._write()
        now.measured = self._meter.measure(now.number, detail, scale, is_rising, norms)
        is_before = now.optimizer_started is None  # with a closure they are complete only after it
        rates = now.learning_rates
        self._checks.on_gradients(now.number, now.measured, rates, is_before=is_before)

    def _is_suspicious(self, now: TrainingStepDraft) -> bool:
        """Whether a step that was not to be measured is, with those after it."""
        is_screened = self._governor.detail.is_screened
        if is_screened and self._screen.is_suspicious(self._meter.named, now.number):
            now.is_measured = True
            self._measured_until = now.number + MEASURED_IN_SUCCESSION
        return now.is_measured

    def _synchronize(self) -> None:
        """Wait for the device; its work belongs to the program and is not a cost of capture."""
        if self._device.type == "cuda":
            started = time.perf_counter()
            torch.cuda.synchronize(self._device)
            self._current.waited_s += (waited := time.perf_counter() - started)
            self._step_own_s -= waited

    def _end_step(self, started: float) -> None:
        """End the current step; `started` is when capture began to work on its end."""
        now = self._current
        if names := self._meter.take_unreached():
            self._checks.on_unreached(names)
            text = f"{len(names)} trainable parameters get no gradient, first {names[0]}."
            facts = {"names": names[:100], "n": len(names)}
            now.notes.append(("parameters-without-gradient", text, facts))
        is_measured = now.is_measured
        self._checks.after_step(now.number, is_skipped=now.is_skipped, is_measured=is_measured)
        self._checks.on_evaluated(self._evaluations.n_losses_in_training_mode)
        self._order.add("step skipped" if now.is_skipped else "optimizer.step")
        now.notes += [*self._checks.take(), *self._evaluations.take(), *self._order.take()]
        now.detail, now.device = self._governor.detail.name, now.device or str(self._device)
        now.memory = self._read_memory() if is_measured else None
        if self._collectives is not None:
            now.collectives = self._collectives.take()
            detail = self._governor.detail
            if is_measured:
                now.weights[WEIGHTS_STREAM] = self._meter.sum_weight_bits(sampled=True)
            if now.number % detail.rows_every == 0:
                now.weights[ALL_WEIGHTS_STREAM] = self._meter.sum_weight_bits(sampled=False)
        ended = time.perf_counter()
        since = ended if self._step_started is None else self._step_started
        now.started, now.started_at = since, time.time() - (ended - since)
        now.own_s = self._step_own_s + (ended - started) + self._forwards.own_s
        now.wall_s = ended - since
        if self._reported_loss is not None:
            now.reported_loss = self._reported_loss
        self.own_s += now.own_s
        self.total_s += now.wall_s
        self._check_overhead(now)
        if self.on_step_end is not None:
            self.on_step_end(self._generation, now.number)
        self._reported_loss, self._step_started = None, ended
        self._step_own_s = 0.0
        self._awaiting_loss, self._current = now, self._draft(now.number + 1)
        self._forwards.begin_step(self._current)

    def _draft(self, number: int) -> TrainingStepDraft:
        is_measured = self._governor.detail.measures(number) or number < self._measured_until
        return TrainingStepDraft(
            number=number, is_measured=is_measured or self._ranks.compares(number)
        )

    def _check_overhead(self, now: TrainingStepDraft) -> None:
        writer_s = self._writer_s
        self._writer_s = self.recorder.writer_s
        if now.number < N_IMMEDIATE_STEPS:
            return  # one-time costs of the first steps do not depend on the detail
        written = 0.0 if self.recorder.has_core else self._writer_s - writer_s
        change = self._governor.on_step(now.own_s + written, now.wall_s)
        if change is not None:
            now.notes.append((*change, {"detail": self._governor.detail.name}))
            self._apply_detail()

    def _apply_detail(self) -> None:
        self._forwards.set_detail(self._governor.detail)

    def _flush(self) -> None:
        """Stop waiting for the newest step's loss; write the steps that need not wait for a GPU."""
        waiting, self._awaiting_loss = self._awaiting_loss, None
        if waiting is None:
            return
        self._unwritten.append(waiting)
        is_full = len(self._unwritten) > MAX_UNWRITTEN_STEPS
        if is_full or (self._is_due() and not any(one.needs_wait() for one in self._unwritten)):
            self._write()

    def _is_due(self) -> bool:
        """Whether to write the steps that have ended.

        Those of which little is measured are written together: then the code is in the CPU caches.
        """
        oldest, newest = self._unwritten[0], self._unwritten[-1]
        is_light = not newest.is_measured and newest.number >= N_IMMEDIATE_STEPS
        has_news = bool(newest.notes) or newest.producer is not None
        is_old = time.perf_counter() - oldest.started > MAX_DELAY_S
        return not is_light or has_news or is_old or len(self._unwritten) >= N_TOGETHER

    def _write(self) -> None:
        while self._unwritten:
            step = self._unwritten.popleft()
            training = step.record()
            self.summary.add(training)
            kept = ((self._records, (training, step)),)
            context = step.context(self._generation)
            self.recorder.put(FinishedStep(context, StepBuffer(torch.device("cpu")), kept))

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """Wrap a call so that it never raises into the program: on errors, capture ends."""

        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if self._is_off:
                return
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._switch_off(error)

        return guarded

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        text = f"Capture of the training run failed and is off: {type(error).__name__}: {error}"
        self._event("hook-disabled", text)
        self._uninstall()

    def _event(self, kind: str, text: str, facts: Mapping[str, Any] | None = None) -> None:
        place = (self._generation, self._current.number)
        self.recorder.put(EventRecord(kind, text, time.time(), *place, facts or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingSession:
        """Copies of the model or the optimizer copy their hooks, but must not copy the session."""
        return self


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether an optimizer's step received a closure, from the arguments of its hooks."""
    # The optimizer itself comes first among the arguments.
    return any(map(callable, args[1:])) or callable(kwargs.get("closure"))
