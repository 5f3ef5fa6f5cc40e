"""What torch's own helpers are asked to do while a training run is watched.

Clipping and loss scaling are calls that a model's and an optimizer's hooks do not see. They are
replaced while somebody watches, for the whole process, by functions that do the same and tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from flexinspect_hooks.training.clipping import ClippedGradients, ClippingNorms, measure_clipping


class TrainingObserver(Protocol):
    """Who wants to know; each call comes from the thread that trains."""

    def on_clipped(
        self,
        parameters: Sequence[Tensor],
        before: Tensor,
        max_norm: float,
        how: ClippedGradients | None,
    ) -> None:
        """Gradients of `parameters` were clipped: their total norm before, and the limit.

        `how` tells more, where torch measured them all alike.
        """

    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A `GradScaler` is about to step an optimizer."""

    def after_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """It has, or left the step out."""


_observers: list[TrainingObserver] = []
_originals: dict[str, Any] = {}


def observe_training(observer: TrainingObserver) -> Callable[[], None]:
    """Tell `watcher` from now on; returns what ends it."""
    if not _observers:
        _install()
    _observers.append(observer)

    def detach() -> None:
        if observer in _observers:
            _observers.remove(observer)
        if not _observers:
            _uninstall()

    return detach


_CLIPPING = ("_get_total_norm", "_clip_grads_with_norm_")
"""The two parts of torch's `clip_grad_norm_`, which are its own affair and may change."""


def _set_clipping(functions: Sequence[Any]) -> None:
    for name, function in zip(_CLIPPING, functions, strict=False):
        setattr(clip_grad, name, function)


def _install() -> None:
    clip: Any = clip_grad
    if all(hasattr(clip, name) for name in _CLIPPING):  # else clipping is not seen
        originals = [getattr(clip, name) for name in _CLIPPING]
        _originals["clipping"] = originals
        _set_clipping(_observed_clipping(*originals))
    scaler: Any = torch.amp.GradScaler
    step_original = _originals["step"] = scaler.step

    @functools.wraps(step_original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in tuple(_observers):
            watcher.before_scaler_step(self, optimizer)
        result = step_original(self, optimizer, *args, **kwargs)
        for watcher in tuple(_observers):
            watcher.after_scaler_step(self, optimizer)
        return result

    scaler.step = step


def _observed_clipping(norm: Callable[..., Tensor], clip: Callable[..., None]) -> tuple[Any, Any]:
    """Return the two parts of `clip_grad_norm_` as they are, but that watchers are told."""
    last: ClippingNorms | None = None

    @functools.wraps(norm)
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
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
        (before, last), how = (last, None), None
        if before is not None and before.total is total_norm:
            how = ClippedGradients(before, float(max_norm), [one._version for one in before.grads])
        for watcher in tuple(_observers):
            watcher.on_clipped(clipped, total_norm, float(max_norm), how)

    return total_norm, clip_grads


def _uninstall() -> None:
    _set_clipping(_originals.pop("clipping", ()))
    scaler: Any = torch.amp.GradScaler
    scaler.step = _originals.pop("step")
