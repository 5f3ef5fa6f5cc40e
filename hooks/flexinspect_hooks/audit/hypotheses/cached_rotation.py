"""Hypotheses about the rotation (RoPE) of keys that are read from the cache.

The reference has no cache: each key is rotated once, at its own position. A program that caches
keys before their rotation, or rotates cached keys once more, gives a decode row keys at positions
that depend on the row. The scores of such keys are the right ones plus a bias of each row and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.forward.forward_edits import AttentionInput, ForwardEdit, Rotation
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]
KeyPositions = Callable[["DecodeRow"], Tensor]

MAX_ROWS = 128
"""Decode rows whose keys are rotated again, one row at a time."""


class DecodeRow(Struct, frozen=True):
    """A decode row: its index, the positions (keys,) of the text, and the tokens of the prompt."""

    row: int
    positions: Tensor
    n_prompt: int

    @property
    def reads(self) -> Tensor:
        """How many decode rows read each key up to this row, its own first read not counted."""
        index = torch.arange(len(self.positions), device=self.positions.device)
        return (self.row - index.clamp_min(self.n_prompt - 1)).clamp_min(0)


def _newest(now: DecodeRow) -> Tensor:
    return now.positions[now.row].expand_as(now.positions)


def _none(now: DecodeRow) -> Tensor:
    return torch.zeros_like(now.positions)


def _own_only(now: DecodeRow) -> Tensor:
    rotated = torch.zeros_like(now.positions)
    rotated[now.row] = now.positions[now.row]
    return rotated


def _newest_added(now: DecodeRow) -> Tensor:
    return now.positions + now.positions[now.row] * (now.reads > 0)


def _own_each_step(now: DecodeRow) -> Tensor:
    return now.positions * (1 + now.reads)


def _newest_each_step(now: DecodeRow) -> Tensor:
    steps = now.positions.clone()
    steps[: now.n_prompt] = 0
    sums = steps.cumsum(0)
    return now.positions + (sums[now.row] - sums).clamp_min(0)


_SENTENCES: dict[KeyPositions, str] = {
    _newest: "in which decode rows read all keys rotated (RoPE) for the position of the newest "
    "token, the cached ones too",
    _none: "in which decode rows read keys that are cached without rotation (RoPE)",
    _own_only: "in which decode rows read cached keys without rotation (RoPE), and only their own "
    "key has it",
    _newest_added: "in which decode rows read cached keys that are rotated (RoPE) once more, for "
    "the position of the newest token",
    _own_each_step: "in which each decode step rotates (RoPE) all cached keys once more, for their "
    "own positions",
    _newest_each_step: "in which each decode step rotates (RoPE) all cached keys once more, for "
    "the position of the newest token",
}


def cached_rotation(probe: FaultProbe) -> Edits:
    """Cached keys are rotated for the newest position, never, or again in each step."""
    n_rows = probe.n_rows - probe.first_row
    has_rope = "apply_rotary_pos_emb" in vars(probe.reference.namespace)
    if not probe.is_decode or not has_rope or n_rows > MAX_ROWS:
        return
    for positions, sentence in _SENTENCES.items():
        yield _edit(probe, sentence, positions)


def _edit(probe: FaultProbe, sentence: str, positions: KeyPositions) -> ForwardEdit:
    kept: list[Rotation] = []

    def keep(turn: Rotation) -> tuple[Tensor, Tensor]:
        kept[:] = [turn]
        return turn.rotate(turn.query, turn.key, turn.cos, turn.sin)

    def attention(call: AttentionInput) -> AttentionInput:
        bias = _bias(call, kept[0], probe, positions)
        return replace(call, bias=bias if call.bias is None else call.bias + bias)

    return ForwardEdit(name="cache.rotation", sentence=sentence, rope=keep, attention=attention)


def _bias(
    call: AttentionInput, turn: Rotation, probe: FaultProbe, positions: KeyPositions
) -> Tensor:
    """Return what the scores of decode rows gain if keys are rotated for other positions."""
    n, size = call.key.shape[2], turn.key.shape[-1]
    heads = call.query.shape[1]
    scale = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    bias = torch.zeros(1, heads, n, n, dtype=call.query.dtype, device=call.query.device)
    for row in range(probe.first_row, n):
        there = positions(DecodeRow(row, turn.positions[0], probe.n_prompt))
        tables = turn.tables(there[None])
        key = turn.rotate(turn.key, turn.key, *tables)[1]
        change = (key - call.key[..., :size]).repeat_interleave(heads // key.shape[1], 1)
        bias[:, :, row] = scale * (change @ call.query[:, :, row, :size, None])[..., 0]
    return bias


HYPOTHESES = (cached_rotation,)
