"""Records with every field set to something that is not its default, and comparison of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    ArrayRecord,
    BuildRecord,
    CallRecord,
    Candidate,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    GpuRecord,
    InputsRecord,
    LayerStatRecord,
    LensRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    OutputRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter

NAN, INF = float("nan"), float("inf")


def segments(stop: int = 8) -> tuple[Segment, ...]:
    return (
        Segment(0, 1, "bos", SegmentKind.BOS, 0),
        Segment(1, 3, "paraphrase 1", SegmentKind.PARAPHRASE, 1),
        Segment(3, 4, "separator 1", SegmentKind.SEPARATOR, 1),
        Segment(4, stop, "generated", SegmentKind.GENERATED, 3),
    )


def generation(number: int = 0, **changes: Any) -> GenerationRecord:
    tokens = (
        TokenRecord(0, 1, "<s>", "", 0, 0, True),
        TokenRecord(1, 17, "ĠParis", " Paris", 1, 1),
        TokenRecord(2, 18, "Ċ", "\n", 2, 1),
        TokenRecord(3, 19, "\x1b[31m", "\x1b[31mé🗼\x00", 3, 2),
    )
    values: dict[str, Any] = {
        "generation": number,
        "sample_id": "demo-17",
        "mask": "segment-isolation",
        "positions": "contiguous",
        "segments": segments(),
        "tokens": tokens,
        "expected": ("Paris", "パリ"),
        "declared": {"name": "segment-isolation", "local_starts": [0, 1], "ratio": NAN},
        "started_at": 1000.25,
        "model": "tiny (2)",
    }
    return GenerationRecord(**(values | changes))


def logits() -> LogitsRecord:
    candidates = (
        Candidate(0, 5, " Paris", 9.5, -0.1, 9.25, -0.05),
        Candidate(1, 6, "\u202e\ttab", 8.5, -1.1, -INF, -INF),
    )
    return LogitsRecord(0.5, 1.0, 5, 0, -0.1, 0, 2, -7.5, 9.5, (3, 0, 29), candidates)


def mask(fingerprint: str, heads: int = 1, rows: int = 3, keys: int = 13) -> MaskRecord:
    rng = np.random.default_rng(len(fingerprint))
    cells = rng.random((heads, rows, keys)) < 0.5
    tables = rng.random((2, heads, 1, 1)) < 0.5
    return MaskRecord(
        fingerprint,
        "block",
        *(1, heads, rows, keys, 2, 1, 128, 64, "user.masks:rule", "masks.py:12", True),
        cells=cells,
        partial=tables[0],
        full=tables[1],
    )


def arrays() -> tuple[ArrayRecord, ...]:
    return (
        ArrayRecord("attention.mass", np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        ArrayRecord("q", np.array([[[1.5, NAN], [INF, -0.0]]], np.float16), 0),
        ArrayRecord("k", np.array([[[0x3F80, 0xC000, 0x7FC0]]], np.uint16), 1, "bfloat16"),
        ArrayRecord("empty", np.zeros((0, 3), np.float64)),
        ArrayRecord("scalar", np.array(7, np.int64)),
        ArrayRecord("flags", np.array([True, False, True])),
    )


def step(number: int = 0, generation: int = 0, **changes: Any) -> StepRecord:
    fingerprint = f"f{generation:03}{number:04}"
    place = {"generation": generation, "step": number}
    values: dict[str, Any] = {
        **place,
        "phase": "decode" if number else "prefill",
        "q_len": 1 if number else 4,
        "kv_before": number and 3 + number,
        "kv_after": 4 + number,
        "started_at": 1000.5 + number,
        "wall_ms": 12.5,
        "capture_ms": 0.125,
        "logits": logits(),
        "tokens": (TokenRecord(4 + number, 5, "ĠParis", " Paris", 4 + number, 3, False, number),),
        "inputs": InputsRecord(2, ((0, 3), (7, 1)), (5, 0), (6, -1)),
        "calls": (
            CallRecord(
                *(0, "flex uncompiled", "flexinspect-1", fingerprint, 1, 8, 4, 1, 5, 64, "float32"),
                *(0.125, 1e-6, "lse", 50.0),
            ),
            CallRecord(1, "sdpa", "sdpa", None, 1, 8, 4, 1, 5, 64, "float32", None),
            CallRecord(1, "sdpa", "sdpa", None, 1, 8, 4, 1, 5, 64, "float32", NAN, NAN, None, NAN),
            CallRecord(
                *(2, "sdpa", "own", None, 1, 8, 4, 1, 5, 64, "float32", None, None, None, None),
                *("bool (1, 1, 1, 5)", "RuntimeError: \u202eno"),
            ),
        ),
        "builds": (
            BuildRecord(None, None, 8, 1, 5, "user.masks:rule", 1.5, 4096),
            BuildRecord(1, 2, None, 1, 5, "user.masks:rule", NAN, 0),
        ),
        "layer_stats": (
            LayerStatRecord(0, "self_attn", 0, 0, -1.5, 2.5, 0.25, 1.0, 33.0),
            LayerStatRecord(0, "mlp", 3, 1, -INF, INF, NAN, NAN, INF, 2),
        ),
        "memory": MemoryRecord(10**9, 5 * 10**12, 10**6, 11, 12, 13),
        "gpus": (
            GpuRecord(
                0, "H100 \u202e", 87.0, 5 * 10**10, 8 * 10**10, 10**10, 61, 412.5, ((17, 3),)
            ),
            GpuRecord(1, "H100", NAN, 1, 2),
        ),
        "lens": (
            LensRecord(0, (7, 5), (" Rome", " Paris"), (-0.5, NAN), 1, -1.25),
            LensRecord(1, (5,), ("\x07",), (-0.25,), -1, NAN, 1e-6),
        ),
        "masks": (mask(fingerprint),),
        "arrays": arrays(),
        "findings": (
            Finding(
                "mask.empty-row",
                Severity.ERROR,
                "Row 3 sees nothing\x07.",
                *(generation, 0, number, 1, 2, (3, 4)),
                {"rows": [3], "worst": INF, "text": "\ud800"},
            ),
        ),
        "events": (
            EventRecord("hook", "switched off", 1001.0, generation, number, {"why": [1, None]}),
        ),
    }
    return StepRecord(**(values | changes))


def small_step(number: int, generation: int = 0) -> StepRecord:
    """A step as basic capture makes it."""
    return step(number, generation, masks=(), arrays=(), findings=(), events=())


def end(number: int = 0, n_steps: int = 2) -> GenerationEnd:
    return GenerationEnd(number, "finished", " Paris\n", segments(4 + n_steps), "eos", 1010.5)


def printed() -> tuple[OutputRecord, ...]:
    """What a program printed before its first step and after."""
    return (
        OutputRecord("stdout", "loading\n", 1000.5),
        OutputRecord("stderr", "\x1b[31mred\ufffd\x07", 1001.5, 1, 0),
    )


def write(path: Path, n_generations: int = 1, n_steps: int = 2) -> Path:
    """Write a whole trace."""
    with TraceWriter.create(path, {"model": "demo", "seed": 2**63, "started_at": 1000.0}) as writer:
        for number in range(n_generations):
            writer.begin_generation(generation(number))
            for step_number in range(n_steps):
                writer.write_step(step(step_number, number))
            writer.end_generation(end(number, n_steps))
        writer.write_event(EventRecord("done", "all is written", 1011.0, data={"n": 1}))
        writer.write_output(printed())
    return path


def same(left: Any, right: Any) -> bool:
    """Compare records by value and type; NaN equals NaN, arrays compare by bytes."""
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (
            *(right.dtype, right.shape),
            right.tobytes(),
        )
    if isinstance(left, Struct):
        names = left.__struct_fields__
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in names
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)
