"""A rotary embedding that the program put in the place of the architecture's.

Its base and scaling are what the program means to try out, so its tables are taken as they are.
What can be judged is whether they are those of a rotary embedding: the angles are proportional to
the position ids, and do not depend on the dtype of the hidden states, in which position ids above
256 (bfloat16) or 2048 (float16) are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_modules import is_of_program
from flexinspect_hooks.audit.forward.unrecorded import unrecorded
from flexinspect_hooks.capture.quiet_modules import quiet_module

_CLOSE = 2e-2
"""By how much cos and sin may differ: tables in bfloat16 are rounded by 4e-3."""


class ProgramRotary:
    """Makes the tables of a rotary module of the program, which is called `name` in the model.

    `dtype` is that of the program's hidden states. The methods raise what the module raises.
    """

    def __init__(self, name: str, module: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        self.name, self.cls = name, type(module).__name__
        self._module, self._size, self.dtype = module, hidden_size, dtype

    @property
    def title(self) -> str:
        """The name of the module, and its class."""
        return f"{self.name} ({self.cls})"

    def tables(self, positions: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin (1, rows, size) of positions (1, rows), in float32.

        The module gets hidden states in `dtype`, by default float32, in which angles are exact.
        """
        rows = torch.zeros(1, 1, 1, dtype=dtype or torch.float32, device=positions.device)
        rows = rows.expand(1, positions.shape[1], self._size)
        module: Any = self._module
        with unrecorded(), quiet_module(module):
            cos, sin = module(rows, positions)
        if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[:2] != positions.shape:
            raise ValueError("The module returns other tables than a rotary embedding.")
        return cos.float(), sin.float()

    @cached_property
    def has_exact_angles(self) -> bool:
        """Whether the angles are proportional to the position ids, up to 4095."""
        positions = torch.tensor([[0, 1, 2, 3, 255, 257, 1023, 1025, 2047, 2049, 4095]])
        cos, sin = (one[0].double() for one in self.tables(positions))
        scale = torch.hypot(cos[1], sin[1])
        angles = positions[0].double()[:, None] * torch.atan2(sin[1], cos[1])
        gaps = (cos - scale * angles.cos()).abs(), (sin - scale * angles.sin()).abs()
        return bool(torch.stack(gaps).amax() <= _CLOSE * scale.amax())

    def first_rounded(self, positions: Tensor) -> int | None:
        """Return the first of positions (1, rows) whose angles differ in the program's dtype."""
        if self.dtype == torch.float32:
            return None
        pairs = zip(self.tables(positions), self.tables(positions, self.dtype), strict=True)
        gaps = torch.stack([(one - other).abs().amax(-1)[0] for one, other in pairs]).amax(0)
        found = (gaps > _CLOSE).nonzero().flatten().tolist()
        return int(positions[0, found[0]]) if found else None


def program_rotary(
    root: nn.Module, known: Sequence[str], hidden_size: int, dtype: torch.dtype
) -> ProgramRotary | None:
    """Return the program's rotary module, None if it has none, or if several differ.

    `root` has the program's modules, and `known` are the names of those of the architecture.
    """
    found = [
        (name, module)
        for name, module in root.named_modules()
        if name in known and "rotary" in name.rpartition(".")[2] and is_of_program(module)
    ]
    if len({id(module) for _, module in found}) != 1:
        return None
    return ProgramRotary(*found[0], hidden_size, dtype)
