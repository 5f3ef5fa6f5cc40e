"""Which outputs of a fused projection are the queries, keys, values, gates or neurons."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Q, K, V, GATE, UP = "q", "k", "v", "gate", "up"

_NAMES = {
    Q: ("q", "q_proj", "query", "query_proj", "q_lin", "wq", "to_q", "attn_q"),
    K: ("k", "k_proj", "key", "key_proj", "k_lin", "wk", "to_k", "attn_k"),
    V: ("v", "v_proj", "value", "value_proj", "v_lin", "wv", "to_v", "attn_v"),
    GATE: ("gate", "gate_proj", "w1", "ffn_gate"),
    UP: ("up", "up_proj", "w3", "ffn_up"),
}
_PARTS = {name: part for part, names in _NAMES.items() for name in names}
_HALVES = ("Phi3", "Phi4", "Glm")
_BLOCKS = ("Phi3", "Phi4")
_BY_HEAD = ("GPTNeoX", "Bloom", "Persimmon")


def part_of(name: str) -> str | None:
    """Return which part of a fused projection the name of a module means; None for another."""
    return _PARTS.get(name.lower())


def fused_parts(model: nn.Module, parameter: str) -> dict[str, Tensor]:
    """Return the outputs of each part of a weight that has several, empty for other weights.

    The layouts are those of the classes in transformers: blocks (Phi-3; GPT-2, in the columns of a
    Conv1D), or q, k and v of one head, or group of heads, after the other (GPT-NeoX, Falcon).
    """
    module = parameter.removesuffix(".weight")
    path, _, leaf = module.rpartition(".")
    owner, parent = model.get_submodule(module), model.get_submodule(path)
    kind, weight = type(parent).__name__, getattr(owner, "weight", None)
    is_known = type(parent).__module__.startswith("transformers.") and isinstance(weight, Tensor)
    if not is_known or not isinstance(weight, Tensor) or weight.dim() != 2:
        return {}
    is_conv = type(owner).__name__ == "Conv1D"
    n = weight.shape[1 if is_conv else 0]
    if leaf == "gate_up_proj" and kind.startswith(_HALVES) and not n % 2:
        return _blocks({GATE: n // 2, UP: n // 2})
    if leaf == "c_attn" and is_conv and not n % 3:
        return _blocks(dict.fromkeys((Q, K, V), n // 3))
    heads, pairs, size = head_sizes(model)
    if not heads or not size:
        return {}
    if leaf == "qkv_proj" and kind.startswith(_BLOCKS):
        sizes = {Q: heads * size, K: pairs * size, V: pairs * size}
        return _blocks(sizes) if sum(sizes.values()) == n else {}
    if leaf != "query_key_value":
        return {}
    if kind.startswith(_BY_HEAD) and n == 3 * heads * size:
        return _by_group(n, size, heads, 1)
    if kind.startswith("Falcon"):
        return _falcon_parts(model, n, heads, size)
    return {}


def head_sizes(model: nn.Module) -> tuple[int, int, int]:
    """Return how many heads queries and keys have, and their size; zeros if it is not known."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None) or 0
    pairs = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or (
        getattr(config, "hidden_size", 0) // heads if heads else 0
    )
    is_number = all(isinstance(one, int) for one in (heads, pairs, size))
    return (heads, pairs, size) if is_number else (0, 0, 0)


def _falcon_parts(model: nn.Module, n: int, heads: int, size: int) -> dict[str, Tensor]:
    config: Any = model.config
    if getattr(config, "new_decoder_architecture", False):
        groups = int(config.num_kv_heads)
        is_whole = n == (heads + 2 * groups) * size and not heads % groups
        return _by_group(n, size, groups, heads // groups) if is_whole else {}
    if getattr(config, "multi_query", False):
        sizes = {Q: heads * size, K: size, V: size}
        return _blocks(sizes) if sum(sizes.values()) == n else {}
    return _by_group(n, size, heads, 1) if n == 3 * heads * size else {}


def _blocks(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    ends = list(itertools.accumulate(sizes.values()))
    return {
        part: torch.arange(end - n, end) for (part, n), end in zip(sizes.items(), ends, strict=True)
    }


def _by_group(n: int, size: int, groups: int, n_queries: int) -> dict[str, Tensor]:
    """Return the parts where each group has its queries, then a key and a value, of one size."""
    table = torch.arange(n).view(groups, n_queries + 2, size)
    parts = {Q: table[:, :n_queries], K: table[:, n_queries], V: table[:, n_queries + 1]}
    return {part: one.flatten() for part, one in parts.items()}


def format_ranges(places: Iterable[int], most: int = 3) -> str:
    """Return numbers in rising order as ranges of Python, such as 64:96."""
    ranges: list[list[int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place:
            ranges[-1][1] += 1
        else:
            ranges.append([place, place + 1])
    texts = [f"{first}:{last}" for first, last in ranges[:most]]
    return ", ".join((*texts, *(("...",) if len(ranges) > most else ())))
