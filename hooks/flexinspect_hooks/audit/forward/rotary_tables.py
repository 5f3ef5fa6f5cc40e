"""The rotary tables of an architecture, for other positions, another base or other layers.

An architecture has one table of frequencies, or one per type of layer (Gemma 3 has a base of 1e4 in
its sliding layers and one of 1e6 in the others). Which of them made a layer's cos and sin is read
from these themselves, so that no hypothesis moves a layer to the tables of another type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_rotary import ProgramRotary

_MAX_ROWS = 16
_TOLERANCE = 1e-2
_FREQUENCIES, _ORIGINAL, _SCALE = "inv_freq", "original_inv_freq", "attention_scaling"


Angles = Callable[[Tensor, Tensor], Tensor]
"""Takes positions (1, rows) and frequencies (pairs,); returns angles (1, rows, pairs)."""


def exact_angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return the angles of positions in float32."""
    return positions[..., None].float() * frequencies


class RotaryKind(Struct, frozen=True):
    """The frequencies (pairs,) of one type of layer, and the factor of its cos and sin.

    `name` is the type of the layers, such as "sliding_attention", empty if there is only one.
    """

    name: str
    frequencies: Tensor
    scale: float = 1.0


def rotary_kinds(model: nn.Module) -> list[RotaryKind]:
    """Return the tables of frequencies that the rotary modules of a model hold."""
    found: dict[tuple[str, int], RotaryKind] = {}
    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            if not name.endswith(_FREQUENCIES) or name.endswith(_ORIGINAL) or tensor.dim() != 1:
                continue
            prefix = name.removesuffix(_FREQUENCIES)
            scale = getattr(module, f"{prefix}{_SCALE}", 1.0)
            kind = RotaryKind(prefix.rstrip("_"), tensor.float(), float(scale))
            found.setdefault((kind.name, len(tensor)), kind)
    return list(found.values())


class RotaryTables:
    """Makes tables (cos, sin) like those that a layer got at `positions` (1, rows)."""

    def __init__(
        self,
        model: nn.Module,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        rotary: ProgramRotary | None = None,
    ) -> None:
        self._cos, self._sin, self._positions = cos, sin, positions
        self._model, self._rotary = model, rotary

    @cached_property
    def _kinds(self) -> list[RotaryKind]:
        size = self._cos.shape[-1]
        return [k for k in rotary_kinds(self._model) if size in (n := len(k.frequencies), 2 * n)]

    @cached_property
    def _own(self) -> tuple[RotaryKind | None, bool]:
        """The frequencies of this layer, and whether its pairs of channels are neighbours."""
        choices = [(kind, order) for kind in self._kinds for order in (False, True)]
        gaps = [self._gap(*one) for one in choices]
        least = min(gaps, default=torch.inf)
        return choices[gaps.index(least)] if least <= _TOLERANCE else (None, False)

    def __call__(
        self, positions: Tensor, theta: float | None = None, angles_of: Angles = exact_angles
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of other positions, or of a base `theta` without scaling.

        `angles_of` computes the angles. If no frequencies give this layer's tables, they do not
        change with the positions.
        """
        if self._rotary is not None and theta is None and angles_of is exact_angles:
            cos, sin = self._rotary.tables(positions)
            return cos.to(self._cos.dtype), sin.to(self._sin.dtype)
        own, is_interleaved = self._own
        if theta is not None:
            return self._make(positions, self._of_base(theta), is_interleaved, angles_of)
        if own is None:
            return self._cos, self._sin
        return self._make(positions, own, is_interleaved, angles_of)

    def of_kind(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the tables of another type of layer; this layer's own if there are none."""
        own, is_interleaved = self._own
        kind = next((one for one in self._kinds if one.name == name), None)
        if kind is None or own is None or kind.name == own.name:
            return self._cos, self._sin
        return self._make(self._positions, kind, is_interleaved)

    def _of_base(self, theta: float) -> RotaryKind:
        size, device = self._cos.shape[-1], self._cos.device
        if self._own[0] is not None:  # a table of half the size has as many pairs
            size = 2 * len(self._own[0].frequencies)
        steps = torch.arange(0, size, 2, device=device).float() / size
        return RotaryKind("", 1.0 / (theta**steps))

    def _gap(self, kind: RotaryKind, is_interleaved: bool) -> float:
        """Return by how much the tables of a kind differ from the layer's, in its first rows."""
        if self._cos.dim() != 3 or self._positions.shape[-1] != self._cos.shape[1]:
            return torch.inf
        rows = self._positions[:, :_MAX_ROWS]
        tables = self._make(rows, kind, is_interleaved)
        pairs = zip(tables, (self._cos, self._sin), strict=True)
        return max(float((one - own[:1, :_MAX_ROWS]).abs().max()) for one, own in pairs)

    def _make(
        self,
        positions: Tensor,
        kind: RotaryKind,
        is_interleaved: bool,
        angles_of: Angles = exact_angles,
    ) -> tuple[Tensor, Tensor]:
        like = self._cos
        angles = angles_of(positions, kind.frequencies.to(like.device))
        if like.shape[-1] == 2 * angles.shape[-1]:
            doubled = angles.repeat_interleave(2, -1), torch.cat((angles, angles), -1)
            angles = doubled[0] if is_interleaved else doubled[1]
        cos, sin = angles.cos() * kind.scale, angles.sin() * kind.scale
        return cos.to(like.dtype), sin.to(like.dtype)


def kind_names(model: Any) -> list[str]:
    """Return the types of layers that have rotary tables of their own, if they differ."""
    kinds = [one for one in rotary_kinds(model) if one.name]
    first = kinds[0] if kinds else None
    if first is None or all(
        one.scale == first.scale and torch.equal(one.frequencies, first.frequencies)
        for one in kinds[1:]
    ):
        return []
    return [one.name for one in kinds]


def frequencies_of(model: Any, layer: int | None) -> RotaryKind | None:
    """Return the frequencies of a layer, None if they are not known."""
    kinds, types = rotary_kinds(model), getattr(model.config, "layer_types", None)
    by_name = {one.name: one for one in kinds}
    if types is not None and layer is not None and layer < len(types) and types[layer] in by_name:
        return by_name[types[layer]]
    return by_name.get("")
