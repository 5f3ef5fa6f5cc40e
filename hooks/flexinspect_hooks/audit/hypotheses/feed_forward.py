"""Hypotheses about the MLP of a layer: its neurons, its activation, and the choice of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, LOGITS
from flexinspect_hooks.audit.hypotheses.modules import layer_modules
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe
from flexinspect_hooks.audit.reference.reference_model import BLOCKS

Edits = Iterator[ForwardEdit]
Activation = Callable[[Tensor], Tensor]

_SLICES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Usual widths of the slices in which programs work through an MLP."""
_MOST_EXPERTS = 64
"""Each expert is a forward of its own: with more experts none is left out."""
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": functional.silu,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "GELU (tanh)": lambda rows: functional.gelu(rows, approximate="tanh"),
    "the sigmoid": torch.sigmoid,
    "no activation": lambda rows: rows,
}
_PLAIN = (("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"), ("fc1", "fc2"))
"""Names of the two projections of an MLP without a gate."""


class _Mlp(Struct, frozen=True):
    """The parts of an MLP: `split` gives gate and up (rows, size), or the same tensor twice."""

    name: str
    split: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    down: str
    activation: Activation
    is_gated: bool

    def neurons(self, module: Any, rows: Tensor, activation: Activation | None = None) -> Tensor:
        """Return the values of the neurons, the input of the last projection."""
        gate, up = self.split(module, rows)
        active = (activation or self.activation)(gate)
        return active * up if self.is_gated else active


