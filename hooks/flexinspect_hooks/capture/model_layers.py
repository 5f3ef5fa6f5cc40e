"""Finds the attention modules and the decoder layers of a model."""

from __future__ import annotations

from torch import nn


def attention_layers(model: nn.Module) -> dict[int, int]:
    """Return the `id` of each attention module and its layer index.

    transformers gives `layer_idx` to every module that writes to the cache; the attention call is
    made with that module as its first argument.
    """
    layer_of: dict[int, int] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "ttention" in type(module).__name__:
            layer_of[id(module)] = layer
    return layer_of


def decoder_blocks(model: nn.Module, layer_of: dict[int, int]) -> dict[int, tuple[str, nn.Module]]:
    """Return the decoder layers by index as (name, module): the parents of attention modules."""
    by_name = dict(model.named_modules())
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in by_name.items():
        layer = layer_of.get(id(module))
        if layer is not None and "." in name:
            parent = name.rpartition(".")[0]
            blocks.setdefault(layer, (parent, by_name[parent]))
    return dict(sorted(blocks.items()))
