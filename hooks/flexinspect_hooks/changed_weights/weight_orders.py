"""Weights of one layer whose rows and columns a program put into orders that do not fit together.

Neurons, heads, experts, channels and tokens have no order of their own, so a program may renumber
them: in all weights that have them in the same way. Where two weights have them in two orders, the
model is another function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import may_change
from flexinspect_hooks.changed_weights.fused_parts import K, Q, V, fused_parts, head_sizes
from flexinspect_hooks.changed_weights.weight_matches import Order, Seen, find_order, same_order
from flexinspect_hooks.python_internals.torch_private import MODULE_HOOKS

_UP = ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in")
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out")
_FUSED = ("qkv_proj", "c_attn", "query_key_value")
_OUT = ("o_proj", "out_proj", "c_proj", "dense")
_ROUTERS = ("gate", "router")
_MAX_FACTS, _MAX_LISTED, _MAX_MOVED = 16, 16, 3

Sides = list[tuple[str, Order | None]]


class Weights(Struct, frozen=True):
    """The weights of a model: those that changed as `seen`, and the sizes of those that did not.

    `stacks` has the experts of changed weights (experts, values of each): before, now, and which
    experts were kept.
    """

    seen: Mapping[str, Seen]
    sizes: Mapping[str, tuple[int, int]]
    stacks: Mapping[str, tuple[Tensor, Tensor, Tensor]]

    def outputs(self, name: str) -> Order | None:
        """Return the order of a weight's outputs; None if it is not known."""
        if (one := self.seen.get(name)) is not None:
            return one.order_of_outputs()
        return same_order(self.sizes[name][0]) if name in self.sizes else None

    def inputs(self, name: str) -> Order | None:
        """Return the order of a weight's inputs; None if it is not known."""
        if (one := self.seen.get(name)) is not None:
            return one.order_of_inputs()
        return same_order(self.sizes[name][1]) if name in self.sizes else None


def order_facts(model: nn.Module, weights: Weights) -> list[dict[str, Any]]:
    """Return weights whose orders differ, as entries of an event's data."""
    found = list[dict[str, Any]]()
    if not weights.seen and not weights.stacks:
        return found
    hidden: Sides = []
    for path, module in model.named_modules():
        if not _is_untouched(module):
            continue
        with suppress(Exception):  # a module may be of any kind
            for kind, sides in _constraints(model, path, module, weights, hidden):
                if (facts := _unlike(kind, sides)) is not None:
                    found.append({"path": path, "layers": layers_of(path), **facts})
    with suppress(Exception):
        tokens = ("tokens", _vocabulary(model, weights, hidden))
        for kind, sides in (tokens, *(("channels", one) for one in _by_stack(hidden))):
            if (facts := _unlike(kind, sides)) is not None:
                found.append({"path": "", "layers": _channel_layers(facts), **facts})
    return found[:_MAX_FACTS]


def _channel_layers(facts: dict[str, Any]) -> list[int]:
    labels = facts["sides"][0]["names"]
    return sorted({layer for one in labels for layer in layers_of(one)})