def _mlp(probe: FaultProbe) -> tuple[_Mlp, Any] | None:
    """Return the parts of the MLP in the layer of the divergence, None if they are not known.

    Also None if the layer diverges before its MLP.
    """
    if probe.quantity not in (HIDDEN, LOGITS):
        return None
    modules = layer_modules(probe)
    name = next((one for one in BLOCKS if one in modules), None)
    module: Any = modules.get(name or "")
    own = ("act_fn", "activation_fn", "act")
    activation = next((getattr(module, one) for one in own if hasattr(module, one)), None)
    if name is None or activation is None:
        return None

    def two(module: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        return module.gate_proj(rows), module.up_proj(rows)

    def fused(module: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = module.gate_up_proj(rows).chunk(2, -1)
        return gate, up

    if isinstance(getattr(module, "down_proj", None), nn.Linear):
        if hasattr(module, "gate_proj"):
            return _Mlp(name, two, "down_proj", activation, is_gated=True), module
        if hasattr(module, "gate_up_proj"):
            return _Mlp(name, fused, "down_proj", activation, is_gated=True), module
    for first, last in _PLAIN:
        if hasattr(module, first) and hasattr(module, last):

            def one(module: Any, rows: Tensor, first: str = first) -> tuple[Tensor, Tensor]:
                values = getattr(module, first)(rows)
                return values, values

            return _Mlp(name, one, last, activation, is_gated=False), module
    return None


def neurons_missing(probe: FaultProbe) -> Edits:
    """The last neurons are missing: what slices of a usual width leave over, or the last slice."""
    found = _mlp(probe)
    if found is None:
        return
    mlp, module = found
    rows = torch.zeros(1, 1, probe.config.hidden_size, dtype=probe.reference.dtype)
    size = mlp.neurons(module, rows.to(probe.reference.device)).shape[-1]
    options: dict[int, str] = {}
    for width in _SLICES:
        if width < size:
            left_over = f"what slices of {width} leave over"
            what = left_over if size % width else f"the last slice of {width}"
            options.setdefault(size % width or width, what)
    for n, what in options.items():

        def cut(module: Any, inputs: Any, output: Tensor, before: Tensor, n: int = n) -> Tensor:
            values = mlp.neurons(module, inputs).clone()
            values[..., size - n :] = 0
            result: Tensor = getattr(module, mlp.down)(values)
            return result

        sentence = f"in which the last {n} of {size} neurons of {mlp.name} are missing ({what})"
        yield ForwardEdit(name="mlp.neurons", sentence=sentence, modules={mlp.name: cut})


def activation_changed(probe: FaultProbe) -> Edits:
    """The MLP has another activation."""
    found = _mlp(probe)
    if found is None:
        return
    mlp, _ = found
    points = torch.linspace(-4, 4, 33, device=probe.reference.device)
    for text, activation in _ACTIVATIONS.items():
        if torch.allclose(activation(points), mlp.activation(points), atol=1e-6):
            continue

        def other(
            module: Any,
            inputs: Any,
            output: Tensor,
            before: Tensor,
            activation: Activation = activation,
        ) -> Tensor:
            result: Tensor = getattr(module, mlp.down)(mlp.neurons(module, inputs, activation))
            return result

        sentence = f"whose {mlp.name} has {text} as activation"
        yield ForwardEdit(name="mlp.activation", sentence=sentence, modules={mlp.name: other})


def gate_exchanged(probe: FaultProbe) -> Edits:
    """The activation is applied to the up projection, not to the gate."""
    found = _mlp(probe)
    if found is None or not found[0].is_gated:
        return
    mlp, _ = found

    def exchanged(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        gate, up = mlp.split(module, inputs)
        result: Tensor = getattr(module, mlp.down)(mlp.activation(up) * gate)
        return result

    sentence = f"whose {mlp.name} has its gate and up projection exchanged"
    yield ForwardEdit(name="mlp.gate", sentence=sentence, modules={mlp.name: exchanged})


class _Routing(Struct, frozen=True):
    """What a router gave: `scores` (rows, experts), `weights` and `chosen` (rows, top k)."""

    scores: Tensor
    weights: Tensor
    chosen: Tensor

    def is_normalised(self) -> bool:
        """Whether the weights of each row add up to 1."""
        total = self.weights.float().sum(-1)
        return torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _router(module: Any) -> Any:
    return next((getattr(module, one) for one in ("gate", "router") if hasattr(module, one)), None)


def _reroute(name: str, block: str, sentence: str, change: Callable[[_Routing], Any]) -> Any:
    """Return the edit of a block whose experts get other weights, or are others.

    The weighted experts are taken out of the output and put in again; a shared expert stays.
    """

    def routed(module: Any, inputs: Any, output: Tensor, before: Tensor) -> Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        own = _Routing(*_router(module)(flat))
        chosen, weights = change(own)
        own_sum = module.experts(flat, own.chosen, own.weights)
        new_sum = module.experts(flat, chosen, weights.to(own.weights.dtype))
        result: Tensor = output + (new_sum - own_sum).reshape(output.shape)
        return result

    return ForwardEdit(name=name, sentence=sentence, modules={block: routed})


def _moe(probe: FaultProbe) -> tuple[str, _Routing] | None:
    """Return the name of the block with experts and the form of its routing, None without one.

    Also None if the layer diverges before its experts.
    """
    if probe.quantity not in (HIDDEN, LOGITS):
        return None
    modules = layer_modules(probe)
    for name in BLOCKS:
        router = _router(modules.get(name))
        if router is not None and hasattr(modules[name], "experts"):
            weight = next(router.parameters())
            given = router(torch.ones(1, weight.shape[-1], dtype=weight.dtype).to(weight.device))
            if isinstance(given, tuple) and len(given) == 3 and given[1].shape == given[2].shape:
                return name, _Routing(*given)
    return None


def expert_weights(probe: FaultProbe) -> Edits:
    """The weights of the chosen experts are not normalised, normalised, or not used."""
    found = _moe(probe)
    if found is None:
        return
    block, form = found

    def raw(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, own.scores.float().softmax(-1).gather(-1, own.chosen)

    def normalised(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, own.weights / own.weights.sum(-1, keepdim=True)

    def ones(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, torch.ones_like(own.weights)

    def mean(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, torch.ones_like(own.weights) / own.weights.shape[-1]

    def sigmoid(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, own.scores.float().sigmoid().gather(-1, own.chosen)

    def sigmoid_normalised(own: _Routing) -> tuple[Tensor, Tensor]:
        weights = sigmoid(own)[1]
        return own.chosen, weights / weights.sum(-1, keepdim=True)

    name = "experts.weights"
    for how, change in (("", sigmoid), (" that are normalised", sigmoid_normalised)):
        sentence = f"in which {block} weights the experts by sigmoids{how}, not by a softmax"
        yield _reroute(name, block, sentence, change)
    if form.is_normalised():
        sentence = f"in which {block} does not normalise the weights of the chosen experts"
        yield _reroute(name, block, sentence, raw)
    else:
        sentence = f"in which {block} normalises the weights of the chosen experts to a sum of 1"
        yield _reroute(name, block, sentence, normalised)
    sentence = f"in which {block} adds the chosen experts without their weights"
    yield _reroute(name, block, sentence, ones)
    sentence = f"in which {block} takes the mean of the chosen experts, without their weights"
    yield _reroute(name, block, sentence, mean)


def expert_count(probe: FaultProbe) -> Edits:
    """Each row has one expert less, or one more."""
    found = _moe(probe)
    if found is None:
        return
    block, form = found
    top_k, is_normalised = form.chosen.shape[-1], form.is_normalised()

    for k in (top_k - 1, top_k + 1):
        if not 0 < k <= form.scores.shape[-1]:
            continue

        def chosen(own: _Routing, k: int = k) -> tuple[Tensor, Tensor]:
            weights, chosen = own.scores.float().softmax(-1).topk(k, -1)
            return chosen, weights / weights.sum(-1, keepdim=True) if is_normalised else weights

        sentence = f"in which {block} chooses {k} of the experts, not {top_k}"
        yield _reroute("experts.count", block, sentence, chosen)


def expert_missing(probe: FaultProbe) -> Edits:
    """The output of one expert is missing where it was chosen."""
    found = _moe(probe)
    if found is None or found[1].scores.shape[-1] > _MOST_EXPERTS:
        return
    block, form = found
    for expert in range(form.scores.shape[-1]):

        def without(own: _Routing, expert: int = expert) -> tuple[Tensor, Tensor]:
            return own.chosen, own.weights.masked_fill(own.chosen == expert, 0)

        def renormalised(own: _Routing, expert: int = expert) -> tuple[Tensor, Tensor]:
            left = own.weights.masked_fill(own.chosen == expert, 0)
            return own.chosen, left / left.sum(-1, keepdim=True).clamp_min(1e-9)

        where = f"in which expert {expert} of {block} is dropped after the choice of experts"
        sentence = f"{where}, and the weights of the others are not normalised again"
        yield _reroute("experts.missing", block, sentence, without)
        if form.is_normalised() and form.chosen.shape[-1] > 1:
            sentence = f"{where}, without another expert in its place"
            yield _reroute("experts.missing", block, sentence, renormalised)


def experts_overwritten(probe: FaultProbe) -> Edits:
    """Outputs of chosen experts replace each other, so that only one of each row counts."""
    found = _moe(probe)
    if found is None or found[1].chosen.shape[-1] < 2:
        return
    block, form = found
    top_k = form.chosen.shape[-1]
    options: dict[str, Callable[[Tensor], Tensor]] = {
        "the one with the highest index": lambda chosen: chosen == chosen.amax(-1, keepdim=True),
        "the one with the lowest index": lambda chosen: chosen == chosen.amin(-1, keepdim=True),
        "the one with the largest weight": lambda chosen: _slot(chosen, 0),
        "the one with the smallest weight": lambda chosen: _slot(chosen, top_k - 1),
    }
    for which, kept in options.items():

        def one(own: _Routing, kept: Callable[[Tensor], Tensor] = kept) -> tuple[Tensor, Tensor]:
            return own.chosen, own.weights.masked_fill(~kept(own.chosen), 0)

        sentence = (
            f"in which only one of the {top_k} chosen experts of each row counts in {block}, "
            f"{which} (outputs are assigned, not added)"
        )
        yield _reroute("experts.overwritten", block, sentence, one)


def _slot(chosen: Tensor, slot: int) -> Tensor:
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    return (places == slot).expand_as(chosen)


def expert_order(probe: FaultProbe) -> Edits:
    """The chosen experts have the weights of each other, or other experts run in their place."""
    found = _moe(probe)
    if found is None:
        return
    block, form = found
    n, top_k = form.scores.shape[-1], form.chosen.shape[-1]

    def sorted_experts(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen.sort(-1).values, own.weights

    def reversed_weights(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, own.weights.flip(-1)

    def worst(own: _Routing) -> tuple[Tensor, Tensor]:
        scores, chosen = own.scores.float().topk(top_k, -1, largest=False)
        return chosen, scores.softmax(-1) if form.is_normalised() else own.weights

    def squared(own: _Routing) -> tuple[Tensor, Tensor]:
        return own.chosen, own.weights.square()

    options: dict[str, Callable[[_Routing], Any]] = {
        f"in which {block} applies the weights of the chosen experts twice": squared,
        f"in which {block} chooses the experts with the lowest scores": worst,
    }
    if top_k > 1:
        options |= {
            f"in which {block} sorts the indices of the chosen experts, but not their weights": (
                sorted_experts
            ),
            f"in which {block} gives the chosen experts their weights in reverse order": (
                reversed_weights
            ),
        }
    for shift in (1, -1):

        def shifted(own: _Routing, shift: int = shift) -> tuple[Tensor, Tensor]:
            return (own.chosen + shift) % n, own.weights

        side = "after" if shift > 0 else "before"
        options[f"in which {block} runs the expert {side} each one that is chosen"] = shifted
    for sentence, change in options.items():
        yield _reroute("experts.order", block, sentence, change)


HYPOTHESES = (
    neurons_missing,
    activation_changed,
    gate_exchanged,
    expert_weights,
    expert_count,
    expert_missing,
    experts_overwritten,
    expert_order,
)
