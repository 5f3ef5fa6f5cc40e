"""Files that are damaged or not traces raise a `TraceError`: no other exception, no hang."""

from __future__ import annotations

import ast
import os
import random
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support.earlier_traces import unpack
from support.trace_samples import generation, step

import flexinspect.trace
from flexinspect.core.errors import TraceError, TraceWriteError
from flexinspect.records.step import ArrayRecord
from flexinspect.trace import queries
from flexinspect.trace.file import connections
from flexinspect.trace.file.writer import RuleReview, TraceWriter, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.schema import APPLICATION_ID
from flexinspect.trace.trace_dump import DumpSelection, dump_json, dump_text


def read_all(path: Path) -> str:
    """Read everything there is to read of a trace."""
    with open_trace(path) as reader:
        text = "".join(dump_text(DumpSelection(reader))) + "".join(dump_json(DumpSelection(reader)))
        for row in reader.generations():
            for number in range(min(reader.n_steps(row.generation), 10)):
                reader.record(row.generation, number)
        return text


def change(path: Path, sql: str, *params: object) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(sql, params)
        db.commit()


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(finished, tmp_path / "copy.flextrace"))


def assert_refused(path: Path, sentence: str) -> None:
    before = sorted(path.parent.iterdir()) if path.parent.exists() else None
    with pytest.raises(TraceError, match=sentence) as caught:
        read_all(path)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert before is None or sorted(path.parent.iterdir()) == before


def test_a_missing_file(tmp_path: Path) -> None:
    assert_refused(tmp_path / "no.flextrace", "There is no trace at")
    assert_refused(tmp_path / "no" / "no.flextrace", "There is no trace at")


def test_a_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path, "is a folder")


def test_an_empty_file(copy: Path) -> None:
    copy.write_bytes(b"")
    assert_refused(copy, "is empty")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "is not a regular file")


def test_a_name_with_a_null_byte(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        open_trace(str(tmp_path / "a\0b"))


@pytest.mark.parametrize("content", [b"\x80\x04.", b"x", b"PK\x03\x04" * 100, b"\0" * 5000])
def test_a_file_of_another_kind(copy: Path, content: bytes) -> None:
    copy.write_bytes(content)
    assert_refused(copy, r"is not a flexinspect trace \(not a SQLite file\)")


def test_a_database_of_another_program(tmp_path: Path) -> None:
    change(tmp_path / "a.db", "CREATE TABLE steps (x)")
    assert_refused(tmp_path / "a.db", "of another program")


def test_a_trace_of_an_earlier_build_is_read_without_what_it_lacks(copy: Path) -> None:
    for column in ("branches DROP COLUMN change", "findings DROP COLUMN layers"):
        change(copy, f"ALTER TABLE {column}")
    for table in ("training_steps", "gradients", "reviews", "inputs"):
        change(copy, f"DROP TABLE {table}")
    assert read_all(copy)
    with open_trace(copy) as reader:
        assert [row.change for row in reader.branches(0)] == [{}]
        assert {finding.layers for finding in reader.findings()} <= {()}
        record = reader.record(0, 0)
        assert record is not None
        assert record.inputs is None
        assert reader.reviews() == []


def test_a_future_version(copy: Path) -> None:
    change(copy, "PRAGMA user_version = 3")
    assert_refused(copy, "is a trace of version 3; this program reads up to 2")


def test_a_version_that_is_no_longer_read(copy: Path) -> None:
    change(copy, "PRAGMA user_version = 0")
    assert_refused(copy, "of version 0, which this program no longer reads")


def test_a_header_alone(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:60])
    assert_refused(copy, "cut short at 60 bytes")


def test_a_file_that_lost_its_last_page(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size - 4096)
    assert_refused(copy, "cut short")


def test_a_trace_without_a_table(copy: Path) -> None:
    change(copy, "DROP TABLE calls")
    assert_refused(copy, "is damaged: no such table: calls")


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("UPDATE arrays SET checksum = checksum + 1", "a checksum does not match"),
        ("UPDATE arrays SET data = zeroblob(length(data) + 1)", "a checksum does not match"),
        ("UPDATE arrays SET shape = '[1' WHERE owner IS NOT NULL", "its shape is not a list"),
        ("UPDATE arrays SET shape = '[-1]' WHERE owner IS NOT NULL", "that is not a length"),
        ("UPDATE arrays SET shape = '[1, 9, 99]' WHERE owner IS NOT NULL", "bytes are not"),
        ("UPDATE arrays SET item = 'object' WHERE owner IS NOT NULL", "its type is"),
        ("UPDATE arrays SET codec = 'pickle' WHERE owner IS NOT NULL", "its codec 'pickle'"),
        ("UPDATE arrays SET chunk = 1 WHERE owner IS NOT NULL", "a part of it is missing"),
        ("UPDATE run SET value = '{'", "a row of run holds a value of a wrong type"),
        ("UPDATE segments SET kind = 'odd'", "'odd' is not a SegmentKind"),
        ("UPDATE findings SET severity = 'odd'", "'odd' is not a Severity"),
        ("UPDATE findings SET positions = '[\"x\"]'", "a list of int holds something else"),
        ("UPDATE events SET data = '[]'", "an object holds something else"),
        ("UPDATE generations SET expected = '3'", "a list of str holds something else"),
        ("UPDATE steps SET histogram = NULL", "only a part of its logits"),
        ("UPDATE tokens SET special = 3", "a row of tokens holds"),
        ("UPDATE calls SET lse_error = 'odd'", "a row of calls holds"),
        ("UPDATE tokens SET text = CAST(x'ff' AS TEXT)", "is damaged: Could not decode"),
    ],
)
def test_a_changed_value_is_noticed(copy: Path, sql: str, sentence: str) -> None:
    change(copy, sql)
    assert_refused(copy, sentence)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "


def test_a_step_with_a_number_that_no_run_reaches(copy: Path) -> None:
    change(copy, "UPDATE steps SET step = ? WHERE step = 1", 2**61)
    with open_trace(copy) as reader:
        for read in (reader.last_step, reader.steps):
            with pytest.raises(TraceError, match="a step has the number 2305843009213693952"):
                read(0)


def test_a_disk_that_fails_does_not_make_the_trace_a_damaged_one(copy: Path) -> None:
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorname = "SQLITE_IOERR_READ"
    with pytest.raises(TraceError, match="cannot be read: the disk reports an error") as caught:
        with connections.trace_errors(copy):
            raise failed
    assert "damaged" not in caught.value.sentence()


@pytest.mark.parametrize("name", ["run", "steps", "Findings"])
def test_a_view_in_place_of_a_table_is_never_read(copy: Path, name: str) -> None:
    change(copy, f"DROP TABLE {name}")
    change(copy, f"CREATE VIEW {name} AS {ENDLESS} i AS key, i AS value FROM n")
    assert_refused(copy, f"is damaged: '{name}' is not a table of a trace")


def test_a_computed_column_is_never_read(copy: Path) -> None:
    change(copy, "DROP TABLE output")
    change(copy, "CREATE TABLE output (number INT, text TEXT AS (hex(zeroblob(400000000))))")
    assert_refused(copy, "is damaged: table 'output' has computed columns")


