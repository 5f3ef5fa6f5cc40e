"""The cells of masks, read as packed bits and in pieces: no mask is ever whole in memory.

Packed rows are uint8 of shape (rows, ceil(keys / 8)), the first key in the highest bit (as
`numpy.packbits`), every row from a byte of its own on, and zeros behind its last key. In the trace
rows follow each other without such gaps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from flexinspect.records import Array
from flexinspect.trace import arrays, decode
from flexinspect.trace.reader import TraceReader

Packed = npt.NDArray[np.uint8]

AT_ONCE = 1 << 22
"""Cells that are unpacked at once."""

_TOGETHER = 16
"""Masks whose arrays are read with one query."""

_OF_MASK = (
    "FROM masks m JOIN arrays a ON a.generation = m.generation AND a.branch = m.branch "
    "AND a.step = m.step AND a.owner = m.fingerprint"
)
_FIND = (
    f"SELECT m.generation, m.branch, m.step, a.number, a.item, a.shape, a.codec {_OF_MASK} "
    "WHERE m.fingerprint = ? AND a.stream = 'mask.cells' ORDER BY a.chunk LIMIT 1"
)
_CHUNK = (
    "SELECT dtype, item, shape, codec, checksum, data FROM arrays WHERE generation = ? "
    "AND branch = ? AND step = ? AND number = ? AND chunk = ?"
)
_WHOLE = (
    f"SELECT m.fingerprint, a.chunk, a.dtype, a.item, a.shape, a.codec, a.checksum, a.data "
    f"{_OF_MASK} WHERE m.fingerprint IN ({{}}) AND a.stream = ? ORDER BY m.fingerprint, a.chunk"
)


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the cells of a mask lie in a trace, and their shape."""

    fingerprint: str
    key: tuple[int, int, int, int]
    heads: int
    n_rows: int
    n_keys: int
    codec: str

    @property
    def n_bytes(self) -> int:
        """Bytes of all heads as they are packed in the trace."""
        return -(-self.heads * self.n_rows * self.n_keys // 8)


def find_cells(reader: TraceReader, fingerprint: str) -> Cells | None:
    """Return where a mask's cells lie, None when they were not recorded.

    Raises `TraceError` for a form that no mask has.
    """
    rows = reader._query(_FIND, (fingerprint,))
    if not rows:
        return None
    kinds = ("int", "int", "int", "int", "text", "json", "text")
    generation, branch, step, number, item, shape, codec = reader._guard(
        lambda row: decode.clean_as(kinds, row, "arrays"), rows[0]
    )
    lengths_ok = (
        isinstance(shape, list)
        and len(shape) == 3
        and all(type(length) is int and 0 <= length < 1 << 40 for length in shape)
    )
    if item != "bool" or codec not in ("bits", "bits+zstd") or not lengths_ok:
        raise arrays.damaged(_where(reader, fingerprint), "it is no mask in its form")
    heads, n_rows, n_keys = shape
    key = (generation, branch, step, number)
    return Cells(fingerprint, key, heads, n_rows, n_keys, codec)


def _where(reader: TraceReader, fingerprint: str) -> str:
    return f"the cells of mask {fingerprint!r} in {reader.path}"


def packed_rows(
    reader: TraceReader, cells: Cells, head: int, start: int, stop: int, *, at_most: int = 256
) -> Iterator[tuple[int, Packed]]:
    """Yield (row, packed rows from it on) of the rows `start <= row < stop` of one head.

    At most `at_most` rows at a time, fewer where they are long. What lies before `start` is read
    and dropped, what lies behind `stop` is not read. Raises `TraceError` for damaged bytes.
    """
    n_keys = cells.n_keys
    source = _Bits(reader, cells)
    source.skip((head * cells.n_rows + start) * n_keys)
    step = max(1, min(at_most, AT_ONCE // max(n_keys, 1)))
    for row in range(start, stop, step):
        n_rows = min(step, stop - row)
        yield row, source.rows(n_rows, n_keys)
    if head == cells.heads - 1 and stop == cells.n_rows:
        source.finish()


class _Bits:
    """The bits of an array, one after the other."""

    def __init__(self, reader: TraceReader, cells: Cells) -> None:
        self._where = _where(reader, cells.fingerprint)
        self._source: Any = _Chunks(reader, cells, self._where)
        if cells.codec == "bits+zstd":
            self._source = self._unsqueezed(cells.n_bytes)
        self._bit = 0
        self._last = b""

    def _unsqueezed(self, n_bytes: int) -> Any:
        head = self._source.peek()
        try:
            if zstandard.frame_content_size(head) != n_bytes:
                raise arrays.damaged(self._where, "it does not unpack to the size of its shape")
        except zstandard.ZstdError:
            raise arrays.damaged(self._where, "its bytes do not unpack") from None
        return zstandard.ZstdDecompressor().stream_reader(self._source)

    def skip(self, n_bits: int) -> None:
        """Go on by `n_bits`; only from the beginning."""
        n_bytes, self._bit = divmod(n_bits, 8)
        while n_bytes > 0:
            n_bytes -= len(self._read(min(n_bytes, AT_ONCE)))
        self._last = self._read(1) if self._bit else b""

    def rows(self, n_rows: int, n_keys: int) -> Packed:
        """Return the next rows, packed, each from a byte on."""
        end = self._bit + n_rows * n_keys
        data = self._last + self._read(-(-end // 8) - len(self._last))
        start, self._bit = self._bit, end % 8
        self._last = data[-1:] if self._bit else b""
        whole = np.frombuffer(data, np.uint8)
        if start == 0 and n_keys % 8 == 0:
            return whole.reshape(n_rows, n_keys // 8)
        bits = np.unpackbits(whole, count=end)[start:]
        return np.packbits(bits.reshape(n_rows, n_keys), axis=1)

    def finish(self) -> None:
        """Raise `TraceError` if bytes are left."""
        if self._some(1):
            raise arrays.damaged(self._where, "it is longer than its shape")

    def _read(self, n_bytes: int) -> bytes:
        parts: list[bytes] = []
        left = n_bytes
        while left > 0:
            part = self._some(left)
            if not part:
                raise arrays.damaged(self._where, "it ends too early")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _some(self, n_bytes: int) -> bytes:
        try:
            return bytes(self._source.read(n_bytes))
        except (zstandard.ZstdError, MemoryError):
            raise arrays.damaged(self._where, "its bytes do not unpack") from None


class _Chunks:
    """The stored bytes of an array as a file: one chunk in memory, its checksum looked at."""

    def __init__(self, reader: TraceReader, cells: Cells, where: str) -> None:
        self._reader, self._key, self._where = reader, cells.key, where
        self._next = 0
        self._data = memoryview(b"")

    def peek(self) -> bytes:
        """Return some bytes from here on without going on."""
        self._fill()
        return bytes(self._data[:32])

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes (-1: some), none at the end."""
        self._fill()
        size = len(self._data) if size < 0 else size
        part, self._data = bytes(self._data[:size]), self._data[size:]
        return part

    def _fill(self) -> None:
        if self._data or self._next < 0:
            return
        rows = self._reader._query(_CHUNK, (*self._key, self._next))
        if not rows:
            if self._next == 0:
                raise arrays.damaged(self._where, "a part of it is missing")
            self._next = -1
            return
        chunk = self._reader._guard(decode.chunk, rows[0])
        if zlib.crc32(chunk.data) != chunk.checksum:
            raise arrays.damaged(self._where, "a checksum does not match its bytes")
        self._data = memoryview(chunk.data)
        self._next += 1


def mask_arrays(
    reader: TraceReader, fingerprints: Sequence[str], stream: str
) -> Iterator[tuple[str, Array]]:
    """Yield (fingerprint, array) of a stream of many small masks, in no order; some have none.

    Raises `TraceError` for damaged bytes.
    """
    names = list(dict.fromkeys(fingerprints))
    for start in range(0, len(names), _TOGETHER):
        some = names[start : start + _TOGETHER]
        rows = reader._query(_WHOLE.format(", ".join("?" * len(some))), (*some, stream))
        for name, group in groupby(rows, key=lambda row: str(row[0])):
            part = list(group)
            where = f"{stream!r} of mask {name!r} in {reader.path}"
            if [row[1] for row in part] != list(range(len(part))):
                raise arrays.damaged(where, "a part of it is missing")
            chunks = [reader._guard(decode.chunk, row[2:]) for row in part]
            yield name, arrays.decode(chunks, where)[0]


def most_heads(reader: TraceReader, fingerprints: Sequence[str]) -> int:
    """Return the largest number of heads that any of these masks is made for, at least 1."""
    names = list(dict.fromkeys(fingerprints))
    sql = f"SELECT max(heads) FROM masks WHERE fingerprint IN ({', '.join('?' * len(names))})"
    found = reader._query(sql, names)[0][0]
    return max(found, 1) if isinstance(found, int) else 1


@dataclass(frozen=True, slots=True)
class StepCalls:
    """The rows that a step fed, and what each layer's call received: layer → (mask, keys)."""

    step: int
    q_len: int
    kv_before: int
    kv_after: int
    by_layer: dict[int, tuple[str | None, int]]


_CALLS = (
    "SELECT s.step, s.q_len, s.kv_before, s.kv_after, c.layer, c.mask, c.kv_len "
    "FROM steps s LEFT JOIN calls c ON c.generation = s.generation AND c.branch = s.branch "
    "AND c.step = s.step WHERE s.generation = ? AND s.branch = ? AND s.step >= ? AND s.step < ? "
    "ORDER BY s.step, c.call"
)


def step_calls(
    reader: TraceReader, generation: int, branch: int, start: int, stop: int
) -> list[StepCalls]:
    """Return what the own steps `start <= step < stop` of a branch fed and received, in order.

    Of several calls of a layer in a step the first counts.
    """
    found: list[StepCalls] = []
    kinds = ("int", "int", "int", "int", "int?", "text?", "int?")
    for raw in reader._query(_CALLS, (generation, branch, start, stop)):
        step, q_len, before, after, layer, mask, kv_len = reader._guard(
            lambda row: decode.clean_as(kinds, row, "calls"), raw
        )
        if not found or found[-1].step != step:
            found.append(StepCalls(step, q_len, before, after, {}))
        if layer is not None and kv_len is not None:
            found[-1].by_layer.setdefault(layer, (mask, kv_len))
    return found
