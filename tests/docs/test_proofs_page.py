"""The commands of the page about proofs print its text, except for digits."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.paths import DOCS

PAGE = (DOCS / "proofs.md").read_text("utf-8")


def without_digits(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def test_every_example_runs_and_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    printed = without_digits(capsys.readouterr().out)
    assert (len(blocks), len(shown)) == (6, 6)
    for block in shown:
        for line in block.splitlines():
            assert without_digits(line) in printed


def test_every_command_of_the_page_is_one_that_the_parser_takes() -> None:
    import shlex

    from flexinspect.cli.main import build_parser

    lines = re.findall(r"^\$ flexinspect (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        assert build_parser("prove").parse_args(shlex.split(line)).proof in line
