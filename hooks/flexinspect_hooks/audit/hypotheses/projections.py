"""Hypotheses about queries, keys and values before RoPE: a fused projection, and their norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import Any, cast

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, ModuleEdit, Rotation
from flexinspect_hooks.audit.forward.forward_run import active_run
from flexinspect_hooks.audit.hypotheses.modules import epsilon_of, is_norm, layer_modules
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]
_BY_HEAD = "query_key_value"
"""The fused projection of GPT-NeoX, Falcon and Bloom; others have all queries first."""
_FUSED = (_BY_HEAD, "qkv_proj", "c_attn")
_NAMES = "qkv"


class _Heads(Struct, frozen=True):
    """The sizes of a fused projection: `groups` query heads share a key and a value head."""

    kv_heads: int
    groups: int
    size: int

    def split(self, rows: Tensor, *, by_head: bool, order: tuple[int, ...] = (0, 1, 2)) -> Any:
        """Return q, k and v (…, kv heads, groups or 1, size) of fused rows in a layout."""
        numbers = [(self.groups, 1, 1)[part] for part in order]
        if by_head:
            table = rows.view(*rows.shape[:-1], self.kv_heads, self.groups + 2, self.size)
            parts = torch.split(table, numbers, -2)
        else:
            flat = torch.split(rows, [self.kv_heads * n * self.size for n in numbers], -1)
            parts = tuple(
                one.reshape(*one.shape[:-1], self.kv_heads, n, self.size)
                for one, n in zip(flat, numbers, strict=True)
            )
        return tuple(parts[order.index(part)] for part in range(3))

    def join(self, parts: tuple[Tensor, ...], *, by_head: bool) -> Tensor:
        """Return the fused rows (…, width) of q, k and v in a layout."""
        if by_head:
            return torch.cat(parts, -2).flatten(-3)
        return torch.cat([one.flatten(-3) for one in parts], -1)


def _heads_of(probe: FaultProbe, width: int) -> _Heads | None:
    heads = probe.config.num_attention_heads
    size = getattr(probe.config, "head_dim", None) or probe.config.hidden_size // heads
    kv_heads, rest = divmod(width // size - heads, 2)
    if width % size or rest or kv_heads < 1 or heads % kv_heads:
        return None
    return _Heads(kv_heads, heads // kv_heads, size)


def fused_layout(probe: FaultProbe) -> Edits:
    """A fused projection of queries, keys and values is split in another layout, or order."""
    modules = layer_modules(probe)
    name = next((one for one in _FUSED if one in modules), None)
    if name is None:
        return
    module: Any = modules[name]
    width = module.weight.shape[1 if name == "c_attn" else 0]  # Conv1D is transposed
    heads = _heads_of(probe, int(width))
    if heads is None:
        return
    own = name == _BY_HEAD

    def edit(sentence: str, read: Callable[[Tensor], tuple[Tensor, ...]]) -> ForwardEdit:
        def change(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
            return heads.join(read(output), by_head=own)

        return ForwardEdit(name="fused.layout", sentence=sentence, modules={name: change})

    count = f"{heads.kv_heads * heads.groups} heads"
    layouts = (f"(3, {count}, {heads.size})", f"({count}, 3, {heads.size})")
    if heads.groups > 1:
        by_group = f"({heads.kv_heads} groups, {heads.groups} + 2 heads, {heads.size})"
        layouts = ("all queries, all keys, all values", by_group)
    if heads.kv_heads > 1:
        sentence = f"in which {name} is split as {layouts[not own]}, not as {layouts[own]}"
        yield edit(sentence, partial(heads.split, by_head=not own))
    for order in permutations(range(3)):
        if order != (0, 1, 2):
            text = ", ".join(_NAMES[part] for part in order)
            sentence = f"in which {name} is split in the order {text}, not q, k, v"
            yield edit(sentence, partial(heads.split, by_head=own, order=order))


def norm_extent(probe: FaultProbe) -> Edits:
    """The norm of queries and keys is taken over each head, not over all, or the reverse."""
    modules = layer_modules(probe)
    names = [one for one in ("q_norm", "k_norm") if one in modules and is_norm(modules[one])]
    names = [one for one in names if "rms" in type(modules[one]).__name__.lower()]
    if not names:
        return
    heads = probe.config.num_attention_heads
    size = getattr(probe.config, "head_dim", None) or probe.config.hidden_size // heads

    def scaled(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        # The weight stays: only the root mean square that the rows are divided by is another.
        squares = inputs.float().pow(2)
        own = squares.mean(-1, keepdim=True)
        if inputs.dim() == 4:
            n = before.shape[1]
            dim = 1 if inputs.shape[1] != n and inputs.shape[2] == n else 2
            other = own.mean(dim, keepdim=True)
        else:
            by_head = squares.view(*squares.shape[:-1], -1, size).mean(-1)
            other = by_head.repeat_interleave(size, -1)
        epsilon = epsilon_of(module)
        result: Tensor = output * ((own + epsilon) / (other + epsilon)).sqrt()
        return result.to(output.dtype)

    weight: Any = modules[names[0]].weight
    is_whole = weight.numel() > size
    what = (
        "over each head in place of the whole projection"
        if is_whole
        else "over all heads in place of each head"
    )
    options = [names, *([one] for one in names)] if len(names) > 1 else [names]
    for chosen in options:
        edits: dict[str, ModuleEdit] = dict.fromkeys(chosen, scaled)
        sentence = f"whose {' and '.join(chosen)} normalise {what}"
        if len(chosen) == 1:
            sentence = f"whose {chosen[0]} normalises {what}"
        yield ForwardEdit(name="norm.extent", sentence=sentence, modules=edits)


def norms_swapped(probe: FaultProbe) -> Edits:
    """Keys are normalised with the norm of the queries, or the reverse."""
    modules = layer_modules(probe)
    names = ("q_norm", "k_norm")
    if not all(one in modules and is_norm(modules[one]) for one in names):
        return
    weights: list[Any] = [modules[one].weight for one in names]
    if weights[0].shape != weights[1].shape or torch.equal(*weights):
        return
    parents = {id(b): a for _, a in _attentions(probe) for b in a.children()}

    def other(name: str) -> ModuleEdit:
        def change(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
            norm: Any = getattr(parents[id(module)], name)
            # The class's own forward: the module's hooks would put this edit into it again.
            return cast(Tensor, type(norm).forward(norm, inputs))

        return change

    keys, queries = {"k_norm": other("q_norm")}, {"q_norm": other("k_norm")}
    for sentence, edits in (
        ("whose keys are normalised by q_norm, not by k_norm", keys),
        ("whose queries are normalised by k_norm, not by q_norm", queries),
        ("whose q_norm and k_norm are exchanged", keys | queries),
    ):
        yield ForwardEdit(name="norm.swapped", sentence=sentence, modules=edits)


def _attentions(probe: FaultProbe) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have norms of queries and keys, by name."""
    for name, module in probe.reference.model.named_modules():
        if isinstance(getattr(module, "k_norm", None), nn.Module):
            yield name, module


