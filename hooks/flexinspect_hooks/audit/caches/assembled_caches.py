"""Finds of which tokens the keys and values in a cache are that the program put together itself.

A program may evict rows of a cache, or join caches that were filled apart and move their keys to
other positions. Such a cache has no reference, but its rows were computed in earlier steps: values
are looked up among the values that these read, and keys among their keys, as they are or rotated.
So it shows whether a key and its value are of the same token, and at which position each key is.

Only batch row 0 and the first key head are read. The last layer that was kept decides, because
equal tokens have equal values in the first one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.cached_layers import CachedLayer
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore, StepEvidence
from flexinspect_hooks.audit.forward.rotary_tables import rotary_kinds

MAX_ROWS = 4096
"""Larger caches are not looked at."""
MAX_STEPS = 4
"""Steps of a generation whose cache is looked at, until something is found."""
MIN_SHARE = 0.8
"""Of the rows of a cache, so many must be known."""
MIN_ROWS = 3
"""Keys and values of different tokens that are reported."""
_MAX_ANGLE = 0.02
"""By how much the rotation of a key may differ, in radians, weighted by the size of its pairs."""
_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Bases of RoPE that programs use."""


class RowSource(NamedTuple):
    """Where a row was computed: generation, step, and its position."""

    generation: int
    step: int
    position: int


class _Known(Struct):
    """The rows of one layer that were read so far: their sources by the bytes of a row."""

    keys: dict[bytes, list[RowSource]]
    values: dict[bytes, list[RowSource]]
    rows: dict[RowSource, Tensor]
    """The key (size,) of each source."""

    def add(self, step: StepEvidence, layer: CachedLayer) -> None:
        """Add the rows that a step computed."""
        keys, values = (one[0, 0].float() for one in (layer.key, layer.value))
        for at in range(step.kv_before, min(step.kv_before + step.q_len, len(keys))):
            position = at
            if step.positions is not None:
                position = int(step.positions[0, at - step.kv_before])
            source = RowSource(step.generation, step.step, position)
            self.keys.setdefault(_bytes(keys[at]), []).append(source)
            self.values.setdefault(_bytes(values[at]), []).append(source)
            self.rows[source] = keys[at]


