"""Adapters whose product was merged into a weight, and whose modules still add it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.weights import is_low_rank
from flexinspect_hooks.capture.quiet_modules import quiet_module
from flexinspect_hooks.changed_weights.weight_changes import Delta, is_similar

_ROWS = 16
_LAYER = re.compile(r"\.(\d+)\.")


class MovedChange(NamedTuple):
    """The change of a parameter that has another name than when the model was made."""

    parameter: nn.Parameter
    delta: Delta


def adapters_twice(model: nn.Module, moved: Mapping[str, MovedChange]) -> list[dict[str, Any]]:
    """Return entries of an event's data, one for all layers with the same module."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, module in model.named_modules() if moved else ():
        find = _added_twice if is_low_rank(module) else _change_added
        with suppress(Exception):  # modules of the program may be of any kind
            for parameter in find(module, moved):
                layer = _LAYER.search(name)
                key = (_LAYER.sub(".*.", name), type(module).__name__)
                facts = found.setdefault(
                    key, {"name": key[0], "class": key[1], "names": [], "layers": []}
                )
                facts["names"].append(parameter)
                facts["layers"] += [] if layer is None else [int(layer[1])]
    return list(found.values())


def _change_added(module: nn.Module, moved: Mapping[str, MovedChange]) -> Iterator[str]:
    """Yield the name of a weight whose change a module of the program adds to its output, too.

    The adapter may be in a dict, or in several variables, so that its factors are not known.
    """
    if type(module).__module__.startswith(("torch.", "transformers.")):
        return
    linears = [one for one in module.children() if isinstance(one, nn.Linear)]
    weight = linears[0].weight if len(linears) == 1 else None
    name = next((name for name, one in moved.items() if one.parameter is weight), None)
    if name is None or weight is None or not moved[name].delta.rank:
        return
    delta = moved[name].delta
    maker = torch.Generator().manual_seed(0)
    columns, places = delta.columns.to(weight.device), delta.rows.to(weight.device)
    rows = torch.zeros(_ROWS, weight.shape[1], device=weight.device, dtype=weight.dtype)
    rows[:, columns] = torch.randn(_ROWS, len(columns), generator=maker).to(rows)
    with quiet_module(module):
        added = module(rows) - linears[0](rows)
    expected = rows[:, columns].float() @ delta.gap.to(weight.device).float().T
    if is_similar(added[:, places].float(), expected):
        yield name


def _added_twice(module: nn.Module, moved: Mapping[str, MovedChange]) -> Iterator[str]:
    """Yield the name of the weight that has the product which a module still adds to its output."""
    *factors, base = sorted(
        (one for one in module.parameters() if one.dim() == 2), key=Tensor.numel
    )
    name = next((name for name, one in moved.items() if one.parameter is base), None)
    if name is None:
        return
    down, up = sorted(factors, key=lambda one: one.shape[-1] != base.shape[1])
    product, delta = (up.detach() @ down.detach()).float(), moved[name].delta
    if not is_similar(product.cpu()[delta.rows.cpu()][:, delta.columns.cpu()], delta.gap):
        return
    maker = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, base.shape[1], generator=maker).to(base.device, base.dtype)
    linear = next(one for one in module.modules() if getattr(one, "weight", None) is base)
    with quiet_module(module):
        added = module(rows) - linear(rows)
    if is_similar(added.float(), rows.float() @ product.T):
        yield name
