"""KV caches of branches: cropping, sharing and storing them.

transformers' dynamic layers create new tensors at every step, so a cropped cache can share its
tensors with the longer one until it grows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

MAX_STORED_CACHES = 3
"""Caches stored beside the live one: that of branch 0, and those of the latest branches."""

_SHAREABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that create new tensors at every step; other kinds write in place."""


def n_rows_of(cache: Any) -> int:
    """The number of rows that a cache has received."""
    return int(cache.get_seq_length())


def can_crop(cache: Any, n_rows: int) -> bool:
    """Whether a cache can be cropped to its first `n_rows` rows without computing anything.

    A sliding layer drops the keys that leave its window, so it can be cropped only before that.
    Layers of other kinds (static, recurrent) write in place, so they cannot be shared at all.
    """
    now = n_rows_of(cache)
    if n_rows == now:
        return all(type(layer) in _SHAREABLE_LAYERS for layer in cache.layers)
    return n_rows < now and all(_holds_all_keys(layer) for layer in cache.layers)


def _holds_all_keys(layer: Any) -> bool:
    if type(layer) is DynamicLayer:
        return True
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.cumulative_length < layer.sliding_window) and not layer.record_past
    return False


def crop_cache(cache: Any, n_rows: int) -> Any:
    """A cache of the first `n_rows` rows that shares its tensors with `cache`."""
    short = copy.copy(cache)
    short.layers = [copy.copy(layer) for layer in cache.layers]
    if n_rows >= n_rows_of(cache):
        return short
    for layer in short.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :n_rows, :], layer.values[..., :n_rows, :]
            if layer.is_sliding:
                layer.cumulative_length = n_rows
    return short


def cache_bytes(caches: Iterable[Any]) -> int:
    """The bytes that caches keep alive together; shared tensors count once."""
    sizes: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            # The size of a recurrent layer's states does not depend on the step.
            named = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
            states = [state for states in named for state in states.values()]
            for tensor in (*_keys_and_values(layer), *filter(torch.is_tensor, states)):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _keys_and_values(layer: Any) -> list[Tensor]:
    values = (getattr(layer, name, None) for name in ("keys", "values"))
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def row_bytes(cache: Any) -> int:
    """The bytes of one row of a cache over all layers, 0 for an empty cache."""
    tensors = [tensor for layer in cache.layers for tensor in _keys_and_values(layer)]
    tables = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.shape[-2]]
    return sum(table.element_size() * table.numel() // table.shape[-2] for table in tables)


class CacheStore(OrderedDict[int, Any]):
    """The longest cache of each branch, by its number, at most `MAX_STORED_CACHES` of them.

    The cache of branch 0 always stays; of the others, the least recently used is dropped first.
    """

    def put(self, branch: int, cache: Any) -> None:
        """Store a cache, unless the store has one of the same branch that is as long."""
        known = self.get(branch)
        if known is None or n_rows_of(known) < n_rows_of(cache):
            self[branch] = cache
        self.move_to_end(branch)
        while len(self) > MAX_STORED_CACHES:
            self.pop(next(number for number in self if number != 0))
