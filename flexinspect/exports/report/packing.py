"""Packs the contents of a branch into one text of base64, and texts into JSON that HTML may hold.

The packed form is raw DEFLATE (RFC 1951, level 6) of: the length of the JSON as a little-endian
uint32, the JSON in UTF-8, zeros up to a multiple of 8, and the arrays, each aligned to 8 bytes. In
the JSON an array is an object `{"$": [type, offset, shape]}`; the offset counts from the first byte
behind the zeros. The script `data.js` unpacks it.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

ALIGNMENT = 8
TYPES = {
    np.dtype(np.uint8): "u1",
    np.dtype(np.uint16): "u2",
    np.dtype(np.int32): "i4",
    np.dtype(np.float32): "f4",
    np.dtype(np.float64): "f8",
}
"""The names of the types that arrays may have; the page reads them as little-endian."""


class _Arrays:
    """The bytes of arrays, and the hook that puts a reference to an array into the JSON."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be packed")
        data = _little_endian(value).tobytes()
        offset = self.size
        data += bytes(-len(data) % ALIGNMENT)
        self.parts.append(data)
        self.size += len(data)
        return {"$": [TYPES[value.dtype], offset, list(value.shape)]}


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def pack(contents: msgspec.Struct) -> str:
    """Return a struct with arrays as base64 text."""
    return base64.b64encode(_deflate(_serialize(contents))).decode("ascii")


def packed_size(contents: msgspec.Struct | None) -> int:
    """Return the number of characters of the packed struct, 0 for None."""
    return 0 if contents is None else -(-len(_deflate(_serialize(contents))) // 3) * 4


def _serialize(contents: msgspec.Struct) -> bytes:
    arrays = _Arrays()
    text = msgspec.json.encode(contents, enc_hook=arrays.add)
    head = len(text).to_bytes(4, "little") + text
    return b"".join((head, bytes(-len(head) % ALIGNMENT), *arrays.parts))


def _deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()
