"""What clipping tells of gradients: their norms, which need no second reading then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from flexinspect_hooks.training.gradstats import foreach_norms, tensor_norms

CHECK_INTERVAL = 10
"""Steps: as often gradients are read though clipping told their norms, to see whether it holds."""

NORM_TOLERANCE = 1e-3
"""How far the norms that clipping told may be from those that are read, as a part of them."""

CLIPPING_DEVICES = ("cpu", "cuda")
CLIPPING_DTYPES = (torch.float32, torch.float64)
"""Of what torch takes the norms of all gradients in one call, in a precision that we trust."""


@dataclass(frozen=True, slots=True)
class ClippingNorms:
    """Norms that torch's clipping took: the `total` one, and that of each gradient."""

    total: Tensor
    norms: Tensor
    grads: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class ClippedGradients:
    """Gradients that torch clipped together to `max_norm`, and their `versions` afterwards."""

    measured: ClippingNorms
    max_norm: float
    versions: Sequence[int]

    def norms_of(self, grads: Sequence[Tensor]) -> list[float] | None:
        """Return the norms of gradients as they are now, None where clipping does not tell them.

        It tells nothing of one that is not finite, or that was changed by torch since.
        """
        if not math.isfinite(total := float(self.measured.total)):
            return None
        left = min(self.max_norm / (total + 1e-6), 1.0)  # what torch multiplied them with
        known = zip(self.measured.grads, self.versions, self.measured.norms.tolist(), strict=True)
        told = {id(one): norm * left for one, version, norm in known if one._version == version}
        found = [told.get(id(one), math.nan) for one in grads]
        return found if all(map(math.isfinite, found)) else None


class NormSource:
    """Gives the norms of gradients: as clipping told them, or by reading the gradients.

    What clipping tells is taken once it agreed with what was read, and never again once it did not:
    a program may change gradients in ways that torch does not count, such as through `.data`.
    """

    def __init__(self) -> None:
        self._agrees: bool | None = None

    def norms(
        self, step: int, clipped: ClippedGradients | None, grads: Sequence[Tensor]
    ) -> list[float]:
        """Return the norm of each gradient of a step."""
        told = None
        if clipped is not None and self._agrees is not False:
            told = clipped.norms_of(grads)
        if told is not None and self._agrees and step % CHECK_INTERVAL:
            return told
        if told is None:
            return tensor_norms(grads)
        norms = foreach_norms(grads)  # the same way, or the norms of large gradients would differ
        pairs = zip(told, norms, strict=True)
        self._agrees = all(math.isclose(one, other, rel_tol=NORM_TOLERANCE) for one, other in pairs)
        return norms


def measure_clipping(
    grads: Sequence[Tensor], norm_type: float, foreach: bool | None
) -> ClippingNorms | None:
    """Return what torch's clipping computes of gradients, bit by bit.

    None for those that it takes in parts, one by one, or in another precision than we do.
    """
    grads = [*grads]
    if not grads or norm_type != 2.0 or foreach is False or not all(map(_is_plain_tensor, grads)):
        return None
    kinds = [*_group_tensors_by_device_and_dtype([[*grads]])]
    if (
        len(kinds) != 1
        or kinds[0][0].type not in CLIPPING_DEVICES
        or kinds[0][1] not in CLIPPING_DTYPES
    ):
        return None
    norms = torch.stack(list(torch._foreach_norm(grads, 2.0)))
    return ClippingNorms(torch.linalg.vector_norm(norms, 2.0), norms, grads)


def _is_plain_tensor(grad: Tensor) -> bool:
    return type(grad) is Tensor and not grad.is_sparse
