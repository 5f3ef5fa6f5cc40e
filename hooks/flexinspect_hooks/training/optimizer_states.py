"""What an optimizer keeps for a parameter: its moments and its count of steps, as of one moment.

Tensors are compared by identity and version, which does not synchronize with a device. A version
does not count what kernels of other packages or operations on `.data` write, so a look can also
have values.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training.gradient_statistics import local_part

MOMENTS = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "exp_avgs", "exp_avg_sqs", "exp_inf", "exp_avg_diff"),
        *("exp_avg_row", "exp_avg_col", "exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var"),
        *("momentum_buffer", "momentum", "velocity", "square_avg", "grad_avg", "sum", "prev"),
        *("m", "v"),
    )
)
"""Names of tensors that every step of an optimizer changes. Others, such as initial weights that a
penalty refers to, may stay as they are."""
COUNTER = "step"
SAMPLE_SIZE = 64  # values of a tensor that are compared

Key = tuple["weakref.ref[Tensor]", int | None]


class Pace(NamedTuple):
    """What one step adds: to the count of steps, and to the versions of the tensors."""

    n_counted: float
    counter_version: int
    version: int


class StateSnapshot(Struct, frozen=True):
    """The state of one parameter at one moment."""

    moments: Mapping[str, Key]
    """Identity and version by name."""
    count: float | None
    """How many steps the optimizer has counted; None if unknown, or on a device."""
    version: int | None
    """Of the parameter."""
    values: Mapping[str, Tensor] | None = None
    """Samples of the moments, of the parameter ("parameter") and of the gradient ("gradient")."""
    counter: tuple[Tensor, int | None] | None = None
    """The tensor that counts the steps, and its version; None if it is a number."""
    is_brief: bool = False
    """Whether the moments were not looked at."""

    @classmethod
    def brief(cls, optimizer: Optimizer, one: nn.Parameter) -> StateSnapshot | None:
        """Look at the count of a parameter's state alone; None if it has no state."""
        state = state_of(optimizer, one)
        if not state:
            return None
        value = state.get(COUNTER)
        return cls({}, _count(value), version_of(one), counter=_counter(value), is_brief=True)

    def pace_to(self, end: StateSnapshot) -> Pace | None:
        """What the step between this look and `end` added; None if it cannot be told."""
        if self.counter is None or end.counter is None or self.counter[0] is not end.counter[0]:
            return None
        if self.count is None or end.count is None:
            return None
        versions = (self.counter[1], end.counter[1], self.version, end.version)
        if None in versions:
            return None
        before, after, first, last = cast(tuple[int, int, int, int], versions)
        return Pace(end.count - self.count, after - before, last - first)

    def after(self, n: int, pace: Pace) -> StateSnapshot:
        """What a look would have found `n` steps later, if each added the same."""
        count = None if self.count is None else self.count + n * pace.n_counted
        version = None if self.version is None else self.version + n * pace.version
        counter = self.counter
        if counter is not None and counter[1] is not None:
            counter = counter[0], counter[1] + n * pace.counter_version
        return StateSnapshot({}, count, version, counter=counter, is_brief=True)

    def is_current_after(
        self, n: int, pace: Pace, optimizer: Optimizer, parameter: nn.Parameter
    ) -> bool:
        """Whether the counter of the steps is what it is `n` steps after this look."""
        if self.counter is None or self.counter[1] is None:
            return False
        tensor, expected = self.counter[0], self.counter[1] + n * pace.counter_version
        is_same = state_of(optimizer, parameter).get(COUNTER) is tensor
        return is_same and version_of(tensor) == expected

    @classmethod
    def at(
        cls, optimizer: Optimizer, one: nn.Parameter, *, with_values: bool
    ) -> StateSnapshot | None:
        """Look at the state of a parameter; None if it has none that is known."""
        moments: dict[str, Key] = {}
        count = counter = None
        state = state_of(optimizer, one)
        for name, value in state.items():
            if name == COUNTER:
                count, counter = _count(value), _counter(value)
            elif name in MOMENTS and isinstance(value, Tensor):
                moments[name] = (weakref.ref(value), version_of(value))
        if not moments and count is None:
            return None
        if not with_values:
            return cls(moments, count, version_of(one), counter=counter)
        values = {"parameter": sample(one).clone()}
        if one.grad is not None and not one.grad.is_sparse:
            values["gradient"] = sample(one.grad).clone()
        values |= {name: sample(state[name]).clone() for name in moments}
        return cls(moments, count, version_of(one), values, counter)

    def same_moments(self, other: StateSnapshot) -> set[str]:
        """Names of moments that are the same tensor in the same version as in another look."""
        same = set()
        for name, (ref, version) in self.moments.items():
            known = other.moments.get(name)
            if known is not None and known[1] == version:
                tensor = ref()
                if tensor is not None and tensor is known[0]():
                    same.add(name)
        return same


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    """The state of a parameter, empty if it has none; none is made."""
    states: Any = getattr(optimizer, "state", None)
    state = states.get(parameter) if isinstance(states, (dict, Mapping)) else None
    return state if isinstance(state, (dict, Mapping)) else {}


def sample(tensor: Tensor) -> Tensor:
    """Evenly spaced values of a tensor, at an odd distance so as not to stay in one column."""
    values = local_part(tensor.detach()).reshape(-1)
    return values[:: (-(-values.numel() // SAMPLE_SIZE)) | 1]


def version_of(tensor: Tensor) -> int | None:
    """The version of a tensor, None for one of inference mode, which has none."""
    try:
        return tensor_version(tensor)
    except RuntimeError:
        return None


def _counter(value: Any) -> tuple[Tensor, int | None] | None:
    return (value, version_of(value)) if isinstance(value, Tensor) else None


def _count(value: Any) -> float | None:
    if isinstance(value, Tensor):
        # Of a tensor that is split, other ranks would have to take part.
        is_read = value.is_cpu and value.numel() == 1 and not hasattr(value, "placements")
        return float(value.item()) if is_read else None
    return float(value) if isinstance(value, (int, float)) else None
