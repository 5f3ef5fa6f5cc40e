"""`python -m benchmarks scale`: whether the interface is as quick on a trace of a million steps.

In a pseudo-terminal, in turns within one run: traces of 200, 100 000 and 1 000 000 steps, and with
masks of 32 768 and 131 072 tokens squared. Ratios are to the trace of 200 steps. Then the interface
follows a run that records 1 000 steps a second. CPU time is that of the interface's process, so
that a loaded machine still gives it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from benchmarks.common import markdown
from benchmarks.terminal import Terminal
from flexinspect.core import plugins
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import RuleReview, TraceWriter, append_reviews

RIGHT = b"\x1b[C"
LOADED_S, COMPLETE_S = 2.0, 0.5
"""Silence after which a large mask has been read, and after which a screen is complete."""
IDLE_CPU_S = 0.02
"""CPU seconds within `LOADED_S` below which all is loaded."""
FRAME_S = 0.3
"""Silence after a frame, long enough that a loaded machine draws no two keys at once."""
N_ROUNDS, N_KEYS, N_WARM = 3, 20, 3
STEPS = {"200 steps": 200, "100,000 steps": 100_000, "1,000,000 steps": 1_000_000}
TOKENS = {"32,768² cells": 32_768, "131,072² cells": 131_072}
BASE = next(iter(STEPS))
TARGETS = {"key": 1.2, "opening": 1.5, "resident_mb": 150, "live_cpu_percent": 15}
RATE, LIVE_S, GROUP = 1_000, 20, 20
"""Steps a second of the live run, its seconds, and steps that are written at once."""


def measure(
    folder: Path | None = None,
    *,
    steps: Mapping[str, int] = STEPS,
    tokens: Mapping[str, int] = TOKENS,
    rounds: int = N_ROUNDS,
    live_s: float = LIVE_S,
) -> dict[str, Any]:
    """Return all figures; traces that are not yet in `folder` are made, which takes minutes."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="flexinspect-bench-")
    folder = folder or Path(tempfile.gettempdir()) / "flexinspect-bench"
    traces = make_traces(folder, steps, tokens)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in traces}
    for number in range(rounds):
        for name in list(traces) if number % 2 else list(traces)[::-1]:
            middle = steps.get(name, 2) // 2
            print(f"round {number + 1}, {name}", file=sys.stderr, flush=True)
            samples[name].append(open_and_step(traces[name], middle))
    return {"traces": summarize(samples), "live": follow_live(folder, live_s)}


def make_traces(
    folder: Path, steps: Mapping[str, int], tokens: Mapping[str, int]
) -> dict[str, Path]:
    """Make the traces that are not there yet, each marked as reviewed."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, n in steps.items():
        found[name] = path = folder / f"steps-{n}.flextrace"
        if not path.exists():
            synthetic.long_trace(path, steps=n)
            mark_reviewed(path)
    for name, n in tokens.items():
        found[name] = path = folder / f"tokens-{n}.flextrace"
        if not path.exists():
            synthetic.wide_trace(path, tokens=n)
            mark_reviewed(path)
    return found


def mark_reviewed(path: Path) -> None:
    """Store in a trace that all rules ran and found nothing more.

    Otherwise opening it would start them in another process, which takes longer than the benchmark.
    """
    rules = plugins.names(plugins.RULES)
    append_reviews(path, [RuleReview(name, 0, (), (), synthetic.STARTED_AT, 0.0) for name in rules])


def open_and_step(path: Path, step: int) -> dict[str, float]:
    """Open a trace and press keys; return seconds, CPU seconds of the process, and its bytes."""
    with Terminal(["open", str(path), "--step", str(step)]) as terminal:
        terminal.until(b"step ")
        header = time.perf_counter() - terminal.started
        terminal.drawn_cpu_s = terminal.cpu_s()
        rest = terminal.settle(silence=COMPLETE_S)
        opening_cpu = terminal.drawn_cpu_s
        _wait_until_idle(terminal)
        _press_keys(terminal, N_WARM)
        before = terminal.cpu_s()
        frames = _press_keys(terminal, N_KEYS)
        return {
            "opening_s": header + rest,
            "opening_cpu_s": opening_cpu,
            "key_s": statistics.median(frames),
            "key_cpu_s": (terminal.cpu_s() - before) / N_KEYS,
            "resident": terminal.resident(),
        }


def _wait_until_idle(terminal: Terminal) -> None:
    """Read until the process takes no CPU time any more: large masks are read in the background."""
    before = -1.0
    while terminal.cpu_s() - before > IDLE_CPU_S:
        before = terminal.cpu_s()
        terminal.drain(LOADED_S)


def _press_keys(terminal: Terminal, n: int) -> list[float]:
    """Press a key `n` times and return the seconds of each frame.

    A loaded machine may draw two keys at once; then the second has no frame of its own.
    """
    frames = []
    for _ in range(n):
        with suppress(TimeoutError):
            frames.append(terminal.frame(RIGHT, FRAME_S))
    if not frames:
        raise TimeoutError("the interface draws nothing after a key")
    return frames


def summarize(samples: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians, and medians of the ratios to the base trace of the same round."""
    base = samples[next(iter(samples))]
    found = {}
    for name, rounds in samples.items():
        one = {
            key: round(statistics.median(each[key] for each in rounds), 4)
            for key in ("opening_s", "opening_cpu_s", "key_s", "key_cpu_s")
        }
        one["resident_mb"] = round(max(each["resident"] for each in rounds) / 1e6, 1)
        for key in ("opening_s", "opening_cpu_s", "key_s", "key_cpu_s"):
            ratios = [each[key] / other[key] for each, other in zip(rounds, base, strict=True)]
            one[f"{key}_ratio"] = round(statistics.median(ratios), 3)
        found[name] = one
    return found


