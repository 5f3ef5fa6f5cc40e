"""Observes what a training loop calls of torch besides its model and optimizer.

Losses, cleared gradients, schedulers, gradient scalers and data loaders. While installed, these
functions of torch are replaced, for the whole process, by functions that do the same and notify.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils.data import DistributedSampler, dataloader

from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.training.batch_values import batch_values
from flexinspect_hooks.training.loss_checks import OF_CLASSES, check_loss_inputs, class_loss

LOSS_FUNCTIONS = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "ctc_loss"),
    *("cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    *("triplet_margin_loss", "poisson_nll_loss", "gaussian_nll_loss"),
)
"""Functions of `torch.nn.functional` whose scalar result is a loss."""

MAX_CHECKED_LOSSES = 3  # calls of each loss function whose arguments are checked
MAX_SAMPLERS = 4  # one inside the other
MAX_KEYS = 64  # earlier batches of an iterator with which a batch is compared

Notify = Callable[..., None]  # the name of an observer's method, and its arguments

_losses: list[tuple[Tensor, bool]] = []
"""On which `backward` runs, before they were scaled, and whether they were; the innermost last."""
_scaled: list[tuple[weakref.ref[Tensor], Tensor]] = []  # the last loss that a scaler scaled


def current_loss() -> Tensor | None:
    """The loss that the backward pass which runs began with, before it was scaled; None if none."""
    return _losses[-1][0] if _losses else None


def is_loss_scaled() -> bool:
    """Whether a gradient scaler scaled the loss of the backward pass that runs."""
    return bool(_losses) and _losses[-1][1]


class LoadedBatch(Struct, frozen=True):
    """A batch that a `DataLoader` returned: the time it took, and an equal one before.

    `number` counts the batches of the iterator, `earlier` is that of an equal batch among the last
    `MAX_KEYS` (None without one). `n_restarts` counts the loads just before it that also were the
    first of a new iterator over the same loader, and equal, although the loader has more batches.
    `same_epoch` is the number of the epoch whose order a `DistributedSampler` repeats in this pass
    (None if it does not).
    """

    wait_s: float
    number: int
    earlier: int | None
    n_workers: int
    n_restarts: int = 0
    same_epoch: int | None = None


def observe_loop(notify: Notify) -> ExitStack:
    """Install everything; closing the result restores it."""
    stack = ExitStack()
    for install in (_observe_backward, _observe_clearing, _observe_scaler, _observe_losses):
        install(notify, stack)
    _observe_schedulers(notify, stack)
    _observe_loaders(notify, stack)
    _observe_checkpoints(notify, stack)
    return stack


def _observe_backward(notify: Notify, stack: ExitStack) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        one = tensors if isinstance(tensors, Tensor) else None
        if one is None or one.numel() != 1:
            return original(tensors, *args, **kwargs)
        loss = _unscaled(one)
        notify("on_backward", loss)
        _losses.append((loss, loss is not one))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _losses.pop()

    stack.callback(patch(torch.autograd, "backward", backward))


def _unscaled(loss: Tensor) -> Tensor:
    return next((before for scaled, before in _scaled if scaled() is loss), loss)


def _observe_clearing(notify: Notify, stack: ExitStack) -> None:
    for owner in (torch.optim.Optimizer, nn.Module):
        original = owner.zero_grad

        def clear(
            self: Any, *args: Any, _original: Callable[..., None] = original, **kwargs: Any
        ) -> None:
            _original(self, *args, **kwargs)
            notify("on_cleared", self)

        stack.callback(patch(owner, "zero_grad", functools.wraps(original)(clear)))


def _observe_scaler(notify: Notify, stack: ExitStack) -> None:
    scaler: Any = torch.amp.GradScaler
    scale_original, unscale_original = scaler.scale, scaler.unscale_

    @functools.wraps(scale_original)
    def scale(self: Any, outputs: Any) -> Any:
        result = scale_original(self, outputs)
        if isinstance(outputs, Tensor) and isinstance(result, Tensor) and result is not outputs:
            _scaled[:] = [(weakref.ref(result), outputs.detach())]
        return result

    @functools.wraps(unscale_original)
    def unscale(self: Any, optimizer: Any) -> Any:
        result = unscale_original(self, optimizer)
        notify("on_unscaled", self, optimizer)
        return result

    stack.callback(_scaled.clear)
    stack.callback(patch(scaler, "scale", scale))
    stack.callback(patch(scaler, "unscale_", unscale))


def _observe_losses(notify: Notify, stack: ExitStack) -> None:
    for name in LOSS_FUNCTIONS:
        original = getattr(functional, name, None)
        if original is not None:
            stack.callback(patch(functional, name, _observed_loss(name, original, notify)))


def _observed_loss(name: str, original: Callable[..., Any], notify: Notify) -> Callable[..., Any]:
    n_checked, is_of_classes = 0, name in OF_CLASSES

    def check(args: Any, kwargs: Any) -> None:
        try:
            with torch.no_grad():
                failures = check_loss_inputs(name, args, kwargs)
        except Exception:
            return  # values that cannot be read, as under vmap
        if failures:
            notify("on_loss_inputs", failures)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_checked
        try:
            result = original(*args, **kwargs)
        except (IndexError, RuntimeError):  # wrong labels on a CPU
            if all(one.device.type == "cpu" for one in args if isinstance(one, Tensor)):
                check(args, kwargs)
            raise
        if n_checked < MAX_CHECKED_LOSSES and not torch.compiler.is_compiling():
            n_checked += 1
            check(args, kwargs)
        if torch.compiler.is_compiling():
            return result
        if not result.requires_grad and result.dim() == 0:
            notify("on_loss", result)
        elif is_of_classes and result.requires_grad:
            notify("on_class_loss", functools.partial(class_loss, args, kwargs, result))
        return result

    return loss


def _observe_schedulers(notify: Notify, stack: ExitStack) -> None:
    base: Any = torch.optim.lr_scheduler.LRScheduler
    original = base.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if (n := getattr(self, "_step_count", 0)) > 1:  # 1 is the step of its own creation
            notify("on_scheduler", getattr(self, "optimizer", None), self, is_first=n == 2)
        return result

    stack.callback(patch(base, "step", step))


def _observe_loaders(notify: Notify, stack: ExitStack) -> None:
    base: Any = dataloader._BaseDataLoaderIter
    original = base.__next__
    keys: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
    restarts, epochs = Restarts(), Epochs()

    @functools.wraps(original)
    def following(self: Any) -> Any:
        started = time.perf_counter()
        batch = original(self)
        waited = time.perf_counter() - started
        known = keys.setdefault(self, {})
        number = known[None] = known.get(None, -1) + 1
        values, is_telling = batch_values(batch)
        key = values if is_telling else None
        earlier = None if key is None else known.get(key)
        if key is not None:
            known[key] = number
            if len(known) > MAX_KEYS + 1:
                del known[next(one for one in known if one is not None)]
        n_workers = int(getattr(self, "_num_workers", 0))
        sampler = getattr(self, "_index_sampler", None)
        n_restarts, same = restarts.add(sampler, number, values), epochs.repeated(self, sampler)
        notify("on_batch", LoadedBatch(waited, number, earlier, n_workers, n_restarts, same))
        return batch

    stack.callback(patch(base, "__next__", following))


class Epochs:
    """Finds iterators that repeat the order of the one before: `set_epoch` was not called."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], int | None]] = (
            weakref.WeakKeyDictionary()
        )
        """Of each sampler: its newest iterator, and the epoch that it repeats."""
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def repeated(self, iterator: Any, sampler: Any) -> int | None:
        """The epoch of an iterator if its shuffled order is that of the iterator before it."""
        for _ in range(MAX_SAMPLERS):
            sampler = getattr(sampler, "sampler", sampler)
        if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
            return None
        newest, epoch = self._last.get(sampler, (None, None))
        if newest is None or newest() is not iterator:
            before, now = self._epochs.get(sampler), int(sampler.epoch)
            epoch = now if now == before else None
            self._epochs[sampler] = now
            self._last[sampler] = weakref.ref(iterator), epoch
        return epoch


