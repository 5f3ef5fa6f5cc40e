"""A part of an array equals the same items of the whole array, and needs only its own chunks."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
import support.trace_samples as samples

from flexinspect.core.errors import TraceError
from flexinspect.records.step import Array, ArrayRecord
from flexinspect.trace.array_parts import StoredArray, find_array, read_equal_arrays
from flexinspect.trace.arrays import CHUNK_BYTES
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace

N_ITEMS = CHUNK_BYTES // 4 * 2 + 1000  # two whole chunks of float32, and a short one
SPANS = [(0, 1), (5, 9), (N_ITEMS // 2 - 3, N_ITEMS // 2 + 3), (N_ITEMS - 2, N_ITEMS), (7, 7)]
BORDER = CHUNK_BYTES // 4


def write(path: Path, array: Array, dtype: str | None = None) -> Path:
    with TraceWriter.create(path, {"model": "parts"}) as writer:
        writer.begin_generation(samples.generation())
        writer.write_step(samples.step(0, arrays=(ArrayRecord("parts", array, 3, dtype),)))
    return path


def stored(reader: TraceReader) -> StoredArray:
    found = find_array(reader, 0, 0, "parts", 3, 0)
    assert found is not None
    return found


@pytest.mark.parametrize("item", ["float32", "float16", "int64"])
def test_a_part_equals_the_items_of_the_whole(tmp_path: Path, item: str) -> None:
    array = (np.arange(N_ITEMS) % 2000).astype(item).reshape(8, -1)
    reader = open_trace(write(tmp_path / "t.flextrace", array))
    found = stored(reader)
    assert found.shape == array.shape
    for start, stop in [*SPANS, (BORDER - 1, BORDER + 1), (0, N_ITEMS)]:
        part = found.read(reader, start, stop)
        assert part.dtype == array.dtype
        np.testing.assert_array_equal(part, array.ravel()[start:stop])


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    wide = np.array([[1.0, -2.5, 0.125]], np.float32)
    narrow = (wide.view(np.uint32) >> 16).astype(np.uint16)
    reader = open_trace(write(tmp_path / "t.flextrace", narrow, "bfloat16"))
    np.testing.assert_array_equal(stored(reader).read(reader, 1, 3), [-2.5, 0.125])


def test_a_damaged_chunk_does_not_matter_to_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "t.flextrace", np.zeros(N_ITEMS, np.float32))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE arrays SET checksum = checksum + 1 WHERE stream = 'parts' AND chunk = 1")
    reader = open_trace(path)
    found = stored(reader)
    assert not found.read(reader, 0, BORDER).any()
    with pytest.raises(TraceError, match="checksum"):
        found.read(reader, 0, BORDER + 1)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DELETE FROM arrays WHERE stream = 'parts' AND chunk = 1", "a part of it is missing"),
        ("UPDATE arrays SET shape = '[9000000]' WHERE stream = 'parts'", "a part of it is missing"),
        ("UPDATE arrays SET item = 'object' WHERE stream = 'parts'", "form of an array of numbers"),
        ("UPDATE arrays SET codec = 'bits' WHERE stream = 'parts'", "form of an array of numbers"),
        ("UPDATE arrays SET shape = '[-4]' WHERE stream = 'parts'", "form of an array of numbers"),
    ],
)
def test_an_array_that_cannot_be_read_is_a_sentence(tmp_path: Path, sql: str, message: str) -> None:
    path = write(tmp_path / "t.flextrace", np.zeros(N_ITEMS, np.float32))
    with sqlite3.connect(path) as db:
        db.execute(sql)
    reader = open_trace(path)
    with pytest.raises(TraceError, match=message):
        stored(reader).read(reader, 0, N_ITEMS)


def test_an_array_that_was_not_recorded_is_not_found(tmp_path: Path) -> None:
    reader = open_trace(write(tmp_path / "t.flextrace", np.zeros(4, np.float32)))
    assert find_array(reader, 0, 0, "parts", 2, 0) is None
    assert find_array(reader, 0, 1, "parts", 3, 0) is None


def write_steps(path: Path, *shapes: tuple[int, ...] | None) -> Path:
    """Write steps with an array of each shape, none where it is None."""
    with TraceWriter.create(path, {"model": "parts"}) as writer:
        writer.begin_generation(samples.generation())
        for number, shape in enumerate(shapes):
            one = () if shape is None else (ArrayRecord("parts", filled(number, shape), 3),)
            writer.write_step(samples.step(number, arrays=(*one, ArrayRecord("q", np.ones(2), 3))))
    return path


def filled(number: int, shape: tuple[int, ...]) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * number


def test_equal_arrays_of_steps_are_read_at_once(tmp_path: Path) -> None:
    reader = open_trace(write_steps(tmp_path / "t.flextrace", *[(2, 1, 3)] * 5))
    found = read_equal_arrays(reader, (0, 0), range(1, 4), "parts", 3)
    expected = np.stack([filled(number, (2, 1, 3)) for number in (1, 2, 3)])
    assert found is not None
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "shapes",
    [((2, 3), None, (2, 3)), ((2, 3), (3, 2), (2, 3)), ((2, 3), (2, 3)), ((N_ITEMS,),) * 3],
    ids=["a step without", "another shape", "too few steps", "several chunks"],
)
def test_other_arrays_are_not_read_at_once(
    tmp_path: Path, shapes: tuple[tuple[int, ...] | None, ...]
) -> None:
    reader = open_trace(write_steps(tmp_path / "t.flextrace", *shapes))
    assert read_equal_arrays(reader, (0, 0), range(3), "parts", 3) is None


def test_damage_in_one_of_equal_arrays_is_a_sentence(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "t.flextrace", (4,), (4,))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE arrays SET checksum = checksum + 1 WHERE stream = 'parts' AND step = 1")
    with pytest.raises(TraceError, match="checksum"):
        read_equal_arrays(open_trace(path), (0, 0), range(2), "parts", 3)
