"""The learning rates of an optimizer."""

from __future__ import annotations

import math
from typing import Any


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rate of each parameter group, NaN where it is not known.

    Adafactor with relative steps, for one, keeps None there and finds its rate by itself.
    """
    return tuple(_rate(group.get("lr")) for group in optimizer.param_groups)


def _rate(rate: Any) -> float:
    try:
        return float(rate)
    except (TypeError, ValueError):
        return math.nan  # always the same object, so that unknown rates compare as unchanged
