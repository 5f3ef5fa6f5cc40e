"""Follows the rows of a batch through a cache that was reordered, as in a beam search.

A beam search continues the best rows and drops others: it reorders the cache, so that row 2 of a
step may continue row 0 of the step before. What a cache holds shows in its newest keys: they are
those of the rows of the step before, in the new order. The last layer's keys depend on all of a
row's text, so equal keys are of equal texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

MAX_ROWS = 64
"""Larger batches are no beam search that is followed."""


def newest_keys(cache: Any, n_cached: int, least: int = 2) -> Tensor | None:
    """Return the newest of `n_cached` keys of a cache's last layer with keys, (batch, values).

    None for an empty cache, for fewer than `least` rows, and for a cache without a tensor of keys.
    """
    if n_cached < 1:
        return None
    cache = getattr(cache, "self_attention_cache", cache)  # beside that of an encoder's output
    for layer in reversed(getattr(cache, "layers", None) or ()):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.dim() != 4:
            continue
        if not least <= keys.shape[0] <= MAX_ROWS or not keys.shape[2]:
            return None
        newest = keys[:, :, min(n_cached, keys.shape[2]) - 1]
        return newest.detach().flatten(1).clone()
    return None


def parents(before: Tensor | None, now: Tensor | None) -> list[int] | None:
    """Return which row of the step before each row of a cache continues, None if unknown.

    `before` are the newest keys after a step, and `now` the newest keys at the beginning of the
    next one, (batch, values) both. A row that several rows agree with continues the row of its own
    number, if that is among them.
    """
    if before is None or now is None or before.shape[1] != now.shape[1]:
        return None
    found = []
    for row, keys in enumerate(now):
        same = (before == keys).all(1).nonzero().flatten().tolist()
        if not same:
            return None
        found.append(row if row in same else int(same[0]))
    return found


def lineage(batch: int, order: Sequence[Sequence[int] | None], sizes: Sequence[int]) -> list[int]:
    """Return the row of each step that the last step's row `batch` comes from.

    `order[n]` are the parents of the rows of step n, and `sizes[n]` how many rows it has.
    """
    rows, row = [], batch
    for known, size in zip(reversed(order), reversed(sizes), strict=True):
        row = min(row, size - 1)
        rows.append(row)
        if known is not None and row < len(known):
            row = known[row]
    return rows[::-1]


def followed(batch: int, order: Sequence[Sequence[int] | None], sizes: Sequence[int]) -> list[int]:
    """Return which row of each step continues the first step's row `batch`, until it leaves.

    The arguments are those of `lineage`.
    """
    rows, row = [], batch
    for step, (known, size) in enumerate(zip(order, sizes, strict=True)):
        if step and known is not None:
            children = [child for child, parent in enumerate(known) if parent == row]
            if not children:
                break
            row = row if row in children else children[0]
        if row >= size:
            break
        rows.append(row)
    return rows
