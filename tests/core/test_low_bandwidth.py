"""When the interface saves output, measured on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from flexinspect.core import low_bandwidth

PROGRAM = """
import json, os, sys
from flexinspect.core.low_bandwidth import choose_bandwidth
choose_bandwidth()
print(json.dumps({name: value for name, value in os.environ.items() if "TEXTUAL" in name}),
      file=sys.stderr)
"""


def settings(answer_s: float | None = None, **variables: str) -> dict[str, str]:
    """Return what is set in a terminal that reports its cursor after so many seconds, or never."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLORTERM": "truecolor", **variables}
    run = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(run, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env)
    os.close(theirs)
    if answer_s is not None:
        seen = b""
        while b"\x1b[6n" not in seen:
            seen += os.read(ours, 1 << 16)
        time.sleep(answer_s)
        os.write(ours, b"x\x1b[12;1R")
    assert process.stderr is not None
    chosen: dict[str, str] = json.loads(process.stderr.read())
    process.wait()
    process.stderr.close()
    os.close(ours)
    return chosen


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEXTUAL_FPS", "TEXTUAL_COLOR_SYSTEM", low_bandwidth.VARIABLE, "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)


SAVING = {"TEXTUAL_FPS": "15", "TEXTUAL_COLOR_SYSTEM": "256"}


def test_without_ssh_the_terminal_is_not_asked() -> None:
    assert settings() == {}


def test_a_terminal_that_answers_late_over_ssh_is_slow() -> None:
    assert settings(0.6, SSH_CONNECTION="a") == SAVING


def test_a_terminal_that_answers_at_once_over_ssh_is_not() -> None:
    assert settings(0.0, SSH_CONNECTION="a") == {}


def test_the_variable_overrides_the_measurement() -> None:
    assert settings(SSH_CONNECTION="a", FLEXINSPECT_LOW_BANDWIDTH="0") == {}
    assert settings(FLEXINSPECT_LOW_BANDWIDTH="1") == SAVING


def test_a_terminal_of_16_colours_keeps_them() -> None:
    chosen = settings(FLEXINSPECT_LOW_BANDWIDTH="1", COLORTERM="")
    assert chosen == {"TEXTUAL_FPS": "15"}
