"""`python -m benchmarks growth`: whether recording costs as much at the end of a run as before.

A small model with a sliding window generates thousands of tokens under `flexinspect.watch`, so that
its own work per step does not grow; then it answers hundreds of prompts within one trace. In each
tenth of the run: the CPU time of capture in the model's thread (that of the recorded step less that
of the same step of a bare run), bytes of the trace per step, and the memory of the process. Then
the same step of models with more and more layers, and the record of one mask for longer and longer
prompts.
"""

from __future__ import annotations

import gc
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from msgspec import Struct, to_builtins

import flexinspect
from benchmarks import synthetic
from benchmarks.common import markdown
from flexinspect.trace.file.writer import TraceWriter

WINDOW = 32
"""Keys that the model keeps."""
PROMPT_TOKENS = 16
N_PARTS = 10
LAYERS = (2, 4, 8, 16, 32)
LENGTHS = (512, 1024, 2048, 4096, 8192)
FLAT = 1.2
"""By how much a figure of the last part may exceed that of the second, which has warm caches."""


class Part(Struct, frozen=True):
    """A part of a run that ends after `steps` steps, or answers.

    `capture_ms` is the CPU time that recording adds to a step in the model's thread,
    `bytes_per_step` the growth of the trace, and `rss` the memory of the process in bytes at its
    end. Where the work is answers, each counts as one step.
    """

    steps: int
    capture_ms: float
    bytes_per_step: float
    rss: int


def small_model(layers: int = 2) -> Any:
    """Return a random model whose cache keeps the last `WINDOW` keys."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 20,
        sliding_window=WINDOW,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return MistralForCausalLM(config).eval().requires_grad_(False)


def generate_steps(model: Any, n: int) -> Iterator[int]:
    """Generate `n` tokens with a cache, and yield the number of each."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.arange(PROMPT_TOKENS)[None] % model.config.vocab_size
    with torch.no_grad():
        for number in range(n):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            yield number


def answer_prompts(model: Any, n: int) -> Iterator[int]:
    """Answer `n` prompts with three tokens each, and yield the number of each."""
    for number in range(n):
        ids = (torch.arange(PROMPT_TOKENS)[None] + number) % model.config.vocab_size
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        yield number


Work = Callable[[Any, int], Iterator[int]]


