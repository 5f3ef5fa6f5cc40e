"""CPU time of the audit's digests in the model's thread: `python -m benchmarks.audit_digests`.

The demo model decodes under capture at level advanced; of each two steps in a row one has its
digests switched off, so that both kinds have the same load of the machine around them. The call
that makes the digests is timed by itself, too, with outputs of larger models, and beside the floor:
a stack of the newest rows and a product with a matrix of eight columns.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexinspect
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.hidden_digests import N_SUMS, HiddenDigests

STEP_US = 15_000
SHAPES = {"demo": (4, 192), "1B": (16, 2048), "3B": (28, 3072), "8B": (32, 4096)}
N_CALLS = 2000


def cpu_us(call: Callable[[], object]) -> float:
    """Return the thread's CPU time of a call in microseconds."""
    started = time.thread_time()
    call()
    return (time.thread_time() - started) * 1e6


def measure_calls(layers: int, hidden: int) -> tuple[float, float]:
    """Return the medians of the digests of one decode step, and of the floor, in microseconds."""
    outputs = [torch.randn(1, 1, hidden) for _ in range(layers)]
    kept: list[tuple[int, Tensor, int | None]] = [(n, o, None) for n, o in enumerate(outputs)]
    matrix, digests = torch.randn(hidden, N_SUMS), HiddenDigests()
    stack = torch.stack([output[0] for output in outputs]).flatten(1)
    step = StepContext(0, 1, "decode", 1, 40, "advanced")
    model, ours, floor = torch.nn.Identity(), [], []
    for _ in range(N_CALLS):
        buffer = StepBuffer(torch.device("cpu"))
        buffer.owner = digests
        ours.append(cpu_us(lambda buffer=buffer: digests.reduce(kept, stack, model, step, buffer)))  # type: ignore[misc]
        floor.append(cpu_us(lambda: torch.stack([o[0, 0] for o in outputs]) @ matrix))
    return statistics.median(ours), statistics.median(floor)


def measure_steps(n_pairs: int) -> tuple[float, float, float]:
    """Return what digests take in a decode step, and add to its CPU time, in microseconds.

    The first is the median time of the call within the step, where caches are cold. The second is
    the median difference of two steps in a row, one with digests, in random order; the third the
    standard error of this median, which other load of the machine makes large.
    """
    from transformers import AutoModelForCausalLM

    from flexinspect.inputs.model_names import DEMO

    model = AutoModelForCausalLM.from_pretrained(DEMO).eval()
    order = random.Random(0)
    chosen = {2 * pair + order.randrange(2) for pair in range(n_pairs)}
    original, times, calls = HiddenDigests.reduce, list[float](), list[float]()

    def in_chosen_steps(self: HiddenDigests, *args: Any) -> None:
        if args[3].step in chosen:
            calls.append(cpu_us(lambda: original(self, *args)))

    HiddenDigests.reduce = in_chosen_steps  # type: ignore[assignment,method-assign]
    try:
        with (
            torch.no_grad(),
            tempfile.TemporaryDirectory() as folder,
            flexinspect.watch(model, out=Path(folder) / "t.flextrace"),
        ):
            rows, past = torch.arange(3, 40)[None], None
            for _ in range(2 * n_pairs):
                started = time.thread_time()
                output = model(rows, past_key_values=past, use_cache=True)
                times.append((time.thread_time() - started) * 1e6)
                past, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)
    finally:
        HiddenDigests.reduce = original  # type: ignore[method-assign]
    pairs = zip(times[4::2], times[5::2], range(4, 2 * n_pairs, 2), strict=True)
    added = [one - other if step in chosen else other - one for one, other, step in pairs]
    low, middle, high = statistics.quantiles(added, n=4)
    # Of normal values: a median's error is 1.25 times a mean's, quartiles are 1.35 apart.
    error = 1.25 * (high - low) / 1.35 / len(added) ** 0.5
    return statistics.median(calls[2:]), middle, error


def main() -> None:
    """Print all measurements."""
    torch.set_num_threads(1)
    call, added, error = measure_steps(1000)
    print(
        f"demo model: {call:.1f} us within a step; whole steps differ by {added:.0f} us "
        f"(standard error {error:.0f} us)"
    )
    print("| layers x hidden | digests | stack and product | share of 15 ms |")
    print("|---|---|---|---|")
    for layers, hidden in SHAPES.values():
        ours, floor = measure_calls(layers, hidden)
        share = ours / STEP_US
        print(f"| {layers} x {hidden} | {ours:.1f} us | {floor:.1f} us | {share:.3%} |")


if __name__ == "__main__":
    main()
