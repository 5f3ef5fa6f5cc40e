"""Checks of what holds in any healthy training: each that fails is one event of a step.

They run in the thread that trains, so they read no tensor of a device, except in the first steps.
The rule `training_checks` turns the events into findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.core.text import plural
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training import forward_passes
from flexinspect_hooks.training.evaluation_passes import Note
from flexinspect_hooks.training.forward_checks import (
    AutocastCheck,
    CheckpointCheck,
    DropoutCheck,
)
from flexinspect_hooks.training.gradient_statistics import NamedParameters
from flexinspect_hooks.training.loop_calls import LoadedBatch, is_loss_scaled
from flexinspect_hooks.training.loss_checks import ClassLoss
from flexinspect_hooks.training.measurement import GradientMeter, UpdateNorms
from flexinspect_hooks.training.micro_batches import MeansCheck, ScheduleCheck
from flexinspect_hooks.training.model_checks import (
    Failure,
    check_constant_inputs,
    check_frozen_flags,
    check_initializations,
    check_modes,
    check_optimizer,
    check_rows,
    check_stale_gradients,
    check_tied_weights,
    check_unregistered,
    has_modes,
)
from flexinspect_hooks.training.state_checks import StateCheck
from flexinspect_hooks.training.token_checks import ShiftCheck, check_padding
from flexinspect_hooks.training.update_checks import (
    MAX_VALUE_CHECKS,
    OutsideCheck,
    RoundingCheck,
    UpdateCheck,
    check_outliers,
)

EVENT = "training-check"
N_FIRST_STEPS = 2  # in which inputs and dtypes are checked
N_WITHOUT_GRADIENT = 3  # first steps without a gradient: the first may only appease a scheduler
MIN_TRAINING_MODE_LOSSES = 2  # without gradients, which are an evaluation without eval()
N_WITHOUT_LABELS = 2  # first losses without any label


class StepChecks:
    """The checks of one training; `take` returns the events of those that failed since."""

    def __init__(self, meter: GradientMeter, optimizer: Optimizer | None) -> None:
        self._meter, self._optimizer = meter, optimizer
        self._notes: list[Note] = []
        self._reported: set[str] = set()
        self._clearing = ClearingCheck()
        self._updates, self._rounding = UpdateCheck(), RoundingCheck()
        self._outside, self._states = OutsideCheck(), StateCheck(optimizer)
        self._dropout, self._autocast = DropoutCheck(), AutocastCheck()
        self._means, self._shifts, self._schedule = MeansCheck(), ShiftCheck(), ScheduleCheck()
        self._checkpoints = CheckpointCheck()
        self._n_class_losses = 0
        self._n_backward = 0  # backward passes that a training began in the step
        self._same_epoch: int | None = None
        self._sizes: list[int] = []
        self._named: NamedParameters = ()
        self._trained: NamedParameters = ()
        self._is_unscaled = False
        self._n_constant = 0  # forward passes in succession whose inputs are constant
        self._without_gradient = 0  # steps, -1 after one with a gradient
        self._modes: set[bool] = set()  # of the models in the forward passes of the step
        self._was_in_training_mode = False

    def take(self) -> list[Note]:
        """The events since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _fail(self, check: str, text: str, **facts: Any) -> None:
        """Report a failed check, once."""
        if check not in self._reported:
            self._reported.add(check)
            self._notes.append((EVENT, text, {"check": check, **facts}))

    def report(self, failures: Sequence[Failure]) -> None:
        """Report failed checks, each once."""
        for check, text, facts in failures:
            self._fail(check, text, **facts)

    # -- what the program calls --------------------------------------------------------------------

    def on_forward(self, model: nn.Module, args: Sequence[Any], kwargs: Any, number: int) -> None:
        """A forward pass with gradients begins."""
        values = (*args, *kwargs.values())
        self.report(self._dropout.flush() if model.training else self._dropout.on_inputs(values))
        if not model.training:
            self._dropout.begin(model, values)
        if number < N_FIRST_STEPS:
            self.report(check_rows(kwargs))
            self.report(check_padding(model, kwargs))
            self._shifts.on_forward(args, kwargs)
            inputs = [one for one in values if isinstance(one, Tensor)]
            # A forward never waits for its device.
            is_here = not any(map(forward_passes.is_remote, inputs))
            constant = check_constant_inputs(inputs) if is_here else []
            self._n_constant = self._n_constant + 1 if constant else 0
            if self._n_constant > 1:
                self.report(constant)
            self._autocast.begin(model)
        self._modes.add(model.training)

    def on_evaluation(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """A forward pass without gradients begins."""
        inputs = (*args, *kwargs.values())
        self.report(self._dropout.on_inputs(inputs))
        if not model.training and self._dropout.begin(model, inputs):
            self.report(check_modes(model))

    def on_forward_end(self) -> None:
        """A forward pass has ended."""
        self.report(self._dropout.end())
        self.report(self._autocast.end())

    def on_end(self) -> None:
        """The training has ended."""
        self.report(self._dropout.flush())

    def on_class_loss(self, loss: ClassLoss) -> None:
        """A loss of classes with gradients was computed in one of the first steps."""
        self._n_class_losses += 1
        self._means.on_class_loss(loss)
        self._shifts.on_class_loss(loss)
        if loss.n_labels or not loss.target.numel() or self._n_class_losses > N_WITHOUT_LABELS:
            self._n_class_losses = N_WITHOUT_LABELS
        elif self._n_class_losses == N_WITHOUT_LABELS:
            text = f"All labels of the first {N_WITHOUT_LABELS} losses are {loss.ignored}, which "
            text += "the loss ignores: nothing is learned from these batches"
            self._fail("labels-ignored", text, ignored=loss.ignored)

    def on_backward(self, loss: Tensor, number: int) -> None:
        """The program calls `backward` on a loss while step `number` runs."""
        self._n_backward += 1
        if number < N_FIRST_STEPS:
            self._means.on_backward(loss)

    def on_backward_pass(self, *, is_measured: bool) -> None:
        """A backward pass through the model begins, of a step that is measured or not."""
        self._clearing.is_scaled = is_loss_scaled()
        if is_measured:
            self._clearing.before_backward()

    def on_backward_pass_end(self) -> None:
        """A backward pass through the model has ended, of a step that is measured."""
        self._clearing.after_backward()

    def on_cut_checkpoint(self, function: Any, number: int) -> None:
        """A reentrant checkpoint runs, of which no input requires gradients."""
        if number < N_FIRST_STEPS:
            self._checkpoints.add(function)

    def on_unreached(self, names: Sequence[str]) -> None:
        """Parameters got no gradient in the first backward pass."""
        self.report(self._checkpoints.check(self._meter.named, names))

    def on_changes(self, number: int, norms: UpdateNorms) -> None:
        """How much a step has changed each parameter."""
        self.report(check_outliers(norms.changes, norms.weights, norms.gradients, number))

    def on_clipped(self) -> None:
        """Gradients of the step were clipped."""
        if self._clearing.is_scaled and not self._is_unscaled:
            text = "The gradients are clipped before they are unscaled: the limit applies to "
            text += "gradients that still contain the loss scale"
            self._fail("clip-before-unscale", text)

    def on_unscaled(self) -> None:
        """The gradients of the step were unscaled."""
        self._is_unscaled = True

    def on_scheduler(self, scheduler: Any, number: int, *, is_first: bool) -> None:
        """A scheduler made a step while step `number` runs."""
        self._schedule.on_step(scheduler)
        if number == 0 and is_first:
            name = type(scheduler).__name__
            text = f"{name}.step() was called before the first optimizer.step(): the first value "
            text += "of the schedule is skipped"
            self._fail("scheduler-first", text, scheduler=name)

    def on_batch(self, batch: LoadedBatch) -> None:
        """A loader returned a batch."""
        self._same_epoch = batch.same_epoch
        if batch.n_restarts >= N_FIRST_STEPS:
            text = "The program makes a new iterator of the DataLoader for each step, as in "
            text += "next(iter(loader)), and trains on its first batch again and again"
            self._fail("restarted-loader", text, n=batch.n_restarts + 1)
        if batch.earlier is None:
            return
        why = ""
        if batch.n_workers > 1:
            why = f"; its {batch.n_workers} workers may draw the same random numbers"
        text = f"Batch {batch.number} of the DataLoader equals batch {batch.earlier} of the same "
        text += f"pass in every value that was compared{why}"
        facts = {"batch": batch.number, "earlier": batch.earlier, "n_workers": batch.n_workers}
        self._fail("repeated-batch", text, **facts)

    def on_evaluated(self, n_losses: int) -> None:
        """So many losses were computed without gradients, with the model in training mode."""
        check = "evaluated-in-training-mode"
        if n_losses < MIN_TRAINING_MODE_LOSSES or check in self._reported:
            return
        if has_modes(self._meter.model):
            text = f"The model is in training mode in {n_losses} forward passes without gradients "
            text += "whose loss was computed: dropout and batch norm act as in training, and batch "
            text += "norm learns from these batches"
            self._fail(check, text, n=n_losses)

    # -- a step ------------------------------------------------------------------------------------

    def on_gradients(
        self,
        number: int,
        measured: TrainingStepRecord | None,
        rates: Sequence[float],
        *,
        is_before: bool,
    ) -> None:
        """The gradients of a step are complete, before the optimizer steps or after it."""
        model, named = self._meter.model, self._meter.named
        if number == 0:
            self._check_first(model)
        if self._same_epoch is not None:
            text = "DistributedSampler.set_epoch() was not called between two passes over the data:"
            text += f" both have the order of epoch {self._same_epoch}, so every epoch has the "
            text += "same batches"
            self._fail("same-order", text, epoch=self._same_epoch)
        if self._clearing.was_not_cleared():
            text = f"The gradients of step {number - 1} were not cleared before the backward pass "
            text += f"of step {number}: it adds to them, so every step uses the sum of all before"
            self._fail("gradients-not-cleared", text, parameter=self._clearing.name)
        if self._meter.lost:
            names = self._meter.lost
            also = f", and that of {plural(len(names) - 1, 'other parameter')}" * (len(names) > 1)
            text = f"The gradient of {names[0]}{also} is exactly 0 in step {number}, but it was "
            text += "not in any step before, and those of the parameters around it are not"
            self._fail("lost-gradient", text, names=names[:100])
        if is_before and self._optimizer is not None:
            self.report(self._outside.before_step(number, self._optimizer))
        trained = self._trained_by_optimizer(named)
        self._check_any_gradient(number, trained)
        total = 0.0 if measured is None else measured.total_norm or 0.0
        is_expected = is_before and total > 0 and any(rate > 0 for rate in rates)
        self._updates.before(trained, is_expected=is_expected)
        self._rounding.before(trained if is_expected else (), self._optimizer, rates)
        self._clearing.choose(trained)

    def _trained_by_optimizer(self, named: NamedParameters) -> NamedParameters:
        """The parameters that the optimizer holds; found again only if one of the two changes."""
        if self._optimizer is None:
            return named
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes or named is not self._named:
            self._named = named
            held = {id(one) for group in groups for one in group["params"]}
            self._sizes = sizes
            self._trained = [one for one in named if id(one.parameter) in held]
            self.report(check_stale_gradients(self._meter.model, held))
        return self._trained

    def _check_any_gradient(self, number: int, trained: NamedParameters) -> None:
        """Find an optimizer that steps without any gradient, in the first steps."""
        if self._without_gradient < 0 or self._optimizer is None or not trained:
            return
        if any(one.parameter.grad is not None for one in trained):
            self._without_gradient = -1
            return
        self._without_gradient += 1
        if self._without_gradient == N_WITHOUT_GRADIENT:
            kind = type(self._optimizer).__name__
            text = (
                f"No parameter of {kind} has a gradient in the first {N_WITHOUT_GRADIENT} steps: "
            )
            text += "no backward pass reaches them (a loss that is detached, or of another model)"
            self._fail("no-gradients", text, optimizer=kind)

    def _check_first(self, model: nn.Module) -> None:
        self.report(check_frozen_flags(model))
        self.report(check_tied_weights(model))
        self.report(check_initializations(model))
        if self._optimizer is not None:
            self.report(check_optimizer(model, self._optimizer))
            self.report(check_unregistered(model, self._optimizer))

    def before_step(self, *, is_measured: bool) -> None:
        """The optimizer is about to step."""
        self._states.before_step(is_brief=not is_measured)

    def after_step(self, number: int, *, is_skipped: bool, is_measured: bool) -> None:
        """A step has ended; `on_gradients` was called if it `is_measured`."""
        self._is_unscaled = False
        self._check_micro_batches(number)
        self._check_modes(number)
        failures = self._states.after_step(
            number, self._trained, is_skipped=is_skipped, is_brief=not is_measured
        )
        self.report(failures)
        if is_measured:
            self._after_measured(number, is_skipped=is_skipped)
        else:
            self._outside.forget()

    def _after_measured(self, number: int, *, is_skipped: bool) -> None:
        self._clearing.after_step()
        self.report(self._rounding.after(number))
        self._outside.after_step(self._trained)
        if self._optimizer is not None and self._updates.is_still() and not is_skipped:
            name = type(self._optimizer).__name__
            text = f"Step {number} of {name} changed none of the parameters that were compared, "
            text += "although their gradients and a learning rate are not 0"
            self._fail("no-update", text, optimizer=name)

    def _check_modes(self, number: int) -> None:
        modes, self._modes = self._modes, set()
        has_changed = modes == {False} and self._was_in_training_mode
        self._was_in_training_mode |= modes == {True}
        if has_changed and has_modes(self._meter.model):
            text = f"The model is trained in evaluation mode from step {number} on, and was in "
            text += "training mode before: train() was not called after an evaluation"
            self._fail("trained-in-evaluation-mode", text)

    def _check_micro_batches(self, number: int) -> None:
        n_backward, self._n_backward = self._n_backward, 0
        self.report(self._schedule.end_step(number, n_backward))
        if number < N_FIRST_STEPS:
            self.report(self._means.end_step(number))
            self.report(self._shifts.end_step())


class ClearingCheck:
    """Whether somebody clears the gradients between two steps, by one small parameter.

    Its gradient at the start of a backward pass is compared with what it was when the last step or
    backward pass ended: the same memory in the same version was not cleared.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_scaled = False
        """Whether the last backward pass began with a loss that a scaler scaled."""
        self._parameter: nn.Parameter | None = None
        self._known: tuple[int, int | None] | None = None
        self._at_begin: tuple[int, int | None] | None = None
        self._is_cleared = self._was_cleared = True
        self._n_backward = self._n_value_checks = 0

    def choose(self, trained: NamedParameters) -> None:
        """Choose the smallest parameter that has a gradient, once."""
        if self._parameter is not None or self._n_value_checks < 0:
            return
        dense = [o for o in trained if (g := o.parameter.grad) is not None and not g.is_sparse]
        if not dense:
            return
        one = min(dense, key=lambda o: o.parameter.numel())
        self.name, self._parameter = one.name, one.parameter

    def _state(self) -> tuple[int, int | None] | None:
        grad = None if self._parameter is None else self._parameter.grad
        return None if grad is None else (grad.data_ptr(), tensor_version(grad))

    def before_backward(self) -> None:
        """A backward pass begins."""
        state, parameter = self._state(), self._parameter
        self._at_begin, self._was_cleared = state, True
        if self._is_cleared or state is None or state != self._known:
            return
        if self._n_value_checks < MAX_VALUE_CHECKS and parameter is not None:
            self._n_value_checks += 1
            # Its version does not show what is done through `.data`.
            grad = parameter.grad
            self._was_cleared = grad is not None and not bool(grad.any())
            if self._was_cleared:
                self._n_value_checks = MAX_VALUE_CHECKS

    def after_backward(self) -> None:
        """A backward pass has ended; one that did not reach the parameter tells nothing."""
        state = self._state()
        if state != self._at_begin:
            self._n_backward += 1
            self._is_cleared, self._known = self._was_cleared, state

    def was_not_cleared(self) -> bool:
        """Whether backward passes since the last step only added to its gradients."""
        return self._n_backward > 0 and not self._is_cleared

    def after_step(self) -> None:
        """A step has ended, whose gradients are to be cleared before they are used again."""
        self._known, self._n_backward = self._state(), 0
        self._is_cleared = self._known is None
