"""`e` opens the mask_mod of the layer in the editor, or says why it cannot."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.traces import sample_trace
from support.tui import settle

from flexinspect.panels.base import TracePlace
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.code_editor import open_code


def traced(tmp_path: Path, source: str | None) -> Path:
    path = sample_trace(tmp_path / "sample.flextrace")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE masks SET mask_mod_source = ?", (source,))
    return path


async def pressed(path: Path) -> list[str]:
    """Press `e`; return the messages."""
    app: Any = InspectorApp(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("e")
        await settle(pilot)
        return [note.message for note in app._notifications]


async def test_an_editor_with_a_window_opens_the_file_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    monkeypatch.setenv("VISUAL", "code")
    assert await pressed(traced(tmp_path, f"{__file__}:31")) == []
    assert started == [["code", "--goto", f"{__file__}:31"]]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "No mask_mod and no forward of yours is recorded for layer 0 here."),
        ("<stdin>", "No mask_mod and no forward of yours is recorded for layer 0 here."),
        ("/nowhere/gen.py:31", "/nowhere/gen.py:31 does not exist on this machine."),
    ],
)
async def test_what_cannot_be_opened_is_one_sentence(
    tmp_path: Path, source: str | None, sentence: str
) -> None:
    assert await pressed(traced(tmp_path, source)) == [sentence]


@pytest.mark.parametrize(
    ("mask_mod", "finding", "opened"),
    [
        (None, None, "forward"),
        (f"{__file__}:31", None, "mask_mod"),
        (f"{__file__}:31", Finding("path.mixed", Severity.ERROR, "Mixed.", layer=0), "forward"),
    ],
)
def test_the_forward_is_opened_without_a_mask_mod_and_for_a_finding_about_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask_mod: str, finding: Any, opened: str
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    monkeypatch.setenv("VISUAL", "code")
    path = traced(tmp_path, mask_mod)
    with sqlite3.connect(path) as db:
        data = json.dumps({"source": f"{__file__}:40", "name": "forward", "layers": [0, 1]})
        db.execute(
            "INSERT INTO events (at, kind, text, data) VALUES (0, 'source', 'forward', ?)", (data,)
        )
    app: Any = SimpleNamespace(notify=pytest.fail)
    with open_trace(path) as reader:
        open_code(app, reader, TracePlace(), finding)
    line = {"forward": 40, "mask_mod": 31}[opened]
    assert started == [["code", "--goto", f"{__file__}:{line}"]]


async def test_an_editor_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", str(tmp_path / "code"))
    (message,) = await pressed(traced(tmp_path, f"{__file__}:31"))
    assert message == f"{tmp_path / 'code'} could not be started: No such file or directory."


async def test_a_terminal_that_cannot_be_suspended_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "vim")
    (message,) = await pressed(traced(tmp_path, f"{__file__}:31"))
    assert message == "vim could not be started: this terminal cannot be suspended."
