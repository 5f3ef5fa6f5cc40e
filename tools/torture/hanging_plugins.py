"""Plug-ins that hang, installed as another package would install them: by an entry point."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

WAYS = {
    "sleeps": "import time\n    while True: time.sleep(60)",
    "computes": "while True: pass",
    "waits": "import threading\n    threading.Event().wait()",
}
"""How it hangs."""


class Hanging(Struct, frozen=True):
    """A kind of plug-in: its group, and the code of one named `hanging`.

    In the code, `act("place")` hangs if it is the place that was chosen.
    """

    group: str
    code: str
    places: tuple[str, ...]


HANGING = {
    "panels": Hanging(
        "flexinspect.panels",
        """
from flexinspect.panels.base import Help, Panel, Picture
class Hang(Panel):
    name, title = "hanging", "Hanging"
    help = Help("It hangs.", "It hangs.", "It hangs.")
    initial_options = None
    def __init__(self): act("constructor")
    def load(self, source, request): act("load")
    def describe(self, data): act("describe"); return ["x"]
    def paint(self, data, request, theme): act("paint"); return Picture([], "")
""",
        ("import", "constructor", "load", "describe"),
    ),
    "rules": Hanging(
        "flexinspect.rules",
        """
from flexinspect.rules.engine import Rule
class Hang(Rule):
    name, findings = "hanging", {}
    def __init__(self): act("constructor")
    def reset(self): act("start")
    def on_step(self, step): act("step"); return ()
    def on_generation_end(self): act("end"); return ()
""",
        ("import", "constructor", "start", "step", "end"),
    ),
    "exports": Hanging(
        "flexinspect.exports",
        """
class Hang:
    name, description, suffix, is_folder, unit = "hanging", "It hangs.", ".hang", False, "rows"
    def __init__(self): act("constructor")
    def export(self, reader, target, options, progress):
        target.write_text("half"); act("export"); return {}
""",
        ("import", "constructor", "export"),
    ),
    "importers": Hanging(
        "flexinspect.importers",
        """
class Hang:
    name, title = "hanging", "It hangs."
    def __init__(self): act("constructor")
    def recognizes(self, folder): act("recognizes"); return True
    def open(self, folder, tick): act("open")
""",
        ("import", "constructor", "recognizes", "open"),
    ),
    "hypotheses": Hanging("flexinspect.hypotheses", "Hang = ()\n", ("import",)),
    "hooks": Hanging(
        "flexinspect.hooks",
        """
from flexinspect_hooks.capture.hook import Hook
class Hang(Hook):
    name = "hanging"
    def __init__(self): act("constructor")
    def install(self, context): act("install"); return ()
    def open(self, step): act("open")
    def reduce(self, step, buffer): act("reduce")
    def record(self, step, kept, values, draft): act("record")
""",
        ("import", "constructor", "install", "open", "reduce", "record"),
    ),
}
ACTS = {
    name: tuple(f"{way} in {place}" for place in one.places for way in WAYS)
    for name, one in HANGING.items()
}
"""By the name of a kind: what a plug-in of it may do."""

_HEAD = """
def hang():
    {way}
def act(place):
    if place == {place!r}: hang()
act("import")
"""


def install(folder: Path, hanging: Hanging, act: str) -> dict[str, str]:
    """Write a package with the plug-in; return the variables with which Python finds it."""
    way, _, place = act.partition(" in ")
    about = folder / "hanging_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{hanging.group}]\nhanging = hanging_plugin:Hang\n")
    code = _HEAD.format(way=WAYS[way], place=place) + hanging.code
    (folder / "hanging_plugin.py").write_text(code, "utf-8")
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
