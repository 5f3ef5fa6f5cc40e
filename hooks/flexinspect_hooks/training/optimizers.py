"""What an optimizer tells of itself and of its step."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rate of each parameter group, NaN where it is not known.

    Adafactor with relative steps, for one, keeps None there and finds its rate by itself.
    """
    return tuple(_learning_rate(group.get("lr")) for group in optimizer.param_groups)


def _learning_rate(rate: Any) -> float:
    try:
        return float(rate)
    except (TypeError, ValueError):
        return math.nan  # always the same object, so that unknown rates compare as unchanged


def has_closure(args: Any, kwargs: Any) -> bool:
    """Tell whether an optimizer's step was given a closure, from the arguments of its hooks."""
    # The optimizer itself comes first among the arguments.
    return any(map(callable, args[1:])) or callable(kwargs.get("closure"))


def remaining_scale(optimizer: Optimizer) -> float:
    """Return what gradients are still multiplied with: a fused optimizer divides by itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
