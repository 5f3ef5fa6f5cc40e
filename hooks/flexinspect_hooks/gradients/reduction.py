"""Reduces gradients to a few numbers during the backward pass; no gradient is kept in memory.

One backward pass gives the gradient of every parameter, and all of them would not fit into memory.
So a hook on each parameter reduces its gradient as soon as it is complete and returns zeros, which
take no memory. No `.grad` is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.records.step import GradientStat

NORM_CHUNK_SIZE = 1 << 20  # values that are converted to float64 and summed at once


class GradientObserver:
    """Makes parameters and hidden states of `model` require gradients, and reduces these.

    `blocks` maps a layer to (name, decoder layer). On exit, `requires_grad` of every parameter is
    restored, and all hooks are removed. Differentiate once with respect to `parameters` and
    `leaves`; the latter are layer outputs that depend on no parameter.
    """

    def __init__(self, model: Any, blocks: Mapping[int, tuple[str, nn.Module]]) -> None:
        self._model, self.blocks = model, blocks
        self._restore = ExitStack()
        self._layer_and_part: dict[str, tuple[int | None, str]] = {}
        self.parameters: list[nn.Parameter] = []
        self.leaves: list[Tensor] = []
        self.stats: dict[str, GradientStat] = {}  # by parameter name
        self.norms: dict[int, Tensor] = {}  # of the gradient at each layer's output; -1: embeddings
        self.embeddings: Tensor | None = None  # output of that layer; `gradient` is its gradient
        self.gradient: Tensor | None = None

    def __enter__(self) -> GradientObserver:
        with ExitStack() as stack:
            stack.callback(self.parameters.clear)
            stack.callback(self.leaves.clear)
            for name, parameter in self._model.named_parameters():
                if parameter.is_floating_point():  # quantised weights have no gradient
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(True)
                    self.parameters.append(parameter)
                    hook = self._reduction_hook(name, parameter)
                    stack.enter_context(parameter.register_hook(hook))
            embeddings = self._model.get_input_embeddings()
            stack.enter_context(embeddings.register_forward_hook(self._on_embedding_output))
            for layer, (_, block) in self.blocks.items():
                stack.enter_context(block.register_forward_hook(self._layer_output_hook(layer)))
            self._restore = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def note_unreached_layers(self) -> None:
        """Set 0 for the parameters of each layer that the backward pass did not reach.

        In a layer that it reached, experts that received no token rightly have no gradient.
        """
        reached = {stat.layer for stat in self.stats.values()}
        for name, (layer, part) in self._layer_and_part.items():
            if layer is not None and layer not in reached:
                self.stats[name] = GradientStat(name, 0.0, 0.0, 0, 0, layer, part)

    def _reduction_hook(self, name: str, parameter: nn.Parameter) -> Any:
        layer, part = self._layer_and_part[name] = self._locate(name, parameter)

        def reduce(gradient: Tensor) -> Tensor:
            norm = float(gradient_norm(gradient))
            n_nan = n_inf = 0
            if norm != norm or norm == torch.inf:
                n_nan, n_inf = int(gradient.isnan().sum()), int(gradient.isinf().sum())
            empty = gradient.new_zeros(1)
            ends = torch.stack(torch.aminmax(gradient)) if gradient.numel() else empty
            largest = float(ends.abs().max())
            self.stats[name] = GradientStat(name, norm, largest, n_nan, n_inf, layer, part)
            return gradient.new_zeros(()).expand_as(gradient)

        return reduce

    def _locate(self, name: str, parameter: nn.Parameter) -> tuple[int | None, str]:
        """The layer (None outside the layers) and the part (see `GradientStat`) of a parameter."""
        for layer, (block, _) in self.blocks.items():
            if name.startswith(f"{block}."):
                return layer, part_in_layer(name.removeprefix(f"{block}."))
        model = self._model
        is_embedding = parameter is getattr(model.get_input_embeddings(), "weight", None)
        if parameter is getattr(model.get_output_embeddings(), "weight", None):
            return None, "tied" if is_embedding else "lm_head"
        if is_embedding:
            return None, "embedding"
        return None, "norm" if _NORM_PATTERN.search(name) else "other"

    def _on_embedding_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        def on_gradient(gradient: Tensor) -> None:
            self.gradient, self.norms[-1] = gradient.detach(), gradient_norm(gradient)

        if not output.requires_grad:
            output = output.detach().requires_grad_(True)
        self.embeddings = output.detach()
        output.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        return output

    def _layer_output_hook(self, layer: int) -> Any:
        def on_gradient(gradient: Tensor) -> None:
            self.norms[layer] = gradient_norm(gradient)

        def watch(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
                return None
            is_cut_off = not hidden.requires_grad
            if is_cut_off:  # then make it a leaf, to measure the gradient on both sides
                self.leaves.append(hidden := hidden.detach().clone().requires_grad_(True))
                hidden = hidden.clone()  # later code may change it in place
            hidden.register_hook(on_gradient)  # type: ignore[no-untyped-call]
            if not is_cut_off:
                return None
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return watch


def gradient_norm(gradient: Tensor) -> Tensor:
    """The Euclidean norm, summed in float64: squares of large gradients overflow float32.

    It is summed in chunks, because torch makes a float64 copy of what it sums.
    """
    pieces = gradient.detach().reshape(-1).split(NORM_CHUNK_SIZE)  # type: ignore[no-untyped-call]
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


_NORM_PATTERN = re.compile(r"norm|(^|[._])ln(_|\.|$)")
_MLP_PATTERN = re.compile(r"mlp|feed_?forward|ffn|moe|expert|gate_up|fc\d|router")
_PROJECTION_NAMES = {
    "q": ("q_proj", "query", "wq", "to_q"),
    "k": ("k_proj", "key", "wk", "to_k"),
    "v": ("v_proj", "value", "wv", "to_v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv", "in_proj"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "wo", "to_out"),
}


def part_in_layer(name: str) -> str:
    """The part of a parameter by its name within a layer, such as "self_attn.q_proj.weight"."""
    path, _, _ = name.rpartition(".")
    if _NORM_PATTERN.search(path):
        return "norm"
    if _MLP_PATTERN.search(path):
        return "mlp"
    module = path.rpartition(".")[2]
    default = "attention" if "att" in path else "other"
    return next((part for part, names in _PROJECTION_NAMES.items() if module in names), default)
