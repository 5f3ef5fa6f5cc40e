"""Tensors of safetensors files as numpy arrays, read one at a time.

The format is a length (8 bytes, little-endian), a JSON header, and the data:
https://huggingface.co/docs/safetensors. The safetensors library returns no bfloat16 in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from flexinspect.core.errors import ModelError, UsageError
from flexinspect.inputs.model_sizes import read_header
from flexinspect.records.step import Array
from flexinspect.trace.arrays import widen_bfloat16

MAX_TENSOR_BYTES = 8 << 30
"""Size up to which a tensor is read; the logits of 131 072 tokens are larger."""

NUMPY_TYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Types of safetensors that are read, by their names in the header."""


class Tensor(Struct, frozen=True):
    """An array with the name of its true type: a bfloat16 is widened to float32."""

    array: Array
    dtype: str


def to_tensor(raw: Array, dtype: str) -> Tensor:
    """Return an array of stored elements (uint16 for bfloat16) as a `Tensor`."""
    return Tensor(widen_bfloat16(raw, dtype), dtype)


def storage_type(dtype: str) -> np.dtype[np.generic]:
    """Return the little-endian numpy type of the stored elements."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")


class _Entry(Struct, frozen=True):
    """A tensor in the header of a file; the offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """One file; its header is checked when it is opened. Raises `UsageError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path)
            header.pop("__metadata__", None)
            self._header = msgspec.convert(header, dict[str, _Entry])
            with path.open("rb") as file:
                self._data_start = 8 + int.from_bytes(file.read(8), "little")
        except (ModelError, OSError, msgspec.ValidationError) as error:
            what = f"{path} is missing, damaged or not a safetensors file."
            raise UsageError(what, hint="Write the dump again.") from error
        self.names = tuple(self._header)

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises `UsageError` when it is missing or of another type."""
        if name not in self.names:
            some = ", ".join(self.names[:8]) + (" ..." if len(self.names) > 8 else "")
            raise UsageError(f"{self.path} has no tensor '{name}'; it has {some or 'none'}.")
        entry = self._header[name]
        dtype, shape = NUMPY_TYPES.get(entry.dtype), entry.shape
        if dtype is None:
            known = ", ".join(NUMPY_TYPES)
            what = f"'{name}' in {self.path} has the type {entry.dtype}; {known} are read."
            raise UsageError(what)
        item = storage_type(dtype)
        start, stop = entry.data_offsets
        n_bytes = math.prod(shape) * item.itemsize
        if not 0 <= start <= stop or stop - start != n_bytes or any(n < 0 for n in shape):
            raise UsageError(
                f"'{name}' in {self.path} is damaged: its size is not that of {shape}."
            )
        check_size(n_bytes, f"'{name}' in {self.path}")
        with self.path.open("rb") as file:
            file.seek(self._data_start + start)
            raw = np.fromfile(file, item, math.prod(shape)).reshape(shape)
        return to_tensor(raw, dtype)


def check_size(n_bytes: int, name: str) -> None:
    """Raise `UsageError` for a tensor that is too large to be read."""
    if n_bytes > MAX_TENSOR_BYTES:
        limit = f"at most {MAX_TENSOR_BYTES >> 30} GiB are read"
        raise UsageError(f"{name} takes {n_bytes >> 30} GiB; {limit}.", hint="Dump less of it.")
