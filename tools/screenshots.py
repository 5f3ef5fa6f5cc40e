"""`make screenshots`: the pictures of the README, taken of the interface on a real run.

Runs the demo question at level extreme, opens its trace as a user would, presses keys, and saves
what is on the screen. Needs the extra `png`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flexinspect.drawing.export import to_png
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import LoadedCanvas

IMAGES = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: which panels, how large, which keys are pressed first."""

    name: str
    size: tuple[int, int]
    panels: tuple[str, ...]
    keys: tuple[str, ...] = ()


SHOTS = (
    Shot("wide", (150, 44), ("mask", "logits", "attention", "path"), ("right",)),
    Shot("small", (80, 24), ("mask", "tokens"), ("right", "m", "m", "m")),
)


def record(trace: Path) -> None:
    """Run the demo question."""
    words = [sys.executable, "-P", "-m", "flexinspect", "run", "--model", "demo", "--no-ui"]
    words += ["--dataset", "demo", "--level", "extreme", "--out", str(trace)]
    subprocess.run(words, check=True)


async def shoot(shot: Shot, trace: Path) -> str:
    """Return the screen as SVG."""
    from flexinspect.tui import saved_state

    saved_state.save_state(panels=shot.panels)
    app = InspectorApp(trace)
    async with app.run_test(size=shot.size) as pilot:
        for key in shot.keys:
            await pilot.press(key)
        screen = app.screen
        for canvas in screen.query(LoadedCanvas):
            await canvas.loader.wait_idle()
        await pilot.pause(0.2)
        return app.export_screenshot(title="flexinspect open demo.flextrace", simplify=True)


def main() -> None:
    """Make all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_STATE_HOME=folder, COLORTERM="truecolor", TERM="xterm-256color")
        os.environ.pop("NO_COLOR", None)
        trace = Path(folder) / "demo.flextrace"
        record(trace)
        for shot in SHOTS:
            svg = asyncio.run(shoot(shot, trace))
            file = IMAGES / f"{shot.name}.png"
            file.write_bytes(to_png(svg, zoom=1.0))
            print(f"{file.relative_to(IMAGES.parents[1])}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
