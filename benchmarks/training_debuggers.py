"""What the training debuggers cost: each level and each switch, with one thread of torch.

Two encoders are trained on random sequences: one whose step takes 50 ms or more, one whose step
takes a few. Each block of steps with a debugger, or with a switch, lies between two without. What
the calls of the debugger take by themselves is measured too: other work changes that least.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Block, cell, clocks, markdown, sandwiched
from flexinspect.records.debug_switches import SWITCHES, DebugLevel, short_name
from flexinspect_hooks.training_debuggers import (
    SwitchBoard,
    TrainingDebugger,
    TrainingLoop,
    debug_logging,
)

SIZES = {"large": (256, 4, 32), "small": (64, 2, 16)}
"""Name → width, layers, tokens of a sequence; eight sequences make a batch."""
CLASSES = 4
STEPS = {"large": 4, "small": 20}
"""Steps in one block of one case: all of them in the first window of the profiler's switches."""
SHARES = {("large", "levels"): 0.3, ("large", "switches"): 0.45}
"""Parts of the time; the others share the rest."""
WANTED = {"basic": 1.02, "advanced": 1.10, "extreme": 1.25}
"""Of steps of 50 ms and more."""


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

    def plain(self) -> float:
        """Train on the batches without anything of ours."""
        self.model.train()
        for inputs, labels in self.batches:
            self._backward(inputs, labels)
            self.optimizer.step()
        return 0.0

    def monitored(self, debugger: TrainingDebugger) -> float:
        """Train with a call of the debugger per step; returns the CPU seconds of the calls."""
        self.model.train()
        calls = 0.0
        for step, (inputs, labels) in enumerate(self.batches):
            loss = self._backward(inputs, labels)
            started = time.thread_time()
            debugger.monitor_training_step(self.model, loss, step)
            calls += time.thread_time() - started
            self.optimizer.step()
        return calls

    def _backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        torch.autograd.backward(loss)
        return loss


def measure(*, seconds: float) -> dict[str, Any]:
    """Measure both sizes, with one torch thread."""
    torch.set_num_threads(1)
    return {size: _measure(Bench(size), seconds) for size in SIZES}


def _measure(bench: Bench, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in bench.model.parameters())}
    with tempfile.TemporaryDirectory() as folder, debug_logging(Path(folder) / "debug.log"):
        for kind, cases in (
            ("levels", _levels(bench)),
            ("switches", _switches(bench, Path(folder))),
        ):
            plain, *others = cases
            blocks = sandwiched(
                cases[plain],
                {name: cases[name] for name in others},
                seconds=seconds * SHARES.get((bench.size, kind), 0.125),
            )
            found[kind] = {name: clocks(each) for name, each in blocks.items()}
            if kind == "levels":
                steps = sorted(one.bottom("cpu") for each in blocks.values() for one in each)
                found["step_ms"] = round(steps[len(steps) // 2] / STEPS[bench.size] * 1e3, 2)
    return found


def _timed(work: Callable[[], float]) -> Block:
    """Run a block; `work` returns the CPU seconds of the debugger's own calls, if it knows them."""
    wall, cpu = time.perf_counter(), time.process_time()
    calls = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Block(wall, cpu, calls / max(cpu - calls, 1e-9))


def _levels(bench: Bench) -> dict[str, Callable[[], Block]]:
    """Return the cases of the levels, the first without the debugger."""
    cases: dict[str, Callable[[], Block]] = {"off": partial(_timed, bench.plain)}
    for level in DebugLevel:
        debugger = TrainingDebugger(level, switches=SwitchBoard())
        cases[level.value] = partial(_timed, partial(bench.monitored, debugger))
    return cases


def _switches(bench: Bench, folder: Path) -> dict[str, Callable[[], Block]]:
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

    def run(switch: str) -> float:
        with turned(switch):
            loop.train_epoch(bench.batches, bench.batches[:1])
        return 0.0

    names = ["", *SWITCHES]
    return {short_name(name) or "off": partial(_timed, partial(run, name)) for name in names}


def table(facts: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown: the larger model's first."""
    sizes = [facts[size] for size in SIZES]
    head = [""]
    for found in sizes:
        step = f"{found['parameters'] / 1e6:.1f} million weights, {found['step_ms']:.0f} ms"
        head += [f"{step}: wall clock", "CPU of the process", "the calls alone"]
    rows = [
        _row(name, [found[kind][name] for found in sizes])
        for kind in ("levels", "switches")
        for name in sizes[0][kind]
    ]
    return markdown([*head, "target"], rows)


def _row(name: str, of_sizes: list[dict[str, Any]]) -> list[str]:
    row = [name if name in WANTED else f"`{name}`"]
    for found in of_sizes:
        stated = f"{found['stated']:.3f}" if "stated" in found else ""
        row += [cell(found["wall"]), cell(found["cpu"]), stated]
    return [*row, f"{WANTED[name]:.2f}" if name in WANTED else ""]
