"""What can be wrong with the arguments of a loss function of torch, which computes a loss anyway.

Each check returns its failures: the name of the check, a sentence without its full stop, and facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.training.model_checks import Failure

OF_CLASSES = ("cross_entropy", "nll_loss")
WITH_LOGITS = "binary_cross_entropy_with_logits"
OF_PROBABILITIES = ("binary_cross_entropy", WITH_LOGITS)
OF_DIFFERENCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
IGNORED_LABEL = -100  # the default of `ignore_index` in torch
TOLERANCE = 1e-2  # of a sum of probabilities, in bfloat16
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "ToCopy")
"""The first words of backward functions of operations that keep the values of a tensor."""


class ClassLoss(Struct, frozen=True):
    """A loss of classes on the CPU: its labels, the one it ignores, and its value.

    `n_labels` are those that are not ignored; `is_mean` says that `value` is the mean over them.
    """

    target: Tensor
    ignored: int
    n_labels: int
    value: float
    is_mean: bool


def class_loss(args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> ClassLoss | None:
    """Describe a call of `cross_entropy` or `nll_loss`; None if its labels cannot be read here."""
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(target, Tensor) or target.device.type != "cpu":
        return None
    if target.is_floating_point() or result.dim():
        return None
    ignored = _ignored_label(args, kwargs)
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    reduction = args[6] if len(args) > 6 else kwargs.get("reduction", "mean")
    is_mean = reduction == "mean" and weight is None
    target = target.detach()
    n = int(target.ne(ignored).sum())
    return ClassLoss(target, ignored, n, float(result.detach()), is_mean)


def _ignored_label(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED_LABEL))


def check_loss_inputs(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Failure]:
    """Check the arguments of `torch.nn.functional`'s function `name`.

    Values are read on the CPU only, because reading them elsewhere waits for the device.
    """
    output = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not output.numel():
        return []
    if name == WITH_LOGITS and _is_from(output, "Sigmoid"):
        text = f"{name} gets the result of a sigmoid: it applies one itself, and expects the "
        text += "scores before it"
        return [("loss-of-probabilities", text, {"function": "sigmoid"})]
    output, target = output.detach(), target.detach()
    if name in OF_DIFFERENCES:
        return _check_sizes(name, output, target)
    if output.device.type != "cpu" or target.device.type != "cpu":
        return []
    if name in OF_CLASSES and output.dim() > 0:
        ignored = _ignored_label(args, kwargs)
        return [*_check_labels(name, output, target, ignored), *_check_scores(name, output)]
    if name in OF_PROBABILITIES and target.numel():
        return _check_probabilities(name, target)
    return []


def _is_from(tensor: Tensor, operation: str) -> bool:
    """Whether a tensor is the result of an operation, perhaps with another shape or dtype."""
    made_by = tensor.grad_fn
    while made_by is not None and made_by.name().startswith(_VIEWS):
        made_by = made_by.next_functions[0][0]
    return made_by is not None and made_by.name().startswith(f"{operation}Backward")


def _check_labels(name: str, output: Tensor, target: Tensor, ignored: int) -> list[Failure]:
    """Labels of any shape, for scores (classes,) or (rows, classes, ...)."""
    labels = target[target != ignored]
    if target.is_floating_point() or not labels.numel():
        return []
    n_classes = output.shape[min(1, output.dim() - 1)]
    low, high = (int(one) for one in torch.aminmax(labels))
    if low >= 0 and high < n_classes:
        return []
    text = f"{name} gets labels from {low} to {high} for {n_classes} classes: labels are numbers "
    text += f"from 0 to {n_classes - 1}"
    return [("labels-out-of-range", text, {"least": low, "most": high, "classes": n_classes})]


def _check_scores(name: str, output: Tensor) -> list[Failure]:
    """Scores (rows, classes, ...) that a softmax has made, which the loss function also applies."""
    if output.dim() < 2 or min(output.shape[:2]) < 2 or not output.is_floating_point():
        return []
    low, high = (float(one) for one in torch.aminmax(output))
    if name == "nll_loss" and high > TOLERANCE:
        text = f"nll_loss gets values up to {high:.4g}: it expects logarithms of probabilities, "
        text += "which are never above 0, as log_softmax returns them"
        return [("loss-of-scores", text, {"most": high})]
    if low < 0 or high > 1 + TOLERANCE:
        return []
    for dim, over in ((1, "the classes"), (0, "the rows of the batch, not over the classes")):
        sums = output.sum(dim, dtype=torch.float32)
        if bool(((sums - 1).abs() < TOLERANCE).all()):
            text = f"{name} gets probabilities, which sum to 1 over {over}: it applies a softmax "
            text += "itself, and expects the scores before one"
            return [("loss-of-probabilities", text, {"dim": dim})]
    return []


def _check_probabilities(name: str, target: Tensor) -> list[Failure]:
    low, high = (float(one) for one in torch.aminmax(target))
    if low >= 0 and high <= 1:
        return []
    text = f"{name} gets targets from {low:.4g} to {high:.4g}: they are probabilities from 0 to 1"
    return [("labels-out-of-range", text, {"least": low, "most": high})]


def _check_sizes(name: str, output: Tensor, target: Tensor) -> list[Failure]:
    """Sizes that torch expands to one larger than both, as (n, 1) and (n,) to (n, n)."""
    n = max(output.dim(), target.dim())
    padded = ((*(1,) * (n - one.dim()), *one.shape) for one in (output, target))
    shape = tuple(max(pair) for pair in zip(*padded, strict=True))
    if math.prod(shape) <= max(output.numel(), target.numel()):
        return []
    sizes = tuple(output.shape), tuple(target.shape)
    text = f"{name} gets an output of size {sizes[0]} and a target of size {sizes[1]}: it compares "
    text += f"every value with many others, in size {shape}"
    return [("loss-of-sizes", text, {"output": [*sizes[0]], "target": [*sizes[1]]})]
