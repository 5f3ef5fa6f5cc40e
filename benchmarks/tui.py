"""`python -m benchmarks tui`: what the interface costs, in a real pseudo-terminal.

First screen, memory, and the time from a key to the last byte of the frame, on a short trace, on
one of 100 000 steps and on one with a mask of 32 768 tokens, in turns within one run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import repaint, synthetic
from benchmarks.common import cpu_of_commands
from benchmarks.terminal import Terminal
from flexinspect.analysis.offline_rules import review
from flexinspect.trace.reader import open_trace

HELLO = """
from textual.app import App, ComposeResult
from textual.widgets import Static

class Hello(App):
    BINDINGS = [("q", "quit", ""), ("right", "count", "")]
    number = 0

    def compose(self) -> ComposeResult:
        yield Static(self.text())

    def text(self) -> str:
        lines = (f"step {self.number} of a text that fills the screen, line {n}" for n in range(40))
        return "\\n".join(lines)

    def action_count(self) -> None:
        self.number += 1
        self.query_one(Static).update(self.text())

Hello().run()
"""
"""The smallest Textual application that fills a screen, and draws it anew for a key."""

RIGHT = b"\x1b[C"
N_STARTS, N_KEYS, N_ROUNDS = 7, 40, 3
IDLE_S = 20
FIRST_LOAD_S = 2.0
"""Silence after which the largest mask has been read once; its time is given by itself."""
COMPLETE_S = 0.5
"""Silence after which a first screen is complete."""


def measure(folder: Path | None = None, *, steps: int = 100_000, tokens: int = 32_768) -> Any:
    """Return all figures; the big traces are made in `folder` unless they exist."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="flexinspect-bench-")
    traces = make_traces(folder or Path(tempfile.gettempdir()) / "flexinspect-bench", steps, tokens)
    return {
        "repaint": repaint.measure(),
        "start_up": start_up(traces["short"]),
        "first_screen_s": {name: first_screen(path) for name, path in traces.items()},
        "key_to_frame_ms": key_to_frame(traces),
        "idle_cpu_percent": idle_cpu(traces["short"]),
    }


