"""Judges in which weights the adapters landed that a program merged, by the names of their factors.

Each change of a weight is compared with the product of every pair of factors that has a name with
a layer in it. Products of different adapters are nearly orthogonal, so a change that is one of them
cannot be mistaken for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.changed_weights.adapter_factors import Pair, layer_name
from flexinspect_hooks.changed_weights.part_places import misplaced_parts
from flexinspect_hooks.changed_weights.weight_changes import Delta, rows_of

_SAME, _OTHER = 0.9, 0.5
"""Cosines: a change above the first is that of a pair; below the second it is not. Between them is
what two merged adapters, or rounding to a small dtype, give."""
_SIDE = 32
"""Rows and columns that are compared."""
_MAX_LAYERS = 256

Series = Mapping[int, Pair]


class _Group(Struct, frozen=True):
    """The changes of one kind of weight: `layers`, and (layers, rows, columns) of each change."""

    name: str
    leaf: str
    layers: Sequence[int]
    gaps: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, ...]
    n_model: int
    """How many layers of the model have this weight."""


def place_facts(
    model: nn.Module, deltas: Mapping[str, Delta], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Return what is wrong with merged adapters, as entries of an event's data."""
    found = {
        "misplaced": [
            *misplaced_adapters(model, deltas, pairs),
            *misplaced_parts(model, deltas, pairs),
        ],
        "flipped": list(_flipped(model, deltas, pairs)),
    }
    return {name: facts for name, facts in found.items() if facts}


def misplaced_adapters(
    model: nn.Module, deltas: Mapping[str, Delta], pairs: Sequence[Pair]
) -> Iterator[dict[str, Any]]:
    """Yield kinds of weights to which adapters of other layers, or of other modules, were added."""
    series = _series(pairs)
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for group in _groups(model, deltas):
        if any(_is_right(group, those) for key, those in series.items() if key[-1] == group.leaf):
            continue
        similar = {
            key: one for key, those in series.items() if (one := _cosines(group, those)) is not None
        }
        facts = _other_layers(group, series, similar) or _other_module(
            group, series, similar, leaves
        )
        if facts:
            yield facts


def _flipped(
    model: nn.Module, deltas: Mapping[str, Delta], pairs: Sequence[Pair]
) -> Iterator[dict[str, Any]]:
    """Yield square matrices to which the product of their LoRA was added transposed.

    Yields nothing if a matrix that is not square shows that the factor that reads the input is not
    the one that the program calls A.
    """
    sure: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:
        if pair.is_sure:
            sure.setdefault((pair.number, pair.leaf), []).append(pair)
    found = []
    for name, delta in deltas.items() if sure else ():
        owner, known = model.get_submodule(name.rpartition(".")[0]), layer_name(name)
        is_flipped = type(owner).__name__ == "Conv1D"  # of transformers: (inputs, outputs)
        if known is None or not (is_flipped or isinstance(owner, nn.Linear)):
            continue
        for pair in sure.get(known[1:], ()):
            sides = (pair.inner, pair.outer) if is_flipped else (pair.outer, pair.inner)
            wrong = _cosine(sides[1], sides[0], delta)
            if wrong > _SAME and delta.shape[0] != delta.shape[1]:
                return
            if wrong > _SAME and _cosine(*sides, delta) < _OTHER:
                found.append({"name": name, "size": delta.shape[0], "adapter": pair.name})
                break
    yield from found


def _cosine(left: Tensor, right: Tensor, delta: Delta) -> float:
    """Return how similar a change is to a product, 0 to 1; 0 for another shape."""
    if (len(left), len(right)) != delta.shape:
        return 0.0
    one = rows_of(left, delta.rows) @ rows_of(right, delta.columns).T
    scale = one.norm() * delta.gap.norm()
    return float((one * delta.gap).sum().abs() / scale.clamp_min(1e-30))


# -- what is compared ------------------------------------------------------------------------------


def _series(pairs: Sequence[Pair]) -> dict[tuple[str, ...], Series]:
    """Return the pairs by their names without the number; only names that are unambiguous."""
    found: dict[tuple[str, ...], dict[int, list[Pair]]] = {}
    for pair in pairs:
        found.setdefault(pair.series, {}).setdefault(pair.number, []).append(pair)
    return {
        key: {number: those[0] for number, those in sorted(by_number.items())}
        for key, by_number in found.items()
        if len(by_number) <= _MAX_LAYERS and all(len(those) == 1 for those in by_number.values())
    }


def _groups(model: nn.Module, deltas: Mapping[str, Delta]) -> Iterator[_Group]:
    kinds: dict[str, list[tuple[int, str]]] = {}
    n_model: dict[str, int] = {}
    for name, _ in model.named_parameters():
        if (known := layer_name(name)) is not None:
            n_model[known[0]] = n_model.get(known[0], 0) + 1
            if name in deltas:
                kinds.setdefault(known[0], []).append((known[1], name))
    for kind, named in kinds.items():
        named = sorted(named)[:_MAX_LAYERS]
        those = [deltas[name] for _, name in named]
        if len({one.gap.shape for one in those}) == len({one.shape for one in those}) == 1:
            first = those[0]
            rows, columns = (_few(n) for n in first.gap.shape)
            gaps = torch.stack([one.gap[rows][:, columns] for one in those])
            places = first.rows.cpu()[rows], first.columns.cpu()[columns]
            leaf, layers = kind.split(".")[-2], [layer for layer, _ in named]
            yield _Group(kind, leaf, layers, gaps, *places, first.shape, n_model[kind])


