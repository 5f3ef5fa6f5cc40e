"""A prompt of three lines under a mask with segments that nobody declared."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np

from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import (
    CallRecord,
    GenerationEnd,
    GenerationRecord,
    MaskRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.trace.file.writer import TraceWriter

LINES = (
    "What| is| the| money| of| Japan|?|\n",
    "Name| its| cur|ren|cy|.|\n",
    "Answer| with| one| word|:",
)
TEXTS = ["<bos>", *(text for line in LINES for text in line.split("|"))]
SECOND, THIRD = 9, 16
"""Positions at which the second and the third line begin."""


def blocks(borders: Sequence[int], n: int = len(TEXTS), reader: int | None = None) -> Any:
    """Return the cells of a mask with blocks at the borders; rows from `reader` on see all."""
    owner = np.searchsorted(np.array(borders), np.arange(n), side="right")
    rows = np.arange(n)[:, None]
    same = (owner[:, None] == owner) | (np.arange(n) == 0)
    return (same | (rows >= (n if reader is None else reader))) & (np.arange(n) <= rows)


def generation(texts: Sequence[str] = TEXTS, declared: Any = None) -> GenerationRecord:
    tokens = tuple(
        TokenRecord(pos, pos, text, text, pos, 0, special=text.startswith("<"))
        for pos, text in enumerate(texts)
    )
    segments = (
        Segment(0, len(texts), "prompt", SegmentKind.SHARED, 0),
        Segment(len(texts), len(texts) + 9, "generated", SegmentKind.GENERATED, 1),
    )
    facts = {"tokenizer": {"bos": 0, "adds_bos": True}, **(declared or {})}
    return GenerationRecord(0, "s", "", "", segments, tokens, declared=facts)


def prefill(cells: Any, name: str = "") -> StepRecord:
    """Return a prefill of two layers that executed the mask, with a fingerprint of it."""
    n = len(cells)
    name = name or sha1(np.packbits(cells).tobytes()).hexdigest()[:16]
    mask = MaskRecord(name, "block", 1, 1, n, n, 0, cells=np.asarray(cells)[None])
    calls = tuple(
        CallRecord(layer, "flex", "cpu", name, 1, 2, 2, n, n, 8, "float32", None)
        for layer in range(2)
    )
    return StepRecord(0, 0, "prefill", n, 0, n, 0.0, 1.0, 0.1, calls=calls, masks=(mask,))


def write(
    path: Path, cells: Any, texts: Sequence[str] = TEXTS, declared: Any = None, name: str = ""
) -> Path:
    """Write a finished trace of one prefill."""
    about = generation(texts, declared)
    with TraceWriter.create(path, {"level": "advanced", "rules": []}) as writer:
        writer.begin_generation(about)
        writer.write_step(prefill(cells, name))
        writer.end_generation(GenerationEnd(0, "finished", "", about.segments, "length"))
    return path
