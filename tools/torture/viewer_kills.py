"""The real interface, in a terminal, is killed or its terminal closed while it follows a recording.

The recording goes on and is complete, a capture that lost its parent ends with a readable trace,
and a terminal that is still there is in order: the main screen, and its modes as before.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flexinspect.core.errors import FlexInspectError
from flexinspect.trace.reader import open_trace
from tools.torture import recordings, warm
from tools.torture.forks import Child
from tools.torture.recordings import NAME
from tools.torture.results import Failure

RUN = "run --model demo --dataset demo --level basic --out run.flextrace"
END_S = 20.0
"""How long a capture may take to end; a machine that tests share is slow."""
ALTERNATE_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
Kind = Callable[[random.Random, Path], list[str]]


class Terminal:
    """A pseudo-terminal, and what was written to it."""

    def __init__(self) -> None:
        self._outer, self.inner = pty.openpty()
        termios.tcsetwinsize(self.inner, (40, 120))
        os.set_blocking(self._outer, False)
        self._modes: Any = termios.tcgetattr(self.inner)
        self.said = bytearray()

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Read what is written for a time."""
        until = time.monotonic() + seconds
        while not is_over() and time.monotonic() < until:
            with suppress(OSError):
                while piece := os.read(self._outer, 1 << 16):
                    self.said += piece
            time.sleep(0.005)

    def hang_up(self) -> None:
        """Close the terminal, as a window that is closed."""
        os.close(self._outer)
        os.close(self.inner)

    def disorder(self) -> list[str]:
        """Return what a program has left other than it was, and close the terminal."""
        self.wait(0.05)
        wrong = []
        if self.said.rfind(ALTERNATE_SCREEN) > self.said.rfind(MAIN_SCREEN):
            wrong.append("the terminal is left on the alternate screen")
        if termios.tcgetattr(self.inner) != self._modes:
            wrong.append("the modes of the terminal are changed")
        self.hang_up()
        return wrong


def prepare(folder: Path) -> None:
    """Start the process from which interfaces and captures are forked."""
    warm.prepare(folder)
    recordings.import_all(folder)


def attempt(_: None, seed: int, folder: Path) -> list[Failure]:
    """Kill the viewer of one kind of recording."""
    kind = KINDS[seed % len(KINDS)]
    how = " ".join((kind.__doc__ or "").split("\n")[0].split())
    return [Failure("viewer", each, how) for each in kind(random.Random(seed), folder)]


def _interface(words: str, folder: Path) -> tuple[Any, Terminal]:
    terminal = Terminal()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.inner)
    return warm.start(words, folder, **streams), terminal


def _kill(viewer: Any, terminal: Terminal, how: str) -> list[str]:
    """End an interface in one way; return what is wrong with the terminal that it leaves."""
    if how == "hang up":
        terminal.hang_up()  # whoever writes to it gets an error; a shell would send SIGHUP
        viewer.send_signal(signal.SIGHUP)
    else:
        viewer.send_signal(getattr(signal, how))
        terminal.wait(END_S, lambda: viewer.poll() is not None)
    until = time.monotonic() + END_S
    while viewer.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    wrong = [] if viewer.poll() is not None else ["the viewer does not end"]
    if wrong:
        viewer.kill()
    if how == "hang up":
        return wrong
    return wrong + (terminal.disorder() if how != "SIGKILL" else [])


def viewer_of_a_recording(rng: random.Random, folder: Path) -> list[str]:
    """`open` follows a recording of another process, and is killed."""
    writer = Child(
        lambda tell: recordings.write(folder / NAME, tell, 0, 2, 30, pause_s=rng.uniform(0, 0.03))
    )
    writer.wait_for("created")
    viewer, terminal = _interface(f"open {NAME}", folder)
    terminal.wait(rng.uniform(0.05, 1.5))
    wrong = _kill(viewer, terminal, rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "hang up")))
    end = writer.finish()
    wrong += [f"the writer ended with {end}"] if end else []
    if "closed" not in writer.lines:
        wrong.append("the writer did not close the trace")
    told = (line for line in writer.lines if not line.startswith(("says ", "raised ")))
    return wrong + recordings.judge(folder / NAME, tuple(told), folder)


def viewer_of_a_model(rng: random.Random, folder: Path) -> list[str]:
    """`attach` follows a running model, and is killed: the model answers all questions."""
    n_samples = 4
    with (folder / "said").open("wb") as out:
        run = warm.start(f"{RUN} --no-ui --max-samples {n_samples}", folder, stdout=out, stderr=out)
    until = time.monotonic() + END_S
    while not (folder / NAME).exists() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    viewer, terminal = _interface(f"attach {NAME}", folder)
    terminal.wait(rng.uniform(0.1, 1.5))
    wrong = _kill(viewer, terminal, rng.choice(("SIGKILL", "SIGTERM", "hang up")))
    code = run.wait(timeout=10 * END_S)
    if code not in (0, 1):  # 1: a rule has found something
        said = (folder / "said").read_bytes()[-300:]
        wrong.append(f"the run ended with {code}: {said.decode('utf-8', 'replace')!a}")
    return wrong + _judge(folder / NAME, ("finished",), n_samples)


def interface_of_a_run(rng: random.Random, folder: Path) -> list[str]:
    """`run` with its interface is killed: the model's process ends, and its trace is readable."""
    run, terminal = _interface(f"{RUN} --max-samples 600", folder)
    terminal.wait(rng.uniform(0.3, 3.0))
    capture = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    wrong = _kill(run, terminal, rng.choice(("SIGKILL", "SIGTERM", "hang up")))
    _, alive = psutil.wait_procs(capture, timeout=END_S)
    for process in alive:
        wrong.append("the model's process goes on")
        process.kill()
    return wrong + _judge(folder / NAME, ("interrupted", "failed", "recording"), 0)


def _judge(trace: Path, states: tuple[str, ...], n_finished: int) -> list[str]:
    """Return what is wrong with a trace; there may be none if nothing had run."""
    if not trace.exists():
        return ["there is no trace"] if n_finished else []
    try:
        with open_trace(trace) as reader:
            wrong = [] if reader.state in states else [f"the trace is {reader.state}"]
            rows = reader.generations()
            for row in rows:
                for step in range(reader.n_steps(row.generation)):
                    if reader.record(row.generation, step) is None:
                        wrong.append(f"step {step} of generation {row.generation} is missing")
            if sum(row.state == "finished" for row in rows) < n_finished:
                wrong.append(f"{len(rows)} generations of {n_finished} are recorded")
            return wrong
    except FlexInspectError as error:
        return [f"the trace is refused: {error.message}"]


KINDS: tuple[Kind, ...] = (viewer_of_a_recording, viewer_of_a_model, interface_of_a_run)
