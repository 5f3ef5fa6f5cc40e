"""The page about the training debuggers describes what it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.paths import DOCS

from flexinspect.records.debug_switches import SWITCHES, short_name
from flexinspect_hooks import training_debuggers
from flexinspect_hooks.training_debuggers import debug_functions

PAGE = (DOCS / "debugger-api.md").read_text("utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.filterwarnings("ignore")
def test_every_block_of_the_page_prints_what_stands_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(debug_functions, "_common_boards", [])
    names: dict[str, Any] = {"__name__": "page"}
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == PAGE.count("```python") >= 8
    for source, expected in blocks:
        exec(compile(source, "debugger-api.md", "exec"), names)
        printed = capsys.readouterr().out
        pattern = re.escape(expected.strip()).replace("…", ".*")
        assert re.fullmatch(pattern, printed.strip()), printed


def test_the_page_names_every_switch_and_every_public_name() -> None:
    table = PAGE.split("## Thirteen switches")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == [short_name(name) for name in SWITCHES]
    for name in training_debuggers.__all__:
        assert name in PAGE, name
