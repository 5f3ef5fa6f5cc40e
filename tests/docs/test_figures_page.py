"""The examples of the page about figures run and print what it shows; its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.pages import blocks, commands, run_python
from support.paths import DOCS

from flexinspect.cli.main import COMMANDS, build_parser

PAGE = (DOCS / "figures.md").read_text("utf-8")


def test_every_example_runs_and_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEXINSPECT_LANG", raising=False)
    run_python(PAGE)
    pyplot.close("all")
    assert len(blocks(PAGE, "python")) == 5
    assert capsys.readouterr().out == "".join(blocks(PAGE, "text"))
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {
        *("mask.png", "window.pdf", "analysis.svg", "generation.gif", "generation.html")
    }


def test_every_command_of_the_page_is_one_that_the_parser_takes() -> None:
    lines = commands(PAGE)
    assert len(lines) == 10
    for line in lines:
        words = shlex.split(line)
        assert words[0] in COMMANDS
        assert build_parser(words[0]).parse_args(words).command == words[0]


def test_its_pictures_exist() -> None:
    for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", PAGE):
        assert (DOCS / name).is_file(), name
