"""The page about ranks shows what the commands print for recorded ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import blocks
from support.paths import DOCS
from support.rank_traces import unpack
from support.tui import screen_lines, settle

from flexinspect.analysis.ranks.rank_comparison import compare_ranks
from flexinspect.analysis.ranks.rank_run import find_run, open_ranks
from flexinspect.cli.main import main
from flexinspect.tui.app import InspectorApp

PAGE = (DOCS / "ranks.md").read_text("utf-8")


def shown(command: str) -> str:
    """Return what the page shows below a command."""
    return next(block for block in blocks(PAGE, "console") if block.startswith(f"$ {command}\n"))


def test_the_report_is_that_of_the_recorded_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ranks", str(unpack("train", tmp_path))])
    expected = shown("flexinspect ranks traces").split("\n", 1)[1]
    assert capsys.readouterr().out.strip() == expected.strip()


def test_the_ranks_that_stopped_are_those_of_the_recorded_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ranks", str(unpack("died", tmp_path))])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Rank")]
    expected = shown("flexinspect ranks died | grep -i ^rank").strip().split("\n")[1:]
    assert lines == expected


async def test_the_picture_is_that_of_the_interface(tmp_path: Path) -> None:
    run, _ = find_run(unpack("train", tmp_path))
    with open_ranks(run) as readers:
        found = compare_ranks(run, readers)
    app: Any = InspectorApp(ranks=found)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        lines = [line.rstrip() for line in screen_lines(app)]
    picture = PAGE.split("how late each rank is:\n\n```\n")[1].split("\n```")[0].split("\n")
    at = lines.index(picture[0])
    assert lines[at : at + len(picture)] == picture


def test_the_page_names_every_key_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ranks", str(unpack("answer", tmp_path)), "--json"])
    found = json.loads(capsys.readouterr().out)
    text = PAGE.split("`--json` prints")[1]
    named = set(re.findall(r"`(\w+)`", text))
    keys = {*found, *found["waiting"], *found["first"]}
    assert keys <= named
    assert {*found["ranks"][0]} - {"local_rank", "started_at"} <= named
