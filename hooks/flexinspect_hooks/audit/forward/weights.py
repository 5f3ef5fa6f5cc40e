"""A snapshot of a model's weights, shared and not copied."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import quiet_module


class Snapshot(Struct):
    """A model's class, configuration and weights, shared and not copied, as of one moment.

    `attributes` are the numbers that modules hold besides tensors, such as the epsilon of a norm,
    by name of the module, and `classes` the names of their classes. `own_forwards` are modules
    whose `forward` was replaced in the instance.
    `grafts` are leaf modules of another library (adapters, quantised matrices), which the reference
    uses as they are. `low_rank` are modules of the program that look like an adapter: a linear
    layer with two small matrices beside it.
    """

    model_class: type
    config: Any
    tensors: dict[str, Tensor]
    grafts: dict[str, nn.Module]
    parameters: Sequence[Tensor]
    attributes: dict[str, dict[str, float]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    own_forwards: tuple[str, ...] = ()
    low_rank: dict[str, nn.Module] = field(default_factory=dict)
    children: dict[str, nn.Module] = field(default_factory=dict)

    def root(self) -> nn.Module:
        """Return a module with the program's modules under their names; its forward does nothing.

        The root of the program itself is not held, so that it can be deleted.
        """
        root = nn.Module()
        for name, module in self.children.items():
            root.add_module(name, module)
        return root

    @property
    def n_bytes(self) -> int:
        """The bytes of the weights."""
        return sum(one.nbytes for one in self.parameters)


def snapshot(model: nn.Module, moved: Mapping[str, Tensor] | None = None) -> Snapshot:
    """Return the weights of a model, without copying them.

    `moved` are parameters that a module of the program holds, by the names that they had.
    """
    parameters = list(model.parameters())
    tensors = dict(moved or {}) | dict(model.state_dict(keep_vars=True).items())
    grafts = {
        name: module for name, module in model.named_modules() if name and _is_foreign_leaf(module)
    }
    config = copy.deepcopy(getattr(model, "config", None))
    return Snapshot(
        model.__class__,
        config,
        tensors,
        grafts,
        parameters,
        {name: numbers_of(module) for name, module in model.named_modules()},
        {name: type(module).__name__ for name, module in model.named_modules() if name},
        tuple(name for name, module in model.named_modules() if name and _has_own_forward(module)),
        {name: module for name, module in model.named_modules() if name and is_low_rank(module)},
        dict(model.named_children()),
    )


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module of the program is a linear layer with two small matrices beside it."""
    if f"{type(module).__module__}.".startswith(("torch.", "transformers.", *_FOREIGN)):
        return False
    matrices = [one for one in module.parameters() if one.dim() == 2]
    if len(matrices) != 3 or not any(isinstance(one, nn.Linear) for one in module.children()):
        return False
    *small, base = sorted(matrices, key=Tensor.numel)
    ranks = set(small[0].shape) & set(small[1].shape)
    return bool(ranks) and min(ranks) < min(base.shape)


def is_pure(module: nn.Module, n_inputs: int, n_outputs: int) -> bool:
    """Whether a module gives the same (rows, outputs) twice for the same (rows, inputs)."""
    first = next(module.parameters())
    maker = torch.Generator().manual_seed(0)
    rows = torch.randn(3, n_inputs, generator=maker).to(first.device, first.dtype)
    # In its own mode, in which the reference calls it.
    with quiet_module(module, keeps_mode=True):
        try:
            one, other = module(rows), module(rows)
        except Exception:  # a module of the program may be of any kind
            return False
    return isinstance(one, Tensor) and one.shape == (3, n_outputs) and bool((one == other).all())


def numbers_of(module: nn.Module) -> dict[str, float]:
    """Return the public attributes of a module that are numbers, without flags."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and type(value) in (int, float)
    }


def _has_own_forward(module: nn.Module) -> bool:
    # Accelerate wraps the `forward` of instances to move their inputs, which is no fault.
    return "forward" in vars(module) and not hasattr(module, "_hf_hook")


def write_count(tensors: Sequence[Tensor]) -> int:
    """Return how often tensors were modified in place, as far as torch counts it."""
    return sum(0 if one.is_inference() else one._version for one in tensors)


_FOREIGN = ("peft.", "bitsandbytes.", "quanto.", "optimum.", "torchao.", "hqq.", "gptqmodel.")


def _is_foreign_leaf(module: nn.Module) -> bool:
    name = f"{type(module).__module__}."
    return name.startswith(_FOREIGN) and not hasattr(module, "config")
