"""How long commands take: to be answered, to stop the model, and to let it run again."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flexinspect
from flexinspect.control import discovery
from flexinspect.control.client import ControlClient
from flexinspect.control.messages import StepRef
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.control.step_barrier import StepBarrier

DEMO = Path(flexinspect.__file__).parent / "data" / "demo"
PROGRAM = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(DEMO)!r})
model = AutoModelForCausalLM.from_pretrained({str(DEMO)!r}).eval()
inputs = tokenizer("What is the capital of France?", return_tensors="pt")
while True:
    model.generate(**inputs, min_new_tokens=64, max_new_tokens=64, do_sample=False)
"""
PATIENCE_S = 120


def measure(rounds: int = 100) -> dict[str, Any]:
    """Command the demo model, which generates for ever, and return milliseconds."""
    folder = Path(tempfile.mkdtemp(prefix="fx"))
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    (folder / "endless.py").write_text(PROGRAM)
    args = ("-m", "flexinspect", "run", "--no-ui", "--level", "basic", "--out", "t.flextrace")
    process = subprocess.Popen(
        [sys.executable, *args, "endless.py"], cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        measured = _commands(_client(), rounds, folder / "t.flextrace")
        return {"milliseconds": measured, "barrier": _barrier_ns()}
    finally:
        process.terminate()  # it ends the program too, which would run for ever
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _client() -> ControlClient:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for entry in discovery.running():
            client = ControlClient(discovery.Address(entry.address.socket))
            if client.status().place.step > 0:
                return client
        time.sleep(0.05)
    raise SystemExit("the program did not begin")


def _commands(client: ControlClient, rounds: int, trace: Path) -> dict[str, Any]:
    answers, stops, asks, sent = [], [], [], []
    for _ in range(rounds):
        asks.append(_ms(client.status))
        started = time.perf_counter()
        client.pause()
        answers.append((time.perf_counter() - started) * 1e3)
        while client.status().state != "paused":
            time.sleep(0.001)
        stops.append((time.perf_counter() - started) * 1e3)
        sent.append(time.time())
        client.continue_()
        time.sleep(0.05)
    return {
        "status": _percentiles(asks),
        "pause to answer": _percentiles(answers),
        "pause to paused": _percentiles(stops),
        "continue to running": _percentiles(_delays(sent, trace)),
        "a step by itself": _step_ms(trace),
    }


def _delays(sent: Sequence[float], trace: Path) -> list[float]:
    """Return how long after each command the model's thread continued, by the trace."""
    with TraceReader(trace) as reader:
        resumed_at = [row.event.at for row in reader.events() if row.event.kind == "resumed"]
    return [(at - requested) * 1e3 for requested, at in zip(sent, resumed_at, strict=True)]


def _step_ms(trace: Path) -> dict[str, float]:
    """Return a decode step's time, which a pause has to wait for."""
    with TraceReader(trace) as reader:
        return _percentiles([step.wall_ms for step in reader.steps(0) if step.phase == "decode"])


def _ms(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "p95": round(sorted(values)[int(0.95 * (len(values) - 1))], 3),
    }


def _barrier_ns(n: int = 200_000) -> dict[str, float]:
    """Return what a step pays at a barrier that has no command, in nanoseconds."""
    barrier, place = StepBarrier(), StepRef()
    barrier.between_steps(place)
    started = time.perf_counter()
    for _ in range(n):
        barrier.between_steps(place)
    return {"nanoseconds per step": round((time.perf_counter() - started) / n * 1e9, 1)}
