"""Read a part of a large array without the rest, and the small arrays of many steps at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from flexinspect.records.step import Array
from flexinspect.trace import arrays, codec
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.schema import WHERE_STEP, WHERE_STEPS

_FIND_SQL = (
    f"SELECT number, dtype, item, shape, codec FROM arrays {WHERE_STEP} "
    "AND owner IS NULL AND stream = ? AND layer IS ? AND chunk = 0"
)
_CHUNKS_SQL = (
    "SELECT chunk, dtype, item, shape, codec, checksum, data FROM arrays "
    f"{WHERE_STEP} AND number = ? AND chunk >= ? AND chunk < ? ORDER BY chunk"
)
_STEPS_SQL = (
    "SELECT step, chunk, dtype, item, shape, codec, checksum, data FROM arrays "
    f"{WHERE_STEPS} AND owner IS NULL AND stream = ? AND layer IS ? ORDER BY step, number, chunk"
)


class StoredArray(Struct, frozen=True):
    """An array of numbers in a trace: its place, shape and type; `name` is for messages."""

    name: str
    key: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    item: str

    def read(self, reader: TraceReader, start: int, stop: int) -> Array:
        """Return the items `start <= index < stop` of the flat array; bfloat16 is widened.

        Reads the chunks that hold them. Raises `TraceError` for damaged bytes.
        """
        item = arrays.STORED_DTYPES[self.item]
        low, high = start * item.itemsize, stop * item.itemsize
        size, total = arrays.CHUNK_BYTES, math.prod(self.shape) * item.itemsize
        numbers = range(low // size, -(-high // size))
        key = (*self.key, numbers.start, numbers.stop)
        chunks = reader._read(codec.decode_chunk, _CHUNKS_SQL, key)
        found = [(one.number, len(arrays.checked_data(one, self.name))) for one in chunks]
        if found != [(number, min(size, total - number * size)) for number in numbers]:
            raise arrays.damaged_array(self.name, "a part of it is missing")
        data = b"".join(chunk.data for chunk in chunks)
        first = low - numbers.start * size
        part = np.frombuffer(data[first : first + high - low], item)
        return arrays.widen_bfloat16(part.astype(item.newbyteorder("="), copy=False), self.dtype)


def find_array(
    reader: TraceReader, generation: int, step: int, stream: str, layer: int, branch: int
) -> StoredArray | None:
    """Return where an array of numbers of a step is stored, None when there is none.

    Raises `TraceError` when it cannot be an array of numbers.
    """
    kinds = ("int", "text", "text", "ints", "text")
    params = (generation, branch, step, stream, layer)
    rows = reader._read_values(kinds, _FIND_SQL, params, "arrays")
    if not rows:
        return None
    number, dtype, item, shape, form = rows[0]
    name = f"{stream!r} of step {step} of generation {generation} in {reader.path}"
    if form != "raw" or item not in arrays.STORED_DTYPES or min(shape, default=0) < 0:
        raise arrays.damaged_array(name, "it does not have the form of an array of numbers")
    arrays.check_form(stream, arrays.STORED_DTYPES[item], shape, name)
    return StoredArray(name, (generation, branch, step, number), tuple(shape), dtype, item)


def read_equal_arrays(
    reader: TraceReader, branch: tuple[int, int], steps: range, stream: str, layer: int
) -> Array | None:
    """Return the arrays of a stream in steps of one (generation, branch), (steps, ...).

    It reads them several times faster than one by one. None unless every step has one array of one
    chunk, all of one shape and type. Raises `TraceError` for damaged bytes.
    """

    def make(row: Sequence[Any]) -> tuple[Any, arrays.ArrayChunk]:
        return row[0], codec.decode_chunk(row[1:])

    params = (*branch, steps.start, steps.stop, stream, layer)
    rows = reader._read(make, _STEPS_SQL, params)
    forms = {(one.number, one.dtype, one.item, one.shape, one.codec) for _, one in rows}
    if [step for step, _ in rows] != [*steps] or len(forms) != 1:
        return None
    first = rows[0][1]
    item = arrays.STORED_DTYPES.get(first.item)
    if first.codec != "raw" or first.number or item is None:
        return None
    name = f"{stream!r} of steps {steps.start} to {steps.stop - 1} in {reader.path}"
    shape = arrays.parse_shape(first.shape, name)
    arrays.check_form(stream, item, shape, name)
    if {len(one.data) for _, one in rows} != {math.prod(shape) * item.itemsize}:
        return None
    data = b"".join(arrays.checked_data(one, name) for _, one in rows)
    stacked = np.frombuffer(data, item).reshape(len(rows), *shape)
    return arrays.widen_bfloat16(stacked.astype(item.newbyteorder("="), copy=False), first.dtype)
