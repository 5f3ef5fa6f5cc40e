"""Checks of what holds in any healthy training: each that fails is one event of a step.

They run in the thread that trains, so they read no tensor of a device, except in the first steps.
The rule `training_checks` turns the events into findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.core.text import plural
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training import forward_passes
from flexinspect_hooks.training.evaluation_passes import Note
from flexinspect_hooks.training.gradient_statistics import NamedParameters
from flexinspect_hooks.training.loop_calls import LoadedBatch, is_loss_scaled
from flexinspect_hooks.training.measurement import GradientMeter
from flexinspect_hooks.training.model_checks import (
    AutocastCheck,
    DropoutCheck,
    Failure,
    check_constant_inputs,
    check_frozen_flags,
    check_modes,
    check_optimizer,
    check_rows,
    check_stale_gradients,
    check_tied_weights,
    has_modes,
)

EVENT = "training-check"
MAX_VALUE_CHECKS = 3  # steps in which a gradient is read that nobody seems to have cleared
REMOTE_INTERVAL = 100  # steps between two comparisons of values on a device, which wait for it
MAX_SAMPLES, SAMPLE_SIZE = 8, 16  # parameters whose update is checked, and values of each
N_FIRST_STEPS = 2  # in which inputs and dtypes are checked
N_WITHOUT_GRADIENT = 3  # first steps without a gradient: the first may only appease a scheduler
MIN_TRAINING_MODE_LOSSES = 2  # without gradients, which are an evaluation without eval()

Guard = Callable[[Callable[..., None]], Callable[..., None]]


class StepChecks:
    """The checks of one training; `take` returns the events of those that failed since."""

    def __init__(self, meter: GradientMeter, optimizer: Optimizer | None) -> None:
        self._meter, self._optimizer = meter, optimizer
        self._notes: list[Note] = []
        self._reported: set[str] = set()
        self._clearing = ClearingCheck()
        self._updates = UpdateCheck()
        self._dropout, self._autocast = DropoutCheck(), AutocastCheck()
        self._sizes: list[int] = []
        self._named: NamedParameters = ()
        self._trained: NamedParameters = ()
        self._is_unscaled = False
        self._n_constant = 0  # forward passes in succession whose inputs are constant
        self._without_gradient = 0  # steps, -1 after one with a gradient
        self._modes: set[bool] = set()  # of the models in the forward passes of the step
        self._was_in_training_mode = False

    def install(self, hooks: ExitStack, guarded: Guard) -> None:
        """Let `hooks` remove what the checks register."""
        self._clearing.begin(hooks, guarded)
        hooks.callback(self.on_forward_end)

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
        if not model.training:
            self._dropout.begin(model)
        if number < N_FIRST_STEPS:
            self.report(check_rows(kwargs))
            inputs = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            # A forward never waits for its device.
            is_here = not any(map(forward_passes.is_remote, inputs))
            constant = check_constant_inputs(inputs) if is_here else []
            self._n_constant = self._n_constant + 1 if constant else 0
            if self._n_constant > 1:
                self.report(constant)
            self._autocast.begin(model)
        self._modes.add(model.training)

    def on_evaluation(self, model: nn.Module) -> None:
        """A forward pass without gradients begins."""
        if not model.training and self._dropout.begin(model):
            self.report(check_modes(model))

    def on_forward_end(self) -> None:
        """A forward pass has ended."""
        self.report(self._dropout.end())
        self.report(self._autocast.end())

    def on_clipped(self) -> None:
        """Gradients of the step were clipped."""
        if self._clearing.is_scaled and not self._is_unscaled:
            text = "The gradients are clipped before they are unscaled: the limit applies to "
            text += "gradients that still contain the loss scale"
            self._fail("clip-before-unscale", text)

    def on_unscaled(self) -> None:
        """The gradients of the step were unscaled."""
        self._is_unscaled = True

    def on_scheduler(self, name: str, number: int) -> None:
        """A scheduler made its first step while step `number` runs."""
        if number == 0:
            text = f"{name}.step() was called before the first optimizer.step(): the first value "
            text += "of the schedule is skipped"
            self._fail("scheduler-first", text, scheduler=name)

    def on_batch(self, batch: LoadedBatch) -> None:
        """A loader returned a batch."""
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
        trained = self._trained_by_optimizer(named)
        self._check_any_gradient(number, trained)
        total = 0.0 if measured is None else measured.total_norm or 0.0
        is_expected = is_before and total > 0 and any(rate > 0 for rate in rates)
        self._updates.before(trained, is_expected=is_expected)
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
        if self._optimizer is not None:
            self.report(check_optimizer(model, self._optimizer))

    def after_step(self, number: int, *, is_skipped: bool) -> None:
        """A step has ended."""
        self._is_unscaled = False
        self._clearing.after_step()
        if self._optimizer is not None and self._updates.is_still() and not is_skipped:
            name = type(self._optimizer).__name__
            text = f"Step {number} of {name} changed none of the parameters that were compared, "
            text += "although their gradients and a learning rate are not 0"
            self._fail("no-update", text, optimizer=name)
        modes, self._modes = self._modes, set()
        has_changed = modes == {False} and self._was_in_training_mode
        self._was_in_training_mode |= modes == {True}
        if has_changed and has_modes(self._meter.model):
            text = f"The model is trained in evaluation mode from step {number} on, and was in "
            text += "training mode before: train() was not called after an evaluation"
            self._fail("trained-in-evaluation-mode", text)


class ClearingCheck:
    """Whether somebody clears the gradients between two steps, by one small parameter.

    Two hooks compare its gradient at the start of a backward pass with what it was when the last
    step or backward pass ended: the same memory in the same version was not cleared.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_scaled = False
        """Whether the last backward pass began with a loss that a scaler scaled."""
        self._parameter: nn.Parameter | None = None
        self._known: tuple[int, int | None] | None = None
        self._is_cleared = True
        self._n_backward = self._n_value_checks = 0

    def begin(self, hooks: ExitStack, guarded: Guard) -> None:
        """Keep where hooks are registered."""
        self._hooks, self._guarded = hooks, guarded

    def choose(self, trained: NamedParameters) -> None:
        """Choose the smallest parameter that has a gradient, once."""
        if self._parameter is not None or self._n_value_checks < 0:
            return
        dense = [o for o in trained if (g := o.parameter.grad) is not None and not g.is_sparse]
        if not dense:
            return
        one = min(dense, key=lambda o: o.parameter.numel())
        self.name, self._parameter = one.name, one.parameter
        parameter: Any = one.parameter
        before = parameter.register_hook(self._guarded(self._before_accumulation))
        add = parameter.register_post_accumulate_grad_hook
        after = add(self._guarded(self._after_accumulation))
        for handle in (before, after):
            self._hooks.callback(handle.remove)

    def _state(self) -> tuple[int, int | None] | None:
        grad = None if self._parameter is None else self._parameter.grad
        return None if grad is None else (grad.data_ptr(), tensor_version(grad))

    def _before_accumulation(self, _: Tensor) -> None:
        self._n_backward += 1
        self.is_scaled = is_loss_scaled()
        if self._is_cleared:
            return
        state, parameter = self._state(), self._parameter
        if state is None or state != self._known:
            self._is_cleared = True
        elif self._n_value_checks < MAX_VALUE_CHECKS and parameter is not None:
            self._n_value_checks += 1
            # Its version does not show what is done through `.data`.
            grad = parameter.grad
            self._is_cleared = grad is not None and not bool(grad.any())
            if self._is_cleared:
                self._n_value_checks = MAX_VALUE_CHECKS
        else:
            self._is_cleared = True  # unknown

    def _after_accumulation(self, _: Tensor) -> None:
        self._known = self._state()

    def was_not_cleared(self) -> bool:
        """Whether backward passes since the last step only added to its gradients."""
        return self._n_backward > 0 and not self._is_cleared

    def after_step(self) -> None:
        """A step has ended, whose gradients are to be cleared before they are used again."""
        self._known, self._n_backward = self._state(), 0
        self._is_cleared = self._known is None


