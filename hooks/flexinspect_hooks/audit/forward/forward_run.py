"""One forward of the reference: what it runs under, and the values that it gives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.encoder_inputs import EncoderInput
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, Scope
from flexinspect_hooks.audit.forward.program_hooks import HookInReference
from flexinspect_hooks.audit.forward.program_rotary import ProgramRotary

Point = tuple[str, int | None]
"""What is compared, and its layer: see `QUANTITIES`."""

EMBEDDING, LOGITS = "embedding", "logits"
QUERY, KEY, VALUE = "query", "key", "value"
HEADS, ATTENTION, HIDDEN = "attention of the heads", "attention output", "hidden state"
ENCODER, CROSS = "encoder output", "cross attention output"
QUANTITIES = (QUERY, KEY, VALUE, HEADS, ATTENTION, CROSS, HIDDEN)
"""The quantities of a layer, in the order of the forward. Queries and keys are rotated."""

OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj", "wo", "o")
"""Names of the module that takes the attention of the heads."""


class ExpertChoice(Struct, frozen=True):
    """The scores (rows, experts) that a router gave, and the experts (rows, chosen) it chose."""

    scores: Tensor
    experts: Tensor


class Run(Struct):
    """One forward of the reference.

    `masks` maps a layer to the keys that each row may attend to, bool (1 or heads, rows, keys); a
    layer without one has the architecture's own mask. `ends` (rows,) is how many keys there were
    when the program computed each row: no mask opens later ones. `biases` and `score_mods` are
    those of the program that are taken as they are, by layer. `noise` is the relative size of
    random changes at every point. `stop_after` ends the forward after a layer. `encoder` is what
    the encoder of the model reads, if it has one. `experts` are those that the rows of a layer go
    to, if not their own, and rows (layer, row) in `other_experts` go to the next best one in place
    of the last. The routers' own choices are left in `routes`. `hooks` are those of the program
    that are taken as they are, and `rotary` is its rotary module if that is.
    """

    positions: Tensor
    ends: Tensor | None = None
    masks: Mapping[int, Tensor] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)
    score_mods: Mapping[int, Any] = field(default_factory=dict)
    edits: Sequence[tuple[ForwardEdit, Scope]] = ()
    noise: float = 0.0
    stop_after: int | None = None
    generator: torch.Generator | None = None
    encoder: EncoderInput | None = None
    experts: Mapping[int, Tensor] = field(default_factory=dict)
    other_experts: tuple[tuple[int, int], ...] = ()
    hooks: Sequence[HookInReference] = ()
    rotary: ProgramRotary | None = None
    routes: dict[int, ExpertChoice] = field(default_factory=dict)
    values: dict[Point, Tensor] = field(default_factory=dict)
    layer: int = -1
    layer_input: Tensor | None = None

    def perturb(self, tensor: Tensor) -> Tensor:
        """Return a tensor with relative changes of the size of `noise`."""
        if not self.noise or not tensor.is_floating_point():
            return tensor
        random = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float32)
        scale = (2 * random - 1).to(tensor.device, tensor.dtype) * self.noise
        return tensor * (1 + scale)


class StopForwardError(Exception):
    """Ends a forward of the reference after the last layer that is needed."""


_active = threading.local()


def active_run() -> tuple[Any, Run] | None:
    """Return the reference and the run of this thread, None outside of one."""
    return getattr(_active, "run", None)


def set_active_run(active: tuple[Any, Run] | None) -> None:
    """Set the reference and the run of this thread."""
    _active.run = active


def output_projection(attention: nn.Module) -> nn.Module | None:
    """Return the module that takes the attention of the heads, None if it is not recognised."""
    return next((m for n, m in attention.named_children() if n in OUTPUT_PROJECTIONS), None)


def window_mask(n: int, window: int | None, device: torch.device | str) -> Tensor:
    """Return the causal mask, bool (n, n), with a sliding window of keys if there is one."""
    rows = torch.arange(n, device=device)[:, None]
    keys = torch.arange(n, device=device)[None]
    mask = keys <= rows
    return mask if window is None else mask & (keys > rows - window)


def mix_rows(plain: Tensor, edited: Tensor, first_row: int, dim: int) -> Tensor:
    """Return `plain` with the rows from `first_row` on of `edited`."""
    if first_row <= 0:
        return edited
    length = plain.shape[dim] - first_row
    if length <= 0:
        return plain
    rest = edited.narrow(dim, first_row, length)
    return torch.cat((plain.narrow(dim, 0, first_row), rest), dim)
