"""The forward and backward passes of a training step: times, loss, first non-finite output.

Module hooks only keep references, which are dropped when the root forward ends. On a CPU they are
read only if the model's output is non-finite, so a normal forward pass costs only the hooks. Where
the smallest modules are watched, those of a layer are dropped when it returns finite values, so
that the next layer can use their memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect.records.step import LayerStatRecord
from flexinspect.records.training_step import MODEL_OUTPUT, AnomalyOrigin
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.training import loop_calls
from flexinspect_hooks.training.gradient_statistics import stack_nonfinite_counts, tensor_facts

MAX_PENDING_FORWARDS = 64  # forward passes without a backward pass that are kept
MAX_MICRO_BATCHES = 4096  # of a step that are kept: the optimizer may never step
HOOK_COST_S = 2e-6  # measured, of a hook that only keeps a reference; timing it would cost more

UNCHECKED_WEIGHTS = "its weights were looked at only after the update"
"""Detail of a module whose weights may have become non-finite only in the update itself."""

Guard = Callable[[Callable[..., None]], Callable[..., None]]  # makes a function never raise

ModuleOutputs = Sequence[tuple[str, nn.Module, Any]]  # modules by name, with what they returned
OutputKey = tuple[int, str, int]  # the index and name of a module, and its number of values
ReadStats = Callable[[], list[LayerStatRecord]]

_micro_batches: partial[deque[Any]] = partial(deque, maxlen=MAX_MICRO_BATCHES)


class StepPasses(Struct):
    """The results of one forward pass, or of all passes since the last optimizer step."""

    n_forward: int = 0
    n_backward: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    losses: deque[Tensor | float] = field(default_factory=_micro_batches)
    are_shares: bool = False  # the step's loss is the sum of the losses, not their mean
    producer: AnomalyOrigin | None = None
    output_gradient_norms: deque[Tensor | float] = field(default_factory=_micro_batches)
    device: str = ""
    autocast: str = ""
    stats: list[LayerStatRecord] = field(default_factory=list)
    pending: ReadStats | None = None  # for statistics that are still on their device
    extremes: deque[Extremes] = field(default_factory=_micro_batches)
    is_updated: bool = False  # whether the weights may have changed since
    is_counted: bool = False  # a backward pass followed, so it belongs to the step
    is_evaluation: bool = False  # of a model in evaluation mode
    backward_losses: deque[Tensor | float] = field(default_factory=_micro_batches)
    last_backward: int = -1  # its number, as several forward passes may share one

    def add(self, one: StepPasses) -> None:
        """Add a forward pass that belongs to the step."""
        self.n_forward += 1
        self.forward_s += one.forward_s
        self.are_shares = one.are_shares
        self.losses += one.losses
        self.extremes += one.extremes
        self.stats, self.pending = one.stats or self.stats, one.pending or self.pending
        self.device, self.autocast = one.device or self.device, one.autocast or self.autocast
        self.producer = self.producer or one.producer

    def drop_backward(self) -> None:
        """Forget the passes so far, because the program cleared their gradients."""
        self.n_forward = self.n_backward = 0
        self.producer, self.pending, self.stats = None, None, []
        for values in (self.losses, self.backward_losses, self.output_gradient_norms):
            values.clear()
        self.extremes.clear()

    def resolve(self) -> None:
        """Read the results of an accelerator, and find the first producer of NaN or Inf."""
        if self.pending is not None:
            self.stats, self.pending = self.pending(), None
        for one in self.extremes:
            if self.producer is None:
                self.producer = one.producer(is_updated=self.is_updated)
        self.extremes.clear()


class ForwardListener(Protocol):
    """What is told of the forward passes of a model."""

    def on_forward_begin(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """A forward pass begins that may have a backward pass."""

    def on_backward_pass(self) -> None:
        """A backward pass through the model begins."""

    def on_backward_pass_end(self) -> None:
        """A backward pass through the model has ended."""

    def on_evaluation_begin(self, model: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """A forward pass without gradients begins."""

    def on_outputs(self, outputs: ModuleOutputs) -> None:
        """The outputs that were kept of a forward pass that may have a backward pass."""

    def on_forward_end(self) -> None:
        """A forward pass of either kind has ended, perhaps by an exception."""

    def on_evaluation(self, model: nn.Module, loss: Tensor | float | None) -> None:
        """A forward pass has ended that has no backward pass; `loss` is what it returned."""


class ForwardWatch:
    """Hooks on a model, and the results of its passes since the last `begin_step`.

    `watches_leaves` keeps the outputs of the smallest modules instead of the layers', `keeps_stats`
    computes statistics of the outputs; both may change between two forward passes. `prefix` stands
    before the names of a model that is a part of another.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        passes: StepPasses,
        listener: ForwardListener,
        guarded: Guard,
        prefix: str = "",
    ) -> None:
        self.watches_leaves = self.keeps_stats = False
        self.own_s = 0.0
        self.passes = passes
        self._model = model
        self._listener, self._guarded = listener, guarded
        self._guarded_gradient = guarded(self._on_output_gradient)
        self.prefix = prefix
        self._outputs: list[tuple[str, nn.Module, Any]] = []
        self._may_release = False  # the first step needs all outputs
        self._n_kept = self._n_released = 0
        self._released_stats: list[LayerStatRecord] = []
        self._inside_s = 0.0
        self._inputs: tuple[Any, ...] = ()
        self._is_open = self._is_share = self._is_evaluating = False
        self._pending: deque[StepPasses] = deque(maxlen=MAX_PENDING_FORWARDS)
        self._started = 0.0
        self._hooks, self._module_hooks = ExitStack(), ExitStack()
        self._watched_leaves: bool | None = None  # no module is hooked yet

    def install(self) -> None:
        """Register the hooks."""
        model = self._model
        begin, end = self._guarded(self._begin), self._guarded(self._end)
        if torch_private.is_compiled_in_place(model):
            self._hooks.callback(torch_private.wrap_compiled(model, begin, end))
            return
        before = model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        self._hooks.enter_context(before)
        # Also after a forward that raised, or it would never end.
        self._hooks.enter_context(model.register_forward_hook(end, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        self._module_hooks.close()
        self._hooks.close()
        self._pending.clear()
        self._release()

    @property
    def has_forward(self) -> bool:
        """Whether there was a forward pass since the last `begin_step`."""
        return bool(self._pending) or self.passes.n_forward > 0

    def count_pending(self) -> None:
        """Add the forward passes of a step whose backward pass was not observed."""
        if self.passes.n_backward == 0:
            for one in self._pending:
                self._count(one)
        self._pending.clear()

    def begin_step(self, passes: StepPasses) -> None:
        """Add the results of passes to `passes` from now on, which has none yet."""
        for one in self._pending:
            if one.is_evaluation:
                self._listener.on_evaluation(self._model, next(iter(one.losses), None))
        self._pending.clear()
        self.passes, self._may_release = passes, True

    def _count(self, one: StepPasses) -> None:
        if not one.is_counted:
            one.is_counted = True
            self.passes.add(one)

    def _hook_modules(self) -> None:
        """Hook only the modules whose outputs are kept now: every hook costs time."""
        model, self._watched_leaves = self._model, self.watches_leaves
        self._module_hooks.close()
        # In a compiled model a hook would be compiled too, or break its graph.
        if type(model).__name__ == "OptimizedModule" or torch_private.is_compiled_in_place(model):
            return
        leaves = ((name, one) for name, one in model.named_modules() if not any(one.children()))
        named = leaves if self.watches_leaves else blocks_of(model)
        for name, module in {id(one): (name, one) for name, one in named}.values():
            if module is not model:
                hook = module.register_forward_hook(self._output_hook(name))
                self._module_hooks.enter_context(hook)
        if self.watches_leaves:
            blocks = {id(one): one for _, one in blocks_of(model) if any(one.children())}
            for block in blocks.values():
                hook = block.register_forward_hook(self._block_hook())
                self._module_hooks.enter_context(hook)

    def _output_hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_open:
                self._outputs.append((f"{self.prefix}{name}", module, output))

        return keep

    def _block_hook(self) -> Callable[..., None]:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_open and self._may_release:
                self._release_block(output)

        return self._guarded(release)

    @torch.no_grad()
    def _release_block(self, output: Any) -> None:
        """Drop what the modules of a layer returned, which itself returned `output`."""
        started = time.perf_counter()
        tensors = [*dense_tensors(output)]
        if not tensors or any(map(is_remote, tensors)):
            return  # reading them would wait for the device
        new = self._outputs[self._n_kept :]
        if self.keeps_stats:
            self._released_stats += output_stats(new, self._n_released + self._n_kept)
        if all(map(is_finite, tensors)):
            del self._outputs[self._n_kept :]
            self._n_released += len(new)
        self._n_kept = len(self._outputs)
        self._inside_s += time.perf_counter() - started

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_open:
            return
        self._is_evaluating = not torch.is_grad_enabled()
        if self._is_evaluating:
            self._listener.on_evaluation_begin(module, args, kwargs)
            return
        started = time.perf_counter()
        self._listener.on_forward_begin(module, args, kwargs)
        self._release()
        if self._watched_leaves is not self.watches_leaves:
            self._hook_modules()
        self._inputs = (*args, *kwargs.values())
        # Passed by `transformers.Trainer`: then each loss is divided by the items of all batches.
        self._is_share = kwargs.get("num_items_in_batch") is not None
        self._is_open = True
        self._started = time.perf_counter()
        self.own_s += self._started - started

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_open:
            if self._is_evaluating:
                self._listener.on_forward_end()
            if self._is_evaluating and output is not None:
                self._listener.on_evaluation(module, loss_of(output))
            return
        ended = time.perf_counter()
        self._is_open = False
        self._listener.on_forward_end()
        try:
            if output is not None:
                with torch.no_grad():
                    self._read(output, ended)
        finally:
            self._release()
            self.own_s += time.perf_counter() - ended

    def _read(self, output: Any, ended: float) -> None:
        spent = ended - self._started - self._inside_s
        forward = StepPasses(forward_s=spent, are_shares=self._is_share)
        self.own_s += self._inside_s
        forward.is_evaluation = not self._model.training
        self._listener.on_outputs(self._outputs)
        loss = loss_of(output)
        self._pending.append(forward)
        main = loss if loss is not None else next(floating_tensors(output), None)
        if main is None:
            return
        kind, forward.device = ("cpu", "cpu") if main.is_cpu else _names_of(main.device)
        if torch.is_autocast_enabled(kind):
            forward.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        value: Any = math.nan
        if loss is not None:
            # Its current value, because the program may change it later.
            value = loss.detach().clone() if is_remote(loss) else loss.item()
            forward.losses.append(value)
        if main.requires_grad and not main.is_leaf:  # hooks on a parameter would accumulate
            hook = partial(self._guarded_gradient, forward, loss is not None)
            main.register_hook(hook)  # type: ignore[no-untyped-call]
        self.own_s += (self._n_released + len(self._outputs)) * HOOK_COST_S
        if self.keeps_stats and is_remote(main):
            forward.pending = pending_stats(self._outputs, main.device)
        elif self.keeps_stats:
            rest, first = self._outputs[self._n_kept :], self._n_released + self._n_kept
            forward.stats = [*self._released_stats, *output_stats(rest, first)]
        if is_remote(main):
            forward.extremes.append(self._extremes(output, loss, main.device))
        elif not (
            all(map(is_finite, dense_tensors(output))) if loss is None else math.isfinite(value)
        ):
            forward.producer = self._extremes(output, loss, main.device).producer()

    def _extremes(self, output: Any, loss: Tensor | None, device: torch.device) -> Extremes:
        """Reduce the outputs of the modules and the model, without waiting for the device."""
        outs = [
            (name, module, one) for name, module, out in self._outputs for one in dense_tensors(out)
        ]
        outer = [*dense_tensors(output)]
        n_deciding = len(outer) if loss is None else 1
        if loss is not None:  # scalars are parts of the loss, or the loss itself
            outer = [one for one in outer if one.dim() and one is not loss]
        root = self.prefix.rstrip(".") or MODEL_OUTPUT
        outs += [(root, self._model, one) for one in outer]
        outs += [] if loss is None else [("", self._model, loss)]
        # A float mask contains -inf by design, so only the maximum of an input is checked.
        inputs = [one for value in self._inputs for one in dense_tensors(value) if one.numel()]
        values = [*(one.max() for one in inputs), *(max_abs(tensor) for _, _, tensor in outs)]
        sources = [(name, module, tensor.dtype) for name, module, tensor in outs]
        return Extremes(stack_numbers(values, device), len(inputs), n_deciding, sources)

    def _release(self) -> None:
        self._outputs.clear()
        self._released_stats = []
        self._n_kept = self._n_released = 0
        self._inside_s, self._inputs = 0.0, ()

    def _on_output_gradient(self, forward: StepPasses, is_loss: bool, grad: Tensor) -> None:
        started = time.perf_counter()
        passes = self.passes
        self._count(forward)
        if not is_loss:
            passes.output_gradient_norms.append(max_abs(grad.detach()))
        # If one backward pass goes through several forward passes, the first hook is its start.
        number = torch_private.backward_number()
        if number == passes.last_backward:
            return
        passes.last_backward = number
        passes.n_backward += 1
        self._listener.on_backward_pass()
        if not passes.losses and (loss := loop_calls.current_loss()) is not None:
            value = loss.detach().clone() if is_remote(loss) else loss.item()
            passes.backward_losses.append(value)
        torch_private.call_after_backward(partial(self._on_backward_end, passes, started))

    def _on_backward_end(self, passes: StepPasses, started: float) -> None:
        passes.backward_s += time.perf_counter() - started
        self._listener.on_backward_pass_end()


def _names_of(device: torch.device) -> tuple[str, str]:
    """The kind of a device, and its name."""
    return device.type, str(device)


def loss_of(output: Any) -> Tensor | None:
    """The loss in a model's output: `.loss`, the key "loss", or the output if it is a scalar."""
    if isinstance(output, (dict, Mapping)):  # the first is tested faster
        loss = output.get("loss")
    elif isinstance(output, Tensor):
        loss = output if output.dim() == 0 else None  # (1,) may be the prediction of a batch of 1
    else:
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        return None
    return loss


def blocks_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers: members of module lists at any depth, and the modules beside those."""
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, lists):
            yield from ((f"{path}.{key}", one) for key, one in child.named_children())
        elif any(isinstance(one, lists) for one in child.modules()):
            yield from blocks_of(child, f"{path}.")
        else:
            yield path, child


def pending_stats(outputs: ModuleOutputs, device: torch.device) -> ReadStats | None:
    """Reduce module outputs without waiting for the device; None if there are none.

    The result waits and reads the records; the spread of a non-finite output is unknown (NaN).
    """
    outs = dict(_first_tensors(outputs))
    if not outs:
        return None
    numbers = stack_numbers([_reduce_output(tensor) for tensor in outs.values()], device)
    each = [stack_nonfinite_counts([tensor]) for tensor in outs.values()]
    counts = torch.cat([one.to(device, non_blocking=device.type != "cpu") for one in each])
    keys = [*outs]

    def read() -> list[LayerStatRecord]:
        rows: list[list[float]] = numbers.tolist()
        has_nonfinite = not all(math.isfinite(row[0]) for row in rows)
        n_nonfinite = counts.tolist() if has_nonfinite else [(0, 0)] * len(rows)
        return [_stat_record(*one) for one in zip(keys, rows, n_nonfinite, strict=True)]

    return read


def output_stats(outputs: ModuleOutputs, first: int = 0) -> list[LayerStatRecord]:
    """Statistics of module outputs; waits for each, with more passes if it is non-finite.

    The records count the outputs from `first` on.
    """
    records = []
    for key, tensor in _first_tensors(outputs, first):
        row = _reduce_output(tensor.float() if tensor.dtype.itemsize < 4 else tensor).tolist()
        record = _stat_record(key, row, (0, 0))
        if not math.isfinite(row[0]):
            (facts,) = tensor_facts([tensor])
            record = LayerStatRecord(*key[:2], **facts._asdict(), norm=row[0])
        records.append(record)
    return records


def _first_tensors(outputs: ModuleOutputs, first: int = 0) -> Iterator[tuple[OutputKey, Tensor]]:
    for index, (name, _, output) in enumerate(outputs, first):
        tensor = next(dense_tensors(output), None)
        if tensor is not None:
            yield (index, name, tensor.numel()), tensor.detach()


def _reduce_output(tensor: Tensor) -> Tensor:
    """Norm, mean, minimum and maximum (4,), in three passes."""
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    if not tensor.numel():
        return tensor.new_zeros(4, dtype=wide)
    norm, mean = torch.linalg.vector_norm(tensor, dtype=wide), tensor.mean(dtype=wide)
    return torch.stack([norm, mean, *(end.to(wide) for end in torch.aminmax(tensor))])


def _stat_record(key: OutputKey, row: Sequence[float], counts: Sequence[int]) -> LayerStatRecord:
    index, name, n_values = key
    n_nan, n_inf = counts
    norm, mean, least, most = row
    deviation = math.nan
    if not n_values or n_nan or n_inf:
        least = most = mean = math.nan
    elif math.isfinite(norm):  # else the squares left the range
        deviation = math.sqrt(max(norm * norm / n_values - mean * mean, 0.0))
    return LayerStatRecord(index, name, n_nan, n_inf, least, most, mean, deviation, norm)


class Extremes(Struct, frozen=True):
    """The largest values of the inputs of one forward pass, and of its modules' outputs.

    `values` are still on their device: the first `n_inputs` are maxima of inputs, the others the
    largest magnitudes of outputs, in the order of `sources`. There is an anomaly only if one of the
    last `n_deciding` is non-finite.
    """

    values: Tensor
    n_inputs: int
    n_deciding: int
    sources: Sequence[tuple[str, nn.Module, torch.dtype]]
    """The name of a module ("" for a loss), the module, and the dtype of a tensor it returned."""

    def producer(self, *, is_updated: bool = False) -> AnomalyOrigin | None:
        """The origin of the first non-finite output: the inputs, weights, a module, or the loss.

        Waits for the device. `is_updated` says that the weights may have changed since.
        """
        values = self.values.tolist()
        inputs, outputs = values[: self.n_inputs], values[self.n_inputs :]
        nonfinite = [at for at, value in enumerate(outputs) if not math.isfinite(value)]
        if not nonfinite or nonfinite[-1] < len(outputs) - self.n_deciding:
            return None  # an inner -inf, as masks have it, is not an anomaly
        if any(not value < math.inf for value in inputs):
            return AnomalyOrigin("input", "", detail="the batch")
        name, module, dtype = self.sources[nonfinite[0]]
        if not name:
            return AnomalyOrigin("loss", "")
        kind, detail = "module", str(dtype).removeprefix("torch.")
        n_carriers = len({self.sources[at][0] for at in nonfinite} - {name, MODEL_OUTPUT, ""})
        bad = next((n for n, one in module.named_parameters() if not one.isfinite().all()), None)
        if bad is not None and is_updated:  # the update may have made the weights so
            detail = f"{detail}; {UNCHECKED_WEIGHTS}"
        elif bad is not None:
            kind, n_carriers = "weights", n_carriers + 1
            prefix = "" if name == MODEL_OUTPUT else f"{name}."
            name = prefix + bad.removeprefix("_orig_mod.")
        class_name = type(module).__name__ if kind == "module" else ""
        return AnomalyOrigin(kind, name, n_carriers, detail, class_name)


def is_remote(tensor: Tensor) -> bool:
    """Whether reading a tensor would wait for its device."""
    return not tensor.is_cpu


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite, after a synchronisation."""
    return math.isfinite((tensor if tensor.numel() == 1 else max_abs(tensor)).item())


def max_abs(tensor: Tensor) -> Tensor:
    """The largest magnitude in a tensor, NaN if it has one; 0-dim, on the tensor's device."""
    if not tensor.numel():
        return tensor.new_zeros(())
    if is_remote(tensor):
        largest: Tensor = torch.linalg.vector_norm(tensor, math.inf)
        return largest
    low, high = torch.aminmax(tensor)  # on a CPU fifteen times as fast
    return torch.maximum(high, -low)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in a module's input or output, one level deep."""
    parts: Iterable[Any] = (value,)
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, Sequence):
        parts = value
    for one in parts:
        if isinstance(one, Tensor) and one.is_floating_point():
            yield one


def dense_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors that torch can reduce: neither float8 nor sparse."""
    for one in floating_tensors(value):
        if one.layout is torch.strided and one.dtype.itemsize > 1:
            yield one


def stack_numbers(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers of any device and precision as one tensor on `device`; waits only for a CPU."""
    if not values:
        return torch.zeros(0, device="cpu")
    is_double = any(value.dtype is torch.float64 for value in values)
    dtype = torch.float64 if is_double else torch.float32
    non_blocking = device.type != "cpu"  # on the CPU, a copy could be read before it is complete
    return torch.stack([value.to(device, dtype, non_blocking=non_blocking) for value in values])
