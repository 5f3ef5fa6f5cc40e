"""Hypotheses about modules: a norm, bias, residual or block that is skipped, or done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward_edits import Edit, ModuleEdit
from flexinspect_hooks.audit.probe import Probe

Edits = Iterator[Edit]
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")


def _names(probe: Probe, *, inside: bool) -> dict[str, nn.Module]:
    """Return the leaf modules of a layer (or those outside of all layers) by their last name."""
    blocks = list(probe.reference.blocks.values())
    number = probe.layer if probe.layer is not None else next(iter(probe.reference.blocks))
    if inside:
        _, block = probe.reference.blocks.get(number, blocks[0])
        return {name.rpartition(".")[2]: one for name, one in block.named_modules() if name}
    prefixes = tuple(f"{name}." for name, _ in blocks)
    named = probe.reference.model.named_modules()
    return {n.rpartition(".")[2]: m for n, m in named if n and not n.startswith(prefixes)}


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _skip(module: nn.Module, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
    return inputs if isinstance(inputs, Tensor) and inputs.shape == output.shape else output


def norm_skipped(probe: Probe) -> Edits:
    """A normalization is left out, or its weight, or the 1 that is added to its weight."""
    modules = _names(probe, inside=True)
    modules |= {n: m for n, m in _names(probe, inside=False).items() if n in _FINAL_NORMS}

    def unweighted(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        variance = inputs.float().pow(2).mean(-1, keepdim=True)
        return (inputs.float() * torch.rsqrt(variance + _epsilon(module))).to(output.dtype)

    def without_one(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return unweighted(module, inputs, output, before) * module.weight

    for name, module in modules.items():
        if not _is_norm(module):
            continue
        yield Edit(name="norm.skipped", sentence=f"without {name}", modules={name: _skip})
        sentence = f"in which {name} does not use its weight"
        yield Edit(name="norm.skipped", sentence=sentence, modules={name: unweighted})
        if "gemma" in type(module).__name__.lower():
            sentence = f"in which {name} multiplies by its weight, not by 1 + weight"
            yield Edit(name="norm.weight", sentence=sentence, modules={name: without_one})


def _epsilon(module: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return 1e-6


def bias_skipped(probe: Probe) -> Edits:
    """The biases of a linear module are left out."""

    def unbiased(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output - module.bias

    modules = _names(probe, inside=True)
    biased = {n: m for n, m in modules.items() if getattr(m, "bias", None) is not None}
    linear = {name: module for name, module in biased.items() if not _is_norm(module)}
    for name in linear:
        edit = {name: unbiased}
        yield Edit(name="bias.skipped", sentence=f"without the bias of {name}", modules=edit)
    projections: dict[str, ModuleEdit] = {
        n: unbiased for n in ("q_proj", "k_proj", "v_proj") if n in linear
    }
    if len(projections) > 1:
        sentence = "without the biases of q_proj, k_proj and v_proj"
        yield Edit(name="bias.skipped", sentence=sentence, modules=projections)


def residual_skipped(probe: Probe) -> Edits:
    """The input of the layer is not added to the output of its attention."""

    def minus(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output - before

    def plus(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output + before

    def zero(module: nn.Module, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        return torch.zeros_like(output)

    names = _names(probe, inside=True)
    attention = next((n for n in ("self_attn", "attn", "attention") if n in names), None)
    if attention is not None:
        sentence = "without the residual around the attention"
        yield Edit(name="residual.skipped", sentence=sentence, modules={attention: minus})
        sentence = "in which the residual around the attention is added twice"
        yield Edit(name="residual.doubled", sentence=sentence, modules={attention: plus})
        sentence = "without the attention block"
        yield Edit(name="block.skipped", sentence=sentence, modules={attention: zero})
    for name in ("mlp", "feed_forward"):
        if name in names:
            yield Edit(name="block.skipped", sentence=f"without {name}", modules={name: zero})


def embedding_scale(probe: Probe) -> Edits:
    """The embeddings are scaled by the root of the hidden size, or not scaled though they are."""
    size = float(getattr(probe.config, "hidden_size", 1)) ** 0.5

    def larger(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output * size

    def smaller(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output / size

    for name in ("embed_tokens", "wte", "embed_in", "word_embeddings"):
        if name in _names(probe, inside=False):
            sentence = "without the scale of the embeddings"
            yield Edit(
                name="embedding.scale", sentence=sentence, modules={name: smaller}, whole_model=True
            )
            sentence = "with embeddings scaled by the root of the hidden size"
            yield Edit(
                name="embedding.scale", sentence=sentence, modules={name: larger}, whole_model=True
            )


HYPOTHESES = (norm_skipped, bias_skipped, residual_skipped, embedding_scale)