def _few(n: int) -> Tensor:
    return torch.linspace(0, n - 1, min(n, _SIDE), dtype=torch.float64).round().long()


def _products(group: _Group, series: Series) -> Iterator[Tensor]:
    """Yield the products of pairs where the group's changes were read, in either orientation.

    Nothing if the products have another shape.
    """
    outer, inner = ([getattr(one, side) for one in series.values()] for side in ("outer", "inner"))
    if len({one.shape for one in outer}) != 1 or len({one.shape for one in inner}) != 1:
        return
    for left, right in ((outer, inner), (inner, outer)):
        if (len(left[0]), len(right[0])) == group.shape:
            at_rows = torch.stack([rows_of(one, group.rows) for one in left])
            yield at_rows @ torch.stack([rows_of(one, group.columns) for one in right]).mT


def _is_right(group: _Group, series: Series) -> bool:
    """Whether each layer got the pair with its number; quicker than to compare it with all."""
    if any(layer not in series for layer in group.layers):
        return False
    own = {layer: series[layer] for layer in group.layers}
    for products in _products(group, own):
        if bool(
            (
                torch.cosine_similarity(group.gaps.flatten(1), products.flatten(1)).abs() > _SAME
            ).all()
        ):
            return True
    return False


def _cosines(group: _Group, series: Series) -> Tensor | None:
    """Return how similar each change is to each product, (layers, pairs), in either orientation.

    None if the products have another shape.
    """
    found = []
    for products in _products(group, series):
        overlap = torch.einsum("irc,jrc->ij", group.gaps, products)
        norms = [one.flatten(1).norm(dim=1).clamp_min(1e-30) for one in (group.gaps, products)]
        found.append((overlap / norms[0][:, None] / norms[1]).abs())
    return torch.stack(found).amax(0) if found else None


# -- judgement -------------------------------------------------------------------------------------


def _taken(series: Series, cosines: Tensor) -> list[int | None]:
    """Return for each changed layer the number of the pair that it got, None for none."""
    numbers, (best, places) = list(series), cosines.max(1)
    pairs = zip(best.tolist(), places.tolist(), strict=True)
    return [numbers[place] if value > _SAME else None for value, place in pairs]


def _other_layers(
    group: _Group, all_series: Mapping[Any, Series], similar: Mapping[Any, Tensor]
) -> dict[str, Any]:
    """Return the facts of layers that got another layer's adapter; empty if there are none."""
    takings = {key: _taken(all_series[key], cosines) for key, cosines in similar.items()}
    for key, taken in takings.items():
        series, numbers = all_series[key], list(all_series[key])
        # Names that begin at 1 number the same layers.
        first = int(numbers == list(range(1, group.n_model + 1)))
        wrong = []
        for row, (layer, number) in enumerate(zip(group.layers, taken, strict=True)):
            own = layer + first
            is_named_right = any(those[row] == own for those in takings.values())
            if number is None or number == own or own not in series or is_named_right:
                continue
            if float(similar[key][row, numbers.index(own)]) < _OTHER:
                wrong.append((layer, number))
        got = [number for number in taken if number is not None]
        is_rising = all(one < other for one, other in pairwise(got))
        # In rising order the adapters may be those of a smaller model, or go where they are wanted;
        # and a model with repeated layers repeats the adapters too.
        is_whole = numbers == list(range(first, first + group.n_model))
        if wrong and (is_whole or (not is_rising and len(set(got)) == len(got))):
            return {
                "name": group.name,
                "layers": [layer for layer, _ in wrong],
                "taken": [number for _, number in wrong],
                "adapter": series[wrong[0][1]].name,
                "own": series[wrong[0][0] + first].name,
                "order": _order(got, numbers),
            }
    return {}


def _order(got: Sequence[int], numbers: Sequence[int]) -> str:
    """Say by what order the adapters were taken, empty if by no known one."""
    if len(got) > 2 and len(set(got)) == 1:
        return "same"
    as_text = [number for number in sorted(numbers, key=str) if number in set(got)]
    if list(got) == as_text and as_text != sorted(as_text):
        return "text"
    return "reversed" if len(got) > 1 and list(got) == sorted(got, reverse=True) else ""


def _other_module(
    group: _Group,
    all_series: Mapping[Any, Series],
    similar: Mapping[Any, Tensor],
    leaves: set[str],
) -> dict[str, Any]:
    """Return the facts of a weight that got the adapters of another module; empty if it did not."""
    for key, cosines in similar.items():
        leaf = key[-1]
        own_key = (*key[:-1], group.leaf)
        if leaf == group.leaf or leaf not in leaves or own_key not in similar:
            continue
        own, taken = all_series[own_key], _taken(all_series[key], cosines)
        wrong = [
            (layer, number)
            for row, (layer, number) in enumerate(zip(group.layers, taken, strict=True))
            if number in own and float(similar[own_key][row].max()) < _OTHER
        ]
        if wrong:
            number = wrong[0][1] or 0
            return {
                "name": group.name,
                "layers": [layer for layer, _ in wrong],
                "taken": [number for _, number in wrong],
                "adapter": all_series[key][number].name,
                "own": own[number].name,
                "order": "module",
            }
    return {}
