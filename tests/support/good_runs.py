"""Traces of small trainings with given numbers and calls, from which invariants are learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from flexinspect.records.collectives import WEIGHTS_STREAM
from flexinspect.records.step import (
    ArrayRecord,
    EventRecord,
    GenerationEnd,
    GenerationRecord,
    StepRecord,
)
from flexinspect.records.training_step import CALLS_EVENT, PARAMETERS_EVENT, TrainingStepRecord
from flexinspect.trace.file.writer import TraceWriter

CALLS = ("zero_grad", "forward", "backward", "clip_grad_norm_", "optimizer.step")
PARAMETERS = {
    "first.weight": {"dtype": "float32", "size": [8, 4], "group": 0},
    "second.weight": {"dtype": "float32", "size": [4, 1], "group": 0},
}
INPUTS = {"input_ids": ["int64", 4, 16], "labels": ["int64", 4, 16]}
Change = Callable[[int, dict[str, Any]], object]


def write_run(
    path: Path,
    seed: int,
    change: Change | None = None,
    *,
    n_steps: int = 60,
    rank: int | None = None,
    calls: Mapping[int, Sequence[str]] | None = None,
    facts: Mapping[int, Mapping[str, Any]] | None = None,
    parameters: Mapping[str, Any] = PARAMETERS,
    weights: Mapping[int, int] | None = None,
    name: str = "training Net",
    state: str = "finished",
) -> Path:
    """Write a training whose loss falls from about 2 to about 0.5, with noise of the seed.

    `change` may change the fields of the record of a step, `calls` and `facts` are those of the
    event of a step, `weights` changed sums of the bits of weights.
    """
    random = Random(seed)
    run = {} if rank is None else {"rank": rank, "world_size": 2, "started_at": 1000.0}
    with TraceWriter.create(path, run) as writer:
        declared = {"training": {"groups": ["first", "second"]}}
        writer.begin_generation(GenerationRecord(0, name, "", "", (), (), declared=declared))
        last: dict[str, Any] = {}
        for step in range(n_steps):
            fields = _fields(step, n_steps, random)
            if change is not None:
                change(step, fields)
            events = [_event(PARAMETERS_EVENT, 0, {"parameters": parameters})] * (step == 0)
            now = {"calls": [*(calls or {}).get(step, CALLS)], "modes": ["training"]}
            now |= {"repeated_batches": 0, "inputs": INPUTS, **(facts or {}).get(step, {})}
            if now != last:
                events.append(_event(CALLS_EVENT, step, now))
                last = now
            sums = np.array([(weights or {}).get(step, 7 + step), 9], np.int64)
            arrays = (ArrayRecord(WEIGHTS_STREAM, sums),) if rank is not None else ()
            place = (0, step, "train", 0, 0, 0, 1000.0 + step, 10.0 + random.random(), 0.1)
            record = TrainingStepRecord(**fields)
            writer.write_step(
                StepRecord(*place, training=record, arrays=arrays, events=tuple(events))
            )
        writer.end_generation(GenerationEnd(0, state, "", (), "", 2000.0))
        writer.close(state)
    return path


def _event(kind: str, step: int, data: Mapping[str, Any]) -> EventRecord:
    return EventRecord(kind, kind, 0.0, 0, step, data)


def _fields(step: int, n_steps: int, random: Random) -> dict[str, Any]:
    norms = (random.uniform(0.8, 1.2), random.uniform(0.3, 0.5))
    total = float(np.hypot(*norms))
    rate = 0.01 * (1 - step / n_steps)
    return {
        "loss": (0.5 + 1.5 * 0.95**step) * random.uniform(0.9, 1.1),
        "loss_source": "backward",
        "learning_rates": (rate, rate / 10),
        "total_norm": min(total, 1.0),
        "norm_before_clip": total,
        "max_norm": 1.0,
        "n_parameters": 2,
        "group_norms": norms,
        "group_ratios": (0.01 * rate, 0.02 * rate) if step % 10 == 0 else (),
        "n_backward": 1,
    }
