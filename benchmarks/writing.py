"""How fast a trace is written: real step records, written again and again by the real writer."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.capture import CapturedRun
from benchmarks.common import bench_prompt
from flexinspect.records.step import LEVELS, GenerationRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

STEPS = 1000


def measure(model: Any) -> dict[str, Any]:
    """Return milliseconds per `write_step`, steps and megabytes per second, per level."""
    return {level: _throughput(_sample_step(model, level)) for level in LEVELS}


def _sample_step(model: Any, level: str) -> StepRecord:
    """Return a decode step as a real run of this level recorded it."""
    prompt = bench_prompt(8)
    run = CapturedRun(model, prompt, level, compiled=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.flextrace"
        with TraceWriter.create(path, {}) as writer:
            run._run(writer)
        with open_trace(path) as reader:
            step = reader.record(0, 4)
    assert step is not None
    return step


def _throughput(step: StepRecord) -> dict[str, Any]:
    prompt = bench_prompt(STEPS)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.flextrace"
        with TraceWriter.create(path, {}) as writer:
            writer.begin_generation(
                GenerationRecord(0, "bench", "m", "contiguous", prompt.segments, ())
            )
            for number in range(STEPS):
                record = _numbered(step, number)
                started = time.perf_counter()
                writer.write_step(record)
                times.append(time.perf_counter() - started)
        size = path.stat().st_size
    return {
        "write_step_ms": round(statistics.median(times) * 1e3, 4),
        "steps_per_s": round(STEPS / sum(times)),
        "megabytes_per_s": round(size / sum(times) / 1e6, 1),
        "bytes_per_step": round(size / STEPS),
    }


def _numbered(step: StepRecord, number: int) -> StepRecord:
    """Return the record as step `number`, with a mask of its own as every decode step has."""
    masks = tuple(replace(mask, fingerprint=f"{number:016x}") for mask in step.masks)
    calls = tuple(replace(call, mask=f"{number:016x}") for call in step.calls)
    tokens = tuple(replace(token, pos=256 + number, step=number) for token in step.tokens)
    return replace(step, step=number, masks=masks, calls=calls, tokens=tokens)
