"""Text that attacks a terminal, a spreadsheet or a page survives each format, and stays inert."""

from __future__ import annotations

import csv
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import nbformat
import pytest
from pyarrow import parquet
from support.earlier_traces import unpack
from support.exporting import Timeline, export
from support.poisoned_traces import text_columns
from support.trace_samples import write
from support.traces import sample_trace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flexinspect.cli.main import main
from flexinspect.trace.schema import TABLES

ATTACK = '=HYPERLINK("//x",1)\x1b[2J\r\n</script>\u202e\x00\x9b\'{0}%s,'
"""A formula, an escape sequence, a new line, markup, a change of direction, and zero."""

CHOICES = {"kind", "severity", "state", "phase", "key", "value"}
"""Columns that flexinspect compares with what it knows, apart from those of arrays."""

POISON = {
    "text": "? || {0}",
    "texts": "json_insert({0}, '$[#]', ?)",
    "object": "json_insert({0}, '$.attack', ?)",
}
"""By the kind of a column: the SQL that puts the attack into its text."""


def poison_column(path: Path, table: str, column: str, kind: str) -> None:
    """Put the attack into all texts of a column, unless it is a key."""
    with closing(sqlite3.connect(path)) as db, suppress(sqlite3.IntegrityError), db:
        new = POISON[kind.removesuffix("?")].format(column)
        db.execute(f"UPDATE {table} SET {column} = {new} WHERE {column} <> ''", (ATTACK,))


@pytest.fixture(scope="module", params=[write, sample_trace])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace that has the attack in every column of text, except in keys and choices."""
    folder = tmp_path_factory.mktemp("hostile")
    whole = request.param(folder / "whole.flextrace")
    path = Path(shutil.copy(whole, folder / "poisoned.flextrace"))
    kinds = {(table.name, name): kind for table in TABLES for name, kind in table.kinds.items()}
    columns = [
        (table, column, kinds[table, column].removesuffix("?"))
        for table, column in text_columns(whole)
        if table != "arrays" and column not in CHOICES
    ]
    assert len(columns) >= 20
    for table, column, kind in columns:
        if kind in POISON:
            poison_column(path, table, column, kind)
    return path


def stored_texts(path: Path) -> dict[tuple[str, str], list[str]]:
    """Return the texts of the trace by table and column."""
    with closing(sqlite3.connect(path)) as db:
        return {
            (table, column): [
                text for (text,) in db.execute(f"SELECT {column} FROM {table} WHERE {column} <> ''")
            ]
            for table, column in text_columns(path)
        }


@pytest.mark.parametrize("name", ["perfetto", "tensorboard", "parquet", "csv", "notebook"])
def test_what_the_command_prints_is_escaped(
    path: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out\x1b[31m"
    assert main(["export", str(path), "--to", name, "-o", str(target)]) == 0
    printed = capsys.readouterr()
    assert "out\\x1b[31m" in printed.out
    assert "\x1b" not in printed.out + printed.err


def test_parquet_has_every_text_as_it_is(path: Path) -> None:
    folder, n_attacks = export(path, "parquet"), 0
    for (table, column), texts in stored_texts(path).items():
        found = parquet.read_table(folder / f"{table}.parquet")[column]
        if found.type == "string":
            # A query may read an index, whose order is another one.
            assert sorted(filter(None, found.to_pylist())) == sorted(texts), (table, column)
            n_attacks += sum(ATTACK in text for text in texts)
    assert n_attacks > 20


def test_csv_has_every_text_behind_a_quotation_mark(path: Path) -> None:
    folder, n_attacks = export(path, "csv"), 0
    for (table, column), texts in stored_texts(path).items():
        with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
            fields = [row[column] for row in csv.DictReader(lines, strict=True)]
        assert not any(field.startswith(("=", "+", "-", "@", "\t", "\r")) for field in fields)
        if any(text.startswith(ATTACK) for text in texts):
            assert [field.removeprefix("'") for field in fields if field] == texts
            n_attacks += len(texts)
    assert n_attacks > 20


def test_perfetto_has_the_texts_and_its_tracks_are_whole(path: Path) -> None:
    texts = [*Timeline(export(path, "perfetto")).texts()]
    assert len([text for text in texts if ATTACK in text]) > 5


def test_tensorboard_has_the_texts_as_tags(path: Path) -> None:
    run = EventAccumulator(str(export(path, "tensorboard") / "generation-0")).Reload()
    tags = [tag for kind in ("scalars", "histograms") for tag in run.Tags()[kind]]
    assert len([tag for tag in tags if ATTACK in tag]) >= 4


def test_the_notebook_has_no_text_of_the_trace(path: Path) -> None:
    notebook = nbformat.read(export(path, "notebook"), as_version=4)
    nbformat.validate(notebook)
    assert "HYPERLINK" not in str(notebook)


@pytest.mark.parametrize("column", ["segments.kind", "branches.state", "arrays.stream"])
@pytest.mark.parametrize("name", ["perfetto", "tensorboard", "parquet", "csv"])
def test_a_text_in_the_place_of_a_choice_is_exported_or_one_sentence(
    name: str, column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unpack("generation", tmp_path)
    poison_column(path, *column.split("."), kind="text")
    code = main(["export", str(path), "--to", name, "-o", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "Traceback" not in printed.err
    assert (code == 0) == (tmp_path / "out").exists()
    if code:
        assert code == 2
        assert "is damaged: " in printed.err
