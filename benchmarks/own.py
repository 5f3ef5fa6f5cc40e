"""What watching somebody's own code costs: `model.generate` under SDPA with and without `watch`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flexinspect
from benchmarks.capture import level_facts
from benchmarks.common import Timing, bench_prompt, interleave, milliseconds
from benchmarks.engine import time_generate
from flexinspect.prompts import Prompt
from flexinspect.records import LEVELS


class WatchedRun:
    """`model.generate` under `flexinspect.watch`; opening and closing the trace is not timed."""

    def __init__(self, model: Any, prompt: Prompt, level: str) -> None:
        self._model, self._prompt, self._level = model, prompt, level
        self.bytes_per_step = 0.0
        self.stated: list[float] = []

    def __call__(self) -> Timing:
        """Run once, into a real trace."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "own.flextrace"
            with flexinspect.watch(self._model, out=path, level=self._level) as trace:
                timing = time_generate(self._model, self._prompt)
            with trace.reader() as reader:
                self.stated.append(1 + float(reader.run()["cost"]["ratio"]))
            self.bytes_per_step = path.stat().st_size / (len(timing.steps) + 1)
        return timing


def measure(model: Any, *, rounds: int) -> dict[str, Any]:
    """Return ratio of decode and of the whole generation, per level."""
    model.set_attn_implementation("sdpa")
    prompt = bench_prompt()
    watched = {level: WatchedRun(model, prompt, level) for level in LEVELS}
    cases: dict[str, Callable[[], Timing]] = {
        "without": lambda: time_generate(model, prompt),
        **watched,
    }
    timings = interleave(cases, rounds)
    plain = timings["without"]
    facts: dict[str, Any] = {
        "decode_ms_without": milliseconds([t.decode / len(t.steps) for t in plain])
    }
    for level, run in watched.items():
        facts[level] = {
            **level_facts(level, timings[level], plain, run.stated),
            "trace_bytes_per_step": round(run.bytes_per_step),
        }
    return facts
