"""Arrays as bytes: codecs, chunks and checksums. Numbers and bools only, never objects."""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Struct

from flexinspect.core.errors import TraceError, TraceWriteError
from flexinspect.records.step import Array

CHUNK_BYTES = 1 << 20  # bytes of stored data in one row at most
MIN_COMPRESS_BYTES = 512  # packed bytes below which compressing costs more than it saves
CODECS = ("raw", "bits", "bits+zstd")

STORED_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Types that can be stored, little-endian, by name."""

_DTYPE_NAMES = {np.dtype(name): name for name in STORED_DTYPES}
"""Their names by type, because numpy computes `dtype.name` on each access (8 µs)."""


class _ThreadCompressor(threading.local):
    """A compressor takes 20 µs to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)


_thread_compressor = _ThreadCompressor()
_MAX_DIMS = 32
_MAX_BYTES = 1 << 40


class EncodedArray(Struct, frozen=True):
    """An array as the trace stores it, in `chunks` of at most `CHUNK_BYTES` bytes."""

    dtype: str
    item: str
    shape: str
    codec: str
    chunks: tuple[memoryview, ...]


class ArrayChunk(Struct, frozen=True):
    """One row of the table of arrays, without its key."""

    dtype: str
    item: str
    shape: str
    codec: str
    checksum: int
    data: bytes


def encode_array(array: Array, dtype: str | None = None) -> EncodedArray:
    """Return `array` in its stored form; `dtype` names its true type if numpy has none for it.

    Raises `TraceWriteError` for arrays that are not of numbers or bools.
    """
    item = _DTYPE_NAMES.get(array.dtype) or array.dtype.name
    if item not in STORED_DTYPES:
        raise TraceWriteError(
            f"An array of {array.dtype} cannot be recorded: a trace holds only numbers and bools."
        )
    if item == "bool":
        codec, data = _encode_bits(array)
    else:
        codec, data = "raw", np.asarray(array, STORED_DTYPES[item]).tobytes()
    starts = range(0, max(len(data), 1), CHUNK_BYTES)
    chunks = tuple(memoryview(data)[start : start + CHUNK_BYTES] for start in starts)
    return EncodedArray(dtype or item, item, str(list(array.shape)), codec, chunks)


def decode_array(chunks: Sequence[ArrayChunk], array_name: str) -> tuple[Array, str]:
    """Return the array that `chunks` hold, and the name of its true type.

    Raises `TraceError` with `array_name` when a checksum or a length is wrong.
    """
    first = chunks[0]
    shape = _parse_shape(first.shape, array_name)
    item = STORED_DTYPES.get(first.item)
    if item is None or first.codec not in CODECS:
        raise damaged_array(array_name, f"its type is {first.item!r} and its codec {first.codec!r}")
    for chunk in chunks:
        if zlib.crc32(chunk.data) != chunk.checksum:
            raise damaged_array(array_name, "a checksum does not match its bytes")
    data = first.data if len(chunks) == 1 else b"".join(chunk.data for chunk in chunks)
    if first.codec != "raw":
        return _decode_bits(data, first.codec, shape, array_name), first.dtype
    if len(data) != math.prod(shape) * item.itemsize:
        what = f"{len(data)} bytes are not {list(shape)} of {item.name}"
        raise damaged_array(array_name, what)
    array = np.frombuffer(data, item).reshape(shape)
    return array.astype(item.newbyteorder("="), copy=False), first.dtype


def widen_bfloat16(array: Array, dtype: str) -> Array:
    """Return `array` in a type of numpy: bfloat16 (stored as uint16) is widened to float32."""
    if dtype != "bfloat16" or array.dtype != np.uint16:
        return array
    wide: npt.NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
    return wide


def damaged_array(array_name: str, reason: str) -> TraceError:
    """Return the error for an array that cannot be as it was recorded."""
    return TraceError(
        f"The trace is damaged: {array_name} cannot be read, because {reason}.",
        hint="Other steps may still be readable; copy the file again if you can.",
    )


def _encode_bits(array: Array) -> tuple[str, bytes]:
    bits = np.packbits(array, axis=None).tobytes()
    if len(bits) < MIN_COMPRESS_BYTES:
        return "bits", bits
    squeezed = _thread_compressor.compressor.compress(bits)
    return ("bits+zstd", squeezed) if len(squeezed) < len(bits) else ("bits", bits)


def _parse_shape(text: str, where: str) -> tuple[int, ...]:
    try:
        shape = json.loads(text)
    except (ValueError, RecursionError):
        shape = None
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise damaged_array(where, "its shape is not a list of lengths")
    if any(type(length) is not int or not 0 <= length < _MAX_BYTES for length in shape):
        raise damaged_array(where, "its shape holds something that is not a length")
    return tuple(shape)


def _decode_bits(data: bytes, codec: str, shape: tuple[int, ...], where: str) -> Array:
    n_cells = math.prod(shape)
    n_bytes = -(-n_cells // 8)
    if n_bytes > _MAX_BYTES:
        raise damaged_array(where, f"its shape {list(shape)} is larger than any recorded array")
    if codec == "bits+zstd":
        data = _decompress(data, n_bytes, where)
    if len(data) != n_bytes:
        raise damaged_array(where, f"{len(data)} bytes are not {list(shape)} of bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=n_cells)
    return bits.astype(np.bool_).reshape(shape)


def _decompress(data: bytes, n_bytes: int, where: str) -> bytes:
    try:
        if zstandard.frame_content_size(data) != n_bytes:
            raise damaged_array(where, "it does not decompress to the size of its shape")
        return zstandard.ZstdDecompressor().decompress(data)
    except (zstandard.ZstdError, MemoryError):
        raise damaged_array(where, "its bytes do not decompress") from None
