"""What `flexinspect audit TRACE` takes as a whole command, beside the imports that it needs.

The commands run in turn, so that all have the same load of the machine around them. The trace is
that of an answer of the demo model, which is a Llama.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import cpu_of_commands, markdown

TOKENS = 20
ROUNDS = 7
MOST_S = 3.0
"""What the audit of `TOKENS` tokens may take."""
_MODEL_CLASS = "from transformers import LlamaForCausalLM"
IMPORTS = {
    "`import torch`": "import torch",
    "`import torch, transformers`": "import torch, transformers",
    f"`{_MODEL_CLASS}`": _MODEL_CLASS,
    "the same without garbage collection": (
        f"import gc; gc.disable(); {_MODEL_CLASS}; gc.freeze(); gc.enable()"
    ),
}
AUDIT = "`flexinspect audit TRACE`"


def measure() -> dict[str, Any]:
    """Return the medians of CPU and clock in seconds, of imports alone and of the audit."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "answer.flextrace"
        _run(["-m", "flexinspect", *_recording(trace)])
        commands = {name: ["-c", code] for name, code in IMPORTS.items()}
        commands[AUDIT] = ["-m", "flexinspect", "audit", str(trace)]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(ROUNDS + 1):
            for name, arguments in commands.items():
                seconds = _run(arguments)
                if number:  # the first round reads files that later ones find in memory
                    taken[name].append(seconds)
    medians = {
        name: {
            "cpu_s": round(statistics.median(cpu for cpu, _ in times), 2),
            "wall_s": round(statistics.median(wall for _, wall in times), 2),
        }
        for name, times in taken.items()
    }
    return {"rounds": ROUNDS, "tokens": TOKENS, "bound_s": MOST_S, "commands": medians}


def _recording(trace: Path) -> list[str]:
    args = f"run --model demo --dataset demo --max-samples 1 --max-new-tokens {TOKENS} --no-ui"
    return [*args.split(), "--cue", "In a sentence:", "--stop", "eos", "--out", str(trace)]


def _run(arguments: Sequence[str]) -> tuple[float, float]:
    """Run Python, and return the seconds of CPU and clock until its process has ended."""
    started, used = time.perf_counter(), cpu_of_commands()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall = time.perf_counter() - started
    return cpu_of_commands() - used, wall


def table(facts: dict[str, Any]) -> str:
    """Return the seconds of each command."""
    rows = [
        [
            name,
            *(f"{found[clock]:.2f}" for clock in ("cpu_s", "wall_s")),
            f"{facts['bound_s']:g}" if name == AUDIT else "",
        ]
        for name, found in facts["commands"].items()
    ]
    return markdown(["", "CPU, s", "clock, s", "target"], rows)
