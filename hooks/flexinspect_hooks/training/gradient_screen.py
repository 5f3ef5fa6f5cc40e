"""A look at a few gradients of a step that is not measured."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from flexinspect_hooks.training.gradient_statistics import NamedParameters, is_plain

MAX_PARAMETERS = 4  # that are looked at, evenly spaced in the model
HISTORY = 50  # norms of earlier steps that a norm is compared with
MIN_HISTORY = 4  # with fewer of them, no finite norm stands out
RATIO = 10.0  # of a norm to the largest one before


class GradientScreen:
    """Finds the steps whose gradients stand out: by NaN or Inf, or by their size.

    Of each matrix one row is read, in the next step another one: NaN and explosions come from above
    in a backward pass, so they are in nearly all values. Gradients that are on a device are not
    read, because the training would wait for it.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=HISTORY)

    @torch.no_grad()
    def is_suspicious(self, named: NamedParameters, step: int) -> bool:
        """Whether a step is to be measured."""
        given = (one.parameter.grad for one in named[:: -(-len(named) // MAX_PARAMETERS) or 1])
        gradients = [one for one in given if one is not None and one.numel()]
        if not gradients or not is_plain(gradients):
            return False
        rows = [_row(one, step) for one in gradients]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(rows))).item()
        if not math.isfinite(norm):
            return True
        before = self._norms
        if len(before) >= MIN_HISTORY and norm > RATIO * max(before):
            return True
        before.append(norm)
        return False


def _row(gradient: Tensor, step: int) -> Tensor:
    return gradient[step % len(gradient)] if gradient.dim() > 1 else gradient