def run_parts(work: Work, n: int, level: str, model: Any | None = None) -> list[Part]:
    """Record `n` units of work in one trace, and return what each of `N_PARTS` parts cost."""
    model = small_model() if model is None else model
    ends = [n * part // N_PARTS for part in range(1, N_PARTS + 1)]
    bare = _thread_ms(work(model, n), lambda _: None)
    marks: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "growth.flextrace"
        with flexinspect.watch(model, out=path, level=level) as trace:

            def mark(number: int) -> None:
                if number + 1 in ends:
                    trace.reader().close()  # waits until all is written
                    marks[number + 1] = _trace_bytes(path), _resident()

            recorded = _thread_ms(work(model, n), mark)
    return [_part(start, stop, marks, bare, recorded) for start, stop in pairwise([0, *ends])]


def _part(
    start: int,
    stop: int,
    marks: Mapping[int, tuple[int, int]],
    bare: Sequence[float],
    recorded: Sequence[float],
) -> Part:
    size, rss = marks[stop]
    before = marks[start][0] if start else 0
    added = statistics.median(recorded[start:stop]) - statistics.median(bare[start:stop])
    return Part(stop, round(added, 4), round((size - before) / (stop - start)), rss)


def _thread_ms(work: Iterator[int], done: Callable[[int], None]) -> list[float]:
    """Return the CPU milliseconds of this thread for each unit of work; calls `done` after it."""
    costs, before = [], time.thread_time()
    for number in work:
        costs.append(1e3 * (time.thread_time() - before))
        done(number)
        before = time.thread_time()
    return costs


def _trace_bytes(path: Path) -> int:
    """Return the bytes of all pages of a trace, those in its WAL included."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        ((pages,),) = db.execute("PRAGMA page_count").fetchall()
        ((size,),) = db.execute("PRAGMA page_size").fetchall()
    return int(pages * size)


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def by_layers(steps: int, level: str) -> dict[str, dict[str, float]]:
    """Return the capture of a step and its bytes, by the number of layers."""
    found = {}
    for layers in LAYERS:
        last = run_parts(generate_steps, steps, level, small_model(layers))[-1]
        found[str(layers)] = {"capture_ms": last.capture_ms, "bytes_per_step": last.bytes_per_step}
    return found


def by_prompt_length(lengths: Sequence[int] = LENGTHS) -> dict[str, dict[str, int]]:
    """Return the bytes of a segment-isolation mask in the trace, by the length of its prompt."""
    found = {}
    for length in lengths:
        each = (length - 9) // 5
        made = synthetic._Made(synthetic._prompt([each] * 5, 1), 1, thin=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mask.flextrace"
            with TraceWriter.create(path, {}) as writer:
                writer.begin_generation(made.generation())
                mask = made._prefill_mask()
                writer.write_steps(list(made.steps(0, 1)))
            with closing(sqlite3.connect(path)) as db:
                sql = "SELECT sum(length(data)) FROM arrays WHERE owner IS NOT NULL"
                ((size,),) = db.execute(sql).fetchall()
        assert mask.partial is not None
        assert mask.full is not None
        blocks = int(mask.partial.sum() + mask.full.sum())
        found[str(mask.q_len)] = {"cells": mask.q_len**2, "blocks": blocks, "bytes": int(size)}
    return found


def measure(steps: int = 10_000, level: str = "advanced") -> dict[str, Any]:
    """Return all figures, those of answers from a tenth as many of them as steps."""
    run_parts(generate_steps, N_PARTS, level)  # imports, first allocations
    found: dict[str, Any] = {"level": level}
    for name, work, n in (
        ("steps", generate_steps, steps),
        ("answers", answer_prompts, steps // 10),
    ):
        parts = run_parts(work, n, level)
        found[name] = {"parts": to_builtins(parts), **_last_to_second(parts)}
    found["layers"] = by_layers(max(steps // 20, N_PARTS), level)
    found["masks"] = by_prompt_length()
    return found


def _last_to_second(parts: Sequence[Part]) -> dict[str, float | None]:
    """Return how the last part compares with the second, and the growth of memory per step."""
    second, last = parts[1], parts[-1]
    n = last.steps - second.steps
    return {
        "capture_ratio": _ratio(last.capture_ms, second.capture_ms),
        "bytes_ratio": _ratio(last.bytes_per_step, second.bytes_per_step),
        "rss_bytes_per_step": round((last.rss - second.rss) / n, 1),
    }


def _ratio(last: float, second: float) -> float | None:
    """Return a ratio, None where a short run has nothing to compare with."""
    return round(last / second, 3) if second > 0 else None


def table(facts: dict[str, Any]) -> str:
    """Return the figures as tables in Markdown."""
    return "\n\n".join(
        (
            *(_parts_table(name, facts[name]) for name in ("steps", "answers")),
            _layers_table(facts["layers"]),
            _masks_table(facts["masks"]),
        )
    )


def _parts_table(name: str, found: dict[str, Any]) -> str:
    rows = [
        [
            f"{part['steps']:,}",
            f"{part['capture_ms']:.2f}",
            f"{part['bytes_per_step']:,.0f}",
            f"{part['rss'] / 1e6:.1f}",
        ]
        for part in found["parts"]
    ]
    each = name.removesuffix("s")
    head = [f"{name} so far", f"capture, ms of CPU per {each}", f"bytes per {each}", "memory, MB"]
    grown = (
        f"Last part against the second: capture {found['capture_ratio']}, "
        f"bytes {found['bytes_ratio']} (target {FLAT}); memory grew by "
        f"{found['rss_bytes_per_step']:.0f} bytes per {each}."
    )
    return f"{markdown(head, rows)}\n\n{grown}"


def _layers_table(found: dict[str, Any]) -> str:
    rows = [
        [layers, f"{one['capture_ms']:.2f}", f"{one['bytes_per_step']:,.0f}"]
        for layers, one in found.items()
    ]
    return markdown(["layers", "capture, ms of CPU per step", "bytes per step"], rows)


def _masks_table(found: dict[str, Any]) -> str:
    rows = [
        [length, f"{one['cells']:,}", f"{one['blocks']:,}", f"{one['bytes']:,}"]
        for length, one in found.items()
    ]
    return markdown(["prompt", "cells", "blocks that are not empty", "bytes of the mask"], rows)