def make_traces(folder: Path, steps: int, tokens: int) -> dict[str, Path]:
    """Make the traces that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    short, long, wide = (folder / f"{name}.flextrace" for name in ("short", "long", "wide"))
    if not short.exists():
        synthetic.long_trace(short, steps=200)
        with open_trace(short) as reader:  # as after a run
            review(reader)
    if not long.exists():
        synthetic.long_trace(long, steps=steps)
    if not wide.exists():
        synthetic.wide_trace(wide, tokens=tokens)
    return {"short": short, "long": long, "wide": wide}


def start_up(path: Path) -> dict[str, float]:
    """Return the CPU seconds of the start of `open` and of `HELLO`, in turns (medians).

    Until the first pixels are drawn, and until the screen is complete. Also the CPU seconds of
    `flexinspect --version`, `--help`, and of importing argparse.
    """
    viewer, hello = [], []
    for _ in range(N_STARTS):
        viewer.append(_cpu_of_start(["open", str(path)]))
        hello.append(_cpu_of_start(["-c", HELLO], program=()))
    module = ["-P", "-m", "flexinspect"]
    version, help_, argparse = [], [], []
    for _ in range(N_STARTS):
        version.append(_cpu_of([*module, "--version"]))
        help_.append(_cpu_of([*module, "--help"]))
        argparse.append(_cpu_of(["-c", "import argparse"]))
    found = {
        **_ratio("first_pixels", [first for first, _ in viewer], [first for first, _ in hello]),
        **_ratio("complete", [whole for _, whole in viewer], [whole for _, whole in hello]),
        "version_cpu_s": _median(version),
        "help_cpu_s": _median(help_),
        "argparse_cpu_s": _median(argparse),
    }
    print(f"start: {found}", flush=True)
    return found


def _ratio(name: str, ours: list[float], hello: list[float]) -> dict[str, float]:
    return {
        f"{name}_cpu_s": _median(ours),
        f"{name}_hello_world_cpu_s": _median(hello),
        f"{name}_ratio": round(statistics.median(ours) / statistics.median(hello), 2),
    }


def _cpu_of_start(args: list[str], **options: Any) -> tuple[float, float]:
    """Return the CPU seconds until the first pixels, and until nothing more is drawn."""
    with Terminal(args, **options) as terminal:
        terminal.until(b"step ")
        first = terminal.drawn_cpu_s = terminal.cpu_s()
        terminal.settle(silence=COMPLETE_S)
        return first, terminal.drawn_cpu_s


def _cpu_of(args: list[str]) -> float:
    before = cpu_of_commands()
    subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
    return cpu_of_commands() - before


def first_screen(path: Path) -> dict[str, float]:
    """Return the median seconds from the start of the process to the header and to the rest."""
    header, whole = [], []
    for _ in range(N_STARTS):
        with Terminal(["open", str(path)]) as terminal:
            terminal.until(b"step ")
            header.append(_since(terminal))
            rest = terminal.settle(silence=FIRST_LOAD_S)
            whole.append(header[-1] + rest)
            if terminal.has_mapped("torch"):
                raise AssertionError("the viewer has loaded torch")
    return {"header": _median(header), "all_panels": _median(whole)}


def _since(terminal: Terminal) -> float:
    import time

    return time.perf_counter() - terminal.started


def key_to_frame(traces: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return what a step key takes until the frame is complete, by trace and for `HELLO`.

    In milliseconds the median and the 95th percentile, the median of the CPU time, and the ratios
    to `HELLO`. Also the mean of the bytes that a key writes to the terminal, and the memory of the
    process.
    """
    starts = {
        name: ["open", str(path), "--step", str(50_000 if name == "long" else 1)]
        for name, path in traces.items()
    }
    keys = {name: _Keys() for name in ("hello", *starts)}
    for _ in range(N_ROUNDS):
        keys["hello"].measure(Terminal(["-c", HELLO], program=()))
        for name, args in starts.items():
            keys[name].measure(Terminal(args))
    hello = keys.pop("hello").summary()
    compared = ("median", "p95", "cpu")
    return {"hello": hello} | {
        name: found | {f"{one}_ratio": round(found[one] / hello[one], 2) for one in compared}
        for name, found in ((name, key.summary()) for name, key in keys.items())
    }


class _Keys:
    """What step keys took in one program, in several starts of it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.written: list[float] = []
        self.resident = 0

    def measure(self, terminal: Terminal) -> None:
        """Press keys in a program that has just started, and end it."""
        with terminal:
            terminal.until(b"step ")
            terminal.settle(silence=FIRST_LOAD_S)
            for _ in range(5):
                terminal.frame(RIGHT)
            n_bytes, cpu_s = terminal.n_bytes, terminal.cpu_s()
            self.times += [terminal.frame(RIGHT) for _ in range(N_KEYS)]
            self.cpu.append((terminal.cpu_s() - cpu_s) / N_KEYS)
            self.written.append((terminal.n_bytes - n_bytes) / N_KEYS)
            self.resident = max(self.resident, terminal.resident())

    def summary(self) -> dict[str, float]:
        """Return the figures, times in milliseconds."""
        ordered = sorted(self.times)
        return {
            "median": round(1e3 * statistics.median(ordered), 2),
            "p95": round(1e3 * ordered[int(0.95 * len(ordered))], 2),
            "cpu": round(1e3 * statistics.median(self.cpu), 2),
            "n": len(ordered),
            "resident_mb": round(self.resident / 1e6, 1),
            "bytes_per_key": round(statistics.mean(self.written)),
        }


def idle_cpu(path: Path) -> float:
    """Return the CPU that an open, finished trace takes without input, in percent."""
    import time

    with Terminal(["open", str(path)]) as terminal:
        terminal.until(b"step ")
        terminal.settle(silence=FIRST_LOAD_S)
        before = terminal.cpu_s()
        time.sleep(IDLE_S)
        return round(100 * (terminal.cpu_s() - before) / IDLE_S, 2)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)
