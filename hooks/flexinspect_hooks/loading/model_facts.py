"""Facts about a model for the trace: name, class, sizes, dtype, device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from flexinspect_hooks.capture.model_layers import attention_layers

if TYPE_CHECKING:
    from flexinspect_hooks.loading.model_loader import LoadedModel


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
    }
    return {name: fact for name, fact in facts.items() if isinstance(fact, (int, str))}


def loaded_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Return the facts of a model that flexinspect loaded."""
    return {
        **model_facts(loaded.model),
        "name": loaded.source.name,
        "place": loaded.source.place,
        "class": type(loaded.model).__name__,
        "weights": loaded.weights,
        "weights_fingerprint": loaded.weights_fingerprint,
        "parameters": loaded.n_parameters,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "tokenizer": loaded.tokenizer is not None,
        "layers": int(loaded.model.config.num_hidden_layers),
    }
