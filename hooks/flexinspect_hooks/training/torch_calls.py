"""Observes gradient clipping and loss scaling, which the hooks of torch do not report.

While an observer is registered, these functions of torch are replaced, for the whole process, by
functions that do the same and notify the observers. Clipping also computes the norms of gradients,
which then need not be computed again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from torch.nn.utils import clip_grad

from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training import gradient_statistics, loop_calls
from flexinspect_hooks.training.loop_calls import LoadedBatch
from flexinspect_hooks.training.loss_checks import ClassLoss
from flexinspect_hooks.training.model_checks import Failure

_CLIPPING = ("_get_total_norm", "_clip_grads_with_norm_")
"""The two parts of torch's `clip_grad_norm_`, private functions that may change."""
CHECK_INTERVAL = 10  # the norms from clipping are checked against the gradients every so many steps
NORM_TOLERANCE = 1e-3  # relative difference of the norms from clipping and of the gradients


class ClippingNorms(Struct, frozen=True):
    """The norms that torch's clipping computed: the `total` one, and that of each gradient.

    `versions` are those of the gradients after they were clipped to `max_norm`.
    """

    total: Tensor
    norms: Tensor
    grads: Sequence[Tensor]
    max_norm: float = math.inf
    versions: Sequence[int | None] = ()

    def norms_of(self, grads: Sequence[Tensor]) -> list[float] | None:
        """The norms after clipping, None if one is non-finite, or its gradient changed since."""
        if not math.isfinite(total := float(self.total)):
            return None
        factor = min(self.max_norm / (total + 1e-6), 1.0)  # as torch's clipping multiplies
        known = zip(self.grads, self.versions, self.norms.tolist(), strict=True)
        clipped = {
            id(one): norm * factor for one, version, norm in known if tensor_version(one) == version
        }
        norms = [clipped.get(id(one), math.nan) for one in grads]
        return norms if all(map(math.isfinite, norms)) else None


class NormSource:
    """The norms of gradients: from clipping, or computed from the gradients.

    The norms from clipping are used once they agreed with the gradients, and never again once they
    did not: a program may change gradients without a new version, such as through `.data`.
    """

    def __init__(self) -> None:
        self._agrees: bool | None = None

    def norms(self, step: int, clip: ClippingNorms | None, grads: Sequence[Tensor]) -> list[float]:
        """The norm of each gradient of a step."""
        known = None if clip is None or self._agrees is False else clip.norms_of(grads)
        if known is None:
            return gradient_statistics.tensor_norms(grads)
        if self._agrees and step % CHECK_INTERVAL:
            return known
        # As clipping does, or the norms of large gradients differ.
        norms = gradient_statistics.reduce_batched(grads, gradient_statistics.stack_foreach_norms)
        pairs = zip(known, norms, strict=True)
        self._agrees = all(math.isclose(one, other, rel_tol=NORM_TOLERANCE) for one, other in pairs)
        return norms


def measure_clipping(
    grads: Sequence[Tensor], norm_type: float, foreach: bool | None
) -> ClippingNorms | None:
    """The norms of gradients, bit-equal to those that torch's clipping computes.

    None for gradients that torch does not measure in one call, or not in sufficient precision.
    """
    grads = [*grads]
    is_plain = all(type(one) is Tensor and not one.is_sparse for one in grads)
    if not grads or norm_type != 2.0 or foreach is False or not is_plain:
        return None
    device, dtype = grads[0].device.type, grads[0].dtype
    is_precise = device in ("cpu", "cuda") and dtype in (torch.float32, torch.float64)
    if not is_precise or len(gradient_statistics.indices_by_kind(grads)) != 1:
        return None
    norms = torch.stack(list(torch._foreach_norm(grads, 2.0)))
    return ClippingNorms(torch.linalg.vector_norm(norms, 2.0), norms, grads)


