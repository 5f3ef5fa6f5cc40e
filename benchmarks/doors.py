"""What the training debuggers cost: each level and each switch, in CPU time of one thread.

Two encoders are trained on random sequences: one whose step takes 50 ms or more, one whose step
takes a few. Steps with and without are interleaved; the ratio is of neighbouring rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.debugging import SWITCHES, DebugLevel, short_name
from flexinspect_hooks.doors import SwitchBoard, TrainingDebugger, TrainingLoop, debug_logging

SIZES = {"large": (256, 4, 32), "small": (64, 2, 16)}
"""Name → width, layers, tokens of a sequence; eight sequences make a batch."""
CLASSES = 4
STEPS = {"large": 4, "small": 10}
"""Steps in one round of one case: all of them in the first window of the profiler's switches."""


class Encoder(nn.Module):
    """A classifier of sequences: embedding, encoder layers, mean, linear."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores (batch, classes) of ids (batch, tokens)."""
        scores: Tensor = self.classifier(self.layers(self.embed(ids)).mean(1))
        return scores


@dataclass
class Bench:
    """One model with its data, trained by our loop."""

    size: str

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        width, layers, tokens = SIZES[self.size]
        self.model = Encoder(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        ids = torch.randint(1000, (STEPS[self.size], 8, tokens))
        self.batches = [(one, one[:, 0] % CLASSES) for one in ids]

    def plain(self) -> None:
        """Train on the batches without anything of ours."""
        self.model.train()
        for inputs, labels in self.batches:
            self._backward(inputs, labels)
            self.optimizer.step()

    def monitored(self, debugger: TrainingDebugger) -> None:
        """Train with a call of the debugger per step."""
        self.model.train()
        for step, (inputs, labels) in enumerate(self.batches):
            loss = self._backward(inputs, labels)
            debugger.monitor_training_step(self.model, loss, step)
            self.optimizer.step()

    def _backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        return loss


def measure(rounds: int = 5) -> dict[str, Any]:
    """Measure both sizes; every figure is of CPU time, with one torch thread."""
    torch.set_num_threads(1)
    times = {"large": 1, "small": 4}  # a short round says less
    return {size: _measure(Bench(size), times[size] * rounds) for size in SIZES}


def _measure(bench: Bench, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, debug_logging(Path(folder) / "debug.log"):
        levels, base = _compared(_levels(bench), rounds)
        switches, _ = _compared(_switches(bench, Path(folder)), rounds)
    return {
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "step_ms": base / STEPS[bench.size] * 1e3,
        "rounds": rounds,
        "levels": levels,
        "switches": switches,
    }


def _levels(bench: Bench) -> dict[str, Callable[[], None]]:
    """Return the cases of the levels, the first without the debugger."""
    cases: dict[str, Callable[[], None]] = {"off": bench.plain}
    for level in DebugLevel:
        debugger = TrainingDebugger(level, switches=SwitchBoard())
        cases[level.value] = lambda debugger=debugger: bench.monitored(debugger)  # type: ignore[misc]
    return cases


def _switches(bench: Bench, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the cases of the switches, the first with all of them off, all at BASIC."""
    board = SwitchBoard()
    scheduler = torch.optim.lr_scheduler.StepLR(bench.optimizer, 1000)
    loop = TrainingLoop(
        bench.model,
        bench.optimizer,
        nn.functional.cross_entropy,
        scheduler=scheduler,
        switches=board,
        profile_folder=folder,
    )

    @contextmanager
    def turned(switch: str) -> Iterator[None]:
        board.enable_debugging([switch] if switch else [])
        try:
            yield
        finally:
            board.disable_debugging()

    def run(switch: str) -> None:
        with turned(switch):
            loop.train_epoch(bench.batches, bench.batches[:1])

    names = ["", *SWITCHES]
    return {short_name(name) or "off": lambda name=name: run(name) for name in names}  # type: ignore[misc]


def _compared(cases: dict[str, Callable[[], None]], rounds: int) -> tuple[dict[str, Any], float]:
    """Return each case's ratios to the first, which is run right before or after each of them."""
    first, *others = cases
    ratios: dict[str, list[float]] = {name: [] for name in others}
    bases: list[float] = []
    for number in range(rounds + 1):  # the first round warms up
        for name in others:
            order = (first, name) if number % 2 else (name, first)
            seconds = {each: _timed(cases[each]) for each in order}
            if number:
                ratios[name].append(seconds[name] / seconds[first])
                bases.append(seconds[first])
    return {name: _spread(found) for name, found in ratios.items()}, statistics.median(bases)


def _timed(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _spread(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def table(facts: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown, one column per size."""
    heads = [
        f"{found['parameters'] / 1e6:.1f} million parameters, {found['step_ms']:.0f} ms"
        for found in facts.values()
    ]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for kind in ("levels", "switches"):
        first = next(iter(facts.values()))[kind]
        for name in first:
            cells = [_cell(found[kind][name]) for found in facts.values()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, float]) -> str:
    def percent(ratio: float) -> str:
        return f"{(ratio - 1) * 100:+.1f} %"

    return f"{percent(found['ratio'])} ({percent(found['low'])} to {percent(found['high'])})"
