"""What watching a training run costs: AdamW steps of a small Llama with and without, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import milliseconds, ratio
from flexinspect.records import LEVELS
from flexinspect_hooks.training.watching import watch_training

BATCH, LENGTH, VOCABULARY = 2, 96, 4096
STEPS, SETTLING = 8, 2
"""Steps of a block, and how many of its first ones are left out: the first learns the order."""


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of each step of a block, and CPU seconds of the whole process for all of them."""

    steps: tuple[float, ...]
    cpu: float
    stated: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds of all steps."""
        return sum(self.steps)


class Training:
    """A model in training, one block of steps after the other."""

    def __init__(self, device: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).to(device).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
        self._device = device

    def plain(self) -> Block:
        """Train without anybody watching."""
        return self._block()

    def watched(self, level: str, band: float | None = None) -> Block:
        """Train while it is recorded; opening and closing the trace is not timed."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "training.flextrace"
            with watch_training(
                self.model, self._optimizer, out=path, level=level, band=band, quiet=True
            ) as trace:
                block = self._block()
            return Block(block.steps, block.cpu, float(trace.cost["ratio"]))

    def _block(self) -> Block:
        seconds: list[float] = []
        cpu = 0.0
        for number in range(STEPS):
            if number == SETTLING:
                cpu = time.process_time()
            started = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - started)
        return Block(tuple(seconds[SETTLING:]), time.process_time() - cpu)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = self.model(self._ids, labels=self._ids).loss
        loss.backward()
        self._optimizer.step()
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()


def measure(*, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Return the ratio of watched to plain steps per level: wall clock, CPU, and as stated."""
    training = Training(device)
    cases: dict[str, Callable[[], Block]] = {"without": training.plain}
    for level in LEVELS:
        cases[level] = lambda level=level: training.watched(level)  # type: ignore[misc]
    blocks: dict[str, list[Block]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        order = list(cases) if number % 2 == 0 else list(reversed(cases))
        for name in order:
            block = cases[name]()
            if number:  # the first round warms up
                blocks[name].append(block)
    plain = blocks["without"]
    facts: dict[str, Any] = {
        "parameters": sum(one.numel() for one in training.model.parameters()),
        "tokens_per_step": BATCH * LENGTH,
        "step_ms_without": milliseconds([s for block in plain for s in block.steps]),
    }
    for level in LEVELS:
        facts[level] = _compared(blocks[level], plain)
    return facts


def _compared(watched: list[Block], plain: list[Block]) -> dict[str, Any]:
    return {
        "wall": ratio([block.wall for block in watched], [block.wall for block in plain]),
        "cpu": ratio([block.cpu for block in watched], [block.cpu for block in plain]),
        "stated": round(1 + statistics.median(block.stated for block in watched), 4),
    }
