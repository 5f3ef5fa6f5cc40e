"""What capture costs: the same generation with and without, at each level, and trace sizes."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Timing,
    bench_prompt,
    interleave,
    milliseconds,
    ratio,
    time_flex,
)
from flexinspect.prompts import Prompt
from flexinspect.records import LEVELS, GenerationEnd, GenerationRecord, TokenRecord
from flexinspect.trace.writer import TraceWriter
from flexinspect_hooks.generate import Choice
from flexinspect_hooks.session import CaptureSession

BOUNDS = {"basic": 1.02, "advanced": 1.05, "extreme": 1.15}
AIMS = {"basic": 1.01, "advanced": 1.03, "extreme": 1.10}


class CapturedRun:
    """Our generation under capture, written to a real trace; keeps what it wrote."""

    def __init__(self, model: Any, prompt: Prompt, level: str, *, compiled: bool) -> None:
        self._model, self._prompt, self._level = model, prompt, level
        self._compiled = compiled
        self.bytes_per_step: list[float] = []
        self.writer_ms: list[float] = []
        self.stated: list[float] = []

    def __call__(self) -> Timing:
        """Run once; the session's installation and the trace's closing are outside the timing."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.flextrace"
            with TraceWriter.create(path, {"bench": True}) as writer:
                timing = self._run(writer)
            self.bytes_per_step.append(path.stat().st_size / (len(timing.steps) + 1))
        return timing

    def _run(self, writer: TraceWriter) -> Timing:
        prompt = self._prompt
        session = CaptureSession(self._model, writer, level=self._level, copy_logits=False)
        with session:
            session.begin_generation(
                GenerationRecord(0, "bench", "bench", "contiguous", prompt.segments, ())
            )

            def chose(choice: Choice) -> None:
                pos = len(prompt.ids) + choice.step
                token = TokenRecord(pos, choice.token_id, "t", "t", pos, 0, step=choice.step)
                session.chose(token, choice.chosen, choice.scores)

            timing = time_flex(self._model, prompt, compiled=self._compiled, on_choice=chose)
            session.end_generation(GenerationEnd(0, "finished", "", prompt.segments))
        cost = session.cost()
        self.writer_ms.append(1e3 * cost["writer_s"] / max(cost["steps"], 1))
        self.stated.append(1 + cost["ratio"])
        return timing


def measure(model: Any, *, rounds: int, compiled: bool = False) -> dict[str, Any]:
    """Return ratio of decode and of the whole generation, per level, with trace sizes."""
    prompt = bench_prompt()
    captured = {level: CapturedRun(model, prompt, level, compiled=compiled) for level in LEVELS}
    cases: dict[str, Callable[[], Timing]] = {
        "without": lambda: time_flex(model, prompt, compiled=compiled),
        **captured,
    }
    timings = interleave(cases, rounds)
    plain = timings["without"]
    facts: dict[str, Any] = {
        "decode_ms_without": milliseconds([t.decode / len(t.steps) for t in plain])
    }
    for level, run in captured.items():
        with_it = timings[level]
        facts[level] = {
            **level_facts(level, with_it, plain, run.stated),
            "writer_thread_ms_per_step": round(statistics.median(run.writer_ms), 3),
            "trace_bytes_per_step": round(run.bytes_per_step[-1]),
        }
    return facts


def level_facts(
    level: str, with_it: Sequence[Timing], plain: Sequence[Timing], stated: Sequence[float]
) -> dict[str, Any]:
    """Return the ratios of a level beside its bound, its aim and what the runs said themselves."""
    return {
        "ratio": ratio([t.total for t in with_it], [t.total for t in plain]),
        "decode_ratio": ratio([t.decode for t in with_it], [t.decode for t in plain]),
        "bound": BOUNDS[level],
        "aim": AIMS[level],
        "stated_by_the_run": round(statistics.median(stated), 4),
    }