def test_a_query_ends_after_its_time(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_QUERY_S", 0.05)
    with open_trace(copy) as reader, pytest.raises(TraceError, match="a query was stopped"):
        reader._query(f"{ENDLESS} count(*) FROM n")


def test_findings_are_not_written_to_a_file_that_runs_its_own_sql(copy: Path) -> None:
    change(copy, f"CREATE TRIGGER t BEFORE INSERT ON reviews BEGIN {ENDLESS} count(*) FROM n; END")
    with pytest.raises(TraceWriteError, match="it has triggers"):
        append_reviews(copy, [RuleReview("odd", 0, (), (), 0.0, 0.0)])


def test_a_few_bytes_cannot_claim_terabytes_of_cells(copy: Path) -> None:
    zeros = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    with closing(sqlite3.connect(copy)) as db, db:
        values = ("[1, 32768, 32768]", "bits+zstd", zlib.crc32(zeros), zeros)
        sql = "UPDATE arrays SET shape = ?, codec = ?, checksum = ?, data = ? "
        db.execute(f"{sql} WHERE stream = 'mask.cells' AND chunk = 0", values)
    assert len(zeros) < 10_000
    assert_refused(copy, "more cells than can be read at once")


@pytest.mark.parametrize(
    ("change_sql", "sentence"),
    [
        ("shape = '[24]' WHERE stream = 'attention.mass'", "has 3 dimensions"),
        ("item = 'int32' WHERE stream = 'attention.mass'", "has 3 dimensions of 'f'"),
        ("stream = 'hidden' WHERE stream = 'k'", "'hidden' has 2 dimensions"),
    ],
)
def test_an_array_without_the_form_of_its_stream(
    copy: Path, change_sql: str, sentence: str
) -> None:
    change(copy, f"UPDATE arrays SET {change_sql}")
    assert_refused(copy, sentence)


def test_compressed_bytes_that_do_not_decompress(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        causal = ArrayRecord("causal", np.tri(512, dtype=bool))
        writer.write_step(step(0, arrays=(causal,), masks=()))
    change(path, "UPDATE arrays SET data = ?, checksum = ?", b"junk", zlib.crc32(b"junk"))
    assert_refused(path, "do not decompress|does not decompress")


def test_damage_of_one_array_leaves_the_others_readable(copy: Path) -> None:
    change(copy, "UPDATE arrays SET checksum = 0 WHERE stream = 'q'")
    with open_trace(copy) as reader:
        assert reader.array(0, 0, "attention.mass") is not None
        with pytest.raises(TraceError, match="'q' of step 0 of generation 0"):
            reader.array(0, 0, "q", layer=0)


def test_a_locked_file(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexinspect.trace.file.connections.READ_BUSY_S", 0.05)
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TraceError, match="locked by another program"):
            open_trace(copy)


def assert_survives(path: Path) -> None:
    """Anything but success and a `TraceError`, or long work, fails the test."""
    started = time.thread_time()
    with suppress(TraceError):
        read_all(path)
    assert time.thread_time() - started < 5


@pytest.mark.slow
def test_any_flipped_bits_are_read_or_refused(finished: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    whole = finished.read_bytes()
    for number in range(300):
        data = bytearray(whole)
        # Half of the flips go where the structure is: the header, the schema, starts of pages.
        for _ in range(rng.choice([1, 1, 4, 64])):
            page = rng.randrange(len(data) // 4096) * 4096
            offset = page + rng.randrange(24) if number % 2 else rng.randrange(len(data))
            data[offset] ^= 1 << rng.randrange(8)
        path = tmp_path / f"flip{number}"
        path.write_bytes(data)
        assert_survives(path)
        path.unlink()


@pytest.mark.slow
def test_any_truncation_is_read_or_refused(finished: Path, tmp_path: Path) -> None:
    rng = random.Random(2)
    whole = finished.read_bytes()
    path = tmp_path / "cut"
    for number in range(80):
        size = rng.randrange(len(whole))
        path.write_bytes(whole[: size if number % 2 else size // 4096 * 4096])
        assert_survives(path)


def test_any_damage_of_a_wal_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    writer = TraceWriter.create(path, {})
    writer.begin_generation(generation())
    for number in range(3):
        writer.write_step(step(number))
    wal = path.with_name(path.name + "-wal").read_bytes()
    rng = random.Random(3)
    for number in range(60):
        copy = tmp_path / f"w{number}"
        shutil.copy(path, copy)
        data = bytearray(wal[: rng.randrange(len(wal)) if number % 3 == 0 else len(wal)])
        for _ in range(4 if data else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        copy.with_name(copy.name + "-wal").write_bytes(data)
        assert_survives(copy)
    writer.close()


def test_arrays_of_objects_are_refused_when_written(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "a.flextrace", {}) as writer:
        for array in (np.array([{}], object), np.array(["x"]), np.zeros(2, "M8[s]")):
            with pytest.raises(TraceWriteError, match="only numbers and bools"):
                writer.write_step(step(0, arrays=(ArrayRecord("x", array),)))
        assert not writer.failed


def test_nothing_is_ever_unpickled() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch", "runpy"}
    calls = {"eval", "exec", "load", "__import__", "import_module"}
    folder = Path(flexinspect.trace.__file__).parent
    modules = list(folder.glob("*.py"))
    assert len(modules) > 5
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            assert not names & banned, module
            if isinstance(node, ast.Call):
                function = node.func
                called = getattr(function, "id", getattr(function, "attr", ""))
                assert called not in calls, (module, called)
            assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), module


def test_the_identity_is_in_the_header(finished: Path) -> None:
    head = finished.read_bytes()[:100]
    assert head[:16] == b"SQLite format 3\0"
    assert head[68:72] == b"FLXT" == APPLICATION_ID.to_bytes(4, "big")
    assert head[60:64] == b"\0\0\0\2"


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        (
            "UPDATE findings SET severity = 'odd'",
            lambda reader: queries.finding_steps(reader, 0, 0, 9),
        ),
        (
            "UPDATE findings SET id = 'segments.inferred', evidence = '{\"segments\": [[1, 2]]}'",
            lambda reader: queries.inferred_segments(reader, 0),
        ),
    ],
)
def test_a_changed_finding_is_noticed_by_queries(
    copy: Path, sql: str, read: Callable[[TraceReader], object]
) -> None:
    change(copy, sql)
    with open_trace(copy) as reader, pytest.raises(TraceError, match="is damaged: "):
        read(reader)


@pytest.mark.parametrize("norms", ['[1, "x"]', '{"a": 2}', "[1, [2]]"])
def test_a_changed_norm_of_a_group_is_noticed(tmp_path: Path, norms: str) -> None:
    path = unpack("training", tmp_path)
    change(path, "UPDATE training_steps SET group_norms = ?", norms)
    with open_trace(path) as reader, pytest.raises(TraceError, match="is damaged: "):
        reader.group_curve(0, 0, 8, 8)


def test_gradients_of_tokens_that_have_not_two_rows_are_noticed(tmp_path: Path) -> None:
    path = unpack("extreme", tmp_path)
    change(path, "UPDATE arrays SET shape = '[18, 2]' WHERE stream = 'grads.tokens'")
    with open_trace(path) as reader, pytest.raises(TraceError, match="have not two rows"):
        reader.gradients(0, 0)
