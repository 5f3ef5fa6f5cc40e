"""The log lines of each switch: one per batch, with its figures as `record.facts`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.training_step import ParameterGradient, total_norm
from flexinspect_hooks.training.parameters import learning_rates
from flexinspect_hooks.training_debuggers.components import memory_of, tensors_in
from flexinspect_hooks.training_debuggers.debugger_base import MAX_LOGGED_ANOMALIES, log
from flexinspect_hooks.training_debuggers.pytorch_debugger import gradient_problems
from flexinspect_hooks.training_debuggers.switch_board import SwitchBoard

MB = 2**20
MAX_SHOWN_DEVICES = 8

GradientLimits = tuple[float, float]
"""The norms above which a gradient explodes and below which it vanishes."""


class SwitchLog:
    """Logs for the switches that are on; a switch that is off costs one attribute access.

    The training loop, or `monitor_training_step`, calls it; a switch that fails is turned off.
    """

    def __init__(self, board: SwitchBoard) -> None:
        self.board = board
        self._parameter_versions: dict[str, int] = {}
        self._parameter_devices: tuple[str, ...] = ()

    def _log_if_active(
        self, switch: str, step: int, work: Callable[[], tuple[str, dict[str, Any]]]
    ) -> None:
        if self.board.is_active(switch, step):
            self.board.run_guarded(switch, lambda: _log_line(*work()))

    # -- at the start ----------------------------------------------------------------------------

    def log_setup(self, model: nn.Module) -> None:
        """Log at the start: anomaly mode, devices, memory."""
        if self.board.now.enable_autograd_anomaly:
            _log_line("Debugging tools: autograd anomaly detection is on", {"anomaly_mode": True})
        self._log_if_active(
            "debug_device_placement", 0, lambda: _describe_devices("Device placement", model, None)
        )
        self._log_if_active(
            "debug_memory_usage", 0, lambda: _describe_memory("Memory usage", model)
        )

    # -- a batch ---------------------------------------------------------------------------------

    def log_forward(self, batch: int, inputs: Any, output: Any, loss: float | None) -> None:
        """Log the inputs and the output of a forward pass."""
        self._log_if_active(
            "debug_forward_pass", batch, lambda: _describe_forward(batch, inputs, output, loss)
        )

    def log_gradients(
        self,
        batch: int,
        model: nn.Module,
        gradients: Sequence[ParameterGradient],
        limits: GradientLimits,
    ) -> None:
        """Log the gradients after the backward pass, before the optimizer's step."""
        self._log_if_active(
            "debug_gradient_norms", batch, lambda: _describe_norms(batch, gradients, limits)
        )
        self._log_if_active(
            "debug_backward_pass", batch, lambda: self._describe_backward(batch, model, gradients)
        )

    def log_environment(
        self,
        batch: int,
        model: nn.Module,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Log memory, devices if they changed, and precision."""
        self._log_if_active(
            "debug_memory_usage",
            batch,
            lambda: _describe_memory(f"Memory usage - Batch {batch}", model),
        )
        self._log_if_active(
            "debug_mixed_precision",
            batch,
            lambda: _describe_precision(batch, model, scaler, autocast),
        )
        if self.board.is_active("debug_device_placement", batch):
            self.board.run_guarded(
                "debug_device_placement", lambda: self._log_placement(batch, model)
            )

    def log_data_loading(self, batch: int, inputs: Any, waited_ms: float) -> None:
        """Log the batch of a loader, and how long the training waited for it."""
        self._log_if_active(
            "debug_data_loading", batch, lambda: _describe_loading(batch, inputs, waited_ms)
        )

    def log_dataset(self, name: str, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> None:
        """Log the parts of a dataset."""
        self._log_if_active("debug_data_loading", 0, lambda: _describe_dataset(name, sizes, facts))

    # -- between batches -------------------------------------------------------------------------

    def log_validation(self, facts: Mapping[str, Any], model: nn.Module) -> None:
        """Log the result of a validation."""

        def describe() -> tuple[str, dict[str, Any]]:
            memory = memory_of(model)
            text = (
                f"Validation debugging: {facts['samples']} samples in {facts['batches']} batches, "
                f"loss {facts['loss']:.6g}, memory {_format_memory(memory)}"
            )
            return text, {**facts, "memory": memory}

        self._log_if_active("debug_validation", 0, describe)

    def log_early_stopping(self, value: float, stops: bool, stopping: Any) -> None:
        """Log the values and the decision of early stopping."""

        def describe() -> tuple[str, dict[str, Any]]:
            facts = {
                "value": value,
                "best": getattr(stopping, "best", None),
                "waited": getattr(stopping, "waited", None),
                "patience": getattr(stopping, "patience", None),
                "stops": stops,
            }
            decided = "stop" if stops else "go on"
            shown = ", ".join(
                f"{name} {known:.6g}"
                for name in ("value", "best", "waited", "patience")
                if isinstance(known := facts[name], (int, float))
            )
            text = f"Early stopping debugging: {shown}: {decided}"
            return text, facts

        self._log_if_active("debug_early_stopping", 0, describe)

    def log_learning_rate(
        self, batch: int, scheduler: Any, when: str, before: tuple[float, ...]
    ) -> None:
        """Log the learning rates before and after the scheduler's step."""

        def describe() -> tuple[str, dict[str, Any]]:
            rates = learning_rates(scheduler.optimizer)
            kind = type(scheduler).__name__
            change = "unchanged" if before == rates else f"was {_format_rates(before)}"
            text = (
                f"LR scheduling debugging: {kind}, each {when}, {_format_rates(rates)} ({change})"
            )
            return text, {"scheduler": kind, "rates": rates, "before": before, "each": when}

        self._log_if_active("debug_lr_scheduling", batch, describe)

    # -- descriptions ----------------------------------------------------------------------------

    def _describe_backward(
        self, batch: int, model: nn.Module, gradients: Sequence[ParameterGradient]
    ) -> tuple[str, dict[str, Any]]:
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        versions = {name: one._version for name, one in trained.items()}
        moved = [name for name in versions if versions[name] != self._parameter_versions.get(name)]
        is_first, self._parameter_versions = not self._parameter_versions, versions
        with_gradient = {facts.name for facts in gradients}
        without = [name for name in trained if name not in with_gradient]
        bad = [facts.name for facts in gradients if facts.has_nonfinite]
        updated = "" if is_first else f", {len(moved)} of {len(trained)} updated since the last"
        text = (
            f"Backward pass debugging - Batch {batch}: {len(gradients)} of {len(trained)} "
            f"parameters have gradients{updated}, {len(bad)} with NaN or Inf"
        )
        return text, {"without_gradient": without, "updated": moved, "not_finite": bad}

    def _log_placement(self, batch: int, model: nn.Module) -> None:
        placed = tuple(str(one.device) for one in model.parameters())
        if placed != self._parameter_devices:
            self._parameter_devices = placed
            _log_line(*_describe_devices(f"Device placement - Batch {batch}", model, batch))


def _log_line(text: str, facts: dict[str, Any]) -> None:
    log.debug("%s", text, extra={"facts": {**facts, "at": time.time()}})


def _describe_norms(
    batch: int, gradients: Sequence[ParameterGradient], limits: GradientLimits
) -> tuple[str, dict[str, Any]]:
    problems = [
        (facts, sentence)
        for facts in gradients
        for _, sentence in gradient_problems(facts, *limits)
    ]
    for facts, sentence in problems[:MAX_LOGGED_ANOMALIES]:
        log.warning("%s", sentence, extra={"facts": facts})
    norms = {facts.name: facts.norm for facts in gradients}
    total = total_norm(gradients)
    if not norms:
        return f"Gradient norms - Batch {batch}: no parameter has a gradient", {}
    low = min(norms, key=lambda name: norms[name])
    high = max(norms, key=lambda name: norms[name])
    text = (
        f"Gradient norms - Batch {batch}: total {total:.4g}, largest {high} "
        f"{norms[high]:.4g}, smallest {low} {norms[low]:.4g}"
    )
    return text, {"total": total, "norms": norms}


def _describe_forward(
    batch: int, inputs: Any, output: Any, loss: float | None
) -> tuple[str, dict[str, Any]]:
    shapes = {f"{name} shape": tuple(one.shape) for name, one in named_inputs(inputs)}
    made = next(tensors_in(getattr(output, "logits", output)), None)
    facts: dict[str, Any] = dict(shapes)
    if made is not None:
        facts |= {"output shape": tuple(made.shape), "device": str(made.device)}
    if loss is not None:
        facts["loss"] = loss
    parts = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"Forward pass debugging - Batch {batch}: {parts}", facts


_INPUT_NAMES = {"input_ids": "input", "inputs": "input", "attention_mask": "attention-mask"}


def named_inputs(inputs: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their names: input, attention-mask, labels."""
    if isinstance(inputs, Mapping):
        for name, one in inputs.items():
            if isinstance(one, Tensor):
                yield _INPUT_NAMES.get(str(name), str(name)), one
        return
    for number, one in enumerate(tensors_in(inputs)):
        yield ("input", "labels")[number] if number < 2 else f"input {number}", one


def _describe_memory(title: str, model: nn.Module) -> tuple[str, dict[str, Any]]:
    memory = memory_of(model)
    return f"{title}: {_format_memory(memory)}", memory


def _format_memory(memory: Mapping[str, int]) -> str:
    where, sizes = "CUDA", (memory["cuda_allocated"], memory["cuda_reserved"])
    if not torch.cuda.is_available():
        where, sizes = "no CUDA: the model, and its process", (memory["total"], memory["process"])
    used = memory["system_used"] / MB
    allocated, reserved = (f"{size / MB:.1f} MB" for size in sizes)
    return f"Allocated {allocated}, Reserved {reserved} ({where}), system {used:.0f} MB in use"


def _describe_precision(
    batch: int, model: nn.Module, scaler: Any, autocast: torch.dtype | None
) -> tuple[str, dict[str, Any]]:
    kind = next((one.device.type for one in model.parameters()), "cpu")
    if autocast is None and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    dtype = None if autocast is None else str(autocast).removeprefix("torch.")
    scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
    facts = {"scaler": type(scaler).__name__ if scaler is not None else None, "scale": scale}
    scaling = "no scaler" if scaler is None else f"{facts['scaler']} at {scale}"
    text = f"Mixed precision - Batch {batch}: {scaling}, autocast {dtype or 'off'}"
    return text, {**facts, "autocast": dtype}


def _describe_devices(
    title: str, model: nn.Module, batch: int | None
) -> tuple[str, dict[str, Any]]:
    counts = dict(Counter(str(one.device) for one in model.parameters()))
    n_gpus = min(torch.cuda.device_count(), MAX_SHOWN_DEVICES)
    gpus = [_describe_gpu(number) for number in range(n_gpus)]
    placed = ", ".join(f"{count} parameters on {device}" for device, count in counts.items())
    cuda = "; ".join(gpus) if gpus else "CUDA is not available"
    text = f"{title}: {placed or 'no parameters'}; {cuda}"
    return text, {"parameters_on": counts, "cuda": gpus}


def _describe_gpu(number: int) -> str:
    device = torch.cuda.get_device_properties(number)
    used, total = torch.cuda.memory_allocated(number) / MB, device.total_memory / MB
    return f"cuda:{number} {device.name}, {used:.0f} of {total:.0f} MB allocated"


def batch_size(inputs: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    first = next((one for _, one in named_inputs(inputs)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def _describe_loading(batch: int, inputs: Any, waited_ms: float) -> tuple[str, dict[str, Any]]:
    shapes = {name: tuple(one.shape) for name, one in named_inputs(inputs)}
    parts = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    facts = {"samples": batch_size(inputs), "waited_ms": waited_ms, "shapes": shapes}
    what = f"{facts['samples']} samples after {waited_ms:.2f} ms, {parts}"
    return f"Data loading - Batch {batch}: {what}", facts


def _describe_dataset(
    name: str, sizes: Mapping[str, int], facts: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    whole = sum(sizes.values())
    parts = ", ".join(f"{part} {size} ({size / whole:.0%})" for part, size in sizes.items())
    more = "".join(f", {key} {value}" for key, value in facts.items())
    text = f"Data loading - dataset {name}: {whole} samples, {parts}{more}"
    return text, {"name": name, "sizes": dict(sizes), **facts}


def _format_rates(rates: Iterable[float]) -> str:
    return ", ".join("unknown" if rate != rate else f"{rate:.4g}" for rate in rates)
