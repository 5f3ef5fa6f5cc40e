"""What an optimizer tells of itself and of its step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from flexinspect.records.training_step import group_of


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rate of each parameter group, NaN where it is not known.

    Adafactor with relative steps, for one, keeps None there and finds its rate by itself.
    """
    return tuple(_learning_rate(group.get("lr")) for group in optimizer.param_groups)


def _learning_rate(rate: Any) -> float:
    try:
        return float(rate)
    except (TypeError, ValueError):
        return math.nan  # always the same object, so that unknown rates compare as unchanged


def has_closure(args: Any, kwargs: Any) -> bool:
    """Tell whether an optimizer's step was given a closure, from the arguments of its hooks."""
    # The optimizer itself comes first among the arguments.
    return any(map(callable, args[1:])) or callable(kwargs.get("closure"))


def remaining_scale(optimizer: Optimizer) -> float:
    """Return what gradients are still multiplied with: a fused optimizer divides by itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


class NamedParameter(NamedTuple):
    """A parameter, and what is counted of it: its group, and whether it can vanish as a matrix."""

    name: str
    parameter: nn.Parameter
    group: str
    is_matrix: bool


NamedParameters = Sequence[NamedParameter]


def parameters_of(model: nn.Module) -> list[NamedParameter]:
    """Return all parameters of a model, in its order."""
    # `torch.compile` puts a name of its own in front of all others.
    named = ((name.removeprefix("_orig_mod."), one) for name, one in model.named_parameters())
    return [NamedParameter(name, one, group_of(name), one.dim() > 1) for name, one in named]


def trainable(model: nn.Module) -> list[NamedParameter]:
    """Return the parameters that gradients are wanted for, by name, in the model's order."""
    return [one for one in parameters_of(model) if one.parameter.requires_grad]


def placement_of(model: nn.Module) -> dict[str, int]:
    """Return how many values of the parameters are on each device."""
    found: dict[str, int] = {}
    for one in model.parameters():
        found[str(one.device)] = found.get(str(one.device), 0) + one.numel()
    return found


class ParameterList:
    """The trainable parameters of the model asked about last.

    Walking through a model takes ten times as long as seeing that none of its parts is another one.
    The model itself is not kept alive.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._all: list[NamedParameter] = []
        self._tables: list[Mapping[str, Any]] = []
        self._parts: list[tuple[Mapping[str, Any], str, Any]] = []

    def trainable_of(self, model: nn.Module) -> list[NamedParameter]:
        """Return the parameters that gradients are wanted for now."""
        if self._model is None or self._model() is not model or self._has_changed():
            self._walk(model)
        return [one for one in self._all if one.parameter.requires_grad]

    def _walk(self, model: nn.Module) -> None:
        every, tables = parameters_of(model), list[Mapping[str, Any]]()
        for module in model.modules():
            tables += (module._modules, module._parameters)
        parts = [(one, name, part) for one in tables for name, part in one.items()]

        def forget(_: object) -> None:
            for held in (every, tables, parts):
                held.clear()

        self._all, self._tables, self._parts = every, tables, parts
        self._model = weakref.ref(model, forget)

    def _has_changed(self) -> bool:
        if sum(map(len, self._tables)) != len(self._parts):
            return True
        return any(table.get(name) is not part for table, name, part in self._parts)
