"""The parameters of a model, and the learning rates of an optimizer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from flexinspect.records.training_step import group_of
from flexinspect_hooks.python_internals.torch_private import module_tables


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """The learning rate of each parameter group, NaN if it is unknown.

    Adafactor with relative steps, for example, has None there and computes its rate by itself.
    """
    return tuple(_learning_rate(group.get("lr")) for group in optimizer.param_groups)


def _learning_rate(rate: Any) -> float:
    try:
        return float(rate)
    except (TypeError, ValueError):
        return math.nan  # always the same object, so that unknown rates compare as unchanged


class NamedParameter(NamedTuple):
    """A parameter with its name, its group, and whether it is a matrix.

    Only the gradients of matrices are checked for vanishing.
    """

    name: str
    parameter: nn.Parameter
    group: str
    is_matrix: bool


NamedParameters = Sequence[NamedParameter]


def _parameters_of(model: nn.Module) -> list[NamedParameter]:
    # `torch.compile` adds this prefix to all names.
    named = ((name.removeprefix("_orig_mod."), one) for name, one in model.named_parameters())
    return [NamedParameter(name, one, group_of(name), one.dim() > 1) for name, one in named]


def trainable(model: nn.Module) -> list[NamedParameter]:
    """The parameters that require gradients, in the model's order."""
    return [one for one in _parameters_of(model) if one.parameter.requires_grad]


class ParameterList:
    """A cache of the parameters of one model.

    Walking through a model takes ten times as long as checking that all of its parts are the same.
    The model itself is not kept alive.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._all: list[NamedParameter] = []
        self._tables: Sequence[Mapping[str, Any]] = []
        self._parts: Sequence[tuple[Mapping[str, Any], str, Any]] = []

    def trainable_of(self, model: nn.Module) -> list[NamedParameter]:
        """The parameters that require gradients now."""
        if self._model is None or self._model() is not model or self._has_changed():
            self._walk(model)
        return [one for one in self._all if one.parameter.requires_grad]

    def _walk(self, model: nn.Module) -> None:
        every = _parameters_of(model)
        tables = [table for module in model.modules() for table in module_tables(module)]
        parts = [(one, name, part) for one in tables for name, part in one.items()]

        def forget(_: object) -> None:
            for cached in (every, tables, parts):
                cached.clear()

        self._all, self._tables, self._parts = every, tables, parts
        self._model = weakref.ref(model, forget)

    def _has_changed(self) -> bool:
        if sum(map(len, self._tables)) != len(self._parts):
            return True
        return any(table.get(name) is not part for table, name, part in self._parts)
