"""What the rules cost: each live rule at a decode step, and all rules over a finished trace.

The steps are those of a real run of the demo model with random weights, which does not repeat
itself at once as the trained one does after its answer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from flexinspect.records.step import GenerationRecord, StepRecord
from flexinspect.rules.engine import Rule, RuleRunner, load_rules
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.replay import branch_start_record, replay

STEPS = 500
ROUNDS = 7
MOST_S = 5.0
"""What all rules over a trace of `STEPS` steps may take."""


def measure() -> dict[str, Any]:
    """Return CPU time per step of the live rules, and wall time of all rules over the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.flextrace"
        _record(path)
        with open_trace(path) as reader:
            return _measured(reader)


def _record(path: Path) -> None:
    args = "run --model demo --weights random --dataset demo --max-samples 1 --stop eos --no-ui"
    command = [sys.executable, "-m", "flexinspect", *args.split(), "--out", str(path)]
    command += ["--max-new-tokens", str(STEPS)]
    subprocess.run(command, check=True, capture_output=True)


def _measured(reader: TraceReader) -> dict[str, Any]:
    begun = branch_start_record(reader, reader.generations()[0], reader.branches(0)[0])
    found = (reader.record(0, number) for number in range(reader.n_steps(0)))
    steps = [replace(step, findings=(), events=()) for step in found if step is not None]
    live = [rule for rule in load_rules().rules if not rule.offline_only]
    each = {rule.name: _per_step_us([rule], begun, steps) for rule in live}
    slowest = sorted(each, key=lambda name: -each[name])[:5]
    return {
        "steps": len(steps),
        "live_rules": len(live),
        "all_live_us_per_step": _per_step_us(live, begun, steps),
        "slowest_us_per_step": {name: each[name] for name in slowest},
        "rules": len(load_rules().rules),
        "all_over_the_trace_s": round(statistics.median(_afterwards(reader) for _ in range(3)), 3),
        "bound_s": MOST_S,
    }


def _per_step_us(
    rules: Sequence[Rule], begun: GenerationRecord, steps: Sequence[StepRecord]
) -> float:
    """Return the CPU time of a step in µs, warm: the median of `ROUNDS` passes over all steps."""
    spent = []
    for _ in range(ROUNDS):
        runner = RuleRunner([type(rule)() for rule in rules])
        runner.on_generation_start(begun)
        started = time.thread_time()
        for step in steps:
            runner.on_step(step)
        spent.append(time.thread_time() - started)
    return round(1e6 * statistics.median(spent) / len(steps), 1)


def _afterwards(reader: TraceReader) -> float:
    """Return the seconds in which all rules look at the trace, reading it included."""
    started = time.perf_counter()
    runner = RuleRunner([type(rule)() for rule in load_rules().rules])
    row = reader.generations()[0]
    runner.on_generation_start(branch_start_record(reader, row, reader.branches(0)[0]))
    for record in replay(reader, 0, runner.streams):
        if isinstance(record, StepRecord):
            runner.on_step(record)
    runner.on_generation_end()
    return time.perf_counter() - started
