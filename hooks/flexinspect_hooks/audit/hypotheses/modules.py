"""Hypotheses about modules: a norm, bias, residual or block that is skipped, or done otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, ModuleEdit
from flexinspect_hooks.audit.forward.weights import numbers_of
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Edits = Iterator[ForwardEdit]
_HEAD_NORMS = ("q_norm", "k_norm")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")


def layer_modules(probe: FaultProbe) -> dict[str, nn.Module]:
    """Return the modules in the layer of the divergence by their last name."""
    blocks = list(probe.reference.blocks.values())
    number = probe.layer if probe.layer is not None else next(iter(probe.reference.blocks))
    _, block = probe.reference.blocks.get(number, blocks[0])
    return {name.rpartition(".")[2]: one for name, one in block.named_modules() if name}


def _outer_modules(probe: FaultProbe) -> dict[str, nn.Module]:
    """Return the modules outside of all layers by their last name."""
    prefixes = tuple(f"{name}." for name, _ in probe.reference.blocks.values())
    named = probe.reference.model.named_modules()
    return {n.rpartition(".")[2]: m for n, m in named if n and not n.startswith(prefixes)}


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization, by the name of its class."""
    return "norm" in type(module).__name__.lower()


def _skip(module: nn.Module, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
    return inputs if isinstance(inputs, Tensor) and inputs.shape == output.shape else output


def norm_skipped(probe: FaultProbe) -> Edits:
    """A normalization is left out, or its weight, or the 1 that is added to its weight."""
    modules = layer_modules(probe)
    modules |= {n: m for n, m in _outer_modules(probe).items() if n in _FINAL_NORMS}

    def unweighted(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        variance = inputs.float().pow(2).mean(-1, keepdim=True)
        return (inputs.float() * torch.rsqrt(variance + epsilon_of(module))).to(output.dtype)

    def without_one(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return unweighted(module, inputs, output, before) * module.weight

    norms = {name: module for name, module in modules.items() if is_norm(module)}
    groups: list[tuple[str, ...]] = [(name,) for name in norms]
    if {*_HEAD_NORMS} <= norms.keys():  # a patch mostly replaces both
        groups.append(_HEAD_NORMS)
    for names in groups:
        those, do, their = " and ".join(names), "does", "its weight"
        if len(names) > 1:
            do, their = "do", "their weights"
        edits: list[tuple[str, str, ModuleEdit]] = [
            ("norm.skipped", f"without {those}", _skip),
            ("norm.skipped", f"in which {those} {do} not use {their}", unweighted),
        ]
        if "gemma" in type(norms[names[0]]).__name__.lower():
            multiply = "multiplies" if len(names) == 1 else "multiply"
            sentence = f"in which {those} {multiply} by {their}, not by 1 + weight"
            edits.append(("norm.weight", sentence, without_one))
        for kind, sentence, edit in edits:
            yield ForwardEdit(name=kind, sentence=sentence, modules=dict.fromkeys(names, edit))


def epsilon_of(module: Any) -> float:
    """Return the epsilon of a norm."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    return 1e-6


def bias_skipped(probe: FaultProbe) -> Edits:
    """The biases of a linear module are left out."""

    def unbiased(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output - module.bias

    modules = layer_modules(probe)
    biased = {n: m for n, m in modules.items() if getattr(m, "bias", None) is not None}
    linear = {name: module for name, module in biased.items() if not is_norm(module)}
    for name in linear:
        edit = {name: unbiased}
        yield ForwardEdit(name="bias.skipped", sentence=f"without the bias of {name}", modules=edit)
    projections: dict[str, ModuleEdit] = {
        n: unbiased for n in ("q_proj", "k_proj", "v_proj") if n in linear
    }
    if len(projections) > 1:
        sentence = "without the biases of q_proj, k_proj and v_proj"
        yield ForwardEdit(name="bias.skipped", sentence=sentence, modules=projections)


def residual_skipped(probe: FaultProbe) -> Edits:
    """The input of the layer is not added to the output of its attention."""

    def minus(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output - before

    def plus(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output + before

    def zero(module: nn.Module, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        return torch.zeros_like(output)

    names = layer_modules(probe)
    attention = next((n for n in ("self_attn", "attn", "attention") if n in names), None)
    if attention is not None:
        sentence = "without the residual around the attention"
        yield ForwardEdit(name="residual.skipped", sentence=sentence, modules={attention: minus})
        sentence = "in which the residual around the attention is added twice"
        yield ForwardEdit(name="residual.doubled", sentence=sentence, modules={attention: plus})
        sentence = "without the attention block"
        yield ForwardEdit(name="block.skipped", sentence=sentence, modules={attention: zero})
    for name in ("mlp", "feed_forward"):
        if name in names:
            yield ForwardEdit(
                name="block.skipped", sentence=f"without {name}", modules={name: zero}
            )


def mlp_residual_skipped(probe: FaultProbe) -> Edits:
    """The input of the MLP, before its norm, is not added to its output."""
    names = layer_modules(probe)
    block = next((n for n in ("mlp", "feed_forward") if n in names), None)
    if block is None:
        return
    norms: list[tuple[Tensor, Tensor]] = []
    residual: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        norms.append((inputs, output))
        return output

    def find(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        # Without a norm before it, the MLP takes the residual itself.
        given = next((one for one, normed in norms if torch.equal(normed, inputs)), inputs)
        residual[:] = [given]
        norms.clear()
        return output if last != block else output - given

    def minus(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output - residual[0]

    last = next((n for n in ("post_feedforward_layernorm",) if n in names), block)
    edits: dict[str, ModuleEdit] = {n: keep for n, m in names.items() if is_norm(m)}
    edits |= {block: find} if last == block else {block: find, last: minus}
    sentence = f"without the residual around {block}"
    yield ForwardEdit(name="residual.skipped", sentence=sentence, modules=edits)


def norm_after_residual(probe: FaultProbe) -> Edits:
    """The norm of a block's output, which the architecture adds to the residual, is of the sum."""
    names = layer_modules(probe)
    attention, feed_forward = "post_attention_layernorm", "post_feedforward_layernorm"
    if not (is_norm(names.get(attention, probe.reference.model)) and feed_forward in names):
        return  # without the second, the first is that before the MLP
    middle: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        middle[:] = [before + output]
        return output

    def of_sum(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        changed = module.forward(inputs + before)
        middle[:] = [changed]
        return changed - before

    def of_second_sum(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return module.forward(inputs + middle[0]) - middle[0]

    choices: list[tuple[str, dict[str, ModuleEdit]]] = [
        (attention, {attention: of_sum}),
        (feed_forward, {attention: keep, feed_forward: of_second_sum}),
        (f"{attention} and {feed_forward}", {attention: of_sum, feed_forward: of_second_sum}),
    ]
    for those, edits in choices:
        blocks = {attention: "the attention", feed_forward: "the MLP"}.get(those, "the two blocks")
        sentence = f"in which {those} {'are' if ' and ' in those else 'is'} applied to the sum of "
        sentence += f"the residual and the output of {blocks}, not to the output alone"
        yield ForwardEdit(name="norm.after-residual", sentence=sentence, modules=edits)


def embedding_scale(probe: FaultProbe) -> Edits:
    """The embeddings are scaled by the root of the hidden size, or not scaled though they are."""
    size = float(getattr(probe.config, "hidden_size", 1)) ** 0.5

    def larger(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output * size

    def smaller(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Any:
        return output / size

    for name in ("embed_tokens", "wte", "embed_in", "word_embeddings"):
        if name in _outer_modules(probe):
            sentence = "without the scale of the embeddings"
            yield ForwardEdit(
                name="embedding.scale", sentence=sentence, modules={name: smaller}, whole_model=True
            )
            sentence = "with embeddings scaled by the root of the hidden size"
            yield ForwardEdit(
                name="embedding.scale", sentence=sentence, modules={name: larger}, whole_model=True
            )


def residual_order(probe: FaultProbe) -> Edits:
    """Attention and MLP run one after the other, not side by side, or the reverse.

    In all layers, or only in that of the divergence, whose forward a program may have replaced.
    """
    flag = "use_parallel_residual"
    names = {
        name: bool(getattr(module, flag))
        for name, module in probe.reference.model.named_modules()
        if isinstance(getattr(module, flag, None), bool)
    }
    if names:
        is_parallel = next(iter(names.values()))
        reads = "the sum of the residual and the attention" if is_parallel else "the layer's input"
        block = "" if probe.layer is None else probe.reference.blocks[probe.layer][0]
        for where, chosen in (("", names), (" in this layer alone", {*names} & {block})):
            yield ForwardEdit(
                name="residual.order",
                sentence=f"whose MLP{where} reads {reads} ({flag} is {is_parallel} in the "
                "configuration)",
                attributes={name: {flag: not is_parallel} for name in chosen},
                whole_model=True,
            )


def attribute_changed(probe: FaultProbe) -> Edits:
    """A number that the program's modules hold, such as an epsilon, is not the configuration's."""
    changed: dict[tuple[str, str, float, float], list[str]] = {}
    for name, module in probe.reference.model.named_modules():
        theirs = probe.reference.program_attributes.get(name, {})
        for attribute, own in numbers_of(module).items():
            value = theirs.get(attribute, own)
            if value != own:
                key = (name.rpartition(".")[2], attribute, value, own)
                changed.setdefault(key, []).append(name)
    n_layers = len(probe.reference.blocks)
    for (last, attribute, value, own), names in changed.items():
        where = "" if len(names) == n_layers else f" (in {', '.join(names)})"
        yield ForwardEdit(
            name="attribute.changed",
            sentence=f"in which {last}.{attribute} is {value:g}, not {own:g}{where}",
            attributes={name: {attribute: value} for name in names},
            whole_model=True,
        )


HYPOTHESES = (
    norm_skipped,
    bias_skipped,
    residual_skipped,
    mlp_residual_skipped,
    norm_after_residual,
    residual_order,
    embedding_scale,
    attribute_changed,
)
