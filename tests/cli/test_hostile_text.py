"""No text of a trace reaches the terminal with control characters, whichever column holds it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.earlier_traces import unpack
from support.poisoned_traces import poisoned_copies

from flexinspect.cli.main import main

pytestmark = pytest.mark.slow

ESCAPE = "\x1b[2J"


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the commands that print the trace: all of it, and every panel at its last step."""
    with closing(sqlite3.connect(path)) as db:
        sql = "SELECT generation, branch, max(step) FROM steps GROUP BY 1, 2 ORDER BY 1, 2"
        generation, branch, step = db.execute(sql).fetchall()[-1]
    show = ["show", str(path), f"--generation={generation}", f"--branch={branch}", f"--step={step}"]
    yield from (["dump", str(path)], ["findings", str(path)], show, [*show, "--picture"])


@pytest.mark.parametrize("name", ["branches", "extreme", "training"])
def test_no_column_of_text_reaches_the_terminal_unescaped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = unpack(name, tmp_path), tmp_path / "poisoned.flextrace"
    for column in poisoned_copies(whole, path, ESCAPE):
        for command in commands(path):
            main(command)
            printed = capsys.readouterr()
            assert "\x1b" not in printed.out + printed.err, f"{column}: {command}"
