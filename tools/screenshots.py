"""`make screenshots`: the pictures of the README and of docs/screens.md, taken of real runs.

Runs the demo questions at level extreme, builds exhibits of the museum, opens their traces as a
user would, presses keys, and saves what is on the screen. Needs the extra `png`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from flexinspect.drawing.export import to_png, to_svg
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import LoadedCanvas, theme_of

IMAGES = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of which run, how large, in which theme, which keys are pressed first."""

    name: str
    run: str
    keys: tuple[str, ...]
    size: tuple[int, int]
    theme: str = "textual-dark"


DEMO = "demo"
SCENES = {
    "borders": ("spans-without-bos", ("n",)),
    "decode": ("decode-without-offset", ("right", "a")),
    "layer": ("silent-fallback", ("n",)),
    "nan": ("padding-of-infinity", ("n",)),
}
"""By name, the exhibit of the museum and the keys."""

SIZES = ((80, 24), (120, 40), (200, 55))
SHOTS = (
    Shot("wide", DEMO, ("right",), (150, 44)),
    Shot("small", "spans-without-bos", ("n", "a"), (80, 24)),
    *(
        Shot(f"{name}-{size[0]}x{size[1]}", run, keys, size)
        for name, (run, keys) in SCENES.items()
        for size in SIZES
    ),
    *(
        Shot(f"{name}-light", run, keys, SIZES[1], "textual-light")
        for name, (run, keys) in SCENES.items()
    ),
)


def record(run: str, trace: Path) -> None:
    """Run the demo questions, or build an exhibit."""
    words = [sys.executable, "-P", "-m", "flexinspect"]
    if run == DEMO:
        words += ["run", "--model", "demo", "--dataset", "demo", "--level", "extreme"]
    else:
        words += ["museum", run]
    subprocess.run([*words, "--no-ui", "--out", str(trace)], check=True, stdout=subprocess.DEVNULL)


async def shoot(shot: Shot, trace: Path) -> str:
    """Return the screen as SVG."""
    app = InspectorApp(trace)
    async with app.run_test(size=shot.size) as pilot:
        app.theme = shot.theme
        await settle(pilot)
        for key in shot.keys:
            await pilot.press(key)
            await settle(pilot)
        strips = app.screen._compositor.render_strips()
        return to_svg(strips, title=f"flexinspect open {trace.name}", look=theme_of(app))


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until all is loaded and drawn."""
    await pilot.pause(0.2)
    for canvas in pilot.app.screen.query(LoadedCanvas):
        await canvas.loader.wait_idle()
    await pilot.pause(0.2)


def main() -> None:
    """Make all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_STATE_HOME=folder, COLORTERM="truecolor", TERM="xterm-256color")
        os.environ.pop("NO_COLOR", None)
        for shot in SHOTS:
            trace = Path(folder) / f"{shot.run}.flextrace"
            if not trace.exists():
                record(shot.run, trace)
            svg = asyncio.run(shoot(shot, trace))
            file = IMAGES / f"{shot.name}.png"
            file.write_bytes(to_png(svg, zoom=1.0))
            print(f"{file.relative_to(IMAGES.parents[1])}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
