"""The interface in a real terminal: it starts, steps, saves a picture, quits, leaves it clean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.patience import PATIENCE_S

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")


class Pane:
    """One shell in a separate tmux server, 80 by 24."""

    def __init__(self, folder: Path) -> None:
        self._name = f"flexinspect-{uuid.uuid4().hex}"
        self._run("new-session", "-d", "-x", "80", "-y", "24", "-c", str(folder), "sh")

    def _run(self, *args: str) -> str:
        assert TMUX is not None
        env = {**os.environ, "TERM": "xterm-256color"}
        command = [TMUX, "-f", "/dev/null", "-L", self._name, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        return done.stdout

    def type(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def modes(self) -> str:
        names = ("alternate_on", "mouse_any_flag", "cursor_flag")
        return self._run("display-message", "-p", " ".join(f"#{{{name}}}" for name in names))

    def until(self, ready: Callable[[str], bool], seconds: float = PATIENCE_S) -> str:
        end = time.monotonic() + seconds
        while not ready(text := self.text()):
            assert time.monotonic() < end, f"this never came about; the screen:\n{text}"
            time.sleep(0.05)
        return text

    def end(self) -> None:
        self._run("kill-server")


def _joined(text: str) -> str:
    """Undo the wrapping of long lines at the edge."""
    return text.replace("\n", "")


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Pane]:
    made = Pane(tmp_path)
    yield made
    made.end()


def test_start_step_screenshot_quit_and_a_clean_terminal(
    pane: Pane, trace: Path, tmp_path: Path
) -> None:
    before = pane.modes()
    pane.type(f"{sys.executable} -P -m flexinspect open {trace.name}", "Enter")
    first = pane.until(lambda text: "token 1 of 6" in text and "quit" in text)
    assert "answer 1 of 2 · token 1 of 6" in first.splitlines()[0]
    assert pane.modes() != before
    pane.type("Right", "Right")
    pane.until(lambda text: "token 3 of 6" in text)
    pane.type("s")
    pane.until(lambda text: "Saved" in text)
    pane.type("q")
    # The prompt is back only when the process has given up the terminal's input.
    pane.until(lambda text: "token 3 of 6" not in text and text.rstrip().endswith(("#", "$")))
    pane.type("echo clean $?", "Enter")
    after = pane.until(lambda text: "clean 0" in text)
    assert pane.modes() == before
    assert "\x1b" not in after
    (picture,) = tmp_path.glob("*.svg")
    assert "token 3 of 6" in " ".join(re.findall(r">([^<>\n]+)</text>", picture.read_text()))


def test_an_unreadable_trace_ends_with_its_error_message(pane: Pane, tmp_path: Path) -> None:
    (tmp_path / "bad.flextrace").write_text("not a trace")
    pane.type(f"{sys.executable} -P -m flexinspect open bad.flextrace", "Enter")
    pane.until(lambda text: "This trace cannot be opened" in text)
    pane.type("q")
    text = pane.until(lambda text: "flexinspect: " in text and "This trace cannot" not in text)
    assert "is not a flexinspect trace (not a SQLite file)." in _joined(text)
    assert "Traceback" not in text
    pane.type("echo code $?", "Enter")
    pane.until(lambda text: "code 2" in text)


@pytest.mark.slow
def test_an_interactive_run_waits_in_the_interface_for_each_step(pane: Pane) -> None:
    flags = "run --interactive --weights random --stop eos --max-new-tokens 4 --out i.flextrace"
    pane.type(f"{sys.executable} -P -m flexinspect {flags}", "Enter")
    text = pane.until(lambda text: "paused: --interactive" in text and ". one token" in text)
    assert "no step yet" in text
    for number in (1, 2):
        pane.type(".")
        pane.until(lambda text, n=number: f"token {n} of {n} " in text and "· paused" in text)  # type: ignore[misc]
    pane.type("Space")
    pane.until(lambda text: "of 4" in text and "paused" not in text)
    pane.type("q")
    # It asks while the process is still there, which keeps the model for forks until it is told.
    question, end = "The run is not finished.", "next  flexinspect open i.flextrace"
    text = pane.until(lambda text: question in text or end in _joined(text))
    if question in text:
        pane.type("Enter")
    pane.until(lambda text: end in _joined(text))


def test_sigterm_leaves_the_terminal_clean(pane: Pane, trace: Path) -> None:
    before = pane.modes()
    command = f"{sys.executable} -P -m flexinspect open {trace.name} & echo $! > pid; fg"
    pane.type("set -m", "Enter", command, "Enter")
    pane.until(lambda text: "token 1 of 6" in text and "quit" in text)
    pid = int((trace.parent / "pid").read_text())
    os.kill(pid, 15)
    pane.until(lambda text: "token 1 of 6" not in text and not Path(f"/proc/{pid}").exists())
    pane.type("echo en''ded", "Enter")
    pane.until(lambda text: "ended" in text)
    assert pane.modes() == before


def test_a_program_prints_again_when_the_interface_closes(pane: Pane, tmp_path: Path) -> None:
    script = "import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(3)"
    (tmp_path / "script.py").write_text(script)
    pane.type(f"{sys.executable} -P -m flexinspect run --out t.flextrace script.py", "Enter")
    pane.until(lambda text: "failed" in text and "quit" in text)
    pane.type("0")
    pane.until(lambda text: "!to err" in text)
    pane.type("q")
    text = pane.until(lambda text: "flexinspect open t.flextrace" in text)
    assert text.index("to out\n") < text.index("to err\n") < text.index("flexinspect open t")
    pane.type("echo code $?", "Enter")
    pane.until(lambda text: "code 3" in text)
