"""The forward and backward passes of a training step: times, the loss, the first sick output.

Module hooks only keep references, and let go of them when the root forward is over. They are looked
at only when the model's own output tells of trouble, so a healthy forward costs the hooks alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.step import LayerStatRecord
from flexinspect.records.training_step import AnomalyOrigin
from flexinspect_hooks.training.tensor_statistics import (
    MODEL_OUTPUT,
    Extremes,
    dense_tensors,
    floating_tensors,
    is_finite,
    is_remote,
    max_abs,
    reduce_extremes,
    stack_numbers,
    tensor_facts,
)

Remove = Callable[[], None]

MAX_PENDING_FORWARDS = 64
"""Forwards without a backward pass that are kept at most, until the step's end."""

MAX_MICRO_BATCHES = 4096
"""Micro-batches of a step that are kept at most: the optimizer may never step."""

HOOK_COST_S = 2e-6
"""What a hook that only keeps a reference takes; measured, because timing it would cost more."""


@dataclass(slots=True)
class ForwardPass:
    """What one forward left: part of a step only when a backward pass follows it."""

    seconds: float
    is_share: bool
    losses: list[Tensor | float] = field(default_factory=list)
    extremes: list[Extremes] = field(default_factory=list)
    stats: list[LayerStatRecord] = field(default_factory=list)
    pending: PendingStats | None = None
    producer: AnomalyOrigin | None = None
    device: str = ""
    autocast: str = ""
    is_counted: bool = False


@dataclass(slots=True)
class StepPasses:
    """What the passes since the last optimizer step left."""

    n_forward: int = 0
    n_backward: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    losses: deque[Tensor | float] = field(default_factory=lambda: deque(maxlen=MAX_MICRO_BATCHES))
    are_shares: bool = False
    """Whether the losses of micro-batches add up to that of the step, instead of their mean."""
    producer: AnomalyOrigin | None = None
    output_gradient_norms: deque[Tensor | float] = field(
        default_factory=lambda: deque(maxlen=MAX_MICRO_BATCHES)
    )
    device: str = ""
    autocast: str = ""
    stats: list[LayerStatRecord] = field(default_factory=list)
    pending: PendingStats | None = None
    extremes: deque[Extremes] = field(default_factory=lambda: deque(maxlen=MAX_MICRO_BATCHES))
    is_updated: bool = False
    """Whether the weights may have changed since."""

    def add(self, one: ForwardPass) -> None:
        """Count in a forward that the step learns from."""
        self.n_forward += 1
        self.forward_s += one.seconds
        self.are_shares = one.is_share
        self.losses += one.losses
        self.extremes += one.extremes
        self.stats, self.pending = one.stats or self.stats, one.pending or self.pending
        self.device, self.autocast = one.device or self.device, one.autocast or self.autocast
        self.producer = self.producer or one.producer

    def resolve(self) -> None:
        """Read what an accelerator was left to compute, and find the producer in it."""
        if self.pending is not None:
            self.stats, self.pending = self.pending.records(), None
        for one in self.extremes:
            if self.producer is None:
                self.producer = one.producer(is_updated=self.is_updated)
        self.extremes.clear()


