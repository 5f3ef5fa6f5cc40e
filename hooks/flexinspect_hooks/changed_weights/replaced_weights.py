"""What was made of weights: of those that changed, and of those that a program's modules replace.

A module that stands where a linear layer was made, such as one with packed integers, has no such
weight. The one that it uses is read from its outputs for rows of the identity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import quiet_module
from flexinspect_hooks.changed_weights.weight_matches import Seen
from flexinspect_hooks.changed_weights.weight_orders import (
    Weights,
    has_other_forward,
    is_plain,
    layers_of,
    order_facts,
)
from flexinspect_hooks.changed_weights.weight_values import scale_facts, wrapped_facts

_LIBRARIES = ("torch", "transformers")
_SECONDS = 1.0
_MAX_INPUTS = 1024
_SIZE = 256.0
"""Of the probe rows: so large that the bias does not round the weights off in a small dtype."""
_LINEAR = 0.05
"""How far the output for a random row may be from that of the weight, of its norm."""

Places = Callable[[int], Tensor]
"""Returns the rows, or columns, of a side with so many that a block has."""


class Made(Protocol):
    """What was kept of the parameters of a model; `flipped` are those with (inputs, outputs)."""

    blocks: dict[str, Tensor]
    shapes: dict[str, torch.Size]
    flipped: set[str]


def weights_of(
    model: nn.Module,
    same: Mapping[str, Tensor],
    blocks: Mapping[str, Tensor],
    changed: set[str],
    places: Places,
) -> Weights:
    """Return the weights of a model that are as they were, and what became of the others.

    `same` are the parameters by name that still have their shape, `blocks` what was kept of them.
    """
    seen, sizes, stacks = {}, {}, {}
    for name, one in same.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if one.dim() < 2 or not is_plain(owner):
            continue
        is_flipped = is_conv(owner)
        if name not in changed:
            sizes[name] = (one.shape[1], one.shape[0]) if is_flipped else (len(one), one.shape[1])
        elif one.dim() == 2:
            rows, columns = (places(n) for n in one.shape)
            block = blocks[name]
            if block.shape == one.shape:
                rows, columns = (torch.arange(n) for n in one.shape)
            at_columns = _taken(one, columns, 1)
            at_rows = _taken(one, rows, 0)
            seen[name] = (
                Seen(name, block.T, columns, rows, at_rows.T, at_columns.T)
                if is_flipped
                else Seen(name, block, rows, columns, at_columns, at_rows)
            )
        elif blocks[name].dim() == 3:
            experts = torch.arange(len(one))
            stacks[name] = blocks[name].flatten(1), _cpu(one).flatten(1), experts
        elif one.dim() == 3:
            now = _cpu(one.detach()[:, places(one.shape[1]).to(one.device), 0])
            stacks[name] = blocks[name], now, places(len(one))
    return Weights(seen, sizes, stacks)


def is_conv(owner: nn.Module) -> bool:
    """Whether a module is a Conv1D of transformers, whose weight is (inputs, outputs)."""
    return type(owner).__name__ == "Conv1D"


def _taken(one: Tensor, places: Tensor, dim: int) -> Tensor:
    return _cpu(one.detach().index_select(dim, places.to(one.device)))


def _cpu(one: Tensor) -> Tensor:
    return one.detach().to("cpu", torch.float32)


def wrapped_weights(
    weights: Weights, same: Mapping[str, Tensor], blocks: Mapping[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield changed weights whose largest elements wrapped around."""
    both = {name: (one.before, one.now()) for name, one in weights.seen.items()}
    for name in weights.stacks:
        before, now = blocks[name], _cpu(same[name])
        if before.dim() == 3:  # the last dimension is the one that a scale belongs to
            both[name] = before.flatten(0, 1), now.flatten(0, 1)
    for name, (before, now) in both.items():
        # A scale may also belong to a column.
        found = wrapped_facts(before, now) or wrapped_facts(before.T, now.T)
        if found is not None:
            yield {"name": name, "layers": layers_of(name), **found}


# -- modules of the program ------------------------------------------------------------------------


