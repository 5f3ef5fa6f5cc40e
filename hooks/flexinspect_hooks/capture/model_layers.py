"""Finds the attention modules and the decoder layers of a model, and its facts for the trace."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexinspect_hooks.capture.rank_facts import split_facts


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


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the facts of any torch module; facts that it does not have are left out."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    first = next(model.parameters(), None)
    layers = set(attention_layers(model).values())
    heads = getattr(config, "num_attention_heads", None)
    facts = {
        "name": getattr(model, "name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": str(first.device) if first is not None else "cpu",
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "layers": len(layers) or getattr(config, "num_hidden_layers", None),
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "hidden": getattr(config, "hidden_size", None),
        "vocabulary": getattr(config, "vocab_size", None),
        **split_facts(model),
    }
    return {name: fact for name, fact in facts.items() if isinstance(fact, (int, str))}