def layers_of(name: str) -> list[int]:
    """Return the first number of a name in a list, which is empty if it has none."""
    return [int(part) for part in name.split(".") if part.isdecimal()][:1]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is one of torch or transformers, and computes what its class says."""
    library = type(module).__module__.partition(".")[0]
    return library in ("torch", "transformers") and not has_other_forward(module)


def has_other_forward(module: nn.Module) -> bool:
    """Whether a program gave a module another forward, or hooks that may change what passes."""
    hooks = (vars(module).get(name) or {} for name in MODULE_HOOKS)
    return "forward" in vars(module) or any(
        may_change(h) for these in hooks for h in these.values()
    )


def _is_untouched(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.") and is_plain(module)


# -- which orders must agree -----------------------------------------------------------------------


def _constraints(
    model: nn.Module, path: str, module: nn.Module, weights: Weights, hidden: Sides
) -> Iterator[tuple[str, Sides]]:
    children = {
        name
        for name, child in module.named_children()
        if f"{path}.{name}.weight" in weights.seen or is_plain(child)
    }
    names = {child: f"{path}.{child}.weight" for child in children}
    up, down = ([names[one] for one in those if one in names] for those in (_UP, _DOWN))
    if up and len(down) == 1:
        yield "neurons", _neurons(model, up, down[0], weights)
        hidden += [(f"the inputs of {one}", weights.inputs(one)) for one in up]
        hidden.append((f"the outputs of {down[0]}", weights.outputs(down[0])))
    out = next((names[one] for one in _OUT if one in names), None)
    is_whole = {"q_proj", "k_proj", "v_proj"} <= children
    fused = next((names[one] for one in _FUSED if one in names), None)
    if out is not None and (is_whole or fused is not None):
        readers = [fused] if fused is not None else [names[f"{one}_proj"] for one in "qkv"]
        hidden += [(f"the inputs of {one}", weights.inputs(one)) for one in readers]
        hidden.append((f"the outputs of {out}", weights.outputs(out)))
        if getattr(model.config, "_attn_implementation", "") in _BACKENDS:
            yield from _heads(model, readers, out, weights)
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.Module) and _is_untouched(experts):
        yield "experts", _experts(path, module, experts, weights)


_BACKENDS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


def _neurons(model: nn.Module, up: Sequence[str], down: str, weights: Weights) -> Sides:
    sides: Sides = [(f"the inputs of {down}", weights.inputs(down))]
    for name in up:
        order, parts = weights.outputs(name), dict[str, Tensor]()
        is_fused = name.endswith(".gate_up_proj.weight")
        if is_fused and not (parts := fused_parts(model, name)):
            continue
        for part, places in parts.items():
            label = f"the {part} outputs of {name}"
            sides.append((label, None if order is None else order.within(places)))
        if not parts:
            sides.append((f"the outputs of {name}", order))
    return sides


def _heads(
    model: nn.Module, readers: Sequence[str], out: str, weights: Weights
) -> Iterator[tuple[str, Sides]]:
    heads, pairs, size = head_sizes(model)
    if not size:
        return
    labels, orders = list[str](), list[Order | None]()
    if len(readers) == 3:
        labels = [f"the outputs of {one}" for one in readers]
        orders = [weights.outputs(one) for one in readers]
    else:
        whole, parts = weights.outputs(readers[0]), fused_parts(model, readers[0])
        if not parts:
            return
        heads, pairs = (len(parts[one]) // size for one in (Q, K))
        labels = [f"the {one} outputs of {readers[0]}" for one in (Q, K, V)]
        orders = [None if whole is None else whole.within(parts[one]) for one in (Q, K, V)]
    label_out, order_out = f"the inputs of {out}", weights.inputs(out)
    q, k, v, out_heads = sides = (*orders, order_out)
    if not pairs or heads % pairs:
        return
    (name_q, name_k, name_v), group = labels, heads // pairs
    if any(
        one is not None and one.n != n * size
        for one, n in zip(sides, (heads, pairs, pairs, heads), strict=True)
    ):
        return
    yield "rows of heads", [(name_q, _of_keys(q, group, size)), (name_k, k)]
    yield "rows of heads", [(label_out, _of_keys(out_heads, group, size)), (name_v, v)]
    yield "heads", [(name_q, _of_heads(q, size)), (label_out, _of_heads(out_heads, size))]
    yield "heads", [(name_k, _of_heads(k, size)), (name_v, _of_heads(v, size))]


def _of_heads(order: Order | None, size: int) -> Order | None:
    return None if order is None else order.of_blocks(size)


def _of_keys(order: Order | None, group: int, size: int) -> Order | None:
    """Return the order of the keys that an order of queries asks for, -1 for no order at all."""
    if order is None or group == 1:
        return order
    found: dict[int, set[int]] = {}
    for old, new in zip(order.old.tolist(), order.new.tolist(), strict=True):
        one, two = (at // (group * size) * size + at % size for at in (old, new))
        found.setdefault(one, set()).add(two)
    new_places = [-1 if len(one) > 1 else one.pop() for one in found.values()]
    return Order(torch.tensor(list(found)), torch.tensor(new_places), order.n // group)


def _experts(path: str, module: nn.Module, experts: nn.Module, weights: Weights) -> Sides:
    tables = {name: one for name, one in experts.named_parameters() if one.dim() >= 2}
    counts = {len(one) for one in tables.values()}
    if len(counts) != 1 or not any(one.dim() == 3 for one in tables.values()):
        return []
    sides: Sides = []
    (n,) = counts
    for name in tables:
        full = f"{path}.experts.{name}"
        sides.append((full, _stack_order(full, n, weights)))
    for child in _ROUTERS:
        router = getattr(module, child, None)
        if not isinstance(router, nn.Module) or not is_plain(router):
            continue
        for name, one in router.named_parameters():
            if one.dim() == 2 and len(one) == n:
                full = f"{path}.{child}.{name}"
                sides.append((full, _stack_order(full, n, weights)))
    return sides


def _stack_order(name: str, n: int, weights: Weights) -> Order | None:
    if name in weights.stacks:
        return find_order(*weights.stacks[name])
    if name in weights.seen:
        return weights.outputs(name)
    return same_order(n) if name in weights.sizes else None


def _vocabulary(model: Any, weights: Weights, hidden: Sides) -> Sides:
    if not hasattr(model, "get_output_embeddings"):
        return []
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is None or outputs is None or inputs.weight is outputs.weight:
        return []
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    those = [names[id(one)] for one in (inputs, outputs) if is_plain(one)]
    if len(those) < 2:
        return []
    hidden += [(f"the columns of {one}", weights.inputs(one)) for one in those]
    return [(one, weights.outputs(one)) for one in those]


def _by_stack(hidden: Sides) -> Iterator[Sides]:
    """Yield the sides of each stack of layers, with those of the embeddings and the head."""
    stacks: dict[tuple[str, int], Sides] = {}
    outer = [one for one in hidden if not layers_of(one[0])]
    for label, order in hidden:
        if order is not None and (layers := layers_of(label)):
            stem = label.split(" of ")[1].partition(f".{layers[0]}.")[0]
            stacks.setdefault((stem, order.n), []).append((label, order))
    for (_, n), those in stacks.items():
        yield [*those, *(one for one in outer if one[1] is not None and one[1].n == n)]


# -- judgement -------------------------------------------------------------------------------------


def _unlike(kind: str, sides: Sides) -> dict[str, Any] | None:
    """Return the facts of sides with several orders; None if all that are known agree."""
    groups: list[tuple[Order, list[str]]] = []
    for label, order in sides:
        if order is None:
            continue
        for known, labels in groups:
            if known.agrees(order) is not False:
                labels.append(label)
                break
        else:
            groups.append((order, [label]))
    if len(groups) < 2 or all(order.is_same for order, _ in groups):
        return None
    groups.sort(key=lambda one: (one[0].is_same, -len(one[1])))
    return {
        "kind": kind,
        "is_inverse": _are_inverse(groups[0][0], groups[1][0]),
        "sides": [
            {"names": labels[:_MAX_LISTED], "is_same": order.is_same, **_described(order)}
            for order, labels in groups[:3]
        ],
    }


def _are_inverse(one: Order, other: Order) -> bool:
    first, second = one.sources(), other.sources()
    if first is None or second is None or first == second or len(first) != len(second):
        return False
    return [second[old] for old in first] == list(range(len(first)))


def _described(order: Order) -> dict[str, Any]:
    sources = order.sources()
    is_moved = order.old != order.new
    moved = torch.stack([order.old[is_moved], order.new[is_moved]], 1)[:_MAX_MOVED]
    return {
        "order": None if sources is None else sources[:_MAX_LISTED],
        "n": order.n,
        "moved": moved.tolist(),
    }
