"""Read the cells of masks as packed bits and in pieces, so that no mask is whole in memory.

Packed rows are uint8 of shape (rows, ceil(keys / 8)), with the first key in the highest bit (as
`numpy.packbits`). Every row begins a new byte and is padded with zeros. In the trace, rows follow
each other without padding. Also here: small arrays of many masks, and the masks of many calls.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Struct

from flexinspect.records.step import Array
from flexinspect.trace import arrays, codec
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.schema import WHERE_STEP

PackedMask = npt.NDArray[np.uint8]
MAX_UNPACKED_CELLS = 1 << 22  # cells that are unpacked at once
_MASKS_PER_QUERY = 16  # masks whose arrays are read with one query

_MASK_ARRAYS_FROM = (
    "FROM masks m JOIN arrays a ON a.generation = m.generation AND a.branch = m.branch "
    "AND a.step = m.step AND a.owner = m.fingerprint"
)
_FIND_CELLS_SQL = (
    "SELECT m.generation, m.branch, m.step, a.number, a.item, a.shape, a.codec "
    f"{_MASK_ARRAYS_FROM} WHERE m.fingerprint = ? AND a.stream = 'mask.cells' "
    "ORDER BY a.chunk LIMIT 1"
)
_CHUNK_SQL = (
    "SELECT chunk, dtype, item, shape, codec, checksum, data FROM arrays "
    f"{WHERE_STEP} AND number = ? AND chunk = ?"
)
_MASK_ARRAYS_SQL = (
    "SELECT m.fingerprint, a.chunk, a.dtype, a.item, a.shape, a.codec, a.checksum, a.data "
    f"{_MASK_ARRAYS_FROM} WHERE m.fingerprint IN ({{}}) AND a.stream = ? "
    "ORDER BY m.fingerprint, a.chunk"
)


class StoredCells(Struct, frozen=True):
    """Where a trace stores the cells of a mask, and their shape; `name` is for messages."""

    name: str
    key: tuple[int, ...]
    heads: int
    n_rows: int
    n_keys: int
    codec: str


def find_mask_cells(reader: TraceReader, fingerprint: str) -> StoredCells | None:
    """Return where a mask's cells are stored, None when they were not recorded.

    Raises `TraceError` when the stored array cannot be a mask.
    """
    kinds = ("int", "int", "int", "int", "text", "json", "text")
    rows = reader._read_values(kinds, _FIND_CELLS_SQL, (fingerprint,), "arrays")
    if not rows:
        return None
    *key, item, shape, form = rows[0]
    name = f"the cells of mask {fingerprint!r} in {reader.path}"
    lengths_ok = (
        isinstance(shape, list)
        and len(shape) == 3
        and all(type(length) is int and 0 <= length < 1 << 40 for length in shape)
    )
    if item != "bool" or form not in ("bits", "bits+zstd") or not lengths_ok:
        raise arrays.damaged_array(name, "it does not have the form of a mask")
    heads, n_rows, n_keys = shape
    return StoredCells(name, tuple(key), heads, n_rows, n_keys, form)


def read_packed_rows(
    reader: TraceReader, cells: StoredCells, head: int, start: int, stop: int, *, at_most: int = 256
) -> Iterator[tuple[int, PackedMask]]:
    """Yield (row, packed rows from it on) of the rows `start <= row < stop` of one head.

    At most `at_most` rows at a time, fewer if they are long. Rows before `start` are read and
    dropped, rows from `stop` on are not read. Raises `TraceError` for damaged bytes.
    """
    n_keys = cells.n_keys
    source = _BitStream(reader, cells)
    source.skip((head * cells.n_rows + start) * n_keys)
    step = max(1, min(at_most, MAX_UNPACKED_CELLS // max(n_keys, 1)))
    for row in range(start, stop, step):
        yield row, source.read_rows(min(step, stop - row), n_keys)
    if head == cells.heads - 1 and stop == cells.n_rows:
        source.check_end()


class _BitStream:
    """The bits of a stored array, in order."""

    def __init__(self, reader: TraceReader, cells: StoredCells) -> None:
        self._where = cells.name
        chunks = io.BufferedReader(_ChunkFile(reader, cells))
        self._source: Any = chunks
        if cells.codec == "bits+zstd":
            with self._decompression_errors():
                n_bytes = zstandard.frame_content_size(chunks.peek())
            if n_bytes != -(-cells.heads * cells.n_rows * cells.n_keys // 8):
                what = "it does not decompress to the size of its shape"
                raise arrays.damaged_array(self._where, what)
            self._source = zstandard.ZstdDecompressor().stream_reader(chunks)
        self._bit = 0
        self._partial_byte = b""

    def skip(self, n_bits: int) -> None:
        """Skip `n_bits`; only at the beginning of the stream."""
        n_bytes, self._bit = divmod(n_bits, 8)
        while n_bytes > 0:
            n_bytes -= len(self._read(min(n_bytes, MAX_UNPACKED_CELLS)))
        self._partial_byte = self._read(1) if self._bit else b""

    def read_rows(self, n_rows: int, n_keys: int) -> PackedMask:
        """Return the next rows, packed, each beginning a new byte."""
        end = self._bit + n_rows * n_keys
        data = self._partial_byte + self._read(-(-end // 8) - len(self._partial_byte))
        start, self._bit = self._bit, end % 8
        self._partial_byte = data[-1:] if self._bit else b""
        whole = np.frombuffer(data, np.uint8)
        if start == 0 and n_keys % 8 == 0:
            return whole.reshape(n_rows, n_keys // 8)
        return np.packbits(np.unpackbits(whole, count=end)[start:].reshape(n_rows, n_keys), axis=1)

    def check_end(self) -> None:
        """Raise `TraceError` if bytes are left."""
        with self._decompression_errors():
            rest = self._source.read(1)
        if rest:
            raise arrays.damaged_array(self._where, "it is longer than its shape")

    def _read(self, n_bytes: int) -> bytes:
        with self._decompression_errors():
            data = bytes(self._source.read(n_bytes))
        if len(data) < n_bytes:
            raise arrays.damaged_array(self._where, "it ends too early")
        return data

    @contextmanager
    def _decompression_errors(self) -> Iterator[None]:
        try:
            yield
        except (zstandard.ZstdError, MemoryError):
            raise arrays.damaged_array(self._where, "its bytes do not decompress") from None


class _ChunkFile(io.RawIOBase):
    """The stored bytes of an array as a file, one checked chunk in memory at a time."""

    def __init__(self, reader: TraceReader, cells: StoredCells) -> None:
        self._reader, self._key, self._where = reader, cells.key, cells.name
        self._next_chunk = 0
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._data:
            self._load_chunk()
        size = min(len(buffer), len(self._data))
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size

    def _load_chunk(self) -> None:
        key = (*self._key, self._next_chunk)
        for chunk in self._reader._read(codec.decode_chunk, _CHUNK_SQL, key):
            self._data = memoryview(arrays.checked_data(chunk, self._where))
            self._next_chunk += 1
        if self._next_chunk == 0:
            raise arrays.damaged_array(self._where, "a part of it is missing")


def read_mask_arrays(
    reader: TraceReader, fingerprints: Sequence[str], stream: str
) -> Iterator[tuple[str, Array]]:
    """Yield (fingerprint, array) of one stream of many small masks, in no particular order.

    Masks without such an array are left out. Raises `TraceError` for damaged bytes.
    """
    names = list(dict.fromkeys(fingerprints))

    def make(row: Sequence[Any]) -> tuple[str, arrays.ArrayChunk]:
        return str(row[0]), codec.decode_chunk(row[1:])

    for start in range(0, len(names), _MASKS_PER_QUERY):
        some = names[start : start + _MASKS_PER_QUERY]
        sql = _MASK_ARRAYS_SQL.format(", ".join("?" * len(some)))
        for name, group in groupby(reader._read(make, sql, (*some, stream)), key=itemgetter(0)):
            where = f"{stream!r} of mask {name!r} in {reader.path}"
            yield name, arrays.decode_array([chunk for _, chunk in group], where, stream)[0]


def max_mask_heads(reader: TraceReader, fingerprints: Sequence[str]) -> int:
    """Return the largest number of heads that any of these masks is made for, at least 1."""
    names = list(dict.fromkeys(fingerprints))
    sql = f"SELECT max(heads) FROM masks WHERE fingerprint IN ({', '.join('?' * len(names))})"
    found = reader._query(sql, names)[0][0]
    return max(found, 1) if isinstance(found, int) else 1


class StepCalls(Struct, frozen=True):
    """The rows of a step, and the mask of each layer's call: layer → (fingerprint, keys)."""

    step: int
    q_len: int
    kv_before: int
    kv_after: int
    by_layer: dict[int, tuple[str | None, int]]


