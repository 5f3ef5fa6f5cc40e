"""The thirteen switches of debuggers; each logs one line per batch, with `record.facts`."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from msgspec.structs import asdict, replace
from torch import Tensor, nn

import flexinspect_hooks.training_debuggers.base_debugger as base_debugger
from flexinspect.core.errors import UsageError
from flexinspect.inputs.config import load_config
from flexinspect.records.debug_switches import SWITCHES, DebugSwitches, parse_switch, short_name
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training.gradient_statistics import GradientLimits, Gradients, learning_rates
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.measurements import logits_of, memory_of, tensors_in

MB = 2**20
MAX_SHOWN_DEVICES = 8
_INPUT_NAMES = {"input_ids": "input", "inputs": "input", "attention_mask": "attention-mask"}
T = TypeVar("T")

Names = str | Iterable[str] | None  # switches by short ("memory_usage") or full name; None for all
StepCondition = Callable[[int], bool]  # whether a switch acts in the step of this number


class SwitchBoard:
    """Thirteen switches, for one debugger or several, which may be set from any thread.

    Reading a switch costs an attribute access. A switch whose work fails is turned off
    (`run_guarded`), and the training continues.
    """

    def __init__(self, switches: DebugSwitches | None = None) -> None:
        self.now = DebugSwitches()
        self._conditions: dict[str, StepCondition] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _request_anomaly_mode, id(self), False)
        status = asdict(switches or self.now)
        self._turn([name for name, is_on in status.items() if is_on], True, {})

    def enable_debugging(self, names: Names = None, *, when: StepCondition | None = None) -> None:
        """Turn on switches by short ("memory_usage") or full name; without names, all.

        `when` takes a step's number and returns whether the switches act in it (default: always).
        Raises `UsageError`, which lists all switches, for an unknown name; then nothing changes.
        """
        chosen = _full_names(names)
        if when is not None and not callable(when):
            raise UsageError("when must be a function of the step's number.")
        self._turn(chosen, True, {} if when is None else dict.fromkeys(chosen, when))

    def disable_debugging(self, names: Names = None) -> None:
        """Turn off switches by name; without names, all."""
        self._turn(_full_names(names), False, {})

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of each of the thirteen switches by full name."""
        return asdict(self.now)

    def is_active(self, switch: str, step: int) -> bool:
        """Whether a switch is on and acts in this step; one whose `when` fails is turned off."""
        if not getattr(self.now, switch):
            return False
        when = self._conditions.get(switch)
        return when is None or bool(self.run_guarded(switch, lambda: when(step)))

    def run_guarded(self, switch: str, work: Callable[[], T]) -> T | None:
        """Do a switch's work; if that fails, log a warning and turn the switch off."""
        try:
            return work()
        except Exception as error:
            self.disable_debugging([switch])
            kind, name = type(error).__name__, short_name(switch)
            log.warning("The switch %s failed and is off: %s: %s", name, kind, error)
            return None

    def _turn(self, chosen: Iterable[str], on: bool, conditions: dict[str, StepCondition]) -> None:
        with self._lock:
            others = {name: old for name, old in self._conditions.items() if name not in chosen}
            self._conditions = {**others, **conditions}
            self.now = replace(self.now, **dict.fromkeys(chosen, on))
            _request_anomaly_mode(id(self), self.now.enable_autograd_anomaly)


