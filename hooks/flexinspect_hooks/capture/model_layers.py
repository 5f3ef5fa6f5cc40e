"""Finds the attention modules and the decoder layers of a model, and its facts for the trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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
    """Return the decoder layers by index as (name, module): the parents of attention modules.

    Of a model with an encoder they are those of the decoder. A layer that is a list of parts, as in
    T5, counts as a whole.
    """
    by_name = dict(model.named_modules())
    stack = decoder_stack(model)
    inside = None if stack is None else {id(module) for module in stack.modules()}
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in by_name.items():
        layer = layer_of.get(id(module))
        if layer is not None and "." in name and (inside is None or id(module) in inside):
            parent = _whole_layer(name.rpartition(".")[0], by_name)
            blocks.setdefault(layer, (parent, by_name[parent]))
    return dict(sorted(blocks.items()))


def _whole_layer(name: str, by_name: Mapping[str, nn.Module]) -> str:
    """Return the name of the layer whose list of parts has a module, else the module's own."""
    listed = name.rpartition(".")[0]
    owner = listed.rpartition(".")[0]
    stack = owner.rpartition(".")[0]
    is_part = all(isinstance(by_name.get(one), nn.ModuleList) for one in (listed, stack))
    return owner if is_part else name


def decoder_stack(model: nn.Module) -> nn.Module | None:
    """Return the decoder of a model that has an encoder beside it, None for any other model."""
    return _stacks(model).get("decoder")


def encoder_stack(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a model that has a decoder beside it, None for any other model."""
    return _stacks(model).get("encoder")


def _stacks(model: nn.Module) -> dict[str, nn.Module]:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    for owner in (model, getattr(model, "model", None)):
        found = {name: getattr(owner, name, None) for name in ("encoder", "decoder")}
        stacks = {name: one for name, one in found.items() if isinstance(one, nn.Module)}
        if len(stacks) == 2:
            return stacks
    return {}


def cross_attention(model: nn.Module, layer_of: Mapping[int, int]) -> dict[int, nn.Module]:
    """Return by layer the second attention of the decoder, which reads the encoder's output."""
    stack = decoder_stack(model)
    found: dict[int, list[nn.Module]] = {}
    for module in stack.modules() if stack is not None else ():
        if id(module) in layer_of:
            found.setdefault(layer_of[id(module)], []).append(module)
    return {layer: modules[1] for layer, modules in found.items() if len(modules) == 2}


_HEAD_NAMES = ("lm_head", "embed_out", "output")


def output_embeddings(model: Any) -> nn.Module | None:
    """Return the module that computes logits, None for a model without one."""
    with suppress(NotImplementedError, AttributeError):
        found = model.get_output_embeddings()
        return found if isinstance(found, nn.Module) else None
    return None


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that makes logits of hidden states, None if the model has none."""
    named = (getattr(model, name, None) for name in _HEAD_NAMES)
    return next(
        (one for one in (output_embeddings(model), *named) if isinstance(one, nn.Module)), None
    )


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


_LIBRARY_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention")


def has_own_attention(model: nn.Module, layer_of: Mapping[int, int]) -> bool:
    """Whether the attention of a model is code of the program, which may keep keys by itself.

    `layer_of` has the ids of its attention modules.
    """
    name = str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "eager")
    if not name.startswith(_LIBRARY_ATTENTION):
        return True
    modules = [module for module in model.modules() if id(module) in layer_of]
    places = {getattr(type(one).forward, "__module__", None) or "" for one in modules}
    is_patched = any("forward" in vars(one) for one in modules)
    return is_patched or not all(place.startswith("transformers.") for place in places)
