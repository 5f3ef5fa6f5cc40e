"""What watching a training run costs: AdamW steps of two Llamas with and without, in turn.

Each block of watched steps lies between two plain ones. The wide model has few tokens for many
weights, which is the hard case: reading every gradient once costs the same, however long a step is.
It is trained with clipping too, which reads them anyway.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Block, Sandwich, cell, clocks, markdown, sandwiched
from flexinspect.records.step import LEVELS
from flexinspect_hooks.training.watch_training import TrainingWatch, watch_training

TRAINCHECK = {
    "BERT": 1.272,
    "DCGAN": 0.996,
    "GAT": 0.992,
    "GCN": 1.190,
    "MNIST": 1.728,
    "ResNet-18": 1.053,
    "siamese network": 1.032,
    "image classification": 1.239,
    "summarization": 1.010,
    "VAE": 1.089,
}
"""Step times with TrainCheck relative to those without, by workload, with selective
instrumentation for 100 invariants on a GPU: published figures, not measured here. From
github.com/OrderLab/TrainCheck, docs/assets/csv/overhead_e2e.csv at commit 3feda50e (July 2025)."""

WANTED = {"basic": 1.02, "advanced": 1.10, "extreme": 1.25}


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama, its batch, and the steps of a block.

    The steps before, in which a recorded training measures everything, are not timed.
    """

    hidden: int
    layers: int
    vocabulary: int
    batch: int
    length: int
    clips: bool = False
    steps: int = 10  # weights are compared, and parameters recorded, in every tenth step


N_BEFORE = 14  # steps before those that are timed; at "basic" less is measured after the first 12

# In short steps the level "basic" measures 4 of every 32 steps, so a block has as many.
SIZES = {
    "wide": Size(hidden=512, layers=8, vocabulary=4096, batch=2, length=96),
    "clipping": Size(hidden=512, layers=8, vocabulary=4096, batch=2, length=96, clips=True),
    "usual": Size(hidden=256, layers=6, vocabulary=2048, batch=4, length=128),
    "short": Size(hidden=256, layers=6, vocabulary=2048, batch=2, length=96, steps=32),
}


class Training:
    """A model in training, one block of steps after the other."""

    def __init__(self, device: str, size: Size) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.hidden * 43 // 16,
            num_hidden_layers=size.layers,
            num_attention_heads=size.hidden // 64,
            num_key_value_heads=size.hidden // 128,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).to(device).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._ids = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
        self._device, self._clips, self._n_steps = device, size.clips, size.steps

    def plain(self) -> Block:
        """Train without capture."""
        self._step()  # warms up
        return self._block(None)

    def watched(self, level: str) -> Block:
        """Train while it is recorded; opening and closing the trace is not timed."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "training.flextrace"
            with watch_training(
                self.model, self._optimizer, out=path, level=level, quiet=True
            ) as trace:
                for _ in range(N_BEFORE):
                    self._step()
                return self._block(trace)

    def _block(self, trace: TrainingWatch | None) -> Block:
        self._wait()
        spent, total = _stated(trace)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._n_steps):
            self._step()
        self._wait()
        wall = time.perf_counter() - wall
        after, total_after = _stated(trace)  # all is written then: the writer counts as CPU too
        cpu = time.process_time() - cpu
        return Block(wall, cpu, (after - spent) / max(total_after - total - after + spent, 1e-9))

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = self.model(self._ids, labels=self._ids).loss
        loss.backward()
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def _wait(self) -> None:
        # Not after each step, which would hide where capture makes the next one wait.
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()


def _stated(trace: TrainingWatch | None) -> tuple[float, float]:
    """Return the seconds that a run says it took so far, and those of its steps together."""
    if trace is None:
        return 0.0, 0.0
    trace.reader().close()  # waits for the writer
    cost = trace.cost
    ratio, total = float(cost["ratio"]), float(cost["total_s"])
    return total * ratio / (1 + ratio), total


def measure(*, device: str = "cpu", seconds: float) -> dict[str, Any]:
    """Return the ratio of watched to plain steps: wall clock, CPU, and as the run states it."""
    return {name: _measure(size, device, seconds / len(SIZES)) for name, size in SIZES.items()}


def _measure(size: Size, device: str, seconds: float) -> dict[str, Any]:
    training = Training(device, size)
    cases: dict[str, Callable[[], Block]] = {
        level: partial(training.watched, level) for level in LEVELS
    }
    blocks = sandwiched(training.plain, cases, seconds=seconds)
    return {
        "parameters": sum(one.numel() for one in training.model.parameters()),
        "tokens_per_step": size.batch * size.length,
        "clips": size.clips,
        "step_ms_without": _step_ms(blocks, size.steps),
        "levels": {level: clocks(blocks[level]) for level in LEVELS},
    }


def _step_ms(blocks: dict[str, list[Sandwich]], steps: int) -> float:
    plain = sorted(one.bottom("wall") for found in blocks.values() for one in found)
    return round(plain[len(plain) // 2] / steps * 1e3, 1)


def table(facts: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    head = ["model", "level", "wall clock", "CPU of the process", "stated by the run", "target"]
    rows = [_row(facts[size], level) for size in SIZES for level in LEVELS]
    return f"{markdown(head, rows)}\n\n{cited()}"


def cited() -> str:
    """State the published overhead of TrainCheck; other machines, other programs."""
    low, high = min(TRAINCHECK.values()), max(TRAINCHECK.values())
    worst = max(TRAINCHECK, key=TRAINCHECK.__getitem__)
    return (
        f"For comparison, as published and not measured here: TrainCheck with selective "
        f"instrumentation for 100 invariants takes {low:.2f} to {high:.2f} of the time of a step "
        f"({len(TRAINCHECK)} workloads on a GPU, median {median(TRAINCHECK.values()):.2f}, most "
        f"{worst}; OrderLab/TrainCheck, docs/assets/csv/overhead_e2e.csv)."
    )


def _row(size: dict[str, Any], level: str) -> list[str]:
    found = size["levels"][level]
    model = (
        f"{size['parameters'] / 1e6:.0f} million weights, {size['tokens_per_step']} tokens, "
        f"{size['step_ms_without']:.0f} ms{', clipping' if size['clips'] else ''}"
    )
    figures = [cell(found["wall"]), cell(found["cpu"]), f"{found['stated']:.3f}"]
    return [model, level, *figures, f"{WANTED[level]:.2f}"]
