"""Arrays as bytes: codecs, chunks and checksums. Numbers and bools only, never objects."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Struct

from flexinspect.core.errors import TraceError, TraceWriteError
from flexinspect.core.parsing import parse_json
from flexinspect.records.step import Array
from flexinspect.trace.schema import STREAM_FORMS

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


_thread = threading.local()
"""Holds each thread's compressor, which takes 20 µs to make and must not be shared."""

MAX_DECODED_CELLS = 1 << 28
"""Cells of a bool array that is decoded at once, at most: a few bytes may claim terabytes."""

_MAX_DIMS = 32
_MAX_BYTES = 1 << 40


class ArrayChunk(Struct, frozen=True):
    """One row of the table of arrays: a part of an array, `number` counting from 0."""

    number: int
    dtype: str
    item: str
    shape: str
    codec: str
    checksum: int
    data: bytes


def encode_array(
    array: Array, dtype: str | None = None
) -> tuple[tuple[str, str, str, str], list[memoryview]]:
    """Return dtype, item, shape and codec of `array` in its stored form, and its chunks.

    `dtype` names its true type if numpy has none for it. Raises `TraceWriteError` for arrays that
    are not of numbers or bools.
    """
    item = _DTYPE_NAMES.get(array.dtype) or array.dtype.name
    if item not in STORED_DTYPES:
        raise TraceWriteError(
            f"An array of {array.dtype} cannot be recorded: a trace holds only numbers and bools."
        )
    if item == "bool":
        codec, data = "bits", np.packbits(array, axis=None).tobytes()
        if len(data) >= MIN_COMPRESS_BYTES:
            if not hasattr(_thread, "compressor"):
                _thread.compressor = zstandard.ZstdCompressor(level=1)
            squeezed = _thread.compressor.compress(data)
            codec, data = ("bits+zstd", squeezed) if len(squeezed) < len(data) else (codec, data)
    else:
        codec, data = "raw", np.asarray(array, STORED_DTYPES[item]).tobytes()
    starts = range(0, max(len(data), 1), CHUNK_BYTES)
    chunks = [memoryview(data)[start : start + CHUNK_BYTES] for start in starts]
    return (dtype or item, item, str(list(array.shape)), codec), chunks


def decode_array(
    chunks: Sequence[ArrayChunk], array_name: str, stream: str = ""
) -> tuple[Array, str]:
    """Return the array that `chunks` hold, and the name of its true type.

    Raises `TraceError` with `array_name` when a part is missing, a checksum or length is wrong, or
    the array has not the form of its `stream`.
    """
    first = chunks[0]
    if [chunk.number for chunk in chunks] != list(range(len(chunks))):
        raise damaged_array(array_name, "a part of it is missing")
    shape = parse_shape(first.shape, array_name)
    item = STORED_DTYPES.get(first.item)
    if item is None or first.codec not in CODECS:
        raise damaged_array(array_name, f"its type is {first.item!r} and its codec {first.codec!r}")
    check_form(stream, item, shape, array_name)
    data = b"".join(checked_data(chunk, array_name) for chunk in chunks)
    if first.codec != "raw":
        return _decode_bits(data, first.codec, shape, array_name), first.dtype
    if len(data) != math.prod(shape) * item.itemsize:
        raise damaged_array(array_name, f"{len(data)} bytes are not {list(shape)} of {item.name}")
    array = np.frombuffer(data, item).reshape(shape)
    return array.astype(item.newbyteorder("="), copy=False), first.dtype


def check_form(stream: str, item: np.dtype[Any], shape: Sequence[int], array_name: str) -> None:
    """Raise `TraceError` if an array has not the dimensions and the type of its stream."""
    kinds, n_dims = STREAM_FORMS.get(stream, (item.kind, len(shape)))
    if item.kind not in kinds or len(shape) != n_dims:
        reason = f"it is {item.name} {list(shape)}; {stream!r} has {n_dims} dimensions of '{kinds}'"
        raise damaged_array(array_name, reason)


def checked_data(chunk: ArrayChunk, array_name: str) -> bytes:
    """Return the bytes of a chunk. Raises `TraceError` when its checksum is wrong."""
    if zlib.crc32(chunk.data) != chunk.checksum:
        raise damaged_array(array_name, "a checksum does not match its bytes")
    return chunk.data


def widen_bfloat16(array: Array, dtype: str) -> Array:
    """Return `array` in a type of numpy: bfloat16 (stored as uint16) is widened to float32."""
    if dtype != "bfloat16" or array.dtype != np.uint16:
        return array
    wide: npt.NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
    return wide


def damaged_array(array_name: str, reason: str) -> TraceError:
    """Return the error for an array that cannot be as it was recorded."""
    what = f"The trace is damaged: {array_name} cannot be read, because {reason}."
    hint = "Other steps may still be readable; copy the file again if you can."
    return TraceError(what, hint=hint)


def parse_shape(text: str, where: str) -> tuple[int, ...]:
    """Return a stored shape. Raises `TraceError` for anything else."""
    try:
        shape = parse_json(text)
    except ValueError:
        shape = None
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise damaged_array(where, "its shape is not a list of lengths")
    if any(type(length) is not int or not 0 <= length < _MAX_BYTES for length in shape):
        raise damaged_array(where, "its shape holds something that is not a length")
    return tuple(shape)


def _decode_bits(data: bytes, codec: str, shape: tuple[int, ...], where: str) -> Array:
    n_cells = math.prod(shape)
    n_bytes = -(-n_cells // 8)
    if n_cells > MAX_DECODED_CELLS:
        what = f"The trace holds more cells than can be read at once: {where} has {list(shape)}."
        raise TraceError(what, hint="The mask panel reads such masks in parts.")
    if codec == "bits+zstd":
        try:
            if zstandard.frame_content_size(data) != n_bytes:
                raise damaged_array(where, "it does not decompress to the size of its shape")
            data = zstandard.ZstdDecompressor().decompress(data)
        except (zstandard.ZstdError, MemoryError):
            raise damaged_array(where, "its bytes do not decompress") from None
    if len(data) != n_bytes:
        raise damaged_array(where, f"{len(data)} bytes are not {list(shape)} of bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=n_cells)
    return bits.astype(np.bool_).reshape(shape)
