"""Changes of weights that no copy of them can show: neutral norms, tied tensors, transposed deltas.

The audit uses the weights of the program, so what a program wrote into them looks right to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import quiet_module
from flexinspect_hooks.python_internals.live_objects import live_objects

_MAX_PAIRS = 4096
_MIN_ROWS = 0.5
"""The part of the rows of a table that an adapter changes at least."""
_MIN_CHANGED, _MAX_CHANGED = 8, 64
"""Rows of a table whose rank is measured."""
_SIMILAR = 0.999
"""The cosine of two deltas that are the same but for a factor and rounding."""


class Delta(Struct, frozen=True):
    """The change of a matrix at some `rows` and `columns`, and its rank (0 for full rank)."""

    gap: Tensor
    rank: int
    rows: Tensor
    columns: Tensor
    shape: tuple[int, ...]


def rows_of(tensor: Tensor, places: Tensor) -> Tensor:
    """Return rows of a matrix, float32 on the CPU."""
    return tensor.detach()[places.to(tensor.device)].to("cpu", torch.float32)


def change_facts(
    model: nn.Module, deltas: Mapping[str, Delta], factors: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """Return what is wrong with the changed weights of a model, as entries of an event's data.

    `factors` are matrices that the program had while it wrote to its weights.
    """
    found: dict[str, Any] = {
        "norms": list(_neutral_norms(model)),
        "tied": list(_tied_changes(model, deltas)),
        "transposed": list(_transposed(model, deltas, factors)),
    }
    return {name: facts for name, facts in found.items() if facts}


# -- norms -----------------------------------------------------------------------------------------


def _neutral_norms(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield norms whose weight is 1, or 0, everywhere, and whose gain is 2, or 0.

    Those of the other layers must have a weight that is not the same everywhere.
    """
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, Tensor):
            groups.setdefault(name.rpartition(".")[2], []).append((name, module))
    for group in groups.values():
        flat = [(name, one, _constant(one)) for name, one in group]
        if len(flat) < 2 or 2 * sum(value is not None for *_, value in flat) > len(flat):
            continue
        for name, module, value in flat:
            gain = None if value not in (0.0, 1.0) else _gain(module)
            if gain is not None and (value, gain) in ((1.0, 2.0), (0.0, 0.0)):
                yield {"name": name, "class": type(module).__name__, "weight": value, "gain": gain}


def _constant(module: Any) -> float | None:
    weight: Tensor = module.weight
    first = float(weight.flatten()[0])
    return first if bool((weight == first).all()) else None


def _gain(module: Any) -> float:
    """Return by how much a norm multiplies, of rows whose mean is 0; rounded to a tenth."""
    n = module.weight.numel()
    signs = torch.ones(1, 2, n, device=module.weight.device, dtype=module.weight.dtype)
    signs[..., ::2] = -1  # normalized already
    with quiet_module(module):
        return round(float(module(signs)[..., 1].abs().mean()), 1)


# -- tied weights ----------------------------------------------------------------------------------


def _tied_changes(model: nn.Module, deltas: Mapping[str, Delta]) -> Iterator[dict[str, Any]]:
    """Yield tensors that several modules share, if a change of low rank was added to them."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    for same in names.values():
        changed = next((name for name in same if name in deltas), None)
        if len(same) < 2 or changed is None:
            continue
        rank = deltas[changed].rank
        # A few rows, such as that of the padding, are set on purpose, and have a low rank as well.
        if not rank or deltas[changed].gap.any(1).float().mean() <= _MIN_ROWS:
            rank = _rank_of_rows(deltas[changed].gap)
        if rank:
            yield {"names": same, "rank": rank}


def _rank_of_rows(gap: Tensor) -> int:
    """Return the rank of a change of some rows; 0 if it is as high as that of rows set one by one.

    An adapter of a head may be for a part of the vocabulary. A vector that is added to rows, which
    has rank 1, is meant.
    """
    rows = gap[gap.any(1)][:_MAX_CHANGED].double()
    if len(rows) < _MIN_CHANGED:
        return 0
    values = torch.linalg.svdvals(rows)
    rank = int((values > 1e-4 * values[0]).sum())
    return rank if 1 < rank <= min(rows.shape) // 2 else 0


# -- adapters --------------------------------------------------------------------------------------


def _transposed(
    model: nn.Module, deltas: Mapping[str, Delta], factors: Sequence[Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield square matrices to which the transpose of an adapter's product was added.

    The factors must be known, or the program must still hold them; and changes of other matrices,
    whose shapes leave no choice, must say which of the two factors reads the input.
    """
    small = {name: one for name, one in deltas.items() if one.rank and len(one.shape) == 2}
    if not any(one.shape[0] == one.shape[1] for one in small.values()):
        return
    matrices = _held_matrices({one.rank for one in small.values()}, model, factors)
    read = {name: _reads_out_first(model, name, one, matrices) for name, one in small.items()}
    sure = {read[name] for name, one in small.items() if one.shape[0] != one.shape[1]} - {None}
    if len(sure) != 1:
        return
    for name, one in small.items():
        if one.shape[0] == one.shape[1] and read[name] not in (None, *sure):
            yield {"name": name, "rank": one.rank, "size": one.shape[0]}


def _reads_out_first(
    model: nn.Module, name: str, delta: Delta, factors: list[Tensor]
) -> bool | None:
    """Return whether a change is a product (outputs, inputs) of two factors; None for neither."""
    owner = model.get_submodule(name.rpartition(".")[0])
    is_flipped = type(owner).__name__ == "Conv1D"  # of transformers: (inputs, outputs)
    tall = [one for one in factors if one.shape[1] == delta.rank]
    wide = [one for one in factors if one.shape[0] == delta.rank]
    pairs = [(one, other) for one in tall for other in wide][:_MAX_PAIRS]
    for one, other in pairs:
        for is_transposed in (False, True):
            left, right = (other.T, one.T) if is_transposed else (one, other)
            if (left.shape[0], right.shape[1]) != delta.shape:
                continue
            product = left.index_select(0, delta.rows) @ right.index_select(1, delta.columns)
            if is_similar(product, delta.gap):
                return is_flipped is is_transposed
    return None


def is_similar(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for a factor and rounding."""
    scale = one.norm() * other.norm()
    return bool((one * other).sum().abs() > _SIMILAR * scale.clamp_min(1e-30))


def _held_matrices(ranks: set[int], model: nn.Module, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices with one of the ranks as a side: the factors, and what the program holds."""
    seen = {id(one) for one in model.parameters()}
    found = []
    for one in itertools.chain(factors, live_objects(Tensor)):
        # Others, such as those of a compiler, have no values or do not mix with plain ones.
        is_plain = type(one) in (Tensor, nn.Parameter) and not one.is_meta
        if id(one) in seen or not is_plain or one.dim() != 2:
            continue
        seen.add(id(one))
        if one.is_floating_point() and not ranks.isdisjoint(one.shape):
            found.append(one.detach().to("cpu", torch.float32))
    return found
