"""Faults as edits of the reference's forward: what a hypothesis changes, and where.

An edit has functions for fixed points of a forward. The reference calls them for the layers and
rows in the edit's scope, and keeps the correct values everywhere else: so a fault that begins in a
decode step leaves the prompt as it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput
from flexinspect_hooks.audit.forward.rotary_tables import RotaryTables


class AttentionInput(Struct):
    """The attention of one layer, before it is computed; an edit returns another one.

    `query` is (1, heads, rows, size), `key` and `value` (1, kv heads, keys, size), `mask` (1, 1 or
    heads, rows, keys) is added to the scores. `allowed`, bool of the same shape, is the mask
    without the lowest float. `options` are the other arguments of the architecture's function, such
    as `softcap` and `s_aux`. `output` replaces the attention itself where it is set: it takes this
    and returns (1, rows, heads, size).
    """

    module: nn.Module
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    bias: Tensor | None
    scaling: float | None
    options: dict[str, Any]
    output: Callable[[AttentionInput], Tensor] | None = None


class Rotation(Struct):
    """One call of the rotary embedding: `rotate(q, k, cos, sin)` is the architecture's function.

    `tables(positions, theta, angles_of)` returns cos and sin of other positions (1, rows), of
    another base, or of angles that are computed otherwise; `tables.of_kind(name)` those of layers
    of another type.
    """

    rotate: Callable[..., tuple[Tensor, Tensor]]
    query: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    tables: RotaryTables


ModuleEdit = Callable[[Any, Any, Tensor, Tensor], Any]
"""Takes the module, its input and output, and the input of its layer; returns the output."""


class ForwardEdit(Struct, frozen=True, kw_only=True):
    """One fault. `sentence` completes "the numbers are those of a forward …".

    `modules` maps the last part of a module's name to its edit. `config` are attributes of the
    configuration, set during the forward; such an edit holds for all layers and rows. `cross` is of
    the attention that reads the encoder's output, and `encoder` of what the encoder reads. `prefix`
    are ids before the text. `attributes` are numbers of modules by their full names, set during the
    forward. With `whole_model` the edit cannot be limited to a layer.
    """

    name: str
    sentence: str
    attention: Callable[[AttentionInput], AttentionInput] | None = None
    cross: Callable[[AttentionInput], AttentionInput] | None = None
    encoder: Callable[[EncoderInput], EncoderInput] | None = None
    rope: Callable[[Rotation], tuple[Tensor, Tensor]] | None = None
    positions: Callable[[Tensor], Tensor] | None = None
    modules: Mapping[str, ModuleEdit] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    whole_model: bool = False


class Scope(Struct, frozen=True):
    """Where an edit acts: rows from `first_row` on, in `layers` (None: in all)."""

    first_row: int = 0
    layers: frozenset[int] | None = None

    def has(self, layer: int | None) -> bool:
        """Whether the scope holds a layer; modules outside of all layers belong to "all"."""
        return self.layers is None or (layer is not None and layer in self.layers)
