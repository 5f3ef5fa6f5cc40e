"""The commands of the page about proofs print its text, except for digits."""

from __future__ import annotations

import shlex

import pytest
from support.pages import blocks, commands, run_python, without_digits
from support.paths import DOCS

from flexinspect.cli.main import build_parser

PAGE = (DOCS / "proofs.md").read_text("utf-8")


def test_every_example_runs_and_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_python(PAGE)
    shown = blocks(PAGE, "text")
    printed = without_digits(capsys.readouterr().out)
    assert (len(blocks(PAGE, "python")), len(shown)) == (6, 6)
    for block in shown:
        for line in block.splitlines():
            assert without_digits(line) in printed


def test_every_command_of_the_page_is_one_that_the_parser_takes() -> None:
    lines = commands(PAGE)
    assert len(lines) == 9
    for line in lines:
        assert build_parser("prove").parse_args(shlex.split(line)).proof in line