class TrainingObserver(Protocol):
    """What is told of the calls of a training loop, in the thread that trains."""

    def on_clipped(
        self, clipped: Sequence[Tensor], before: Tensor, limit: float, norms: ClippingNorms | None
    ) -> None:
        """Gradients of these parameters were clipped; their total norm was `before`.

        `norms` are those of each gradient, None if torch did not measure them in one call.
        """

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A `GradScaler` is about to step or to skip an optimizer."""

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A `GradScaler` has stepped or skipped an optimizer."""

    def on_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """A `GradScaler` has unscaled the gradients of an optimizer."""

    def on_cleared(self, owner: Any) -> None:
        """`zero_grad` of an optimizer or a module was called."""

    def on_loss(self, loss: Tensor) -> None:
        """A loss function of torch has returned a scalar without a gradient."""

    def on_loss_inputs(self, failures: Sequence[Failure]) -> None:
        """A loss function of torch was called with arguments that are wrong."""

    def on_class_loss(self, describe: Callable[[], ClassLoss | None]) -> None:
        """A loss of classes was computed with gradients."""

    def on_backward(self, loss: Tensor) -> None:
        """The program calls `backward` on a loss, which is as before it was scaled."""

    def on_cut_checkpoint(self, function: Any) -> None:
        """A reentrant checkpoint runs a function, but no input of it requires gradients."""

    def on_scheduler(self, optimizer: Any, scheduler: Any, *, is_first: bool) -> None:
        """The program has called the `step` of a scheduler."""

    def on_batch(self, batch: LoadedBatch) -> None:
        """A `DataLoader` has returned a batch."""


class BatchObserver(Protocol):
    """An observer that is told of batches alone."""

    def on_batch(self, batch: LoadedBatch) -> None:
        """A `DataLoader` has returned a batch."""


_observers: list[TrainingObserver | BatchObserver] = []
_patches = ExitStack()


@contextmanager
def observe_training(observer: TrainingObserver | BatchObserver) -> Iterator[None]:
    """Notify `observer` of those calls that it has a method for, while the block runs."""
    if not _observers:
        _install()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers[:] = [one for one in _observers if one is not observer]
        if not _observers:
            _patches.close()


def notify(name: str, *args: Any, **facts: Any) -> None:
    """Call a method of every observer that has it."""
    for observer in tuple(_observers):
        if (call := getattr(observer, name, None)) is not None:
            call(*args, **facts)


def _install() -> None:
    if all(hasattr(clip_grad, name) for name in _CLIPPING):  # else clipping is not seen
        functions = _observed_clipping(*(getattr(clip_grad, name) for name in _CLIPPING))
        for name, function in zip(_CLIPPING, functions, strict=True):
            _patches.callback(patch(clip_grad, name, function))
    scaler: Any = torch.amp.GradScaler
    step_original = scaler.step

    @functools.wraps(step_original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        notify("before_scaler_step", self, optimizer)
        result = step_original(self, optimizer, *args, **kwargs)
        notify("after_scaler_step", self, optimizer)
        return result

    _patches.callback(patch(scaler, "step", step))
    _patches.enter_context(loop_calls.observe_loop(notify))


def _observed_clipping(norm: Callable[..., Tensor], clip: Callable[..., None]) -> tuple[Any, Any]:
    """The two parts of `clip_grad_norm_` with the same results, which notify the observers."""
    last: ClippingNorms | None = None

    @functools.wraps(norm)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> Tensor:
        nonlocal last
        last = None if error_if_nonfinite else measure_clipping(tensors, norm_type, foreach)
        if last is None:
            return norm(tensors, norm_type, error_if_nonfinite, foreach)
        return last.total

    @functools.wraps(clip)
    def clip_grads(parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any) -> None:
        nonlocal last
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clip(clipped, max_norm, total_norm, *rest)
        norms, last = last, None
        if norms is not None:
            is_same, versions = norms.total is total_norm, [*map(tensor_version, norms.grads)]
            norms = replace(norms, max_norm=float(max_norm), versions=versions) if is_same else None
        notify("on_clipped", clipped, total_norm, float(max_norm), norms)

    return total_norm, clip_grads