_STEP_CALLS_SQL = (
    "SELECT s.step, s.q_len, s.kv_before, s.kv_after, c.layer, c.mask, c.kv_len "
    "FROM steps s LEFT JOIN calls c ON c.generation = s.generation AND c.branch = s.branch "
    "AND c.step = s.step WHERE s.generation = ? AND s.branch = ? AND s.step >= ? AND s.step < ? "
    "ORDER BY s.step, c.call"
)


def read_step_calls(
    reader: TraceReader, generation: int, branch: int, start: int, stop: int
) -> list[StepCalls]:
    """Return the calls of a branch's own steps `start <= step < stop`, in order.

    If a layer has several calls in a step, the first one counts.
    """
    found: list[StepCalls] = []
    kinds = ("int", *("length",) * 3, "int?", "text?", "length?")
    rows = reader._read_values(kinds, _STEP_CALLS_SQL, (generation, branch, start, stop), "calls")
    for step, q_len, before, after, layer, mask, kv_len in rows:
        if not found or found[-1].step != step:
            found.append(StepCalls(step, q_len, before, after, {}))
        if layer is not None and kv_len is not None:
            found[-1].by_layer.setdefault(layer, (mask, kv_len))
    return found


def step_calls_bytes(calls: Sequence[StepCalls]) -> int:
    """Estimate the memory of calls from those of the last step."""
    return 64 + len(calls) * (384 + 256 * len(calls[-1].by_layer)) if calls else 64
