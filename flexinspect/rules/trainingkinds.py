"""What the findings of a training run stand for, and the advice that each brings."""

from __future__ import annotations

from collections.abc import Mapping

from flexinspect.findings import Severity
from flexinspect.rules.base import FindingKind

LOSS_NAN = "training.loss-nan"
LOSS_SPIKE = "training.loss-spike"
GRADIENT_EXPLOSION = "training.explosion"
GRADIENT_VANISHING = "training.vanishing"
DEAD_PARAMETERS = "training.dead-parameters"
LEARNING_RATE = "training.learning-rate"
NAN_GRADIENT = "training.nan-gradient"
FP16_OVERFLOW = "training.fp16-overflow"
SCALER_SKIPS = "training.scaler-skips"
LOADER_BOUND = "training.loader-bound"

_TRAINING_WHERE = "WHERE generation = {generation} AND branch = {branch}"
_TRAINING_STEPS_QUERY = f"SELECT step, loss, total_norm, learning_rates, producer FROM training_steps {_TRAINING_WHERE} "
_CURVE_QUERY = _TRAINING_STEPS_QUERY + "ORDER BY step"
_GRADS_QUERY = f"SELECT name, norm, max, n_nan, n_inf FROM grads {_TRAINING_WHERE} AND step = {{step}} ORDER BY norm DESC"

TRAINING_KINDS: Mapping[str, FindingKind] = {
    LOSS_NAN: FindingKind(
        Severity.ERROR,
        "the loss is NaN or infinite",
        "Its gradients are not finite either, and one step of the optimizer with them spoils every "
        "weight: from there on the run computes nothing.",
        "Go to the step: the training panel names the first sick output and shows the losses and "
        "norms before it.",
        "Check the inputs for NaN and Inf, the parameters, and whether the learning rate is above "
        "1.0. A logarithm or a division of 0 needs a small epsilon. Leave a step out whose loss is "
        "not finite.",
        _CURVE_QUERY,
    ),
    LOSS_SPIKE: FindingKind(
        Severity.WARNING,
        "the loss jumps far above the ones before it",
        "A spike is often the step before the run diverges, or a batch unlike the others.",
        "The training panel draws the losses; the query lists them with norms and learning rates.",
        "Lower the learning rate or warm it up, clip gradients (max_norm=1.0), and look at the "
        "batch of this step.",
        _CURVE_QUERY,
    ),
    GRADIENT_EXPLOSION: FindingKind(
        Severity.WARNING,
        "the gradient of a parameter has a norm above 10",
        "The optimizer's step grows with the gradient: weights jump away, and the loss follows.",
        "The query lists the parameters of the step by norm; the strip of the training panel shows "
        "in which group it began.",
        "Lower the learning rate, clip the gradients "
        "(torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)), check the scaling of the "
        "inputs.",
        _GRADS_QUERY,
    ),
    GRADIENT_VANISHING: FindingKind(
        Severity.WARNING,
        "the gradient of a weight matrix has a norm below 1e-6 while others learn",
        "The parameter does not learn: the signal is lost on the way back to it.",
        "The strip of the training panel shows norms by group: they fall from the loss towards the "
        "input.",
        "Raise the learning rate, take other activations (ReLU or GELU in place of sigmoid or "
        "tanh), another initialisation, or add skip connections.",
        _GRADS_QUERY,
    ),
    DEAD_PARAMETERS: FindingKind(
        Severity.WARNING,
        "parameters get no gradient, or one of exactly 0, step after step",
        "They stay as they were initialised: units that never fire, a branch that nothing uses, a "
        "tensor that was detached.",
        "The query lists their gradients; go through the forward for a detach, a no_grad or a "
        "branch that is never taken.",
        "Freeze what is meant to stay (requires_grad_(False)); else use the module's output, or "
        "take a smaller learning rate and another activation than ReLU.",
        _GRADS_QUERY,
    ),
    LEARNING_RATE: FindingKind(
        Severity.NOTE,
        "a learning rate is above 1.0",
        "Most optimizers diverge with it within a few steps.",
        "The query lists the learning rates of the steps.",
        "Use 1e-5 to 1e-3 for Adam and its like, 1e-3 to 1e-1 for SGD, unless the method asks for "
        "more.",
        _CURVE_QUERY,
    ),
    NAN_GRADIENT: FindingKind(
        Severity.ERROR,
        "a gradient is NaN or infinite, though the loss is finite",
        "The optimizer's step makes the weight NaN; the next forward shows it everywhere.",
        "Run the step again under torch.autograd.detect_anomaly(): it names the operation.",
        "Look for a square root, a norm or a division at 0 whose forward is finite and whose "
        "derivative is not, and for torch.where around one of them; add an epsilon inside.",
        _GRADS_QUERY,
    ),
    FP16_OVERFLOW: FindingKind(
        Severity.ERROR,
        "an output in float16 is NaN or infinite, though the weights are finite",
        "float16 ends at 65504: what lies above is infinite, and NaN in what is computed next. A 0 "
        "divided by 0 is NaN in any type.",
        "Go to the step: the training panel names the module, which in float32 stays finite.",
        "Train in bfloat16, keep this module in float32, or scale its inputs down.",
        _CURVE_QUERY,
    ),
    SCALER_SKIPS: FindingKind(
        Severity.WARNING,
        "the gradient scaler leaves out step after step",
        "A step that is left out changes no weight, and the batch is lost.",
        "The query lists the scale and the steps left out.",
        "One or two at the start are its way to find the scale. Else look for gradients that "
        "overflow at any scale: a NaN in the forward, a loss that is too large, a step that is "
        "never unscaled.",
        f"SELECT step, scale, is_skipped, n_sick, loss FROM training_steps {_TRAINING_WHERE} ORDER BY step",
    ),
    LOADER_BOUND: FindingKind(
        Severity.WARNING,
        "training waits for its data most of the time",
        "The model stands still while it waits.",
        "The query lists where the time of each step went.",
        "Give the DataLoader workers (num_workers) and pin_memory, prepare the data once, or load "
        "larger pieces.",
        "SELECT step, data_ms, forward_ms, backward_ms, optimizer_ms, other_ms FROM training_steps "
        f"{_TRAINING_WHERE} ORDER BY step",
    ),
}