class Restarts:
    """Counts the loads in succession that are the same first batch of ever new iterators."""

    def __init__(self) -> None:
        self._source: weakref.ref[Any] | None = None
        self._values: tuple[Any, ...] = ()
        self._n = 0

    def add(self, sampler: Any, number: int, values: tuple[Any, ...]) -> int:
        """Count a batch of a loader with this sampler; returns the equal ones just before it."""
        is_same = number == 0 and self._source is not None and self._source() is sampler
        if is_same and values and values == self._values and _has_more_than_one(sampler):
            self._n += 1
        else:
            self._n = 0
        self._source = weakref.ref(sampler) if number == 0 and sampler is not None else None
        self._values = values
        return self._n


def _observe_checkpoints(notify: Notify, stack: ExitStack) -> None:
    """Notice reentrant checkpoints of which no input requires gradients: they cut the graph."""
    name = "check_backward_validity"
    original = getattr(checkpoint, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def check(inputs: Any) -> None:
        inputs = [*inputs]
        if not any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
            notify("on_cut_checkpoint", sys._getframe(1).f_locals.get("run_function"))
        original(inputs)

    stack.callback(patch(checkpoint, name, check))


def _has_more_than_one(sampler: Any) -> bool:
    try:
        return len(sampler) > 1
    except (TypeError, NotImplementedError):
        return False
