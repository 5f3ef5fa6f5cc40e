"""A small trace with gradients in it, made without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from flexinspect.records.step import GradientRecord, GradientStat
from flexinspect.trace.file.writer import TraceWriter
from support.traces import LAYERS, N_PROMPT, RUN, sample_generation, sample_step

PARTS = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "mlp": "mlp.up_proj", "norm": "norm"}


def gradients(step: int = 0, **changes: Any) -> GradientRecord:
    """Return gradients of a step's token: "Emma" (7 to 9) contributes, the cue acts against it."""
    n = N_PROMPT + step
    signed = np.zeros(n, np.float32)
    signed[6:9], signed[12] = 0.2, -0.4
    tokens = np.stack([signed, np.full(n, 1 / n, np.float32)])
    stats = [
        GradientStat(
            f"model.layers.{layer}.{name}.weight", 0.5 * (layer + 1), 0.1, 0, 0, layer, part
        )
        for layer in range(LAYERS)
        for part, name in PARTS.items()
    ]
    stats.append(GradientStat("lm_head.weight", 3.0, 1.0, 0, 0, None, "lm_head"))
    layers = np.array([9.0, *(0.4 / (1 + layer) for layer in range(LAYERS))], np.float32)
    made = GradientRecord(
        *(0, step, 50 + step, "logprob", -0.1, 0.5, "dense reference", 2e-7, 1e-3, 12.5),
        stats=tuple(stats),
        tokens=tokens,
        layers=layers,
    )
    return replace(made, **changes)


def red(step: int) -> GradientRecord:
    """Return what is recorded after a failed check."""
    return gradients(step, logits_error=0.3, stats=(), tokens=None, layers=None)


def nonfinite(step: int) -> GradientRecord:
    """Return gradients of which layer 1's have NaN, and layer 2's none at all."""
    stats = []
    for stat in gradients(step).stats:
        if stat.layer == 1 and stat.part == "q":
            stat = replace(stat, norm=math.nan, max=math.nan, n_nan=4)
        if stat.layer == 2:
            stat = replace(stat, norm=0.0, max=0.0)
        stats.append(stat)
    return gradients(step, stats=tuple(stats))


def grads_trace(path: Path, *records: GradientRecord, steps: int = 4) -> Path:
    """Write a trace of one generation with these gradients after its steps."""
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(sample_generation(0))
        for step in range(steps):
            writer.write_step(sample_step(step))
        for record in records:
            writer.write_gradients(record)
    return path