class ForwardWatch:
    """Hooks on a model, and what its passes left since `take` was called last.

    `is_fine` keeps the outputs of the smallest modules instead of the layers', `keeps_stats` makes
    statistics of the layers' outputs; both may change between two forwards.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_begin: Callable[[], None],
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        self.watches_leaves = False
        self.keeps_stats = False
        self.own_s = 0.0
        self.passes = StepPasses()
        self._model = model
        self._on_begin, self._guarded = on_begin, guarded
        self._outputs: list[tuple[str, nn.Module, Any]] = []
        self._inputs: tuple[Any, ...] = ()
        self._is_open = self._is_share = False
        self._pending: deque[ForwardPass] = deque(maxlen=MAX_PENDING_FORWARDS)
        self._started = 0.0
        self._backward = -1
        self._removers: list[Remove] = []
        self._module_removers: list[Remove] = []
        self._watched_leaves: bool | None = None

    def install(self) -> None:
        """Put the hooks in place."""
        model = self._model
        begin, end = self._guarded(self._begin), self._guarded(self._end)
        if is_compiled_in_place(model):
            self._removers.append(wrap_compiled(model, begin, end))
            return
        before = model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        # After a forward that raised too, or it would never be over.
        after = model.register_forward_hook(end, always_call=True)
        self._removers += [before.remove, after.remove]

    def remove(self) -> None:
        """Take the hooks away."""
        for removers in (self._removers, self._module_removers):
            while removers:
                removers.pop()()
        self._pending.clear()
        self._release()

    @property
    def has_forward(self) -> bool:
        """Whether there was a forward since the last `take`."""
        return bool(self._pending) or self.passes.n_forward > 0

    def count_pending(self) -> None:
        """Count in the forwards of a step whose backward pass was not seen."""
        if self.passes.n_backward == 0:
            for one in self._pending:
                self._count(one)
        self._pending.clear()

    def take(self) -> StepPasses:
        """Return what the passes left, and begin anew."""
        self._pending.clear()
        taken, self.passes = self.passes, StepPasses()
        return taken

    def _count(self, one: ForwardPass) -> None:
        if not one.is_counted:
            one.is_counted = True
            self.passes.add(one)

    # -- forward ---------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        """Put hooks on the modules whose outputs are kept now: each hook costs, wanted or not."""
        model, self._watched_leaves = self._model, self.watches_leaves
        while self._module_removers:
            self._module_removers.pop()()
        # Within a compiled model a hook would be compiled too, or break its graph.
        if is_compiled(model) or is_compiled_in_place(model):
            return
        found = leaves_of(model) if self.watches_leaves else blocks_of(model)
        for name, module in {id(one): (name, one) for name, one in found}.values():
            if module is not model:
                hook = module.register_forward_hook(self._output_hook(name))
                self._module_removers.append(hook.remove)

    def _output_hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_open:
                self._outputs.append((name, module, output))

        return keep

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_open or not torch.is_grad_enabled():
            return
        started = time.perf_counter()
        self._on_begin()
        self._release()
        if self._watched_leaves is not self.watches_leaves:
            self._hook_modules()
        self._inputs = (*args, *kwargs.values())
        # What `transformers.Trainer` hands on: then each loss is divided by the items of all.
        self._is_share = kwargs.get("num_items_in_batch") is not None
        self._is_open = True
        self._started = time.perf_counter()
        self.own_s += self._started - started

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_open:
            return
        ended = time.perf_counter()
        self._is_open = False
        try:
            if output is not None:
                with torch.no_grad():
                    self._read(output, ended)
        finally:
            self._release()
            self.own_s += time.perf_counter() - ended

    def _read(self, output: Any, ended: float) -> None:
        forward, loss = ForwardPass(ended - self._started, self._is_share), loss_of(output)
        self._pending.append(forward)
        main = loss if loss is not None else next(floating_tensors(output), None)
        if main is None:
            return
        forward.device = str(main.device)
        kind = main.device.type
        if torch.is_autocast_enabled(kind):
            forward.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if loss is not None:
            forward.losses.append(_copy_loss(loss))
        if main.requires_grad and not main.is_leaf:  # the hooks of a parameter would pile up
            hook = self._backward_hook(forward, is_loss=loss is not None)
            main.register_hook(hook)  # type: ignore[no-untyped-call]
        self.own_s += len(self._outputs) * HOOK_COST_S
        if self.keeps_stats and is_remote(main):
            forward.pending = pending_stats(self._outputs, main.device)
        elif self.keeps_stats:
            forward.stats = output_stats(self._outputs)
        if is_remote(main):
            forward.extremes.append(self._extremes(output, loss, main.device))
        elif not all(map(is_finite, dense_tensors(output) if loss is None else (loss,))):
            forward.producer = self._extremes(output, loss, main.device).producer()

    def _extremes(self, output: Any, loss: Tensor | None, device: torch.device) -> Extremes:
        """Reduce what was kept, and what the model returned, without waiting for the device."""
        kept = [
            (name, module, one) for name, module, out in self._outputs for one in dense_tensors(out)
        ]
        whole = [(MODEL_OUTPUT, self._model, one) for one in dense_tensors(output)]
        if loss is None:
            return reduce_extremes(self._inputs, [*kept, *whole], len(whole), device)
        # Other numbers are parts of the loss, or the loss itself.
        whole = [one for one in whole if one[2].dim() and one[2] is not loss]
        return reduce_extremes(self._inputs, [*kept, *whole, ("", self._model, loss)], 1, device)

    def _release(self) -> None:
        self._outputs.clear()
        self._inputs = ()

    # -- backward --------------------------------------------------------------------------------

    def _backward_hook(self, forward: ForwardPass, *, is_loss: bool) -> Callable[[Tensor], None]:
        def begun(grad: Tensor) -> None:
            started = time.perf_counter()
            passes = self.passes
            self._count(forward)
            if not is_loss:
                passes.output_gradient_norms.append(max_abs(grad.detach()))
            # Of several forwards that one backward pass goes through, the first hook is its begin.
            number = torch._C._current_graph_task_id()
            if number == self._backward:
                return
            self._backward = number
            passes.n_backward += 1

            def over() -> None:
                passes.backward_s += time.perf_counter() - started

            torch.autograd.Variable._execution_engine.queue_callback(over)

        return self._guarded(begun)


def _copy_loss(loss: Tensor) -> Tensor | float:
    """Return a loss as it is now, for the program may go on to change its own."""
    return loss.detach().clone() if is_remote(loss) else loss.item()


def loss_of(output: Any) -> Tensor | None:
    """Return the loss that a model returned: `.loss`, the key "loss", or a scalar by itself."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, Tensor):
        found = output if output.dim() == 0 else None  # a batch of one has one prediction
    else:
        found = getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        return None
    return found


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a model is what `torch.compile` returned. Asks without loading the compiler."""
    return type(model).__name__ == "OptimizedModule"


def is_compiled_in_place(model: nn.Module) -> bool:
    """Tell whether `model.compile()` was called: then its hooks would be compiled with it."""
    return getattr(model, "_compiled_call_impl", None) is not None


def wrap_compiled(model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Remove:
    """Call `begin` and `end` around what `model.compile()` made; returns what ends it."""
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        begin(model, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            end(model, args, output)
        return output

    def restore() -> None:
        if model._compiled_call_impl is call:
            model._compiled_call_impl = compiled

    model._compiled_call_impl = call
    return restore


def leaves_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that hold no others, in the model's order."""
    return [(name, one) for name, one in model.named_modules() if not any(one.children())]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers: members of module lists, and whatever stands beside them.

    Goes down where a module holds a list somewhere, and takes it whole where it does not.
    """
    return list(_blocks("", model))


def _blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        if isinstance(child, lists):
            yield from ((f"{path}.{key}", one) for key, one in child.named_children())
        elif any(isinstance(one, lists) for one in child.modules()):
            yield from _blocks(path, child)
        else:
            yield path, child


ModuleOutputs = Sequence[tuple[str, nn.Module, Any]]
"""Modules by name, with what they returned."""

OutputKey = tuple[int, str, int]
"""A module's place, its name, and how many values its output has."""


