"""Parquet and CSV: the tables of a trace, read back by other programs."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pyarrow import parquet
from support.earlier_traces import unpack
from support.exporting import export
from support.trace_samples import write
from support.traces import RUN, sample_generation, sample_step, sample_trace

from flexinspect.exports import exporter
from flexinspect.exports.csv import format_text
from flexinspect.records.step import CallRecord
from flexinspect.trace import schema
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace
from flexinspect.trace.table_batches import batch_columns, count_rows, read_batches

FIELD_LIMIT = 1 << 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with rows in most tables, with NaN, infinities, NULL and odd text."""
    return write(tmp_path_factory.mktemp("tables") / "full.flextrace", n_generations=2)


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table as the batches of the reader have them."""
    with open_trace(path) as reader:
        batches = read_batches(reader, schema_table(table), n_rows=2)
        return [
            dict(zip(batch, row, strict=True))
            for batch in batches
            for row in zip(*batch.values(), strict=True)
        ]


def schema_table(name: str) -> schema.Table:
    return next(table for table in schema.TABLES if table.name == name)


def plain(value: Any) -> Any:
    """Return a value with NaN as text, and tuples as lists, to be compared."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with all values `plain`."""
    return [{name: plain(value) for name, value in row.items()} for row in rows]


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["branches", "extreme", "training", "program"])
def test_batches_have_every_row_once_in_the_order_of_the_key(name: str, tmp_path: Path) -> None:
    path = unpack(name, tmp_path)
    with closing(sqlite3.connect(path)) as db, open_trace(path) as reader:
        stored = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
        for table in schema.TABLES:
            key, expected = ", ".join(table.key), list[tuple[Any, ...]]()
            if table.name in stored:  # the recorded traces lack tables that came later
                expected = db.execute(f"SELECT {key} FROM {table.name} ORDER BY {key}").fetchall()
            found: list[tuple[Any, ...]] = []
            for batch in read_batches(reader, table, n_rows=3):
                assert len(batch[table.key[0]]) <= 3
                found += zip(*(batch[column] for column in table.key), strict=True)
            assert found == expected, table.name
            assert count_rows(reader, table) == len(expected)


def test_batches_of_one_generation_have_its_rows_only(tmp_path: Path) -> None:
    with open_trace(unpack("program", tmp_path)) as reader:
        for table in (t for t in schema.TABLES if "generation" in t.kinds):
            whole = [g for batch in read_batches(reader, table) for g in batch["generation"]]
            for generation in (0, 7):
                batches = read_batches(reader, table, generation, n_rows=2)
                own = [g for batch in batches for g in batch["generation"]]
                assert own == [g for g in whole if g == generation], table.name
                assert count_rows(reader, table, generation) == len(own)


def test_a_step_without_logits_has_no_entropy_and_one_with_nan_has_nan(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "run.flextrace", RUN) as writer:
        writer.begin_generation(sample_generation(0))
        step = sample_step(0)
        assert step.logits is not None
        writer.write_step(replace(step, logits=replace(step.logits, entropy=math.nan)))
        writer.write_step(replace(sample_step(1), logits=None))
    export(tmp_path / "run.flextrace", "parquet")
    table = parquet.read_table(tmp_path / "run-parquet" / "steps.parquet")
    assert plain(table["entropy"].to_pylist()) == ["nan", None]
    assert table["chosen_id"].to_pylist() == [50, None]
    assert table["histogram"].to_pylist() == [[1, 4, 9, 3], None]


# -- Parquet --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(path: Path) -> Path:
    return export(path, "parquet")


def test_every_parquet_table_has_the_rows_of_the_trace(path: Path, folder: Path) -> None:
    files = {file.stem for file in folder.glob("*.parquet")}
    assert files == {table.name for table in schema.TABLES}
    for table in schema.TABLES:
        found = parquet.read_table(folder / f"{table.name}.parquet")
        assert found.column_names == list(batch_columns(table))
        assert comparable(found.to_pylist()) == comparable(rows_of(path, table.name))


def test_calls_in_parquet_are_the_records_of_the_trace(path: Path, folder: Path) -> None:
    found = parquet.read_table(folder / "calls.parquet").to_pylist()
    with open_trace(path) as reader:
        calls = [call for g in (0, 1) for step in (0, 1) for call in reader.calls(g, step)]
    for name in CallRecord.__struct_fields__:
        expected = [plain(getattr(call, name)) for call in calls]
        assert [plain(row[name]) for row in found] == expected, name


def test_parquet_columns_have_types_also_in_an_empty_table(folder: Path) -> None:
    empty = parquet.read_schema(folder / "training_steps.parquet")
    assert empty.field("step").type == pa.int64()
    assert empty.field("loss").type == pa.float64()
    assert empty.field("learning_rates").type == pa.list_(pa.float64())
    assert empty.field("is_skipped").type == pa.bool_()
    assert empty.field("anomaly_origin").type == pa.string()
    steps = parquet.read_schema(folder / "steps.parquet")
    assert (steps.field("step").nullable, steps.field("entropy").nullable) == (False, True)
    inputs = parquet.read_schema(folder / "inputs.parquet")
    assert inputs.field("positions").type == pa.list_(pa.list_(pa.int64()))


