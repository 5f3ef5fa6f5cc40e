"""Traces of ranks for the viewer's tests: recorded ones, and training steps with given times.

`tests/fixtures/ranks` was recorded by `rank_programs.PROGRAM`: `answer` by 2 ranks with the words
`generate tiny watch differ`, `train` by 4 with `train late drift`, `died` by 4 with `train die`.
Paths of the machine that recorded them were replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from flexinspect.records.collectives import (
    CALLS_STREAM,
    KINDS,
    TIMES_STREAM,
    WEIGHTS_STREAM,
    group_number,
)
from flexinspect.records.step import ArrayRecord, GenerationEnd, GenerationRecord, StepRecord
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.file.writer import TraceWriter
from support.paths import TESTS

RECORDED = TESTS / "fixtures" / "ranks"
Call = tuple[str, float, float]
"""A collective call: kind, and when the rank entered and left it."""


def unpack(name: str, folder: Path) -> Path:
    """Write the recorded traces of a run into a folder, and return it."""
    for packed in sorted((RECORDED / name).glob("*.zst")):
        (folder / packed.stem).write_bytes(zstandard.decompress(packed.read_bytes()))
    return folder


def write_training(
    path: Path,
    rank: int,
    world_size: int,
    *,
    n_steps: int = 3,
    calls: Mapping[int, Sequence[Call]] | None = None,
    steps: Mapping[int, dict[str, Any]] | None = None,
    weights: Mapping[int, int] | None = None,
    state: str = "finished",
    group: Sequence[int] | None = None,
    **facts: Any,
) -> Path:
    """Write a training of one rank with a loss of its own.

    `calls` are its collective calls by step, `steps` changed fields of its steps, `weights` changed
    sums of its weights, `group` the ranks of its process group (default: all).
    """
    run = {"rank": rank, "world_size": world_size, "started_at": 1000.0, **facts}
    number = group_number(range(world_size) if group is None else group)
    generation = GenerationRecord(
        0, "training", "", "", (), (), declared={"training": {"groups": ["layer"]}}
    )
    writer = TraceWriter.create(path, run)
    writer.begin_generation(generation)
    for step in range(n_steps):
        fields = {"total_norm": 3.0, "group_norms": (3.0,), **(steps or {}).get(step, {})}
        record = TrainingStepRecord(1.0 + rank + step, "reported", (0.1,), **fields)
        sums = np.array([(weights or {}).get(step, 77 + step)], np.int64)
        arrays = [ArrayRecord(WEIGHTS_STREAM, sums), *_collectives(calls, step, number)]
        place = (0, step, "train", 0, 0, 0, 1000.0 + step, 10.0, 0.1)
        writer.write_step(StepRecord(*place, training=record, arrays=tuple(arrays)))
    if state == "recording":
        writer._db.close()  # as a killed process leaves it
        return path
    reason = "RuntimeError: Connection closed by peer" if state == "failed" else ""
    writer.end_generation(GenerationEnd(0, state, "", (), reason, 1010.0))
    writer.close(state)
    return path


def _collectives(
    calls: Mapping[int, Sequence[Call]] | None, step: int, group: int
) -> list[ArrayRecord]:
    own = (calls or {}).get(step, ())
    if not own:
        return []
    facts = np.array([(KINDS.index(kind), 64, group) for kind, _, _ in own], np.int64)
    times = np.array([(entered, left) for _, entered, left in own], np.float64)
    return [ArrayRecord(CALLS_STREAM, facts), ArrayRecord(TIMES_STREAM, times)]
