"""Reads biases from queries, keys and values: a difference that is the same vector in all rows.

A linear layer with the right weights and another bias adds the same vector to each row. RoPE turns
queries and keys by their positions, so the difference is turned back first. What a head has in
place of its own bias then is that of another head, of another projection, none, or its own twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.difference_shape import MIN_ROWS, ComparedTensors, split_last
from flexinspect_hooks.audit.forward.forward_edits import Rotation
from flexinspect_hooks.audit.forward.forward_run import KEY, QUERY, VALUE

_PROJECTIONS = {QUERY: "q_proj", KEY: "k_proj", VALUE: "v_proj"}
_MAX_LISTED = 8


class _Source(Struct, frozen=True):
    """A bias (size) that a head may have, in words that follow "has"."""

    name: str
    vector: Tensor


def head_biases(block: nn.Module, heads: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the biases (heads, size) of the projections of a layer, by quantity.

    `heads` are the numbers of heads by quantity. Empty if a projection is missing or has no bias.
    """
    modules = {name.rpartition(".")[2]: one for name, one in block.named_modules()}
    found = dict[str, Tensor]()
    for quantity, name in _PROJECTIONS.items():
        bias = getattr(modules.get(name), "bias", None)
        n = heads.get(quantity, 0)
        if not isinstance(bias, Tensor) or not n or bias.numel() % n:
            return {}
        found[quantity] = split_last(bias.detach().double().cpu(), n)
    return found


def turned_back(gap: Tensor, turn: Rotation, places: Sequence[int]) -> Tensor:
    """Undo RoPE in rows (rows, heads, size) at positions of the text."""
    index = torch.tensor(places, device=turn.cos.device)
    cos, sin = (one.index_select(1, index).double().cpu() for one in (turn.cos, turn.sin))
    states = gap.transpose(0, 1)[None]
    back: Tensor = turn.rotate(states, states, cos, -sin)[0]
    factor = float((cos.square() + sin.square()).mean())  # some kinds of RoPE scale their tables
    return back[0].transpose(0, 1) / factor


def read_bias(
    quantity: str, compared: ComparedTensors, biases: Mapping[str, Tensor], turn: Rotation | None
) -> list[str]:
    """Return which heads have another bias than their own, and whose; empty for no such error.

    `turn` is the rotation of the layer, None where the quantity is not rotated.
    """
    own, rows = biases[quantity], len(compared.ours)
    if rows < MIN_ROWS or compared.ours.shape[-1] != own.numel():
        return []
    gap = split_last(compared.ours - compared.theirs, len(own))
    if turn is not None:
        gap = turned_back(gap, turn, compared.positions)
    vectors = gap.mean(0)
    if not compared.distance > compared.limit or (gap - vectors).norm() > 0.01 * gap.norm():
        return []
    scale = compared.theirs.norm(dim=-1).mean() / len(own) ** 0.5
    wrong = (vectors.norm(dim=-1) > 16 * compared.limit * scale).nonzero().flatten().tolist()
    level = float(gap.norm(dim=-1).mean()) / 20
    return [
        f"{quantity} head {head} has {_whose(vectors[head] + own[head], own[head], biases, level)}"
        for head in wrong
    ]


def _whose(vector: Tensor, own: Tensor, biases: Mapping[str, Tensor], level: float) -> str:
    """Say whose bias a vector is."""
    for source in _sources(own, biases):
        if source.vector.shape == vector.shape and float((vector - source.vector).norm()) < level:
            return source.name
    return "a bias of no head"


def _sources(own: Tensor, biases: Mapping[str, Tensor]) -> Iterator[_Source]:
    yield _Source("no bias", torch.zeros_like(own))
    yield _Source("its bias twice", 2 * own)
    for quantity, table in biases.items():
        for head, vector in enumerate(table):
            yield _Source(f"that of {quantity} head {head}", vector)


def describe_biases(found: Sequence[str]) -> str:
    """Return a sentence about the biases of heads; empty if there are none."""
    if not found:
        return ""
    more = f", and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return (
        "Before RoPE the difference is the same vector in all rows, so the weights are right and "
        f"the bias is not: {', '.join(found[:_MAX_LISTED])}{more}."
    )
