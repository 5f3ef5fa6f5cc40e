"""`flexinspect open` and the start of the interface, as far as no terminal is needed."""

from __future__ import annotations

import gc
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.traces import sample_trace

from flexinspect.cli import interface
from flexinspect.cli.main import main
from flexinspect.core.errors import TraceError
from flexinspect.trace import schema
from flexinspect.trace.file import salvage
from flexinspect.trace.file import salvage as schemapages
from flexinspect.trace.file.salvage import (
    OFFER,
    delete_repaired_copy,
    describe_readable,
    is_repairable,
    repair_copy,
)
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.trace_session import TraceSession


def flexinspect(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexinspect", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_without_a_terminal_open_says_what_does_without_one(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    done = flexinspect("open", str(path))
    assert done.returncode == 2
    assert "The interface needs a terminal" in done.stderr
    assert "flexinspect show" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("data", "sentence"),
    [(None, "There is no trace at"), (b"not a trace" * 20, "is not a flexinspect trace")],
)
def test_without_a_terminal_what_is_no_trace_is_not_to_be_shown_either(
    data: bytes | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nope.flextrace"
    if data is not None:
        path.write_bytes(data)
    assert main(["open", str(path)]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "flexinspect show" not in err


def test_garbage_collection_is_off_only_while_the_interface_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        interface._make_app()
        assert not gc.isenabled()
        monkeypatch.setattr("flexinspect.inputs.config.load_config", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            interface._make_app()
        assert gc.isenabled()
    finally:
        gc.enable()


def test_alone_without_a_terminal_it_prints_its_help() -> None:
    done = flexinspect()
    assert done.returncode == 0
    assert "flexinspect open run.flextrace" in done.stdout


@pytest.mark.parametrize("flag", ["--step", "--port", "--layer"])
def test_a_number_that_is_none_is_refused(flag: str) -> None:
    done = flexinspect("open", "a.flextrace", flag, "-1x")
    assert done.returncode == 2
    assert "whole number" in done.stderr or "expected one argument" in done.stderr


def test_the_interface_loads_no_torch(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from flexinspect.tui.app import InspectorApp\n"
        "from flexinspect.panels.panel_registry import load_panel, panel_names\n"
        "async def main():\n"
        f"    app = InspectorApp(Path({str(path)!r}))\n"
        "    async with app.run_test(size=(150, 50)) as pilot:\n"
        "        await pilot.press('right')\n"
        "        await pilot.pause(0.5)\n"
        "asyncio.run(main())\n"
        "[load_panel(name) for name in panel_names()]\n"
        "print(sorted({'torch', 'transformers', 'flexinspect_hooks'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_trace_that_is_cut_short_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace", generations=20)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(TraceError, match="cut short"):
        TraceReader(path)
    copy = repair_copy(path)
    assert copy is not None
    assert copy.stat().st_size == len(whole)
    assert any("Readable in it:" in line for line in describe_readable(copy))
    with TraceReader(copy) as reader:
        assert reader.run()["level"] == "advanced"
    delete_repaired_copy(copy)
    assert not copy.exists()
    assert path.read_bytes() == whole[: len(whole) * 3 // 4]


@pytest.mark.parametrize("kept", [30_000, 50_000, 70_000, 90_000, 100_000])
def test_a_small_trace_that_lost_part_of_its_schema_is_read_step_by_step(
    tmp_path: Path, kept: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    whole = path.read_bytes()
    assert len(whole) > 130_000
    path.write_bytes(whole[:kept])
    left = describe_readable(path)
    assert "38 tokens, 12 steps" in left[1]
    copy = repair_copy(path)
    assert copy is not None
    assert describe_readable(copy)[1:] == left[1:]
    with TraceReader(copy) as reader:
        assert [row.step for row in reader.steps(0)] == list(range(6))
        assert reader.tokens(0)[1].text == "Who"
    feed = TraceSession(copy)
    status = feed.poll(0)
    feed.close()
    delete_repaired_copy(copy)
    assert status is not None
    assert (status.state, status.last_step) == ("finished", 5)
    assert main(["dump", str(path)]) == 2
    errors = capsys.readouterr().err
    assert f"cut short at {kept} bytes" in errors
    assert left[1] in errors
    told = f'To see that, in a terminal: flexinspect open {path}, then "{OFFER}".'
    assert told in errors


def test_a_trace_of_another_build_that_lost_part_of_its_schema_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    whole = path.read_bytes()
    statements = schema.create_statements()
    monkeypatch.setattr(schema, "create_statements", lambda: statements[:-1])
    schemapages._empty_trace.cache_clear()
    try:
        path.write_bytes(whole[:60_000])
        assert repair_copy(path) is None
        assert main(["show", str(path)]) == 2
        assert "It cannot be opened without the missing part." in capsys.readouterr().err
        path.write_bytes(whole[:120_000])  # its schema is there
        assert is_repairable(path)
    finally:
        schemapages._empty_trace.cache_clear()


def test_only_a_truncated_trace_is_repaired(tmp_path: Path) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    assert repair_copy(path) is None
    other = tmp_path / "b.flextrace"
    other.write_bytes(b"something else " * 100)
    assert repair_copy(other) is None
    assert describe_readable(tmp_path) == []  # a folder
    assert describe_readable(other) == [
        "The file has 1500 bytes.",
        "Nothing in it can be read as a trace.",
    ]
    assert repair_copy(tmp_path / "none") is None


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


def foreign(path: Path, *sentences: str) -> Path:
    db = sqlite3.connect(path)
    for sentence in sentences:
        db.execute(sentence)
    db.commit()
    db.close()
    return path


def test_a_view_named_like_a_table_is_not_followed(tmp_path: Path) -> None:
    path = foreign(
        tmp_path / "a.flextrace",
        f"CREATE VIEW steps AS {ENDLESS}",
        "CREATE TABLE run (name TEXT)",
        "INSERT INTO run VALUES ('level')",
        "CREATE TABLE tokens (pos INTEGER)",
        "INSERT INTO tokens VALUES (1), (2)",
    )
    started = time.thread_time()
    assert describe_readable(path)[1:] == ["Readable in it: 1 fact about the run, 2 tokens."]
    assert time.thread_time() - started < 1.0


def test_counting_ends_with_its_time_and_says_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage, "MAX_COUNTING_S", 0)
    path = foreign(
        tmp_path / "a.flextrace",
        "CREATE TABLE steps (step INTEGER)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 50000) "
        "INSERT INTO steps SELECT i FROM n",
    )
    _, counted, ended = describe_readable(path)
    number = re.fullmatch(r"Readable in it: at least (\d+) steps\.", counted)
    assert number is not None
    assert 0 < int(number[1]) < 50_000
    assert ended == "Counting stopped after 0 seconds, so there may be more."


PAGE_BYTES = 4096


def test_what_a_cut_trace_still_holds_is_counted_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample_trace(tmp_path / "a.flextrace")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4 // PAGE_BYTES * PAGE_BYTES])
    copy = repair_copy(path)
    assert copy is not None
    counted = describe_readable(copy)[1]
    delete_repaired_copy(copy)
    monkeypatch.setattr(salvage, "repair_copy", None)
    assert describe_readable(path)[1] == counted
    assert [file.name for file in tmp_path.iterdir()] == ["a.flextrace"]


def test_a_copy_that_is_not_wanted_any_more_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    path = sample_trace(tmp_path / "a.flextrace")
    path.write_bytes(path.read_bytes()[:-5000])
    assert repair_copy(path, lambda: True) is None
    assert not list(copies.iterdir())


def test_a_trace_without_a_command_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.flextrace"]) == 2
    alone = capsys.readouterr().err
    assert main(["open", "nowhere.flextrace"]) == 2
    assert alone == capsys.readouterr().err
    assert "nowhere.flextrace" in alone