class HasSwitches:
    """Base of classes with a switch board; its functions are also theirs."""

    switches: SwitchBoard

    def enable_debugging(self, names: Names = None, *, when: StepCondition | None = None) -> None:
        """Turn switches on by short or full name; without names, all. See `SwitchBoard`."""
        self.switches.enable_debugging(names, when=when)

    def disable_debugging(self, names: Names = None) -> None:
        """Turn switches off; without names, all."""
        self.switches.disable_debugging(names)

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of the thirteen switches by full name."""
        return self.switches.get_debugging_status()


def _full_names(names: Names) -> tuple[str, ...]:
    if names is None:
        return SWITCHES
    if not isinstance(names, Iterable):
        raise UsageError(f"Switches have names, and {names!r} is not a name.")
    return tuple(map(parse_switch, [names] if isinstance(names, str) else names))


_anomaly_mode, _anomaly_lock = ExitStack(), threading.Lock()
_anomaly_boards: set[int] = set()  # the `id` of each that requests the anomaly mode


def _request_anomaly_mode(board: int, enabled: bool) -> None:
    with _anomaly_lock:
        was_on = bool(_anomaly_boards)
        (_anomaly_boards.add if enabled else _anomaly_boards.discard)(board)
        if was_on and not _anomaly_boards:
            _anomaly_mode.close()
        elif enabled and not was_on:
            _anomaly_mode.enter_context(torch.autograd.set_detect_anomaly(True))
            log.warning(
                "Autograd anomaly detection is on: every backward pass is slower, for small "
                "models several times; turn it off with disable_debugging()."
            )


_common_boards: list[SwitchBoard] = []


def common_board() -> SwitchBoard:
    """Return the board of debuggers without their own, as the settings section [debugging] sets it.

    Raises `UsageError` for a settings file that cannot be used.
    """
    if not _common_boards:
        _common_boards.append(board_of_settings())
    return _common_boards[0]


def board_of_settings(profile: str = "") -> SwitchBoard:
    """A board set by `[debugging.PROFILE]` of the settings, or by `[debugging]` without a profile.

    Raises `UsageError` for an unknown profile.
    """
    profiles = load_config().debugging
    if profile and profile not in profiles:
        known = ", ".join(sorted(name for name in profiles if name)) or "none"
        raise UsageError(f"The settings have no [debugging.{profile}] (profiles: {known}).")
    return SwitchBoard(DebugSwitches(**profiles.get(profile, {})))


def enable_debugging(names: Names = None, *, when: StepCondition | None = None) -> None:
    """Turn switches of the common board on: see `SwitchBoard.enable_debugging`."""
    common_board().enable_debugging(names, when=when)


def disable_debugging(names: Names = None) -> None:
    """Turn switches of the common board off; without names, all."""
    common_board().disable_debugging(names)


def get_debugging_status() -> dict[str, bool]:
    """The state of the thirteen switches of the common board by full name."""
    return common_board().get_debugging_status()


Line = tuple[str, Mapping[str, Any]]  # the text of a log line, and its figures

P = ParamSpec("P")
Describe = Callable[Concatenate["SwitchLog", int, P], Line | None]
LogStep = Callable[Concatenate["SwitchLog", int, P], None]


def _logged(switch: str) -> Callable[[Describe[P]], LogStep[P]]:
    """Log what a method describes in a step in which a switch acts."""

    def decorate(describe: Describe[P]) -> LogStep[P]:
        @functools.wraps(describe)
        def log_if_active(self: SwitchLog, step: int, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if self.board.is_active(switch, step):
                self.board.run_guarded(
                    switch, lambda: _log_line(describe(self, step, *args, **kwargs))
                )

        return log_if_active

    return decorate


class SwitchLog:
    """Logs for the switches that are on; a switch that is off costs one attribute access.

    It is called with the number of the step, 0 between steps; a switch that fails is turned off.
    """

    def __init__(self, board: SwitchBoard) -> None:
        self.board = board
        self._parameter_versions: dict[str, int] = {}
        self._parameter_devices: tuple[str, ...] = ()

    def log_setup(self, model: nn.Module) -> None:
        """Log at the start: anomaly mode, devices, memory."""
        if self.board.now.enable_autograd_anomaly:
            _log_line(("Debugging tools: autograd anomaly detection is on", {"anomaly_mode": True}))
        self.log_placement(0, model, "Device placement")
        self.log_memory(0, "Memory usage", model)

    @_logged("debug_data_loading")
    def log_data_loading(self, batch: int, inputs: Any, waited_ms: float) -> Line:
        """Log the batch of a loader, and how long the training waited for it."""
        shapes = {name: tuple(one.shape) for name, one in named_inputs(inputs)}
        parts = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        facts = {"samples": batch_size(inputs), "waited_ms": waited_ms, "shapes": shapes}
        what = f"{facts['samples']} samples after {waited_ms:.2f} ms, {parts}"
        return f"Data loading - Batch {batch}: {what}", facts

    @_logged("debug_forward_pass")
    def log_forward(self, batch: int, inputs: Any, output: Any, loss: float) -> Line:
        """Log the inputs, the output and the loss of a forward pass."""
        shapes = {f"{name} shape": tuple(one.shape) for name, one in named_inputs(inputs)}
        facts: dict[str, Any] = {**shapes}
        made = next(tensors_in(logits_of(output)), None)
        if made is not None:
            facts |= {"output shape": tuple(made.shape), "device": str(made.device)}
        facts["loss"] = loss
        parts = ", ".join(f"{name} {value}" for name, value in facts.items())
        return f"Forward pass debugging - Batch {batch}: {parts}", facts

    @_logged("debug_gradient_norms")
    def log_norms(self, batch: int, gradients: Gradients, limits: GradientLimits) -> Line:
        """Log the gradient norms after the backward pass, and the problems of gradients."""
        find = base_debugger.gradient_problems
        problems = ((one, text) for one in gradients.rows for _, text in find(one, limits))
        for one, text in islice(problems, base_debugger.MAX_LOGGED_ANOMALIES):
            log.warning("%s", text, extra={"facts": one})
        norms = {facts.name: facts.norm for facts in gradients.rows}
        if not norms:
            return f"Gradient norms - Batch {batch}: no parameter has a gradient", {}
        low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
        text = f"Gradient norms - Batch {batch}: total {gradients.total:.4g}, largest {high} "
        text += f"{norms[high]:.4g}, smallest {low} {norms[low]:.4g}"
        return text, {"total": gradients.total, "norms": norms}

    @_logged("debug_backward_pass")
    def log_backward(self, batch: int, model: nn.Module, gradients: Gradients) -> Line:
        """Log how many parameters have gradients, and how many the optimizer has updated."""
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        versions = {name: tensor_version(one) or 0 for name, one in trained.items()}
        moved = [name for name in versions if versions[name] != self._parameter_versions.get(name)]
        is_first, self._parameter_versions = not self._parameter_versions, versions
        with_gradient = {one.name for one in gradients.parameters}
        without = [name for name in trained if name not in with_gradient]
        bad = [gradients.parameters[at].name for at in sorted(gradients.counts)]
        updated = "" if is_first else f", {len(moved)} of {len(trained)} updated since the last"
        text = f"Backward pass debugging - Batch {batch}: {len(gradients.norms)} of {len(trained)} "
        text += f"parameters have gradients{updated}, {len(bad)} with NaN or Inf"
        return text, {"without_gradient": without, "updated": moved, "not_finite": bad}

    @_logged("debug_memory_usage")
    def log_memory(self, batch: int, title: str, model: nn.Module) -> Line:
        """Log the memory of the model and the process."""
        memory = memory_of(model)
        return f"{title}: {_format_memory(memory)}", memory

    @_logged("debug_mixed_precision")
    def log_precision(
        self, batch: int, model: nn.Module, scaler: Any, autocast: torch.dtype | None
    ) -> Line:
        """Log the gradient scaler, its scale, and the dtype of autocast."""
        kind = next((one.device.type for one in model.parameters()), "cpu")
        if autocast is None and torch.is_autocast_enabled(kind):
            autocast = torch.get_autocast_dtype(kind)
        dtype = None if autocast is None else str(autocast).removeprefix("torch.")
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        name = type(scaler).__name__ if scaler is not None else None
        scaling = "no scaler" if scaler is None else f"{name} at {scale}"
        text = f"Mixed precision - Batch {batch}: {scaling}, autocast {dtype or 'off'}"
        return text, {"scaler": name, "scale": scale, "autocast": dtype}

    @_logged("debug_device_placement")
    def log_placement(self, batch: int, model: nn.Module, title: str = "") -> Line | None:
        """Log the devices of the parameters, under `title` or else if they changed."""
        if not title:
            before = self._parameter_devices
            self._parameter_devices = tuple(str(one.device) for one in model.parameters())
            if self._parameter_devices == before:
                return None
        counts = dict(Counter(str(one.device) for one in model.parameters()))
        gpus: list[str] = []
        for number in range(min(torch.cuda.device_count(), MAX_SHOWN_DEVICES)):
            gpu = torch.cuda.get_device_properties(number)
            used, total = torch.cuda.memory_allocated(number) / MB, gpu.total_memory / MB
            gpus.append(f"cuda:{number} {gpu.name}, {used:.0f} of {total:.0f} MB allocated")
        placed = ", ".join(f"{count} parameters on {device}" for device, count in counts.items())
        cuda = "; ".join(gpus) or "CUDA is not available"
        title = title or f"Device placement - Batch {batch}"
        text = f"{title}: {placed or 'no parameters'}; {cuda}"
        return text, {"parameters_on": counts, "cuda": gpus}

    @_logged("debug_data_loading")
    def log_dataset(
        self, step: int, name: str, sizes: Mapping[str, int], facts: Mapping[str, Any]
    ) -> Line:
        """Log the parts of a dataset."""
        whole = sum(sizes.values())
        parts = ", ".join(f"{part} {size} ({size / whole:.0%})" for part, size in sizes.items())
        more = "".join(f", {key} {value}" for key, value in facts.items())
        text = f"Data loading - dataset {name}: {whole} samples, {parts}{more}"
        return text, {"name": name, "sizes": dict(sizes), **facts}

    @_logged("debug_validation")
    def log_validation(self, step: int, facts: Mapping[str, Any], model: nn.Module) -> Line:
        """Log the result of a validation."""
        memory = memory_of(model)
        text = f"Validation debugging: {facts['samples']} samples in {facts['batches']} batches, "
        text += f"loss {facts['loss']:.6g}, memory {_format_memory(memory)}"
        return text, {**facts, "memory": memory}

    @_logged("debug_early_stopping")
    def log_early_stopping(self, step: int, value: float, stops: bool, stopping: Any) -> Line:
        """Log the values and the decision of early stopping."""
        names = ("best", "waited", "patience")
        facts = {"value": value, **{name: getattr(stopping, name, None) for name in names}}
        numbers = {name: one for name, one in facts.items() if isinstance(one, (int, float))}
        shown = ", ".join(f"{name} {number:.6g}" for name, number in numbers.items())
        decided = "stop" if stops else "go on"
        return f"Early stopping debugging: {shown}: {decided}", {**facts, "stops": stops}

    @_logged("debug_lr_scheduling")
    def log_learning_rate(
        self, batch: int, scheduler: Any, when: str, before: tuple[float, ...]
    ) -> Line:
        """Log the learning rates before and after the scheduler's step."""
        rates = learning_rates(scheduler.optimizer)
        kind = type(scheduler).__name__
        change = "unchanged" if before == rates else f"was {_format_rates(before)}"
        text = f"LR scheduling debugging: {kind}, each {when}, {_format_rates(rates)} ({change})"
        return text, {"scheduler": kind, "rates": rates, "before": before, "each": when}


