"""`flexinspect run --pdb`: plain pdb on the user's terminal, whose streams are not the run's."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import warm_python
from support.patience import PATIENCE_S

from flexinspect.trace.reader import open_trace


class Terminal:
    """A terminal with a command in it, as a user sees and types."""

    def __init__(self, folder: Path, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self.process = warm_python.Popen(
            (sys.executable, "-m", "flexinspect", "run", "--pdb", "--out", "t.flextrace", *args),
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
        )
        os.close(theirs)

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self._ours, key.encode())

    def type(self, text: str) -> None:
        """Type a line."""
        self.press(text + "\n")

    def until(self, text: str) -> str:
        """Read until a text is seen; returns all before it since the last call."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} was not seen in {self.seen[-2000:]!r}"
            self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            try:
                self.seen += os.read(self._ours, 1 << 16).decode("utf-8", "replace")
            except OSError:
                assert self.process.poll() is None, f"it ended: {self.seen[-2000:]!r}"

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.seen[-2000:]
            try:
                self._read()
            except AssertionError:
                break
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    found: list[Terminal] = []
    yield found
    for one in found:
        one.close()


SCRIPT = """
import sys
secret = 41
breakpoint()
secret += 1
print("read", sys.stdin.readline().strip(), secret)
raise RuntimeError("at the end")
"""


def test_a_program_stops_at_a_breakpoint_steps_and_is_inspected_where_it_failed(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT, "utf-8")
    terminal = Terminal(tmp_path, "--no-ui", "program.py")
    terminals.append(terminal)
    terminal.until("(flexinspect pdb) ")
    terminal.type("p secret * 2")
    assert "82" in terminal.until("(flexinspect pdb) ")
    terminal.type("n")
    assert "-> secret += 1" in terminal.until("(flexinspect pdb) ")
    terminal.type("c")
    terminal.type("a line for the program")
    terminal.until("RuntimeError: at the end")
    terminal.until("(flexinspect pdb) ")
    terminal.type("p secret")
    assert "42" in terminal.until("(flexinspect pdb) ")
    terminal.type("q")
    terminal.until("RuntimeError: at the end")  # as Python prints it
    assert terminal.end() == 1
    with open_trace(tmp_path / "t.flextrace") as reader:
        printed = "".join(row.output.text for row in reader.output())
    assert "read a line for the program 42" in printed


RULES = """
def window(b, h, q_idx, kv_idx):
    global n
    n += 1
    if n == 1:
        breakpoint()
    return q_idx >= kv_idx

n = 0
"""


def test_our_own_generation_stops_on_the_terminal_and_the_interface_is_suspended(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    (tmp_path / "my_rules.py").write_text(textwrap.dedent(RULES), "utf-8")
    args = ("--mask", "my_rules:window", "--prompt", "One?", "--max-new-tokens", "2")
    terminal = Terminal(tmp_path, *args)
    terminals.append(terminal)
    terminal.until("\x1b[?1049h")  # the interface has the screen
    terminal.until("\x1b[?1049l")  # and leaves it
    terminal.until("> stopped: breakpoint()")
    terminal.until("(flexinspect pdb) ")
    terminal.type("p n, tuple(q_idx.shape)")
    assert "(1, ())" in terminal.until("(flexinspect pdb) ")
    terminal.type("c")
    terminal.until("\x1b[?1049h")  # it is back
    terminal.until("model still loaded")  # and the generation has come to its end
    terminal.process.terminate()
    terminal.end()
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert reader.generation(0).state == "finished"


def test_ctrl_c_at_the_prompt_is_the_prompts_and_not_the_runs(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    (tmp_path / "my_rules.py").write_text(textwrap.dedent(RULES), "utf-8")
    args = ("--no-ui", "--mask", "my_rules:window", "--prompt", "One?", "--max-new-tokens", "2")
    terminal = Terminal(tmp_path, *args)
    terminals.append(terminal)
    terminal.until("(flexinspect pdb) ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("--KeyboardInterrupt--")
    terminal.until("(flexinspect pdb) ")
    terminal.type("c")
    assert terminal.end() == 0
    with open_trace(tmp_path / "t.flextrace") as reader:
        assert reader.generation(0).state == "finished"


def test_quit_ends_a_run_as_ctrl_c_does(tmp_path: Path, terminals: list[Terminal]) -> None:
    (tmp_path / "program.py").write_text("breakpoint()\nprint('went on')\n", "utf-8")
    terminal = Terminal(tmp_path, "--no-ui", "program.py")
    terminals.append(terminal)
    terminal.until("(flexinspect pdb) ")
    terminal.type("q")
    assert terminal.end() == 130
    assert "went on" not in terminal.seen
