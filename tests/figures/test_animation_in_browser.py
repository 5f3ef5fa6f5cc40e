"""The page of an animation in headless Chromium: its keys, and playing to the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import CHROMIUM, open_browser
from support.mask_pictures import isolation_picture

from flexinspect.core.languages import load_labels
from flexinspect.figures.animation import save_animation
from flexinspect.figures.mask_figure import FigureStyle

pytestmark = pytest.mark.slow

FRAME = "document.body?.dataset.frame"
BUTTON = "document.getElementById('play')?.textContent"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_keys_step_and_play_stops_at_the_last_step(tmp_path: Path) -> None:
    style = FigureStyle(labels=load_labels("en"), width=3)
    file = save_animation(isolation_picture(2, 4, 1, 3), tmp_path / "a.html", style=style)
    async with open_browser(tmp_path) as page:
        await page.open(f"file://{file}#paused", ready=f"{FRAME} === '0'")
        shown = []
        for key in ("End", "ArrowLeft", "ArrowRight", "ArrowRight", "Home", "ArrowLeft"):
            await page.press(key)
            shown.append(await page.value(FRAME))
        assert shown == ["3", "2", "3", "3", "0", "0"]
        assert await page.value(BUTTON) == "Play"
        await page.press(" ")
        assert await page.value(BUTTON) == "Pause"
        await page.until(f"{FRAME} === '3' && {BUTTON} === 'Play'")
        assert "step 3: query 11" in await page.text("body")
        assert page.problems == []
        outside = [one for one in page.requests if not one.startswith(("file:", "data:"))]
        assert outside == []
