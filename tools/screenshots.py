"""`make screenshots`: the pictures of the README and of docs/screens.md, taken of real runs.

Runs the demo and examples, builds exhibits of the museum, opens their traces as a user would,
presses keys, and saves what is on the screen. Needs the extra `png`. Some of the scenes, into
another folder:

    python -m tools.screenshots own compare --out /tmp/pictures
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from flexinspect.control import discovery
from flexinspect.drawing.picture_files import to_png, to_svg
from flexinspect.tui.app import InspectorApp
from flexinspect.tui.panel_view import LoadedCanvas, theme_of

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS / "examples"
OUT = "OUT"
"""Stands for the path of the trace."""

PROGRAM = ("-P", "-m", "flexinspect")
RUN = (*PROGRAM, "run", "--no-ui", "--out", OUT)
DEMO = (
    *(*RUN, "--model", "demo", "--dataset", "demo", "--level", "extreme"),
    *("--cue", "In a sentence:"),
)
MUSEUM = (*PROGRAM, "museum", "--no-ui", "--out", OUT)
RUNS = {
    "demo": DEMO,
    "causal": (*DEMO, "--mask", "causal"),
    "own": (*RUN, str(EXAMPLES / "one_token_off.py")),
    "decode": (*MUSEUM, "decode-without-offset"),
    "borders": (*MUSEUM, "spans-without-bos"),
    "training": (str(EXAMPLES / "train.py"), "--rate", "30", "--out", OUT),
}
"""By name, the arguments with which Python records a run."""

SIZES = ((80, 24), (120, 40), (200, 55))
THEMES = {"dark": "textual-dark", "light": "textual-light"}


@dataclass(frozen=True, slots=True)
class Scene:
    """The runs that are opened, of which two are compared, and the keys that are pressed."""

    runs: tuple[str, ...]
    keys: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = SIZES
    themes: tuple[str, ...] = tuple(THEMES)


SCENES = {
    "wide": Scene(("demo",), ("end", "left", "left", "left"), ((150, 44),), ("dark",)),
    "own": Scene(("own",)),
    "museum": Scene(("decode",), ("right", "a")),
    "fix": Scene(("borders",), ("i",)),
    "compare": Scene(("demo", "causal")),
    "training": Scene(("training",), ("n",)),
}


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of which scene, how large, in which theme."""

    scene: str
    size: tuple[int, int]
    theme: str

    @property
    def file_name(self) -> str:
        return f"{self.scene}-{self.size[0]}x{self.size[1]}-{self.theme}.png"


def shots(scenes: list[str]) -> Iterator[Shot]:
    """Yield the pictures of the scenes."""
    for name in scenes:
        for size in SCENES[name].sizes:
            for theme in SCENES[name].themes:
                yield Shot(name, size, theme)


def record(run: str, folder: Path) -> Path:
    """Return the trace of a run, which is recorded on first use."""
    trace = folder / f"{run}.flextrace"
    if not trace.exists():
        words = [str(trace) if word == OUT else word for word in RUNS[run]]
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return trace


def open_app(scene: Scene, folder: Path) -> InspectorApp:
    """Return the interface with the trace of the scene, or with two side by side."""
    first, *others = (record(run, folder) for run in scene.runs)
    return InspectorApp(compare=(first, others[0], 0)) if others else InspectorApp(first)


async def shoot(shot: Shot, folder: Path) -> str:
    """Return the screen as SVG."""
    scene = SCENES[shot.scene]
    app = open_app(scene, folder)
    async with app.run_test(size=shot.size) as pilot:
        app.theme = THEMES[shot.theme]
        await settle(pilot)
        for key in scene.keys:
            await pilot.press(key)
            await settle(pilot)
        strips = app.screen._compositor.render_strips()
        command = "compare" if len(scene.runs) > 1 else "open"
        files = " ".join(f"{run}.flextrace" for run in scene.runs)
        return to_svg(strips, title=f"flexinspect {command} {files}", look=theme_of(app))


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until all is loaded and drawn."""
    await pilot.pause(0.2)
    for canvas in pilot.app.screen.query(LoadedCanvas):
        await canvas.loader.wait_idle()
    await pilot.pause(0.2)


def main() -> None:
    """Make the pictures of all scenes, or of those that are named."""
    parser = argparse.ArgumentParser(description="Take the pictures of the docs again.")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--out", type=Path, default=DOCS / "images", help="the folder")
    args = parser.parse_args()
    if unknown := [name for name in args.scenes if name not in SCENES]:
        parser.error(f"There is no scene {unknown[0]!r}.")
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.absolute()
    discovery.running = list  # other runs of this machine belong in no picture
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ.update(XDG_STATE_HOME=folder, COLORTERM="truecolor", TERM="xterm-256color")
        os.environ.pop("NO_COLOR", None)
        for shot in shots(args.scenes or list(SCENES)):
            svg = asyncio.run(shoot(shot, Path(folder)))
            file = out / shot.file_name
            file.write_bytes(to_png(svg, zoom=1.0))
            print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