def _bytes(row: Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


def origin_facts(
    store: EvidenceStore, model: nn.Module, deadline: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield what is wrong with caches that the program put together, as the data of events.

    Ends at `deadline`, a time of `time.perf_counter`.
    """
    if not _has_other_caches(store):
        return
    known = _Known({}, {}, {})
    layer = _last_layer(store)
    length = 0  # of the cache after the last step
    for steps in store.steps.values():
        n_judged = 0
        for step in steps:
            if time.perf_counter() > deadline:
                return
            kept = step.cached.get(layer) if layer is not None else None
            is_new = step.kv_before > 0 and step.kv_before != length
            length = step.kv_before + step.q_len
            if kept is None or not kept.is_intact or kept.key.shape[2] < length:
                continue
            is_new &= n_judged < MAX_STEPS and step.kv_before <= MAX_ROWS
            if is_new and known.rows:
                n_judged += 1
                for facts in _judge(step, kept, known, model):
                    n_judged = MAX_STEPS
                    yield facts | {"layer": layer, "step": step.step, "generation": step.generation}
            known.add(step, kept)


def _has_other_caches(store: EvidenceStore) -> bool:
    """Whether a step has a cache that is not what the step before it left, nor empty."""
    length = 0
    for step in (one for steps in store.steps.values() for one in steps):
        if step.kv_before not in (0, length):
            return True
        length = step.kv_before + step.q_len
    return False


def _last_layer(store: EvidenceStore) -> int | None:
    """Return the last layer of which all steps with a cache were kept."""
    layers = [set(step.cached) for steps in store.steps.values() for step in steps if step.cached]
    return max(set.intersection(*layers), default=None) if layers else None


def _judge(
    step: StepEvidence, kept: CachedLayer, known: _Known, model: nn.Module
) -> Iterator[dict[str, Any]]:
    keys, values = (one[0, 0, : step.kv_before].float() for one in (kept.key, kept.value))
    of_values = [known.values.get(_bytes(row), []) for row in values]
    of_keys = [known.keys.get(_bytes(row), []) for row in keys]
    n = len(keys)
    if sum(map(bool, of_values)) < MIN_SHARE * n:
        return  # values of another dtype, or computed outside of the recorded steps
    found = [*_other_values(of_keys, of_values)]
    yield from found or _moved(keys, of_keys, of_values, known, model)


def _other_values(
    of_keys: Sequence[Sequence[RowSource]], of_values: Sequence[Sequence[RowSource]]
) -> Iterator[dict[str, Any]]:
    """Find rows whose value is of another token than their key."""
    pairs = enumerate(zip(of_keys, of_values, strict=True))
    wrong = [at for at, (key, value) in pairs if key and value and not set(key) & set(value)]
    if len(wrong) < MIN_ROWS:
        return
    at = wrong[0]
    facts = {"pattern": "other-values", "rows": wrong[:100], "n": len(wrong)}
    yield facts | {
        "total": len(of_keys),
        "row": at,
        "key_position": of_keys[at][0].position,
        "value_position": of_values[at][0].position,
    }


class _PlacedKey(NamedTuple):
    """A cached key: its row, its source, and by how many positions it was moved."""

    row: int
    source: RowSource
    shift: int

    @property
    def position(self) -> int:
        return self.source.position + self.shift


def _moved(
    keys: Tensor,
    of_keys: Sequence[Sequence[RowSource]],
    of_values: Sequence[Sequence[RowSource]],
    known: _Known,
    model: nn.Module,
) -> Iterator[dict[str, Any]]:
    """Find keys that were moved to other positions than those of their place in the cache."""
    frequencies = _frequencies(model, keys.shape[-1])
    if frequencies is None:
        return
    placed = list[_PlacedKey]()
    unexplained = list[tuple[int, RowSource, Tensor, Tensor]]()
    sources = _continued(of_values)
    for at, source in enumerate(sources):
        if source is None:
            continue
        if source in of_keys[at]:
            placed.append(_PlacedKey(at, source, 0))
            continue
        angles = _angles(known.rows[source], keys[at], len(frequencies))
        if angles is None:
            return  # it is not rotated, but changed
        shift = _shift_of(*angles, frequencies, len(keys))
        if shift is None:
            unexplained.append((at, source, *angles))
        else:
            placed.append(_PlacedKey(at, source, shift))
    if unexplained:
        yield from _other_base(unexplained, frequencies, len(keys), len(placed))
        return
    yield from _breaks(placed)


def _breaks(placed: Sequence[_PlacedKey]) -> Iterator[dict[str, Any]]:
    """Find the places where the positions of moved keys do not go on."""
    breaks = [
        (before, now)
        for before, now in pairwise(placed)
        if now.row == before.row + 1
        and now.shift != before.shift
        and now.position != before.position + 1
    ]
    if not breaks or not any(one.shift for one in placed):
        return
    before, now = breaks[0]
    end = placed[-1]
    yield {
        "pattern": "moved",
        "row": now.row,
        "position": now.position,
        "before": before.position,
        "shift": now.shift,
        "n_breaks": len(breaks),
        "last": end.position,
        "total": len(placed),
    }


def _other_base(
    unexplained: Sequence[tuple[int, RowSource, Tensor, Tensor]],
    frequencies: Tensor,
    n_keys: int,
    n_placed: int,
) -> Iterator[dict[str, Any]]:
    """Find the base of RoPE by which keys were moved, if it is not the model's."""
    if len(unexplained) < MIN_ROWS:
        return
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    for base in _BASES:
        other = base**-exponents
        shifts = [_shift_of(angles, sizes, other, n_keys) for _, _, angles, sizes in unexplained]
        if None not in shifts:
            ratio = float(frequencies[1] / frequencies[0]) if len(frequencies) > 1 else math.nan
            at, source, *_ = unexplained[0]
            yield {
                "pattern": "base",
                "row": at,
                "base": base,
                "own": ratio ** -len(frequencies),
                "shift": shifts[0],
                "n": len(unexplained),
                "total": len(unexplained) + n_placed,
                "key_position": source.position,
            }
            return


def _continued(of_values: Sequence[Sequence[RowSource]]) -> list[RowSource | None]:
    """Choose of several sources with the same value the one that continues the row before."""
    chosen = list[RowSource | None]()
    for at, sources in enumerate(of_values):
        before = chosen[-1] if chosen else None
        following = of_values[at + 1] if at + 1 < len(of_values) else ()

        def is_next(one: RowSource, before: RowSource | None = before) -> bool:
            return before is not None and one[:2] == before[:2] and one[2] == before[2] + 1

        def leads_on(one: RowSource, following: Sequence[RowSource] = following) -> bool:
            return any(one[:2] == other[:2] and other[2] == one[2] + 1 for other in following)

        first = next(filter(is_next, sources), None) or next(filter(leads_on, sources), None)
        chosen.append(first or next(iter(sources), None))
    return chosen


def _frequencies(model: nn.Module, size: int) -> Tensor | None:
    """Return the frequencies (pairs,) of a model's only rotary table, on the CPU."""
    kinds = rotary_kinds(model)
    if len(kinds) != 1 or 2 * len(kinds[0].frequencies) > size:
        return None
    return kinds[0].frequencies.cpu().double()


def _angles(before: Tensor, now: Tensor, n_pairs: int) -> tuple[Tensor, Tensor] | None:
    """Return by which angle each pair of a key was turned, and the share of its size (pairs,).

    Pairs are channels i and i + n of the first 2n, see Su et al., RoFormer (2021), in the layout of
    transformers' `rotate_half`. None if a pair, or the rest of the key, has another size.
    """
    before, now = before.cpu().double(), now.cpu().double()
    a, b = before[:n_pairs], before[n_pairs : 2 * n_pairs]
    c, d = now[:n_pairs], now[n_pairs : 2 * n_pairs]
    sizes = (a * a + b * b).sqrt()
    scale = float(before.norm()) + 1e-12
    is_turned = bool(((c * c + d * d).sqrt() - sizes).abs().max() < 1e-2 * scale)
    rest = (before - now)[2 * n_pairs :]
    if not is_turned or (len(rest) and float(rest.abs().max()) > 1e-2 * scale):
        return None
    return torch.atan2(a * d - b * c, a * c + b * d), sizes / sizes.sum()


def _shift_of(angles: Tensor, sizes: Tensor, frequencies: Tensor, limit: int) -> int | None:
    """Return the number of positions that explains how the pairs were turned, None if none does."""
    shifts = torch.arange(-limit, limit + 1)
    turned = angles - shifts[:, None].double() * frequencies
    wrapped = torch.remainder(turned + math.pi, 2 * math.pi) - math.pi
    differences = (wrapped.abs() * sizes).sum(-1)
    best = int(differences.argmin())
    return int(shifts[best]) if float(differences[best]) < _MAX_ANGLE else None
