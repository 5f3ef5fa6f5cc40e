"""How long exports of a trace take, and how large they are: whole commands, as a user runs them.

The traces are those of the demo model with random weights, which does not stop by itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import cpu_of_commands

STEPS, SHORT_STEPS = 500, 100
LEVELS = ("advanced", "extreme")
ROUNDS = 5
MOST_S, MOST_MB = 5.0, 5.0
"""What the report of `STEPS` steps may take, and what that of `SHORT_STEPS` steps may weigh."""


def measure() -> dict[str, Any]:
    """Return seconds and megabytes of the report of a run, by level and number of steps."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for level in LEVELS:
            for steps in (SHORT_STEPS, STEPS):
                trace = Path(folder) / f"{level}-{steps}.flextrace"
                _record(trace, level, steps)
                found[f"{level}, {steps} steps"] = _report(trace)
    return {"rounds": ROUNDS, "bound_s": MOST_S, "bound_mb": MOST_MB, "report": found}


def _flexinspect(*arguments: str) -> str:
    command = [sys.executable, "-m", "flexinspect", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _record(trace: Path, level: str, steps: int) -> None:
    args = "run --model demo --weights random --dataset demo --max-samples 1 --stop eos --no-ui"
    sizes = ("--level", level, "--max-new-tokens", str(steps))
    _flexinspect(*args.split(), *sizes, "--out", str(trace))
    _flexinspect("findings", str(trace), "--fail-on", "never")  # so that no rule is timed below


def _report(trace: Path) -> dict[str, Any]:
    target = trace.with_suffix(".html")
    seconds, cpu = [], []
    facts: dict[str, Any] = {}
    for _ in range(ROUNDS):
        started, used = time.perf_counter(), cpu_of_commands()
        answer = _flexinspect("report", str(trace), "-o", str(target), "--overwrite", "--json")
        seconds.append(time.perf_counter() - started)
        cpu.append(cpu_of_commands() - used)
        facts = json.loads(answer)
    return {
        "s": round(statistics.median(seconds), 2),
        "cpu_s": round(statistics.median(cpu), 2),
        "mb": round(facts["bytes"] / 1e6, 2),
        "trace_mb": round(trace.stat().st_size / 1e6, 2),
        "left_out": facts["left_out"],
    }
