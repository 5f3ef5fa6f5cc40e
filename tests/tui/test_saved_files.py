"""Pictures are saved where the program runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tui import press

from flexinspect.tui.app import InspectorApp

SMALL = (80, 24)


async def test_a_screenshot_is_saved_where_the_program_runs(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = InspectorApp(trace)
    async with app.run_test(size=SMALL) as pilot:
        await press(pilot, "s")
        await press(pilot, "S")
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert len(pictures) == 2
    assert all(path.read_text().startswith("<svg") for path in tmp_path.glob("*.svg"))
