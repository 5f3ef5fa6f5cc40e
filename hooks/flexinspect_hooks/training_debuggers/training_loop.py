"""`TrainingLoop`: a small training loop that supports every switch, and its datasets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.utils.data import StackDataset, Subset

import flexinspect_hooks.training_debuggers.profiling as profiling
from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, DebugSwitches, DictDataclass
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.training.forward_passes import loss_of
from flexinspect_hooks.training.gradient_statistics import learning_rates
from flexinspect_hooks.training_debuggers.debug_functions import (
    HasSwitches,
    SwitchBoard,
    batch_size,
)
from flexinspect_hooks.training_debuggers.measurements import logits_of
from flexinspect_hooks.training_debuggers.profiling import PROFILE_FOLDER, ProfileSummary
from flexinspect_hooks.training_debuggers.training_debugger import TrainingDebugger


class EvaluationInfo(DictDataclass):
    """A validation; `accuracy` is None if the outputs are not classes."""

    batches: int
    samples: int
    loss: float
    accuracy: float | None


class EpochInfo(DictDataclass):
    """An epoch; `loss` is the mean over samples, `stops` whether early stopping ended it all."""

    batches: int
    samples: int
    loss: float
    anomaly_steps: int
    validation: EvaluationInfo | None
    stops: bool


class EarlyStopping(Struct):
    """Stops after `patience` validations without an improvement of at least `min_delta`."""

    patience: int = 3
    min_delta: float = 0.0
    best: float | None = None
    waited: int = 0

    def step(self, value: float) -> bool:
        """Add the newest value (lower is better); returns whether to stop."""
        if self.best is None or value < self.best - self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class TrainingLoop(HasSwitches):
    """Trains a model, with a `TrainingDebugger` (`debugger`) and the thirteen switches.

    Without `loss_fn`, a batch is a dict of the model's keyword arguments, and the model returns
    `.loss` (as models of transformers do), a dict with "loss", or the loss. With it, a batch is a
    dict with "labels" or a pair (inputs, labels), and `loss_fn` gets the logits of the output.
    `scaler` and `autocast` (a dtype) are for mixed precision. The `scheduler` steps after each
    `scheduler_each`, "epoch" or "batch". `switches` is a board, or the switches to start with
    (default: the common board); their `when` gets the number of the step since the loop was
    created.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        scheduler: Any = None,
        scheduler_each: str = "epoch",
        scaler: Any = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tokenizer: Callable[..., Mapping[str, Any]] | None = None,
        level: DebugLevel | str = DebugLevel.BASIC,
        switches: SwitchBoard | DebugSwitches | None = None,
        profile_folder: str | Path = PROFILE_FOLDER,
    ) -> None:
        if scheduler_each not in ("epoch", "batch"):
            raise UsageError(f'scheduler_each is "epoch" or "batch", not {scheduler_each!r}.')
        argument_checks.check_module(model, "TrainingLoop")
        argument_checks.check_optimizer(optimizer, "TrainingLoop")
        board = SwitchBoard(switches) if isinstance(switches, DebugSwitches) else switches
        self.debugger = TrainingDebugger(level, switches=board, profile_folder=profile_folder)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._scheduler, self._scheduler_each = scheduler, scheduler_each
        self._scaler, self._autocast = scaler, autocast
        first = next(model.parameters(), None)
        try:
            self._device = torch.device(device or (first.device if first is not None else "cpu"))
        except RuntimeError:
            raise UsageError(f"torch knows no device {device!r}.") from None
        self._tokenizer = tokenizer
        self.switches, self._switch_log = self.debugger.switches, self.debugger.switch_log
        self._step = 0
        self._switch_log.log_setup(model)

    def train_epoch(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        early_stopping: Any = None,
    ) -> EpochInfo:
        """Train on each batch once, then validate, and call `early_stopping.step(loss)`.

        Raises `UsageError` if a loader is not iterable, or `early_stopping` has no `step`.
        """
        argument_checks.check_batches(train_loader, "train_epoch")
        if early_stopping is not None:
            step = getattr(early_stopping, "step", None)
            argument_checks.check_function(step, "early_stopping.step", "the newest loss")
        self.model.train()
        before = self.debugger.get_training_summary().anomaly_steps
        losses: list[tuple[float, int]] = []
        try:
            for batch, waited_ms in _timed_batches(train_loader):
                self._switch_log.log_data_loading(self._step, batch, waited_ms)
                losses.append((self._train_batch(batch), batch_size(batch)))
        finally:
            self.debugger.close()
        self._scheduler_step("epoch", max(self._step - 1, 0))
        validation = None if val_loader is None else self.evaluate_model(val_loader)
        batches, samples, loss = _summarize(losses)
        stops = False
        if early_stopping is not None:
            newest = loss if validation is None else validation.loss
            stops = bool(early_stopping.step(newest))
            self._switch_log.log_early_stopping(0, newest, stops, early_stopping)
        bad = self.debugger.get_training_summary().anomaly_steps - before
        return EpochInfo(batches, samples, loss, bad, validation, stops)

    @torch.no_grad()
    def evaluate_model(self, dataloader: Iterable[Any]) -> EvaluationInfo:
        """The loss and accuracy over a loader; the mode of each module is restored."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        losses: list[tuple[float, int]] = []
        right = judged = 0
        try:
            for batch in argument_checks.check_batches(dataloader, "evaluate_model"):
                moved = self._to_device(batch)
                value, output = self._forward(moved)
                losses.append((float(value), batch_size(moved)))
                n_right, n_judged = _count_correct(output, moved)
                right, judged = right + n_right, judged + n_judged
        finally:
            for module, was_training in modes:
                module.training = was_training
        info = EvaluationInfo(*_summarize(losses), right / judged if judged else None)
        self._switch_log.log_validation(0, info, self.model)
        return info

    def create_training_dataset(
        self,
        texts: Sequence[str],
        labels: Sequence[int],
        name: str = "dataset",
        *,
        ratios: tuple[float, float, float] = (0.8, 0.1, 0.1),
        seed: int = 0,
    ) -> DatasetSplits:
        """Tokenise texts and split them at random into training, validation and test.

        The order is drawn from `seed`. Raises `UsageError` without a tokenizer or texts, if the
        numbers of texts and labels differ, and if the ratios do not add up to 1.
        """
        if self._tokenizer is None:
            raise UsageError("create_training_dataset needs TrainingLoop(..., tokenizer=...).")
        if not texts or len(texts) != len(labels):
            raise UsageError(
                f"The dataset {name} has {len(texts)} texts and {len(labels)} labels; it needs the "
                "same number of each, and at least one."
            )
        if min(ratios) < 0 or abs(sum(ratios) - 1) > 1e-6:
            raise UsageError(f"The split ratios of {name} must add up to 1, but are {ratios}.")
        coded = self._tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        columns = {key: value for key, value in coded.items() if isinstance(value, Tensor)}
        columns["labels"] = torch.as_tensor(list(labels))
        splits = _split(name, columns, ratios, seed)
        facts = {"classes": len(set(labels)), "tokens": splits.length}
        self._switch_log.log_dataset(0, name, splits.sizes(), facts)
        return splits

    def profile_model_performance(
        self,
        dataloader: Iterable[Any],
        num_batches: int = 10,
        *,
        folder: str | Path | None = PROFILE_FOLDER,
        **options: Any,
    ) -> ProfileSummary:
        """Profile forward and backward over some batches; the weights are not changed.

        See `flexinspect.profile_model_performance`.
        """

        def step(batch: Any) -> None:
            loss, _ = self._forward(self._to_device(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.zero_grad()

        return profiling.profile_model_performance(
            dataloader, num_batches, step=step, folder=folder, **options
        )

    def _train_batch(self, batch: Any) -> float:
        moved = self._to_device(batch)
        self.optimizer.zero_grad()
        loss, output = self._forward(moved)
        self._switch_log.log_forward(self._step, moved, output, float(loss.detach()))
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        options = {"optimizer": self.optimizer, "scaler": self._scaler, "autocast": self._autocast}
        self.debugger.monitor_training_step(self.model, loss, self._step, **options)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self._scheduler_step("batch", self._step)
        self._step += 1
        return float(loss.detach())

    def _scheduler_step(self, each: str, step: int) -> None:
        if self._scheduler is None or self._scheduler_each != each:
            return
        before: tuple[float, ...] | None = ()
        if self.switches.now.debug_lr_scheduling:
            rates = partial(learning_rates, self.optimizer)
            before = self.switches.run_guarded("debug_lr_scheduling", rates)
        self._scheduler.step()
        self._switch_log.log_learning_rate(step, self._scheduler, each, before or ())

    def _forward(self, batch: Any) -> tuple[Tensor, Any]:
        dtype = self._autocast
        with nullcontext() if dtype is None else torch.autocast(self._device.type, dtype):
            if self.loss_fn is not None:
                inputs, labels = _split_batch(batch)
                output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
                return self.loss_fn(logits_of(output), labels), output
            output = self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)
        loss = loss_of(output)
        if loss is None:
            what = 'The model returned neither .loss nor ["loss"], nor a single number.'
            raise UsageError(what, hint="Give TrainingLoop a loss_fn.")
        return loss, output

    def _to_device(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(self._device)
        if isinstance(batch, Mapping):
            return {name: self._to_device(one) for name, one in batch.items()}
        if isinstance(batch, (tuple, list)):
            return tuple(self._to_device(one) for one in batch)
        return batch


def _split_batch(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return {name: one for name, one in batch.items() if name != "labels"}, batch.get("labels")
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise UsageError('A batch must be a dict with "labels" or a pair (inputs, labels).')


def _count_correct(output: Any, batch: Any) -> tuple[int, int]:
    """The numbers of correct and of all predictions; (0, 0) if the outputs are not classes."""
    scores = logits_of(output)
    labels = _split_batch(batch)[1] if isinstance(batch, (Mapping, tuple)) else None
    if not isinstance(labels, Tensor) or not isinstance(scores, Tensor):
        return 0, 0
    if labels.is_floating_point() or scores.dim() != 2 or labels.dim() != 1:
        return 0, 0
    return int((scores.argmax(-1) == labels).sum()), int(labels.numel())


def _summarize(losses: Sequence[tuple[float, int]]) -> tuple[int, int, float]:
    """The numbers of batches and samples, and the mean loss over samples."""
    samples = sum(size for _, size in losses)
    total = sum(loss * size for loss, size in losses)
    return len(losses), samples, total / samples if samples else float("nan")


def _timed_batches(loader: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    started = time.perf_counter()
    for batch in loader:
        yield batch, (time.perf_counter() - started) * 1e3
        started = time.perf_counter()


class DatasetSplits(Struct, frozen=True):
    """The parts of a dataset of dicts; `length` is the number of tokens of each padded sample."""

    name: str
    train: Subset[dict[str, Tensor]]
    validation: Subset[dict[str, Tensor]]
    test: Subset[dict[str, Tensor]]
    length: int

    def sizes(self) -> dict[str, int]:
        """The number of samples of each part."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: len(part) for name, part in parts.items()}


def _split(name: str, columns: dict[str, Any], ratios: Sequence[float], seed: int) -> DatasetSplits:
    whole: Any = StackDataset(**columns)  # torch annotates tensors as no datasets
    order = random.Random(seed).sample(range(len(whole)), len(whole))
    n_train, n_validation = (round(ratio * len(order)) for ratio in ratios[:2])
    end = n_train + n_validation
    parts = (order[:n_train], order[n_train:end], order[end:])
    train, validation, test = (Subset(whole, part) for part in parts)
    length = max((one.shape[-1] for one in columns.values() if one.dim() == 2), default=0)
    return DatasetSplits(name, train, validation, test, length)
