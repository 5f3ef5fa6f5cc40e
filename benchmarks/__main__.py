"""`python -m benchmarks [CASE ...]`: run all benchmarks, or those named."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import (
    capture,
    control,
    doors,
    engine,
    own,
    rules,
    training,
    travel,
    tui,
    writing,
)
from benchmarks.common import bench_model, machine, real_model, save

CASES: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "engine-uncompiled": lambda model, rounds: engine.measure(model, rounds=rounds, compiled=False),
    "engine-compiled": lambda model, rounds: engine.measure(model, rounds=rounds, compiled=True),
    "naive": lambda model, rounds: engine.measure_naive(model),
    "capture": lambda model, rounds: capture.measure(model, rounds=rounds),
    "capture-compiled": lambda model, rounds: capture.measure(model, rounds=rounds, compiled=True),
    "own": lambda model, rounds: own.measure(model, rounds=rounds),
    "writing": lambda model, rounds: writing.measure(model),
}
WITHOUT_MODEL: dict[str, Callable[[], Any]] = {
    "tui": tui.measure,
    "rules": rules.measure,
    "control": control.measure,
    "travel": travel.measure,
}
TIMED: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], str]]] = {
    "training": (
        lambda args: training.measure(device=args.device, seconds=args.seconds),
        training.table,
    ),
    "doors": (lambda args: doors.measure(seconds=args.seconds), doors.table),
}
"""Cases that measure for as long as they are told, and how their tables are made."""


def main() -> None:
    """Run the named cases on a quiet machine and save each as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*CASES, *TIMED, *WITHOUT_MODEL]
    parser.add_argument("cases", nargs="*", default=known, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--seconds", type=float, default=180, help="of training and of doors (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--model", help="an alias, with random weights in bfloat16 (default: the small Llama)"
    )
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in known]
    if unknown:
        parser.error(f"unknown case {unknown[0]}; the cases are {', '.join(known)}")
    if len(args.cases) > 1:
        # A process each: compiling leaves pools of threads behind that slow what comes after.
        for name in args.cases:
            subprocess.run([sys.executable, "-m", "benchmarks", name, *_flags(args)], check=True)
        return
    measure(args.cases[0], args)


def _flags(args: argparse.Namespace) -> list[str]:
    flags = [f"--rounds={args.rounds}", f"--threads={args.threads}", f"--device={args.device}"]
    flags.append(f"--seconds={args.seconds}")
    return flags + ([f"--model={args.model}"] if args.model else [])


def measure(name: str, args: argparse.Namespace) -> None:
    """Run one case in this process and save its result."""
    if name in WITHOUT_MODEL:
        save(name, {"case": name, "machine": machine("cpu"), **WITHOUT_MODEL[name]()})
        return
    torch.set_num_threads(args.threads)
    file = name if args.threads == 2 else f"{name}-{args.threads}-threads"
    if name in TIMED:
        measured, table = TIMED[name]
        facts = measured(args)
        save(file, {"case": name, "machine": machine(args.device), **facts})
        print(table(facts), flush=True)
        return
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    model = real_model(args.model, args.device) if args.model else bench_model(args.device)
    facts = CASES[name](model, args.rounds)
    save(file, {"case": name, "model": args.model, "machine": machine(args.device), **facts})


if __name__ == "__main__":
    main()