def _log_line(line: Line | None) -> None:
    if line is not None:
        text, facts = line
        log.debug("%s", text, extra={"facts": {**facts, "at": time.time()}})


def named_inputs(inputs: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their names: input, attention-mask, labels."""
    if isinstance(inputs, Mapping):
        for name, one in inputs.items():
            if isinstance(one, Tensor):
                yield _INPUT_NAMES.get(str(name), str(name)), one
        return
    for number, one in enumerate(tensors_in(inputs)):
        yield ("input", "labels")[number] if number < 2 else f"input {number}", one


def batch_size(inputs: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    first = next((one for _, one in named_inputs(inputs)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def _format_memory(memory: Mapping[str, int]) -> str:
    where, sizes = "CUDA", (memory["cuda_allocated"], memory["cuda_reserved"])
    if not torch.cuda.is_available():
        where, sizes = "no CUDA: the model, and its process", (memory["total"], memory["process"])
    used = memory["system_used"] / MB
    allocated, reserved = (f"{size / MB:.1f} MB" for size in sizes)
    return f"Allocated {allocated}, Reserved {reserved} ({where}), system {used:.0f} MB in use"


def _format_rates(rates: Iterable[float]) -> str:
    return ", ".join("unknown" if rate != rate else f"{rate:.4g}" for rate in rates)
