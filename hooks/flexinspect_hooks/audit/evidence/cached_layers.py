"""Keys and values that layers read from a cache, kept for the audit in a bounded memory.

References are kept, and counted by what they keep alive: the whole storage of a tensor, which may
be a cache that was allocated for the longest text. A small part of such a storage is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.observers.hidden_digests import version_of

MAX_BYTES = 48 << 20
"""The memory that keys and values keep alive, of one model."""
MAX_STORAGE_RATIO = 4
"""A tensor is a part of its storage if that is larger by more than this."""
MAX_COPY = 1 << 20
"""Bytes of a part that is copied; a larger one is not kept."""
REFERENCE_BYTES = 1 << 10
"""What the objects of a reference take, rounded up."""


class CachedLayer(Struct, frozen=True):
    """Keys and values (batch, heads, keys, size) that a layer read, copied only if that is small.

    `version` is that of the keys and the values then: in-place changes since raise it.
    """

    key: Tensor
    value: Tensor
    version: int

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written into the tensors since."""
        return self.version == _versions_of(self.key, self.value)


def _versions_of(key: Tensor, value: Tensor) -> int:
    return (version_of(key) or 0) + (version_of(value) or 0)


class CachedLayers:
    """Keeps what the layers of one model read, as far as memory allows; `n_bytes` are counted."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._storages: dict[int, int] = {}
        """The bytes of storages that are kept alive, by their addresses."""

    def keep(self, calls: Sequence[Any]) -> dict[int, CachedLayer]:
        """Return the keys and values of attention calls by layer; nothing once memory is full."""
        if self.n_bytes >= MAX_BYTES:
            return {}
        kept = [call for call in calls if _can_be_kept(call.key) and _can_be_kept(call.value)]
        if not self._has_memory([one for call in kept for one in (call.key, call.value)]):
            return {}
        found = {}
        for call in kept:
            key, value = _lasting(call.key), _lasting(call.value)
            found[call.layer] = CachedLayer(key, value, _versions_of(key, value))
        return found

    def _has_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Count what tensors keep alive. A storage counts once, in however many steps it is read.

        `n_bytes` stays above the limit once it was: later steps of a long text need no less.
        """
        size, whole = REFERENCE_BYTES * len(tensors), dict[int, int]()
        for one in tensors:
            if _is_part(one):
                size += one.nbytes
            else:
                storage = one.untyped_storage()
                whole[storage.data_ptr()] = storage.nbytes()
        # The memory at an address may have been freed with a step that was not kept.
        size += sum(max(0, n - self._storages.get(place, 0)) for place, n in whole.items())
        self.n_bytes += size
        if self.n_bytes >= MAX_BYTES:
            return False
        self._storages.update(whole)
        return True

    def clear(self) -> None:
        """Count from 0 again, when the tensors were dropped."""
        self.n_bytes = 0
        self._storages.clear()


def _can_be_kept(tensor: Tensor) -> bool:
    """Whether a tensor is plain, counts changes in place, and is no part that is too large to copy.

    Tensors of inference mode do not count changes: what was read from them may be overwritten.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
        return False
    return not _is_part(tensor) or tensor.nbytes <= MAX_COPY


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > MAX_STORAGE_RATIO * tensor.nbytes


def _lasting(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, copied if it is a part of a larger storage."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone() if _is_part(tensor) else tensor
