"""Everything that reads a trace: commands, panels, exports, the interface, and the repair."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from tools.torture.judged import CONTROL, Problem, problem_of

TESTS = Path(__file__).parents[2] / "tests"
STEPS = (0, 1, 3)
VIEWS = ("executed", "received", "difference", "declared")
KEYS = (
    *("right", "end", "left", "down", "tab", "v", "f", "e", "w", "x", "z", "s", "a", "m"),
    *("1", "2", "3", "4", "5", "6", "7", "8", "9", "0", "enter", "question_mark", "escape"),
)
"""Keys of the interface, pressed in an order that the seed chooses."""
TEXT_FILES = (".html", ".ipynb", ".json", ".md", ".mmd", ".svg", ".toml", ".txt")
"""Files that people read. CSV and other tables hold texts exactly as they are in the trace."""
LINE_ENDS = re.compile(rb"\r\n")


class Reader(Struct, frozen=True):
    """Something that reads a trace: its name, and what it does with one in a folder of its own.

    `is_costly` is set for what takes a few hundred milliseconds.
    """

    name: str
    read: Callable[[Path, Path, int], object]
    is_costly: bool = False

    def problem(self, trace: Path, out: Path, seed: int = 0) -> Problem | None:
        """Read a damaged trace; return what is wrong with how that ended, None if nothing.

        Files that are written as text may contain no control characters either.
        """
        found = problem_of(lambda: self.read(trace, out, seed), may_lack_memory=False)
        return found or _wrong_file(out)


def _wrong_file(out: Path) -> Problem | None:
    for file in sorted(out.rglob("*")):
        if file.suffix in TEXT_FILES and file.is_file():
            text = LINE_ENDS.sub(b"\n", file.read_bytes()).decode("utf-8", "replace")
            if found := CONTROL.search(text):
                return Problem("control character", f"{found[0]!a} in {file.name}")
    return None


def readers(sound: Path) -> list[Reader]:
    """Return all readers; `sound` is an undamaged trace, with which some compare."""
    return [*_commands(sound), *_panels(), *_exports(), *_costly()]


def _main(*words: str) -> Callable[[Path, Path, int], object]:
    """Return a reader: a command line in which {trace}, {out} and {seed} are filled in."""

    def read(trace: Path, out: Path, seed: int) -> object:
        from flexinspect.cli.main import main

        return main([word.format(trace=trace, out=out, seed=seed) for word in words])

    return read


def _commands(sound: Path) -> list[Reader]:
    lines = [
        *([command, "{trace}"] for command in ("dump", "findings", "show")),
        *([command, "{trace}", "--json"] for command in ("dump", "findings", "show")),
        *(["findings", "{trace}", f"--{form}"] for form in ("sarif", "junit")),
        *(["show", "{trace}", f"--step={step}", "--layer=1"] for step in STEPS),
        *(["dump", "{trace}", f"--step={step}"] for step in STEPS),
        *(["mask", "--trace", "{trace}", "--view", v, "--plain", "--analysis"] for v in VIEWS),
        *(["mask", "--trace", "{trace}", flag] for flag in ("--verify", "--json")),
        ["mask", "--trace", "{trace}", "-o", "{out}/mask.csv"],
        ["mask", "--trace", "{trace}", "-o", "{out}/mask.npy"],
        ["flowchart", "--trace", "{trace}"],
        ["flowchart", "--trace", "{trace}", "--json"],
        ["flowchart", "--trace", "{trace}", "--out", "{out}/flow.md", "--out", "{out}/flow.html"],
        ["diff", "{trace}", "{trace}"],
        ["diff", "{trace}", str(sound), "--json"],
        ["diff", str(sound), "{trace}"],
        ["report", "{trace}", "-o", "{out}/report.html"],
        ["declare", "{trace}", "--out", "{out}/declared.toml", "--move", "1"],
        ["redact", "{trace}", "-o", "{out}/redacted.flextrace"],
        ["ranks", "{trace}"],
        ["infer", "{trace}", str(sound), "-o", "{out}/invariants.json"],
    ]
    return [Reader(_name(line, sound), _main(*line)) for line in lines]


def _name(line: list[str], sound: Path) -> str:
    words = (word.replace(str(sound), "sound").replace("{out}/", "") for word in line)
    return " ".join(words).replace("{trace}", "TRACE")


def _panels() -> list[Reader]:
    from flexinspect.panels.panel_registry import panel_names

    found = []
    for name in panel_names():
        for flag in ("--picture", "--json"):
            words = ("show", "{trace}", "--panel", name, flag, "--generation=0")
            found.append(Reader(f"panel {name} {flag}", _main(*words)))
        place = ("--step=1", "--layer=1", "--head=1")
        found.append(Reader(f"panel {name}", _main("show", "{trace}", "--panel", name, *place)))
    return found


def _exports() -> list[Reader]:
    from flexinspect.core import plugins

    formats = plugins.BUILT_IN[plugins.EXPORTS]
    return [
        Reader(f"export {to}", _main("export", "{trace}", "--to", to, "-o", "{out}/exported"))
        for to in formats
    ]


def _costly() -> list[Reader]:
    figure = ("mask", "--trace", "{trace}", "-o", "{out}/mask.svg")
    picture = ("show", "{trace}", "--panel", "mask", "--export", "{out}/mask.svg")
    return [
        Reader("interface", _interface, True),
        Reader("interface", _interface, True),
        Reader("figure of the mask", _main(*figure), True),
        Reader("figure of a panel", _main(*picture), True),
        Reader("infer --check", _check_invariants, True),
        Reader("repair", _repair, True),
    ]


def _repair(trace: Path, out: Path, seed: int) -> object:
    """Cut the trace short, and read what can be repaired."""
    from flexinspect.cli.main import main
    from flexinspect.trace.file import salvage

    cut = out / "cut.flextrace"
    data = trace.read_bytes()
    cut.write_bytes(data[: len(data) * (seed % 97 + 1) // 98])
    for line in salvage.describe_readable(cut):
        print(line)
    copy = salvage.repair_copy(cut)
    if copy is None:
        return 0
    try:
        return main(["dump", str(copy)])
    finally:
        salvage.delete_repaired_copy(copy)


def _check_invariants(trace: Path, out: Path, seed: int) -> object:
    """Learn from the trace, and judge it by that."""
    from flexinspect.cli.main import main

    learnt = out / "learnt.json"
    code = main(["infer", str(trace), str(trace), "-o", str(learnt)])
    return main(["infer", "--check", str(learnt), str(trace)]) if code == 0 else code


def _interface(trace: Path, out: Path, seed: int) -> object:
    """Open the interface without a terminal, press some keys, and read the screen."""
    import asyncio

    print(asyncio.run(_drive(trace, seed)))
    return 0


async def _drive(trace: Path, seed: int) -> str:
    """Return the text on the screen after some keys."""
    from flexinspect.tui.app import InspectorApp

    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))  # the support of the tests knows when all is loaded
    driving: Any = importlib.import_module("support.tui")
    app = InspectorApp(trace)
    async with app.run_test(size=(100, 30)) as pilot:
        await driving.settle(pilot)
        for key in random.Random(seed).sample(KEYS, 4):
            if not app.is_running:
                break
            await driving.press(pilot, key)
        return str(driving.screen_text(app))


COSTLY_EVERY = 100
"""Seeds of which one also goes through a costly reader."""


def choose(all_readers: list[Reader], seed: int, count: int, rng: random.Random) -> list[Reader]:
    """Return the readers of a seed: `count` quick ones, and now and then a costly one."""
    quick = [one for one in all_readers if not one.is_costly]
    costly = [one for one in all_readers if one.is_costly]
    more = [rng.choice(costly)] if seed % COSTLY_EVERY == COSTLY_EVERY - 1 else []
    return [*rng.sample(quick, count), *more]
