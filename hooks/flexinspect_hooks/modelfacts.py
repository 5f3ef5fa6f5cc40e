"""What a model says of itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexinspect_hooks.layers import attention_layers


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return what a model says of itself, without what it does not say."""
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
    }
    return {name: fact for name, fact in facts.items() if isinstance(fact, (int, str))}
