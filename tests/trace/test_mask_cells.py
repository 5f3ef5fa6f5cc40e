"""Cells of masks, read as packed bits and in pieces, equal the reader's whole arrays."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.trace_samples as samples

from flexinspect.core.errors import TraceError
from flexinspect.records.step import CallRecord, MaskRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.mask_cells import (
    StoredCells,
    find_mask_cells,
    max_mask_heads,
    read_mask_arrays,
    read_packed_rows,
    read_step_calls,
)
from flexinspect.trace.reader import TraceReader, open_trace


def random_mask(shape: tuple[int, int, int], share: float, name: str = "m") -> MaskRecord:
    cells = np.random.default_rng(shape[1]).random(shape) < share
    return MaskRecord(name, "bool", 1, *shape, 0, cells=cells)


def write(path: Path, *masks: MaskRecord) -> Path:
    with TraceWriter.create(path, {"model": "bits"}) as writer:
        writer.begin_generation(samples.generation())
        writer.write_step(samples.step(0, masks=masks))
    return path


def unpacked(reader: TraceReader, cells: StoredCells, head: int, start: int, stop: int) -> Any:
    found = [rows for _, rows in read_packed_rows(reader, cells, head, start, stop)]
    return np.unpackbits(np.concatenate(found), axis=1, count=cells.n_keys).astype(bool)


def known(reader: TraceReader, name: str = "m") -> StoredCells:
    cells = find_mask_cells(reader, name)
    assert cells is not None
    return cells


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((1, 1, 1), 1.0),
        ((3, 7, 13), 0.5),  # rows that share bytes, heads that do not begin at one
        ((2, 64, 64), 0.0),
        ((1, 300, 641), 0.5),
        ((2, 520, 512), 0.02),
        ((1, 3000, 3300), 0.5),  # does not get smaller, and takes more than one chunk
        ((1, 6000, 6000), 0.06),  # gets smaller, and takes more than one chunk
    ],
)
def test_packed_rows_equal_the_cells_of_the_reader(
    tmp_path: Path, shape: tuple[int, int, int], share: float
) -> None:
    mask = random_mask(shape, share)
    assert mask.cells is not None
    reader = open_trace(write(tmp_path / "t.flextrace", mask))
    cells = known(reader)
    assert (cells.heads, cells.n_rows, cells.n_keys) == shape
    for head in range(shape[0]):
        whole = unpacked(reader, cells, head, 0, shape[1])
        assert np.array_equal(whole, mask.cells[head])
        start, stop = shape[1] // 3, max(shape[1] // 2, shape[1] // 3 + 1)
        part = unpacked(reader, cells, head, start, stop)
        assert np.array_equal(part, mask.cells[head, start:stop])


def test_rows_are_yielded_in_pieces_of_at_most_the_given_size(tmp_path: Path) -> None:
    reader = open_trace(write(tmp_path / "t.flextrace", random_mask((1, 100, 30), 0.5)))
    pieces = list(read_packed_rows(reader, known(reader), 0, 10, 90, at_most=32))
    assert [row for row, _ in pieces] == [10, 42, 74]
    assert [len(rows) for _, rows in pieces] == [32, 32, 16]


def test_padding_bits_are_zero(tmp_path: Path) -> None:
    reader = open_trace(write(tmp_path / "t.flextrace", random_mask((1, 9, 13), 1.0)))
    (_, rows), *_ = read_packed_rows(reader, known(reader), 0, 0, 9)
    assert rows.tolist() == [[0xFF, 0xF8]] * 9


def test_a_mask_without_cells_or_an_unknown_one_has_none(tmp_path: Path) -> None:
    bare = MaskRecord("bare", "block", 1, 1, 4, 4, 0, partial=np.ones((1, 1, 1), np.bool_))
    reader = open_trace(write(tmp_path / "t.flextrace", bare))
    assert find_mask_cells(reader, "bare") is None
    assert find_mask_cells(reader, "nobody") is None


def damage(path: Path, sql: str, *params: Any) -> TraceReader:
    with sqlite3.connect(path) as db:
        assert db.execute(sql, params).rowcount > 0
    db.close()
    return open_trace(path)


BIG = (1, 3000, 3300)
SQUEEZED = (1, 512, 512)


@pytest.mark.parametrize(
    ("shape", "sql", "why"),
    [
        (SQUEEZED, "UPDATE arrays SET checksum = checksum + 1", "checksum"),
        (BIG, "DELETE FROM arrays WHERE owner = 'm' AND chunk = 0", "part of it is missing"),
        (BIG, "DELETE FROM arrays WHERE owner = 'm' AND chunk = 1", "ends too early"),
        (BIG, "UPDATE arrays SET shape = '[1, 3000, 3000]' WHERE owner = 'm'", "longer"),
        (BIG, "UPDATE arrays SET shape = '[1, 3001, 3300]' WHERE owner = 'm'", "too early"),
        (SQUEEZED, "UPDATE arrays SET shape = '[1, 512, 511]' WHERE owner = 'm'", "size of its"),
        (SQUEEZED, "UPDATE arrays SET item = 'int8', dtype = 'int8'", "the form of a mask"),
        (SQUEEZED, "UPDATE arrays SET codec = 'raw' WHERE owner = 'm'", "the form of a mask"),
        (
            SQUEEZED,
            "UPDATE arrays SET shape = '[512, 512]' WHERE owner = 'm'",
            "the form of a mask",
        ),
        (
            SQUEEZED,
            "UPDATE arrays SET shape = '[1, -1, 512]' WHERE owner = 'm'",
            "the form of a mask",
        ),
    ],
)
def test_damaged_cells_raise_a_trace_error(
    tmp_path: Path, shape: tuple[int, int, int], sql: str, why: str
) -> None:
    path = write(tmp_path / "t.flextrace", random_mask(shape, 0.5 if shape == BIG else 0.01))
    reader = damage(path, sql)
    with pytest.raises(TraceError, match=why):
        cells = known(reader)
        list(read_packed_rows(reader, cells, 0, 0, cells.n_rows))


def test_bytes_that_do_not_decompress_are_refused(tmp_path: Path) -> None:
    import zlib

    path = write(tmp_path / "t.flextrace", random_mask(SQUEEZED, 0.01))
    with sqlite3.connect(path) as db:
        (data,) = db.execute("SELECT data FROM arrays WHERE owner = 'm'").fetchone()
    db.close()
    broken = data[:60] + bytes(255 - byte for byte in data[60:])
    sql = "UPDATE arrays SET data = ?, checksum = ? WHERE owner = 'm'"
    reader = damage(path, sql, broken, zlib.crc32(broken))
    with pytest.raises(TraceError, match="m"):
        list(read_packed_rows(reader, known(reader), 0, 0, 512))


def test_many_masks_are_read_together(tmp_path: Path) -> None:
    masks = [random_mask((2, 1, 5 + n), 0.5, f"m{n}") for n in range(40)]
    bare = MaskRecord("bare", "block", 1, 7, 1, 9, 0)
    reader = open_trace(write(tmp_path / "t.flextrace", *masks, bare))
    names = [mask.fingerprint for mask in masks]
    found = dict(read_mask_arrays(reader, [*names, "bare", "nobody", names[0]], "mask.cells"))
    assert found.keys() == set(names)
    for mask in masks:
        assert mask.cells is not None
        assert np.array_equal(found[mask.fingerprint], mask.cells)
    assert max_mask_heads(reader, names) == 2
    assert max_mask_heads(reader, [*names, "bare"]) == 7
    assert max_mask_heads(reader, []) == max_mask_heads(reader, ["nobody"]) == 1


def test_damage_of_one_of_many_is_refused(tmp_path: Path) -> None:
    masks = [random_mask((1, 1, 40), 0.5, f"m{n}") for n in range(4)]
    path = write(tmp_path / "t.flextrace", *masks)
    reader = damage(path, "UPDATE arrays SET checksum = checksum + 1 WHERE owner = 'm2'")
    with pytest.raises(TraceError, match="m2"):
        list(read_mask_arrays(reader, ["m1", "m2"], "mask.cells"))
    assert len(list(read_mask_arrays(reader, ["m1", "m3"], "mask.cells"))) == 2


def test_calls_are_by_step_and_layer_and_the_first_of_a_layer_counts(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "t.flextrace", n_steps=3)
    reader = open_trace(path)
    found = read_step_calls(reader, 0, 0, 0, 2)
    assert [call.step for call in found] == [0, 1]
    assert found[1].by_layer == {0: ("f0000001", 5), 1: (None, 5), 2: (None, 5)}
    assert (found[1].q_len, found[1].kv_before, found[1].kv_after) == (1, 4, 5)


def test_a_step_without_calls_is_returned(tmp_path: Path) -> None:
    calls: tuple[CallRecord, ...] = ()
    path = tmp_path / "t.flextrace"
    with TraceWriter.create(path, {"model": "bits"}) as writer:
        writer.begin_generation(samples.generation())
        writer.write_step(samples.step(0, calls=calls))
    (found,) = read_step_calls(open_trace(path), 0, 0, 0, 9)
    assert found.by_layer == {}
    assert found.q_len == 4