# -- a run that is recorded meanwhile -------------------------------------------------------------


def follow_live(folder: Path, seconds: float) -> dict[str, float]:
    """Follow a run while a process records it; return what that cost, and how late it ended.

    `behind_s` is from the last step to the last byte of the frame that shows it.
    """
    path = folder / "live.flextrace"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.scale", str(path), str(seconds)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()  # the trace is there
        with Terminal(["open", str(path)]) as terminal:
            terminal.until(b"step ")
            started, before = time.perf_counter(), terminal.cpu_s()
            writer.stdin.close()  # it records from here on, however long the viewer took to start
            while writer.poll() is None:
                terminal.drain(0.05)
            wall, cpu = time.perf_counter() - started, terminal.cpu_s() - before
            behind = terminal.settle(silence=LOADED_S)
            resident = terminal.resident()
        n_steps = int(writer.stdout.readline())
    return {
        "steps_per_s": round(n_steps / seconds),
        "cpu_percent": round(100 * cpu / wall, 1),
        "behind_s": round(behind, 2),
        "resident_mb": round(resident / 1e6, 1),
    }


def record_live(path: Path, seconds: float, wait: Callable[[], object] | None = None) -> int:
    """Record steps at `RATE` a second; return how many were written.

    With `wait`, it says when the first steps are written, and goes on once `wait` returns.
    """
    n = int(RATE * seconds)
    made = synthetic._Made(synthetic._prompt([50] * 5, n), n, thin=True)
    groups = [
        list(made.steps(start, min(start + GROUP, n))) for start in range(0, n, GROUP)
    ]  # made before, so that the time is that of writing
    run = synthetic._manifest(made) | {"pid": os.getpid(), "started_at": time.time()}
    with TraceWriter.create(path, run, overwrite=True) as writer:
        writer.write_event(EventRecord("phase", "generating", time.time()))
        writer.begin_generation(made.generation())
        writer.write_steps(groups[0])
        if wait is not None:
            print("recording", flush=True)
            wait()
        started = time.monotonic()
        for number, group in enumerate(groups[1:], 1):
            time.sleep(max(0.0, started + number * GROUP / RATE - time.monotonic()))
            writer.write_steps(group)
        writer.end_generation(made.end())
    return n


def table(facts: Mapping[str, Any]) -> str:
    """Return the figures as tables in Markdown."""
    head = ["trace", "open, s", "s of CPU", "ratio", "key, ms", "ms of CPU", "ratio", "MB"]
    rows = [
        [
            name,
            *(f"{one[key]:.2f}" for key in ("opening_s", "opening_cpu_s", "opening_cpu_s_ratio")),
            *(f"{1e3 * one[key]:.1f}" for key in ("key_s", "key_cpu_s")),
            *(f"{one['key_cpu_s_ratio']:.2f}", f"{one['resident_mb']:.0f}"),
        ]
        for name, one in facts["traces"].items()
    ]
    targets = ["target", "", "", f"{TARGETS['opening']}", "", "", f"{TARGETS['key']}"]
    live = facts["live"]
    text = (
        f"A run of {live['steps_per_s']:,} steps a second is followed at {live['cpu_percent']} % "
        f"of a core (target {TARGETS['live_cpu_percent']} %) with {live['resident_mb']:.0f} MB; "
        f"its last step is drawn {live['behind_s']} s after its end."
    )
    return f"{markdown(head, [*rows, [*targets, str(TARGETS['resident_mb'])]])}\n\n{text}"


if __name__ == "__main__":
    print(record_live(Path(sys.argv[1]), float(sys.argv[2]), sys.stdin.read), flush=True)
