"""What watching user code costs: `model.generate` under SDPA with and without `watch`.

Whole generations are what a user has; but one of a real model takes longer than this kind of
machine keeps its speed. So there are windows, too: some decode steps after one prompt, again and
again from its cache, each watched window between two plain ones of a second or less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import flexinspect
from benchmarks.capture import decode_ms, level_facts
from benchmarks.common import Timing, bench_prompt, cell, markdown, sandwiched
from benchmarks.engine import generate_stamps, time_generate
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import LEVELS

Timed = Callable[[Any, Prompt, int], Timing]
"""Runs `generate` for some tokens after a prompt, and times it."""


class WatchedRun:
    """`model.generate` under `flexinspect.watch`; opening and closing the trace is not timed."""

    def __init__(self, timed: Timed, model: Any, prompt: Prompt, level: str, tokens: int) -> None:
        self._timed = timed
        self._model, self._prompt, self._level, self._tokens = model, prompt, level, tokens
        self.bytes_per_step = 0.0

    def __call__(self) -> Timing:
        """Run once, into a real trace."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "own.flextrace"
            with flexinspect.watch(self._model, out=path, level=self._level) as trace:
                timing = self._timed(self._model, self._prompt, self._tokens)
                written = time.perf_counter()
                trace.reader().close()  # waits until all steps are written
                written = time.perf_counter() - written
            with trace.reader() as reader:
                stated = float(reader.run()["cost"]["ratio"])
            self.bytes_per_step = path.stat().st_size / (len(timing.steps) + 1)
        return replace(timing, written=written, stated=stated)


UNTIMED = 3
"""Steps at the beginning of a window: the first two of a generation are written at once."""


class Window:
    """Decode steps after a prompt whose rows are cached."""

    def __init__(self, model: Any, prompt: Prompt, tokens: int) -> None:
        from transformers import DynamicCache

        self._model, self._tokens = model, tokens
        self._ids = torch.tensor([prompt.ids], device=next(model.parameters()).device)
        self._cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(self._ids, past_key_values=self._cache, use_cache=True)

    def __call__(self, model: Any, prompt: Prompt, tokens: int) -> Timing:
        """Run them once."""
        too_many = self._cache.get_seq_length() - self._ids.shape[1] + 1  # the last one is an input
        self._cache.crop(-too_many)
        stamps = generate_stamps(self._model, self._ids, self._tokens, self._cache)
        return Timing.of(stamps[UNTIMED - 1], stamps[UNTIMED:])


def measure(model: Any, seconds: float, tokens: int) -> dict[str, Any]:
    """Return ratio of decode and of the whole generation, per level."""
    model.set_attn_implementation("sdpa")
    return _measure(time_generate, model, seconds, tokens)


def measure_steps(model: Any, seconds: float, tokens: int) -> dict[str, Any]:
    """Return the ratio of decode steps alone, per level, from windows of `tokens` steps."""
    model.set_attn_implementation("sdpa")
    return _measure(Window(model, bench_prompt(tokens), tokens), model, seconds, tokens)


def _measure(timed: Timed, model: Any, seconds: float, tokens: int) -> dict[str, Any]:
    prompt = bench_prompt(tokens)
    watched = {level: WatchedRun(timed, model, prompt, level, tokens) for level in LEVELS}
    found = sandwiched(lambda: timed(model, prompt, tokens), watched, seconds=seconds)
    facts: dict[str, Any] = {"decode_ms_without": decode_ms(found)}
    for level, run in watched.items():
        facts[level] = {
            **level_facts(level, found[level]),
            "trace_bytes_per_step": round(run.bytes_per_step),
        }
    return facts


def steps_table(facts: dict[str, Any]) -> str:
    """Return the figures of windows as a table in Markdown."""
    rows = [_row(level, facts[level]) for level in LEVELS]
    table = markdown(["level", "decode steps", "stated by the run", "target", "windows"], rows)
    return f"{facts['decode_ms_without']:.1f} ms per token without\n\n{table}"


def _row(level: str, found: dict[str, Any]) -> list[str]:
    steps = found["ratio"]
    windows = f"{steps['rounds']} of {steps['rounds'] + steps.get('left_out', 0)}"
    stated = f"{found['stated_by_the_run']:.3f}"
    return [level, cell(steps), stated, f"{found['bound']:.2f}", windows]
