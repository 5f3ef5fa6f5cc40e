"""`flexinspect export`: what it prints, its exit codes, and what it says about a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.traces import sample_trace

from flexinspect.cli.main import main
from flexinspect.core import plugins
from flexinspect.trace.schema import TABLES

FORMATS = ["perfetto", "tensorboard", "parquet", "csv", "notebook"]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return sample_trace(tmp_path / "run.flextrace")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["export", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_result_lies_in_the_current_folder_by_default(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, str(trace), "--to", "csv")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"run-csv: {len(TABLES)} files, 320 rows, ")
    assert any(line.startswith("  steps.csv: 12 rows, ") for line in lines)
    assert any(line.startswith("  events.csv: 1 row, ") for line in lines)
    assert lines[-1] == f"  and {len(TABLES) - 14} files without rows"
    assert (trace.parent / "run-csv" / "steps.csv").is_file()


@pytest.mark.parametrize("name", FORMATS)
def test_json_lists_the_files_with_their_sizes(
    trace: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, err = run(capsys, "run.flextrace", "--to", name, "--json", "--generation", "1")
    report = json.loads(out)
    assert (code, err) == (0, "")
    about = (report["format"], report["trace"], report["state"], report["generation"])
    assert about == (name, "run.flextrace", "finished", 1)
    assert report["notes"] == []
    assert report["bytes"] == sum(Path(file["path"]).stat().st_size for file in report["files"])
    unit = {"perfetto": "events", "tensorboard": "events", "notebook": "cells"}.get(name, "rows")
    assert report[unit] == sum(file[unit] for file in report["files"]) > 5


def test_the_list_has_a_sentence_for_each_format_and_names_broken_plug_ins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = plugins.registered

    def with_broken(group: str) -> Any:
        yield from every(group)
        yield EntryPoint("odd\x1b", "no_such_module:X", group)

    monkeypatch.setattr(plugins, "registered", with_broken)
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == [*FORMATS, "odd\\x1b"]
    assert "not available: The plug-in" in out.splitlines()[-1]
    code, out, _ = run(capsys, "--list", "--json")
    assert [entry["name"] for entry in json.loads(out)] == [*FORMATS, "odd\x1b"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "No trace is named."),
        (("run.flextrace",), "No format is named."),
        (("run.flextrace", "--to", "parket"), "There is no export to 'parket'; the formats are"),
        (("run.flextrace", "--to", "csv", "--generation", "9"), "has no generation 9."),
        (("none.flextrace", "--to", "csv"), "There is no trace at "),
        (("cut.flextrace", "--to", "csv"), "is damaged: it is cut short at "),
        (("wrong.flextrace", "--to", "parquet"), "is damaged: a row of tokens holds a value"),
        (("run.flextrace", "--to", "notebook", "-o", "file"), "file exists already."),
        (("run.flextrace", "--to", "csv", "-o", "none/csv"), "There is no folder none."),
    ],
)
def test_a_bad_request_is_one_sentence_and_writes_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    import sqlite3
    from contextlib import closing

    (trace.parent / "file").write_text("")
    (trace.parent / "cut.flextrace").write_bytes(trace.read_bytes()[:20_000])
    (trace.parent / "wrong.flextrace").write_bytes(trace.read_bytes())
    with closing(sqlite3.connect(trace.parent / "wrong.flextrace")) as db, db:
        db.execute("UPDATE tokens SET special = 7 WHERE pos = 3")
    before = {path.name for path in trace.parent.iterdir()}
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert {path.name for path in trace.parent.iterdir()} == before


def test_the_nearest_format_is_suggested(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean parquet?" in run(capsys, "run.flextrace", "--to", "parket")[2]


def test_an_unfinished_trace_is_exported_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sample_trace(tmp_path / "run.flextrace", finish=False)
    monkeypatch.setattr("flexinspect.core.environment.is_recorder_alive", lambda run: False)
    code, out, err = run(capsys, "run.flextrace", "--to", "perfetto")
    assert code == 0
    assert "ended without finishing it: the end is missing." in err
    assert out.startswith("run.perfetto-trace: ")
    monkeypatch.setattr("flexinspect.core.environment.is_recorder_alive", lambda run: True)
    code, out, err = run(capsys, "run.flextrace", "--to", "csv", "--json")
    report = json.loads(out)
    assert (code, err, report["state"]) == (0, "", "recording")
    assert report["notes"] == [
        "The trace is still being recorded: the export holds what was written until now."
    ]


def test_a_signal_during_the_export_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import time, sys; from flexinspect.trace import table_batches as t; "
        "from flexinspect.exports import tables; read = t.read_batches; "
        "tables.read_batches = lambda *a: (print('begun', flush=True), time.sleep(60)); "
        "from flexinspect.cli.main import main; "
        "sys.exit(main(['export', sys.argv[1], '--to', 'csv', '-o', sys.argv[2]]))"
    )
    trace = sample_trace(tmp_path / "run.flextrace")
    command = [sys.executable, "-c", code, str(trace), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(list(tmp_path.iterdir())) == 2  # the trace, and the folder being written
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        error = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert error == b"flexinspect: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.flextrace"]
