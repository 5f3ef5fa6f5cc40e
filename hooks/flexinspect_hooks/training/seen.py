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


class Watcher(Protocol):
    """Who wants to know; each call comes from the thread that trains."""

    def clipped(self, parameters: Sequence[Tensor], before: Tensor, max_norm: float) -> None:
        """Gradients of `parameters` were clipped: their total norm before, and the limit."""

    def scaling(self, scaler: Any, optimizer: Any) -> None:
        """A `GradScaler` is about to step an optimizer."""

    def scaled(self, scaler: Any, optimizer: Any) -> None:
        """It has, or left the step out."""


_watchers: list[Watcher] = []
_originals: dict[str, Any] = {}


def attach(watcher: Watcher) -> Callable[[], None]:
    """Tell `watcher` from now on; returns what ends it."""
    if not _watchers:
        _replace()
    _watchers.append(watcher)

    def detach() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers:
            _restore()

    return detach


def _replace() -> None:
    clip: Any = clip_grad
    clip_original = _originals["clip"] = clip._clip_grads_with_norm_
    scaler: Any = torch.amp.GradScaler
    step_original = _originals["step"] = scaler.step

    @functools.wraps(clip_original)
    def clip_grads(parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any) -> None:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clip_original(clipped, max_norm, total_norm, *rest)
        for watcher in tuple(_watchers):
            watcher.clipped(clipped, total_norm, float(max_norm))

    @functools.wraps(step_original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in tuple(_watchers):
            watcher.scaling(self, optimizer)
        result = step_original(self, optimizer, *args, **kwargs)
        for watcher in tuple(_watchers):
            watcher.scaled(self, optimizer)
        return result

    clip._clip_grads_with_norm_ = clip_grads
    scaler.step = step


def _restore() -> None:
    clip: Any = clip_grad
    clip._clip_grads_with_norm_ = _originals.pop("clip")
    scaler: Any = torch.amp.GradScaler
    scaler.step = _originals.pop("step")
