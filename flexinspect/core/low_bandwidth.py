"""Slow connections to the terminal: when the interface saves output, and how.

Over SSH the interface writes some invisible output, and requests the position of the cursor. The
terminal answers when it has read all of it: the time until then is that of a small frame.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time

VARIABLE = "FLEXINSPECT_LOW_BANDWIDTH"
"""Environment variable: "1" saves output, "0" never does; otherwise the connection is measured."""
SLOW_S = 0.25
"""A terminal that takes longer for the probe is slow; most on the same continent take 0.1 s."""
PATIENCE_S = 1.0
_PROBE = b"\x1b[0m" * 4096 + b"\x1b[6n"
_ANSWER = re.compile(rb"\x1b\[\d+;\d+R")


def is_low_bandwidth() -> bool:
    """Return whether the interface saves output."""
    return os.environ.get(VARIABLE) == "1"


def choose_bandwidth() -> None:
    """Save output if the connection is slow; call it before textual is imported."""
    if VARIABLE not in os.environ and "SSH_CONNECTION" in os.environ and _is_slow():
        os.environ[VARIABLE] = "1"
    if is_low_bandwidth():
        os.environ.setdefault("TEXTUAL_FPS", "15")
        if os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
            os.environ.setdefault("TEXTUAL_COLOR_SYSTEM", "256")


def _is_slow() -> bool:
    """Measure the connection; a terminal that does not answer in time is slow."""
    try:
        import termios
        import tty

        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (ImportError, OSError, ValueError, termios.error):
        return False  # no terminal
    try:
        tty.setcbreak(file)
        started = time.monotonic()
        os.write(sys.stdout.fileno(), _PROBE)
        return not _has_answered(file, started + PATIENCE_S) or time.monotonic() - started > SLOW_S
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


def _has_answered(file: int, until: float) -> bool:
    seen = b""
    while not _ANSWER.search(seen):
        ready, _, _ = select.select([file], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            return False
        seen += os.read(file, 1024)
    return True
