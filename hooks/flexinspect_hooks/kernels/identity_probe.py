"""The weights that a kernel itself used, recovered by calling it with an identity as values.

Attention is linear in its values: with columns of the identity as values its output is the weights,
for as many keys at a time as a head is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def identity_values(value: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first key, number of keys, values) for each chunk of keys.

    The values have the shape of `value`, (batch, heads, keys, head size): key `first + i` has the
    unit vector i, and the other keys have 0.
    """
    n_keys, width = value.shape[2:]
    for start in range(0, n_keys, width):
        n = min(width, n_keys - start)
        identity = torch.zeros_like(value)
        columns = torch.arange(n, device=value.device)
        identity[:, :, start + columns, columns] = 1
        yield start, n, identity


def recover_weights(value: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the weights of a kernel in float64, (batch, query heads, rows, keys).

    `call` runs it with the given values and returns (batch, query heads, rows, head size).
    """
    chunks = [call(identity)[..., :n].double() for _, n, identity in identity_values(value)]
    return torch.cat(chunks, -1)