def replaced_facts(
    model: nn.Module,
    weights: Weights,
    made: Made,
    changed: set[str],
    is_followed: Callable[[Tensor], bool],
    places: Places,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (what, facts) of modules that do not compute what the weight that was there did.

    `what` is "orders", "wrapped" or "scaled". `changed` are the names of parameters that did.
    """
    modules, deadline = dict(model.named_modules()), time.perf_counter() + _SECONDS
    found = dict[str, Seen]()
    for name, block in made.blocks.items():
        module = modules.get(name.removesuffix(".weight"))
        if module is None or block.dim() != 2 or time.perf_counter() > deadline:
            continue
        library = type(module).__module__.partition(".")[0]
        if library in _LIBRARIES or _has_weight(module, is_followed):
            continue
        with suppress(Exception):  # a module of the program may be of any kind
            rows, columns = made.shapes[name]
            sides, shape = (block, (rows, columns))
            if name in made.flipped:
                sides, shape = (block.T, (columns, rows))
            one = _seen_module(name, module, sides, shape, places)
            if one is not None:
                found[name] = one
    if not found:
        return
    whole = Weights({**weights.seen, **found}, weights.sizes, weights.stacks)
    for facts in order_facts(model, whole):
        named = [label for side in facts["sides"] for label in side["names"]]
        here = [one for one in found.values() if any(label.endswith(one.name) for label in named)]
        if here:
            module = here[0].name.removesuffix(".weight")
            yield "orders", {**facts, "module": module, "class": here[0].kind}
    for name, one in found.items():
        wrapped = wrapped_facts(one.before, one.now())
        if wrapped is not None:
            base = {"name": name, "class": one.kind, "layers": layers_of(name)}
            yield "wrapped", base | wrapped
    for name, facts in _scaled(model, whole, found, changed).items():
        base = {"name": name, "class": found[name].kind, "layers": layers_of(name)}
        yield "scaled", base | facts


def _has_weight(module: nn.Module, is_followed: Callable[[Tensor], bool]) -> bool:
    """Whether a module has a matrix that was made with the model, as an adapter has."""
    return any(one.dim() > 1 and is_followed(one) for one in module.parameters())


def _seen_module(
    name: str, module: nn.Module, before: Tensor, shape: tuple[int, int], places: Places
) -> Seen | None:
    """Return what a module makes of a weight (outputs, inputs); None if it is no linear layer."""
    weight = _used_weight(module, shape[1]) if shape[1] <= _MAX_INPUTS else None
    if weight is None or weight.shape != shape:
        return None
    is_whole = before.shape == shape
    outputs, inputs = (torch.arange(n) if is_whole else places(n).cpu() for n in shape)
    kind = type(module).__name__
    return Seen(name, before, outputs, inputs, weight[:, inputs], weight[outputs], kind)


def _used_weight(module: Any, n: int) -> Tensor | None:
    """Return the weight (outputs, inputs) that a module uses; None if it is no linear function."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = next((one.dtype for one in tensors if one.is_floating_point()), torch.float32)
    rows = torch.zeros(1, n + 2, n, dtype=dtype, device=device)
    rows[0, :n] = _SIZE * torch.eye(n, dtype=dtype, device=device)
    rows[0, n] = torch.linspace(-1, 1, n).sin().mul(_SIZE).to(device, dtype)
    with quiet_module(module):
        output = module.forward(rows)
    if output.shape[:-1] != (1, n + 2):
        return None
    output = output[0].detach().to("cpu", torch.float32)
    bias = output[n + 1]
    weight: Tensor = ((output[:n] - bias) / _SIZE).T
    expected = weight @ rows[0, n].to("cpu", torch.float32)
    is_linear = (output[n] - bias - expected).norm() <= _LINEAR * expected.norm()
    return weight if bool(is_linear) else None


def _scaled(
    model: nn.Module, weights: Weights, found: Mapping[str, Seen], changed: set[str]
) -> dict[str, dict[str, Any]]:
    """Return modules whose weight has other scales, which nothing else in the layer may undo."""
    facts = dict[str, dict[str, Any]]()
    for name, one in weights.seen.items():
        is_whole = one.at_outputs is not None and one.before.shape[1] == one.at_outputs.shape[1]
        result = scale_facts(one.before, one.now(), is_whole=is_whole)
        if result is not None:
            facts[name] = result
    axes: dict[str, set[str]] = {}
    for name, scaled in facts.items():
        axes.setdefault(_layer(name), set()).add(scaled["axis"])
    touched = _touched_layers(model, {name.removesuffix(".weight") for name in found})
    # A vector, such as the weight of a norm, may have taken the factors.
    touched |= {_layer(name) for name in changed if name not in weights.seen}
    return {
        name: scaled
        for name, scaled in facts.items()
        if name in found
        and _layer(name) not in touched
        and not {"outputs", "inputs"} <= axes[_layer(name)]
    }


def _layer(name: str) -> str:
    """Return the part of a name up to its first number."""
    parts = name.split(".")
    ends = [n for n, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[0] + 1]) if ends else ""


def _touched_layers(model: nn.Module, replaced: set[str]) -> set[str]:
    """Return layers with other modules of the program, or hooks that change something."""
    found = set[str]()
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{one}.") for one in replaced) or not name:
            continue
        is_own = type(module).__module__.partition(".")[0] not in _LIBRARIES
        if is_own or has_other_forward(module):
            found.add(_layer(name))
    return found
