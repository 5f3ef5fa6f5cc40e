"""Which group a parameter belongs to: its layer, and its part of the layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_NORM_PATTERN = re.compile(r"norm|(^|[._])ln(_|\.|$)")
_MLP_PATTERN = re.compile(r"mlp|feed_?forward|ffn|moe|expert|gate_up|fc\d|router")
_ATTENTION_PATTERN = re.compile(r"att")
_PROJECTION_NAMES = {
    "q": ("q_proj", "query", "wq", "to_q"),
    "k": ("k_proj", "key", "wk", "to_k"),
    "v": ("v_proj", "value", "wv", "to_v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv", "in_proj"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "wo", "to_out"),
}


class ParameterLocator:
    """Names the layer and the part of a model's parameters, from names and places alone."""

    def __init__(self, model: Any, blocks: Mapping[int, tuple[str, nn.Module]]) -> None:
        self._prefixes = {f"{name}.": layer for layer, (name, _) in blocks.items()}
        self._embedding = _weight(model.get_input_embeddings())
        self._head = _weight(model.get_output_embeddings())

    def locate(self, name: str, parameter: nn.Parameter) -> tuple[int | None, str]:
        """Return the layer (None for none) and the part (see `flexinspect.gradientrecords`)."""
        for prefix, layer in self._prefixes.items():
            if name.startswith(prefix):
                return layer, part_in_layer(name.removeprefix(prefix))
        return None, self._part_outside_layers(name, parameter)

    def _part_outside_layers(self, name: str, parameter: nn.Parameter) -> str:
        if parameter is self._embedding:
            return "tied" if parameter is self._head else "embedding"
        if parameter is self._head:
            return "lm_head"
        return "norm" if _NORM_PATTERN.search(name) else "other"


def part_in_layer(name: str) -> str:
    """Return the part of a parameter by its name within a layer: "self_attn.q_proj.weight"."""
    *modules, _ = name.split(".")
    path = ".".join(modules)
    if _NORM_PATTERN.search(path):
        return "norm"
    if _MLP_PATTERN.search(path):
        return "mlp"
    last = modules[-1] if modules else ""
    for part, names in _PROJECTION_NAMES.items():
        if last in names:
            return part
    return "attention" if _ATTENTION_PATTERN.search(path) else "other"


def _weight(module: nn.Module | None) -> Any:
    return getattr(module, "weight", None)
