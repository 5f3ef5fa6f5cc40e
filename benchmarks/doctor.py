"""How soon `flexinspect doctor` prints its first line, and how long the whole command takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

ROUNDS = 7
FIRST_TARGET_S = 1.0


def measure() -> dict[str, Any]:
    """Return the median seconds until the first line and until the end, through a pipe."""
    first, whole = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        command = [sys.executable, "-m", "flexinspect", "doctor"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
            assert run.stdout is not None
            run.stdout.readline()
            first.append(time.perf_counter() - started)
            run.stdout.read()
        whole.append(time.perf_counter() - started)
    medians = {"first_s": statistics.median(first), "whole_s": statistics.median(whole)}
    return {"rounds": ROUNDS, "target_s": FIRST_TARGET_S} | {
        name: round(seconds, 2) for name, seconds in medians.items()
    }
