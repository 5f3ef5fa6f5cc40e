"""Which modules of a model are its attention layers and its decoder layers."""

from __future__ import annotations

from torch import nn


def attention_layers(model: nn.Module) -> dict[int, int]:
    """Return id of attention module to layer index.

    transformers gives `layer_idx` to every module that writes to the cache; the attention call is
    made with that module as its first argument.
    """
    found: dict[int, int] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "ttention" in type(module).__name__:
            found[id(module)] = layer
    return found


def decoder_blocks(model: nn.Module, layer_of: dict[int, int]) -> dict[int, tuple[str, nn.Module]]:
    """Return layer index to (name, decoder layer): the parent of each attention module."""
    by_name = dict(model.named_modules())
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in by_name.items():
        layer = layer_of.get(id(module))
        if layer is not None and "." in name:
            parent = name.rpartition(".")[0]
            blocks.setdefault(layer, (parent, by_name[parent]))
    return dict(sorted(blocks.items()))
