"""What an optimizer keeps for a parameter: its moments and its count of steps, as of one moment.

Tensors are told apart by identity and by version, so a look waits for no device. A version does not
count what kernels of other packages or operations on `.data` write, so a look can also have values.
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


class StateLook(Struct, frozen=True):
    """The state of one parameter at one moment."""

    moments: Mapping[str, Key]
    """Identity and version by name."""
    count: float | None
    """How many steps the optimizer has counted; None if unknown, or on a device."""
    version: int | None
    """Of the parameter."""
    values: Mapping[str, Tensor] | None = None
    """Samples of the moments, of the parameter ("parameter") and of the gradient ("gradient")."""

    @classmethod
    def at(cls, optimizer: Optimizer, one: nn.Parameter, *, with_values: bool) -> StateLook | None:
        """Look at the state of a parameter; None if it has none that is known."""
        state = state_of(optimizer, one)
        tensors = {
            name: value
            for name, value in state.items()
            if name in MOMENTS and isinstance(value, Tensor)
        }
        count = _count(state.get(COUNTER))
        if not tensors and count is None:
            return None
        moments = {name: (weakref.ref(value), version_of(value)) for name, value in tensors.items()}
        if not with_values:
            return cls(moments, count, version_of(one))
        values = {"parameter": sample(one).clone()}
        if one.grad is not None and not one.grad.is_sparse:
            values["gradient"] = sample(one.grad).clone()
        values |= {name: sample(value).clone() for name, value in tensors.items()}
        return cls(moments, count, version_of(one), values)

    def same_moments(self, other: StateLook) -> set[str]:
        """Names of moments that are the same tensor in the same version as in another look."""
        return {
            name
            for name, (ref, version) in self.moments.items()
            if name in other.moments
            and (ref() is not None and ref() is other.moments[name][0]())
            and version == other.moments[name][1]
        }


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    """The state of a parameter, empty if it has none; none is made."""
    states: Any = getattr(optimizer, "state", None)
    state = states.get(parameter) if isinstance(states, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def sample(tensor: Tensor) -> Tensor:
    """Evenly spaced values of a tensor, at an odd distance so as not to stay in one column."""
    values = local_part(tensor.detach()).reshape(-1)
    return values[:: (-(-values.numel() // SAMPLE_SIZE)) | 1]


def version_of(tensor: Tensor) -> int | None:
    """The version of a tensor, None for one of inference mode, which has none."""
    return None if tensor.is_inference() else tensor_version(tensor)


def _count(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    is_read = isinstance(value, Tensor) and value.is_cpu and value.numel() == 1
    return float(value) if is_read else None