class UpdateCheck:
    """Whether a step changes some of the parameters that it should.

    An in-place operation counts up the version of a parameter. An optimizer that updates through
    `.data` does not, so values are compared if the version did not change.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, int | None, Tensor | None]] = []
        self._copies = False
        self._n_still = self._n_compared = 0

    def before(self, trained: NamedParameters, *, is_expected: bool) -> None:
        """Note the state of some parameters before a step that is expected to change them."""
        self._before = []
        if not is_expected:
            return
        every = -(-len(trained) // (4 * MAX_SAMPLES)) or 1
        with_gradient = [o.parameter for o in trained[::every] if o.parameter.grad is not None]
        self._n_compared += self._copies
        is_remote = any(one.device.type != "cpu" for one in with_gradient)
        is_rare = self._n_compared > MAX_VALUE_CHECKS and self._n_compared % REMOTE_INTERVAL > 0
        if is_remote and is_rare:
            return
        chosen = with_gradient[:: -(-len(with_gradient) // MAX_SAMPLES) or 1]
        for one in chosen:
            copy = self._values(one).clone() if self._copies else None
            self._before.append((one, tensor_version(one), copy))

    @staticmethod
    def _values(parameter: nn.Parameter) -> Tensor:
        return parameter.detach().reshape(-1)[:SAMPLE_SIZE]

    def is_still(self) -> bool:
        """Whether none of them has changed, neither in this step nor in the one before."""
        before, self._before = self._before, []
        if not before:
            return False
        if any(tensor_version(one) != version for one, version, _ in before):
            self._copies, self._n_still = False, 0
            return False
        if not self._copies:
            self._copies = True
            return False
        is_still = all(
            copy is not None and torch.equal(copy, self._values(one)) for one, _, copy in before
        )
        self._n_still = self._n_still + 1 if is_still else 0
        return self._n_still > 0
