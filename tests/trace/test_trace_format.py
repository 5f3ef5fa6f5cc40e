"""The file format: what any SQLite client reads, and that its documentation is correct."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.paths import DOCS
from support.trace_samples import generation, small_step, step

from flexinspect.records.collectives import (
    ALL_WEIGHTS_STREAM,
    CALLS_STREAM,
    KINDS,
    TIMES_STREAM,
    WEIGHTS_STREAM,
)
from flexinspect.records.step import MASK_ARRAYS, Candidate
from flexinspect.trace import codec, schema
from flexinspect.trace.arrays import CODECS
from flexinspect.trace.file import connections
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.schema import SQL_TYPES

PAGE = DOCS / "trace-format.md"


@pytest.fixture
def client(finished: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(finished)) as db:
        yield db


def test_the_pragmas_identify_a_trace(client: sqlite3.Connection) -> None:
    assert client.execute("PRAGMA application_id").fetchone() == (0x464C5854,)
    assert client.execute("PRAGMA user_version").fetchone() == (2,)
    assert client.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_every_table_is_strict_and_narrow_ones_are_clustered(client: sqlite3.Connection) -> None:
    rows = client.execute("SELECT name, wr, strict FROM pragma_table_list WHERE schema = 'main'")
    found = {name: (bool(wr), bool(strict)) for name, wr, strict in rows}
    found.pop("sqlite_schema")
    assert found == {table.name: (table.clustered, True) for table in schema.TABLES}


STREAMS = (
    *(f"mask.{name}" for name in MASK_ARRAYS),
    *("attention.mass", "attention.lse", "attention.entropy", "attention.slots", "logits.row"),
    *("inputs.ids", "inputs.positions", "inputs.mask", "q", "k", "v", "hidden"),
    *("grads.tokens", "grads.layers", "audit.digests", "audit.weights"),
    *(CALLS_STREAM, TIMES_STREAM, WEIGHTS_STREAM, ALL_WEIGHTS_STREAM),
)


def test_the_page_lists_the_kinds_of_collectives_in_the_order_of_their_numbers() -> None:
    assert f"Kinds from 0: {', '.join(KINDS)} |" in PAGE.read_text("utf-8")


def test_the_page_explains_every_table_column_stream_and_codec() -> None:
    page = PAGE.read_text("utf-8")
    for table in schema.TABLES:
        section = page.split(f"### {table.name}\n")[1].split("\n### ")[0]
        meaning = section.split("\nKey: ")[0].strip()
        assert meaning.endswith(".")
        assert f"Key: {', '.join(table.key)}." in section
        rows = re.findall(r"^\| `(\w+)` \| ([A-Z ]+) \| (\S.*) \|$", section, re.MULTILINE)
        assert [row[:2] for row in rows] == [
            (c, SQL_TYPES[kind]) for c, kind in table.kinds.items()
        ]
    for stream in STREAMS:
        assert re.search(rf"^\| `{stream}` \| \S.* \|$", page, re.MULTILINE), stream
    assert all(f"`{codec}`" in page for codec in CODECS)


def test_the_queries_of_the_page_run(client: sqlite3.Connection) -> None:
    blocks = re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        assert client.execute(block).fetchall() is not None


def test_the_python_code_of_the_page_reads_a_trace(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run.flextrace"
    copy.write_bytes(finished.read_bytes())
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    by_reader, by_sqlite = [dict[str, Any]() for _ in blocks]
    for block, names in zip(blocks, (by_reader, by_sqlite), strict=True):
        exec(block.replace('"run.flextrace"', repr(str(copy))), names)
    assert by_sqlite["mass"].shape == by_reader["mass"].shape
    assert (by_sqlite["mass"] == by_reader["mass"]).all()
    with open_trace(copy) as reader:
        steps = [step for one in reader.generations() for step in reader.steps(one.generation)]
    printed = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert printed == [f"{step.step} {step.chosen_id} {step.entropy}" for step in steps]
    assert len(printed) == 6
    assert len(by_reader["calls"]) > 0


class Spy:
    """Collects the SQL of a reader."""

    def __init__(self, reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: list[tuple[str, object]] = []
        inner = reader._connections.query

        def query(sql: str, params: object = ()) -> list[object]:
            self.queries.append((sql, params))
            return inner(sql, params)  # type: ignore[arg-type]

        monkeypatch.setattr(reader, "_query", query)


def test_every_query_about_a_step_is_a_search_not_a_scan(
    finished: Path, client: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_trace(finished)
    spy = Spy(reader, monkeypatch)
    reader.record(1, 2)
    reader.array(1, 2, "q", 0)
    reader.arrays(1, 2)
    reader.mask("f0010002")
    reader.n_steps(1)
    reader.steps(1, limit=2)
    reader.tokens(1, start=2, limit=2)
    reader.segments(1)
    reader.generation(1)
    reader.branches(1)
    reader.findings(1)
    reader.events(after_id=3)
    reader.output(after_id=1)
    assert len({sql for sql, _ in spy.queries}) > 15
    for sql, params in spy.queries:
        plan = client.execute(f"EXPLAIN QUERY PLAN {sql}", params).fetchall()  # type: ignore[arg-type]
        assert all("SCAN" not in row[3] for row in plan), (sql, plan)


def test_no_python_and_no_torch_is_needed_to_read_the_numbers(client: sqlite3.Connection) -> None:
    row = client.execute(
        "SELECT entropy, chosen_id, json_extract(histogram, '$[2]') FROM steps LIMIT 1"
    ).fetchone()
    assert row == (0.5, 5, 29)


def test_reading_and_dumping_import_neither_torch_nor_textual() -> None:
    code = (
        "import sys, flexinspect.trace.reader, flexinspect.trace.file.writer; "
        "import flexinspect.trace.trace_dump, flexinspect.cli.dump; "
        "print({'torch', 'textual', 'transformers'} & {*sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


def test_a_step_is_one_transaction(tmp_path: Path) -> None:
    executed: list[str] = []
    with TraceWriter.create(tmp_path / "a.flextrace", {}) as writer:
        writer.begin_generation(generation())
        writer._db.set_trace_callback(executed.append)
        writer.write_step(step(0))
        writer._db.set_trace_callback(None)
    assert executed[0] == "BEGIN IMMEDIATE"
    assert [sql for sql in executed if sql in ("BEGIN IMMEDIATE", "COMMIT")] == [
        executed[0],
        executed[-1],
    ]
    assert len(executed) < 20


def test_a_step_of_basic_capture_takes_few_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    with TraceWriter.create(path, {}) as writer:
        writer.begin_generation(generation())
        for number in range(200):
            writer.write_step(small_step(number))
    assert path.stat().st_size / 200 < 2_000


def test_added_tables_and_columns_do_not_disturb(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.flextrace"
    path.write_bytes(finished.read_bytes())
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE steps ADD COLUMN novelty REAL")
        db.execute("CREATE TABLE novelties (x INTEGER) STRICT")
        db.commit()
    with open_trace(path) as reader:
        assert reader.n_steps(0) == 3
        assert reader.record(0, 0) is not None


def test_hostile_views_and_triggers_are_not_trusted(finished: Path) -> None:
    db = connections.connect(finished)
    with closing(db):
        assert db.execute("PRAGMA trusted_schema").fetchone() == (0,)
        assert db.execute("PRAGMA query_only").fetchone() == (1,)
        with pytest.raises(sqlite3.OperationalError):
            db.execute("DELETE FROM steps")


def test_a_record_must_have_the_columns_of_its_table_as_fields() -> None:
    with pytest.raises(TypeError, match="columns of memory are not the fields of Candidate"):
        codec.RowFormat(Candidate, schema.MEMORY, skip=3)