def test_duckdb_queries_the_parquet_files(tmp_path: Path) -> None:
    trace = sample_trace(tmp_path / "run.flextrace")
    folder = export(trace, "parquet")
    sql = f"""
        SELECT t.text, c.path, count(*)
        FROM '{folder}/calls.parquet' c
        JOIN '{folder}/tokens.parquet' t USING (generation, branch, step)
        WHERE generation = 1 AND step >= 4 GROUP BY ALL ORDER BY ALL
    """
    assert duckdb.sql(sql).fetchall() == [
        ("", "flex uncompiled", 4),
        (" .", "flex uncompiled", 3),
        (" .", "sdpa", 1),
    ]


def test_batches_are_row_groups_so_that_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexinspect.exports import tables

    small = lambda *args: read_batches(*args, n_rows=7)  # noqa: E731
    monkeypatch.setattr(tables, "read_batches", small)
    folder = export(sample_trace(tmp_path / "run.flextrace"), "parquet")
    about = parquet.ParquetFile(folder / "candidates.parquet").metadata
    sizes = [about.row_group(n).num_rows for n in range(about.num_row_groups)]
    assert sizes == [7] * 8 + [4]


# -- CSV ------------------------------------------------------------------------------------------


def read_csv(file: Path) -> list[dict[str, str]]:
    csv.field_size_limit(FIELD_LIMIT)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, strict=True))


def unescaped(text: str) -> str:
    """Undo what the page says about text in CSV."""
    return text.removeprefix("'")


NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def as_csv(value: Any, kind: str) -> str:
    """Return what the CSV file has for a value, after `unescaped`."""
    if value is None:
        return ""
    if kind == "bool":
        return "true" if value else "false"
    if kind == "real":
        return NAMES.get(repr(value), repr(value))
    if isinstance(value, list | tuple):
        return json.dumps([NAMES.get(repr(one), one) for one in value], ensure_ascii=False)
    return str(value)


@pytest.fixture(scope="module")
def csv_folder(path: Path) -> Path:
    return export(path, "csv")


def test_every_csv_table_has_the_rows_of_the_trace(path: Path, csv_folder: Path) -> None:
    for table in schema.TABLES:
        kinds = {name: kind.removesuffix("?") for name, kind in batch_columns(table).items()}
        found = [
            {
                name: unescaped(text) if kinds[name] not in ("int", "length") else text
                for name, text in row.items()
            }
            for row in read_csv(csv_folder / f"{table.name}.csv")
        ]
        expected = [
            {name: as_csv(value, kinds[name]) for name, value in row.items()}
            for row in rows_of(path, table.name)
        ]
        assert found == expected, table.name


def test_csv_lines_end_in_crlf_and_no_value_differs_from_empty_text(csv_folder: Path) -> None:
    lines = (csv_folder / "calls.csv").read_bytes().split(b"\r\n")
    assert lines[0].startswith(b"generation,branch,step,call,layer,path,")
    assert lines[-1] == b""
    assert b'"sdpa","sdpa",,1,8,4,' in lines[2]  # no mask: nothing between two commas
    assert b'"<s>","",0,' in (csv_folder / "tokens.csv").read_bytes()  # a text that is empty


def test_duckdb_reads_the_csv_files(path: Path, csv_folder: Path) -> None:
    sql = f"SELECT count(*), sum(q_heads) FROM read_csv('{csv_folder}/calls.csv')"
    rows = rows_of(path, "calls")
    assert duckdb.sql(sql).fetchall() == [(len(rows), sum(row["q_heads"] for row in rows))]


@settings(deadline=None)
@given(st.text(st.sampled_from("=+-@\t\r\n'\",\x00\x1b aé🗼") | st.characters(codec="utf-8")))
@example("")
def test_no_text_is_a_formula_and_every_text_can_be_restored(text: str) -> None:
    field = format_text(text)
    ((read,),) = csv.reader(io.StringIO(field, newline=""), strict=True)
    assert not read.startswith(tuple("=+-@\t\r\n"))
    assert unescaped(read) == text


# -- both -----------------------------------------------------------------------------------------


def test_lone_surrogates_are_escaped_in_every_format(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "run.flextrace", generations=1)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE generations SET expected = ?", ('["\\ud83d"]',))
    for name in ("parquet", "csv", "perfetto", "tensorboard", "notebook"):
        export(path, name)
    table = parquet.read_table(tmp_path / "run-parquet" / "generations.parquet")
    assert table["expected"].to_pylist() == [["\\ud83d"]]
    (row,) = read_csv(tmp_path / "run-csv" / "generations.csv")
    assert row["expected"] == '["\\ud83d"]'


def test_an_export_of_one_generation_has_its_rows_and_the_whole_manifest(path: Path) -> None:
    copy = Path(shutil.copy(path, path.with_name("one.flextrace")))
    folder = export(copy, "parquet", generation=1)
    assert set(parquet.read_table(folder / "steps.parquet")["generation"].to_pylist()) == {1}
    assert parquet.read_table(folder / "run.parquet").num_rows == len(rows_of(path, "run"))
    listed = json.loads((folder / exporter.MANIFEST).read_text())["files"]
    assert listed["steps.parquet"] == 2
