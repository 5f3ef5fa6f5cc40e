"""Key-value caches that are shortened, shared and put aside; none is ever written to twice.

transformers' dynamic layers make new tensors at every step, so a cache that is cropped can share
its tensors with the longer one until it grows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

MAX_STORED_CACHES = 3
"""Caches put aside beside the live one: the base's, and those of the branches left last."""

_SHAREABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that make new tensors at every step; those of other kinds write into their own."""


def n_rows_of(cache: Any) -> int:
    """Return how many rows a cache was fed."""
    return int(cache.get_seq_length())


def can_crop(cache: Any, n_rows: int) -> bool:
    """Say whether a cache can be put back to its first `n_rows` rows without computing anything.

    A sliding layer forgets the keys that left its window, so it can only while none has; layers of
    other kinds (static, recurrent) write in place, so they cannot even be shared as they are.
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
    """Return a cache of the first `n_rows` rows that shares its tensors with `cache`."""
    short = copy.copy(cache)
    short.layers = [copy.copy(layer) for layer in cache.layers]
    if n_rows < n_rows_of(cache):
        for layer in short.layers:
            _crop_layer(layer, n_rows)
    return short


def _crop_layer(layer: Any, n_rows: int) -> None:
    if not layer.is_initialized:
        return
    layer.keys, layer.values = layer.keys[..., :n_rows, :], layer.values[..., :n_rows, :]
    if layer.is_sliding:
        layer.cumulative_length = n_rows


def cache_bytes(caches: Iterable[Any]) -> int:
    """Return the bytes that caches keep alive together; tensors that are shared count once."""
    held: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            for tensor in (*_keys_and_values(layer), *_recurrent_states(layer)):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _keys_and_values(layer: Any) -> list[Tensor]:
    """Return the keys and values of a layer; a recurrent one has none."""
    found = (getattr(layer, name, None) for name in ("keys", "values"))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _recurrent_states(layer: Any) -> list[Tensor]:
    """Return what a recurrent layer carries from step to step, of a size that stays."""
    named = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    return [state for states in named for state in states.values() if isinstance(state, Tensor)]


def row_bytes(cache: Any) -> int:
    """Return the bytes of one row of a cache over all layers, 0 of an empty one."""
    total = 0
    for layer in cache.layers:
        for tensor in _keys_and_values(layer):
            if tensor.dim() > 1 and tensor.shape[-2]:
                total += tensor.element_size() * tensor.numel() // tensor.shape[-2]
    return total


class CacheStore:
    """Caches that were put aside, one per branch: the longest of each, at most `KEPT` of them.

    The base's stays; of the others the one that was used longest ago goes first.
    """

    def __init__(self) -> None:
        self._caches: OrderedDict[int, Any] = OrderedDict()

    def put(self, branch: int, cache: Any) -> None:
        """Put a cache aside, unless a longer one of its branch is there."""
        known = self._caches.get(branch)
        if known is None or n_rows_of(known) < n_rows_of(cache):
            self._caches[branch] = cache
        self._caches.move_to_end(branch)
        while len(self._caches) > MAX_STORED_CACHES:
            self._caches.pop(next(number for number in self._caches if number != 0))

    def items(self) -> list[tuple[int, Any]]:
        """Return branches and their caches."""
        return list(self._caches.items())

    def mark_used(self, branch: int) -> None:
        """Note that a branch's cache was of use, if it is here."""
        if branch in self._caches:
            self._caches.move_to_end(branch)

    def clear(self) -> None:
        """Let go of all of them."""
        self._caches.clear()
