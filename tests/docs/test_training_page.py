"""The page about training shows what its example prints."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from support.paths import DOCS


def without_numbers(text: str) -> list[str]:
    return [re.sub(r"\d+", "#", line) for line in text.strip().splitlines()]


def test_the_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wrong.flextrace"
    monkeypatch.setattr("sys.argv", ["train.py", "--rate", "30", "--out", str(out)])
    runpy.run_path(str(DOCS / "examples" / "train.py"))
    page = (DOCS / "training.md").read_text("utf-8")
    block = page.split("--out wrong.flextrace\n")[1].split("```")[0]
    assert without_numbers(capsys.readouterr().out) == without_numbers(block)


def test_the_page_names_every_finding_of_training() -> None:
    page = (DOCS / "training.md").read_text("utf-8")
    pages = {path.name for path in (DOCS / "findings").glob("training.*.md")}
    assert pages == set(re.findall(r"findings/(training\.[a-z0-9-]+\.md)", page))
    assert len(pages) == 35