@dataclass(frozen=True, slots=True)
class PendingStats:
    """Statistics of the outputs of one forward, still on their device.

    A row of `numbers` is norm, mean, least and greatest value, of `counts` the NaN and Inf.
    """

    numbers: Tensor
    counts: Tensor
    keys: tuple[OutputKey, ...]

    def records(self) -> list[LayerStatRecord]:
        """Return the records after one synchronisation; a second one tells how much is sick.

        Least, greatest, mean and deviation of an output that is not finite are unknown (NaN).
        """
        rows: list[list[float]] = self.numbers.tolist()
        is_sick = not all(math.isfinite(row[0]) for row in rows)
        counts = self.counts.tolist() if is_sick else [(0, 0)] * len(rows)
        return [_stat_record(*one) for one in zip(self.keys, rows, counts, strict=True)]


def pending_stats(outputs: ModuleOutputs, device: torch.device) -> PendingStats | None:
    """Reduce the outputs that were kept, without waiting for the device; None where none is."""
    outs = list(_first_tensors(outputs))
    if not outs:
        return None
    numbers = stack_numbers([_reduce_output(tensor) for _, tensor in outs], device)
    counts = [torch.stack([tensor.isnan().sum(), tensor.isinf().sum()]) for _, tensor in outs]
    later = device.type != "cpu"
    placed = torch.stack([one.to(device, non_blocking=later) for one in counts])
    return PendingStats(numbers, placed, tuple(of for of, _ in outs))


def output_stats(outputs: ModuleOutputs) -> list[LayerStatRecord]:
    """Return statistics of the outputs that were kept, waiting for each."""
    return [_output_stat(of, tensor) for of, tensor in _first_tensors(outputs)]


def _first_tensors(outputs: ModuleOutputs) -> Iterator[tuple[OutputKey, Tensor]]:
    for index, (name, _, output) in enumerate(outputs):
        tensor = next(dense_tensors(output), None)
        if tensor is not None:
            yield (index, name, tensor.numel()), tensor.detach()


def _reduce_output(tensor: Tensor) -> Tensor:
    """Return norm, mean, least and greatest value, in three passes."""
    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    if not tensor.numel():
        return tensor.new_zeros(4, dtype=wide)
    norm, mean = torch.linalg.vector_norm(tensor, dtype=wide), tensor.mean(dtype=wide)
    return torch.stack([norm, mean, *(end.to(wide) for end in torch.aminmax(tensor))])


def _stat_record(key: OutputKey, row: Sequence[float], counts: Sequence[int]) -> LayerStatRecord:
    index, name, n_values = key
    norm, mean, least, most = row
    n_nan, n_inf = counts
    if not n_values or n_nan + n_inf:
        least = most = mean = deviation = math.nan
    elif math.isfinite(norm):
        deviation = math.sqrt(max(norm * norm / n_values - mean * mean, 0.0))
    else:
        deviation = math.nan  # the squares left the range
    return LayerStatRecord(index, name, n_nan, n_inf, least, most, mean, deviation, norm)


def _output_stat(key: OutputKey, tensor: Tensor) -> LayerStatRecord:
    """Return statistics of one output; more passes only where it is not finite."""
    row = _reduce_output(tensor.float() if tensor.dtype.itemsize < 4 else tensor).tolist()
    if math.isfinite(row[0]):
        return _stat_record(key, row, (0, 0))
    facts = tensor_facts(tensor)
    values = (facts.min_value, facts.max_value, facts.mean_value, facts.std_value)
    return LayerStatRecord(*key[:2], facts.n_nan, facts.n_inf, *values, row[0])
