"""The keys and values that a forward wrote into its cache, which need no hook in the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flexinspect_hooks.audit.forward.forward_run import KEY, VALUE


def newest_rows(cache: Any, n_before: int, n_new: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, layer and the newest keys or values (batch, rows, heads, size) of a cache.

    Layers that dropped keys, as those with a sliding window do, are left out.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    for number, layer in enumerate(getattr(cache, "layers", None) or ()):
        for name, attribute in ((KEY, "keys"), (VALUE, "values")):
            table = getattr(layer, attribute, None)
            if (
                isinstance(table, Tensor)
                and table.dim() == 4
                and table.shape[2] >= n_before + n_new
            ):
                newest = table[:, :, n_before : n_before + n_new]
                yield name, number, newest.detach().transpose(1, 2)
