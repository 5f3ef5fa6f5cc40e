"""What a program does between two optimizer steps, in order, and with inputs of which sizes.

Both are an event of a step only if they differ from those of the step before, so a loop that does
the same in each step has one event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.records.training_step import (
    CALLS_EVENT,
    MAX_CALLS,
    MAX_UNIT,
    PARAMETERS_EVENT,
    collapse_repeats,
)
from flexinspect_hooks.training.evaluation_passes import Note
from flexinspect_hooks.training.forward_passes import ModuleOutputs, floating_tensors
from flexinspect_hooks.training.model_checks import clean_name

MAX_SIZE_CHANGES = 200  # of the inputs that are recorded: sizes that always change say nothing
MAX_INPUTS = 32  # of a forward pass
MAX_PARAMETERS = 4096  # that are described


class CallOrder:
    """The calls of one training since its last step; `take` returns its events."""

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._inputs: dict[str, list[Any]] | None = None
        self._modes: set[str] = set()
        self._n_repeated = 0
        self._last: dict[str, Any] = {}
        self._n_size_changes = 0
        self.output_dtypes: dict[str, str] = {}
        """Of the first output of each module whose outputs were kept in the first step."""

    def add(self, call: str) -> None:
        """Add a call. Units of calls that repeat, as with accumulation, are kept once."""
        if len(self._calls) < MAX_CALLS:
            may_repeat = call in self._calls[-MAX_UNIT:]
            self._calls.append(call)
            if may_repeat:
                collapse_repeats(self._calls)

    def add_forward(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add a forward pass with gradients; its inputs are kept if it is the first of the step."""
        self.add("forward")
        self._modes.add("training" if model.training else "evaluation")
        if self._inputs is None and self._n_size_changes <= MAX_SIZE_CHANGES:
            named = [*((str(n), one) for n, one in enumerate(args)), *kwargs.items()]
            self._inputs = {
                name: [_dtype_name(one.dtype), *map(int, one.shape)]
                for name, one in named[:MAX_INPUTS]
                if isinstance(one, Tensor)
            }

    def add_outputs(self, outputs: ModuleOutputs) -> None:
        """Note the dtypes of the outputs of modules."""
        for name, _, output in outputs:
            tensor = next(floating_tensors(output), None)
            if tensor is not None and len(self.output_dtypes) < MAX_PARAMETERS:
                self.output_dtypes[clean_name(name)] = _dtype_name(tensor.dtype)

    def add_repeated_batch(self) -> None:
        """The data loader returned a batch that equals an earlier one."""
        self._n_repeated += 1

    def take(self) -> list[Note]:
        """The event of the step that ends, if anything differs from the step before."""
        now: dict[str, Any] = {"calls": self._calls, "modes": sorted(self._modes)}
        now["repeated_batches"] = self._n_repeated
        if self._inputs is not None:
            now["inputs"] = self._inputs
            self._n_size_changes += self._last.get("inputs", self._inputs) != self._inputs
        self._calls, self._inputs, self._modes, self._n_repeated = [], None, set(), 0
        if now == self._last:
            return []
        self._last = now
        return [(CALLS_EVENT, f"Between two steps: {', '.join(now['calls'])}.", now)]


def parameter_note(model: nn.Module, optimizer: Optimizer | None, facts: Mapping[str, Any]) -> Note:
    """The event that describes each parameter: dtype, size, and which group trains it.

    It also has the other `facts`.
    The number of its group in the optimizer is -1 without one, and None for a frozen parameter.
    """
    groups: dict[int, int] = {}
    if optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            groups |= {id(one): number for one in group["params"]}
    described: dict[str, Any] = {}
    for name, one in model.named_parameters():
        if len(described) == MAX_PARAMETERS:
            break
        held_by = groups.get(id(one), -1) if one.requires_grad else None
        dtype = _dtype_name(one.dtype)
        described[clean_name(name)] = {"dtype": dtype, "size": [*one.shape], "group": held_by}
    text = f"{len(described)} parameters are described."
    return PARAMETERS_EVENT, text, {"parameters": described, **facts}


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
