"""Modules that a program put in the place of the architecture's: the reference uses them as given.

Their weights are not those that the architecture has, such as integers and scales of a quantised
layer. What such a module computes is not judged, but all steps around it are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import quiet_module

_LIBRARIES = ("torch.", "transformers.")
_ROWS = 5
_CLOSE = 1e-3
"""How far a row may move, of its norm, when other rows are beside it: by rounding only."""


class ProgramModule(nn.Module):
    """Calls a module of the program, in the dtype of its own tensors.

    The module is not a child, so nothing is installed in it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # In a tuple, of which the module is no child.
        self._held, self._call = (module,), cast(Any, module.forward)
        self._dtype = own_dtype(module)

    @property
    def held(self) -> nn.Module:
        """The module of the program."""
        return self._held[0]

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output for (..., inputs), in the dtype of the rows."""
        with quiet_module(self._held[0]):
            return self.call(rows)

    def call(self, rows: Tensor) -> Tensor:
        """Do the same, but as the program would: with the hooks inside and the mode of now."""
        given = rows if self._dtype is None else rows.to(self._dtype)
        output: Tensor = self._call(given)
        return output.to(rows.dtype)


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's first floating-point tensor, None if it has none."""
    return next((one.dtype for one in own_tensors(module) if one.is_floating_point()), None)


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def is_of_program(module: nn.Module) -> bool:
    """Whether the class of a module is one of the program."""
    return not f"{type(module).__module__}.".startswith(_LIBRARIES)


def program_module(
    reference: nn.Module, root: nn.Module, name: str
) -> tuple[str, ProgramModule] | None:
    """Return what the program has in the place of a reference's module, and the name of the place.

    It is the module `name`, or the innermost one around it of which the program has another class.
    None if there is none, or if it is not a function of each row alone: only such a one gives the
    same in a forward over all rows as in the steps of the program.
    """
    ours, theirs = dict(reference.named_modules()), dict(root.named_modules())
    while name:
        own, other = ours.get(name), theirs.get(name)
        if other is not None:
            if (
                own is None
                or type(own).__name__ == type(other).__name__
                or not is_of_program(other)
            ):
                return None
            given = ProgramModule(other)
            return (name, given) if _is_of_rows(given, other, width_of(own)) else None
        name = name.rpartition(".")[0]
    return None


def width_of(own: nn.Module) -> int:
    """Return how many inputs a module has: those of its first linear layer, 0 if unknown."""
    found = next((one for one in own.modules() if isinstance(one, nn.Linear)), None)
    if found is not None:
        return int(found.in_features)
    weight = getattr(own, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else 0  # of a Conv1D, or a norm


def _is_of_rows(given: ProgramModule, module: nn.Module, width: int) -> bool:
    device = next((one.device for one in own_tensors(module)), torch.device("cpu"))
    if not width or device.type == "meta":
        return False
    maker = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _ROWS, width, generator=maker).to(device)
    # One block for all calls: each block begins with the same random numbers.
    with quiet_module(module):
        try:
            whole, again, alone = given.call(rows), given.call(rows), given.call(rows[:, :1])
        except Exception:  # a module of the program may be of any kind
            return False
    if whole.shape[:2] != (1, _ROWS) or not torch.equal(whole, again):
        return False
    first = whole[:, :1]
    return alone.shape == first.shape and bool((alone - first).norm() <= _CLOSE * first.norm())
