"""What an optimizer keeps for a parameter: its moments and its count of steps, as of one moment.

Tensors are compared by identity and version, which does not synchronize with a device. A version
does not count what kernels of other packages or operations on `.data` write, so a look can also
have values.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

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
    is_brief: bool = False
    """Whether the moments were not looked at."""

    @classmethod
    def brief(cls, optimizer: Optimizer, one: nn.Parameter) -> StateSnapshot | None:
        """Look at the count of a parameter's state alone; None if it has no state."""
        state = state_of(optimizer, one)
        if not state:
            return None
        return cls({}, _count(state.get(COUNTER)), version_of(one), is_brief=True)

    @classmethod
    def at(
        cls, optimizer: Optimizer, one: nn.Parameter, *, with_values: bool
    ) -> StateSnapshot | None:
        """Look at the state of a parameter; None if it has none that is known."""
        moments: dict[str, Key] = {}
        count = None
        state = state_of(optimizer, one)
        for name, value in state.items():
            if name == COUNTER:
                count = _count(value)
            elif name in MOMENTS and isinstance(value, Tensor):
                moments[name] = (weakref.ref(value), version_of(value))
        if not moments and count is None:
            return None
        if not with_values:
            return cls(moments, count, version_of(one))
        values = {"parameter": sample(one).clone()}
        if one.grad is not None and not one.grad.is_sparse:
            values["gradient"] = sample(one.grad).clone()
        values |= {name: sample(state[name]).clone() for name in moments}
        return cls(moments, count, version_of(one), values)

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


def _count(value: Any) -> float | None:
    if isinstance(value, Tensor):
        # Of a tensor that is split, other ranks would have to take part.
        is_read = value.is_cpu and value.numel() == 1 and not hasattr(value, "placements")
        return float(value.item()) if is_read else None
    return float(value) if isinstance(value, (int, float)) else None
