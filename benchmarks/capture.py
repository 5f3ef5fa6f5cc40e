"""What capture costs: the same generation with and without, at each level, and trace sizes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.common import (
    NEW,
    Sandwich,
    Timing,
    bench_prompt,
    cell,
    compared,
    markdown,
    milliseconds,
    sandwiched,
    time_flex,
)
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import LEVELS, GenerationEnd, GenerationRecord, TokenRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.generation.decoding import Choice
from flexinspect_hooks.sessions.capture_session import CaptureSession

BOUNDS = {"basic": 1.02, "advanced": 1.05, "extreme": 1.15}
AIMS = {"basic": 1.01, "advanced": 1.03, "extreme": 1.10}


class CapturedRun:
    """Our generation under capture, written to a real trace; keeps what it wrote."""

    def __init__(
        self, model: Any, prompt: Prompt, level: str, *, compiled: bool, tokens: int = NEW
    ) -> None:
        self._model, self._prompt, self._level, self._tokens = model, prompt, level, tokens
        self._compiled = compiled
        self.bytes_per_step: list[float] = []
        self.writer_ms: list[float] = []

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
                session.on_token_chosen(token, choice.scores)

            timing = time_flex(
                self._model,
                prompt,
                compiled=self._compiled,
                new_tokens=self._tokens,
                on_choice=chose,
            )
            written = time.perf_counter()
            session.recorder.drain()
            written = time.perf_counter() - written
            session.end_generation(GenerationEnd(0, "finished", "", prompt.segments))
        cost = session.cost()
        self.writer_ms.append(1e3 * cost["writer_s"] / max(cost["steps"], 1))
        return replace(timing, written=written, stated=cost["ratio"])


def measure(model: Any, seconds: float, tokens: int, *, compiled: bool) -> dict[str, Any]:
    """Return ratio of decode and of the whole generation, per level, with trace sizes."""
    prompt = bench_prompt(tokens)
    captured = {
        level: CapturedRun(model, prompt, level, compiled=compiled, tokens=tokens)
        for level in LEVELS
    }

    def plain() -> Timing:
        return time_flex(model, prompt, compiled=compiled, new_tokens=tokens)

    found = sandwiched(plain, captured, seconds=seconds)
    facts: dict[str, Any] = {"decode_ms_without": decode_ms(found)}
    for level, run in captured.items():
        facts[level] = {
            **level_facts(level, found[level]),
            "writer_thread_ms_per_step": round(statistics.median(run.writer_ms), 3),
            "trace_bytes_per_step": round(run.bytes_per_step[-1]),
        }
    return facts


def decode_ms(found: dict[str, list[Sandwich]]) -> float:
    """Return milliseconds per decode step of the plain generations."""
    plain = [one.after for blocks in found.values() for one in blocks]
    return milliseconds([t.decode / len(t.steps) for t in plain if isinstance(t, Timing)])


def level_facts(level: str, blocks: Sequence[Sandwich]) -> dict[str, Any]:
    """Return the ratios of a level with its bound, its aim and what the runs stated themselves."""
    return {
        "ratio": compared(blocks, "total"),
        "decode_ratio": compared(blocks, "decode", "total"),
        "bound": BOUNDS[level],
        "aim": AIMS[level],
        "stated_by_the_run": round(1 + statistics.median(one.case.stated for one in blocks), 4),
    }


def table(facts: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    head = ["level", "whole generation", "decode", "stated by the run", "target", "rounds"]
    rows = [_row(level, facts[level]) for level in LEVELS]
    return f"{facts['decode_ms_without']:.1f} ms per token without\n\n{markdown(head, rows)}"


def _row(level: str, found: dict[str, Any]) -> list[str]:
    whole = found["ratio"]
    figures = [cell(whole), cell(found["decode_ratio"]), f"{found['stated_by_the_run']:.3f}"]
    of = whole["rounds"] + whole.get("left_out", 0)
    return [level, *figures, f"{found['bound']:.2f}", f"{whole['rounds']} of {of}"]
