"""Pictures of the screen, byte for byte: what a change of looks must show on purpose.

`UPDATE_GOLDENS=1 make test` writes them again. They hold for one version of Textual.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import textual
from support.paths import TESTS
from support.tui import settle

from flexinspect.tui import saved_state
from flexinspect.tui.app import InspectorApp

GOLDENS = TESTS / "fixtures" / "goldens"
MADE_WITH = "8.2.8"
CASES = {
    "mask-logits": ((80, 24), ("mask", "logits"), ("right",)),
    "layers-findings": ((80, 24), ("layers", "findings"), ("n",)),
    "tokens-path-plain": ((80, 24), ("tokens", "path"), ("right", "right")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(textual.__version__ != MADE_WITH, reason=f"made with Textual {MADE_WITH}")
async def test_the_screen_looks_as_it_did(
    name: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, panels, keys = CASES[name]
    if name.endswith("plain"):
        monkeypatch.setenv("NO_COLOR", "1")
    saved_state.save_layout("generation", saved_state.Layout(panels))
    app = InspectorApp(trace)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        for key in keys:
            await pilot.press(key)
        await settle(pilot)
        app.clear_notifications()
        await settle(pilot)
        svg = app.export_screenshot(title="flexinspect", simplify=True)
    golden = GOLDENS / f"{name}.svg"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(svg, encoding="utf-8")
    assert svg == golden.read_text("utf-8")