def norm_after_rope(probe: FaultProbe) -> Edits:
    """Queries and keys are normalised after RoPE, not before it."""
    modules = layer_modules(probe)
    names = [one for one in ("q_norm", "k_norm") if one in modules and is_norm(modules[one])]
    weight: Any = modules[names[0]].weight if names else None
    size = getattr(probe.config, "head_dim", None)
    if len(names) < 2 or weight.numel() != size:
        return

    def skip(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        return cast(Tensor, inputs)

    def normed(turn: Rotation) -> tuple[Tensor, Tensor]:
        active = active_run()
        block: Any = probe.reference.blocks[active[1].layer if active is not None else 0][1]
        norms = {n.rpartition(".")[2]: one for n, one in block.named_modules()}
        query, key = turn.rotate(turn.query, turn.key, turn.cos, turn.sin)
        # The class's own forward: the module's hooks would put this edit into it again.
        q_norm, k_norm = norms["q_norm"], norms["k_norm"]
        return type(q_norm).forward(q_norm, query), type(k_norm).forward(k_norm, key)

    yield ForwardEdit(
        name="norm.order",
        sentence="whose q_norm and k_norm are applied after RoPE, not before it",
        modules=dict.fromkeys(names, skip),
        rope=normed,
    )


HYPOTHESES = (fused_layout, norm_extent, norms_swapped, norm_after_rope)
