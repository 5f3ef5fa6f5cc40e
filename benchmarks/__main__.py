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
    audit_trace,
    capture,
    control,
    distributed,
    doctor,
    engine,
    export_formats,
    growth,
    html_report,
    lab,
    masks,
    own,
    parts,
    peers,
    rewind,
    rules,
    scale,
    training,
    training_debuggers,
    tui,
    writing,
)
from benchmarks.common import NEW, bench_model, machine, real_model, save, thin_model
from benchmarks.generation_bugs import runner as generation_bugs
from benchmarks.training_bugs import inferred
from benchmarks.training_bugs import runner as training_bugs

THIN = "thin"
CASES: dict[str, Callable[[Any, argparse.Namespace], dict[str, Any]]] = {
    "engine-uncompiled": lambda model, a: engine.measure(
        model, a.seconds, a.tokens, compiled=False
    ),
    "engine-compiled": lambda model, a: engine.measure(model, a.seconds, a.tokens, compiled=True),
    "naive": lambda model, a: engine.measure_naive(model, a.tokens),
    "capture": lambda model, a: capture.measure(model, a.seconds, a.tokens, compiled=False),
    "capture-compiled": lambda model, a: capture.measure(model, a.seconds, a.tokens, compiled=True),
    "own": lambda model, a: own.measure(model, a.seconds, a.tokens),
    "own-steps": lambda model, a: own.measure_steps(model, a.seconds, a.tokens),
    "parts": lambda model, a: parts.measure(model, a.seconds),
    "peers": lambda model, a: peers.measure(model, a.seconds, a.tokens),
    "writing": lambda model, _: writing.measure(model),
}
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "capture": capture.table,
    "capture-compiled": capture.table,
    "own": capture.table,
    "own-steps": own.steps_table,
    "parts": parts.table,
    "peers": peers.table,
}
WITHOUT_MODEL: dict[str, Callable[[], Any]] = {
    "tui": tui.measure,
    "rules": rules.measure,
    "control": control.measure,
    "rewind": rewind.measure,
    "export-formats": export_formats.measure,
    "html-report": html_report.measure,
    "audit-trace": audit_trace.measure,
    "doctor": doctor.measure,
    "masks": masks.measure,
    "lab": lab.measure,
    "ray": distributed.measure,
}
TIMED: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], str]]] = {
    "training": (
        lambda args: training.measure(device=args.device, seconds=args.seconds),
        training.table,
    ),
    "training-debuggers": (
        lambda args: training_debuggers.measure(seconds=args.seconds),
        training_debuggers.table,
    ),
    "training-bugs": (lambda _: training_bugs.measure(), training_bugs.table),
    "generation-bugs": (lambda _: generation_bugs.measure(), generation_bugs.table),
    "inferred-invariants": (lambda _: inferred.measure(), inferred.table),
    "growth": (lambda args: growth.measure(args.steps), growth.table),
    "scale": (lambda _: scale.measure(), scale.table),
}
"""Cases that measure for a given time, and how their tables are made."""


def main() -> None:
    """Run the named cases on a quiet machine and save each as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [*CASES, *TIMED, *WITHOUT_MODEL]
    parser.add_argument("cases", nargs="*", default=known, metavar="CASE")
    parser.add_argument(
        "--seconds",
        type=float,
        default=180,
        help="of each case that runs in turns (default: %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=NEW, help="of a generation (%(default)s)")
    parser.add_argument("--steps", type=int, default=10_000, help="of growth (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--model",
        help="an alias, with random weights in bfloat16, or thin, whose steps are mostly Python "
        "(default: the small Llama)",
    )
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in known]
    if unknown:
        parser.error(f"unknown case {unknown[0]}; the cases are {', '.join(known)}")
    if len(args.cases) > 1:
        # A process each: compiling leaves thread pools that slow the cases after it.
        for name in args.cases:
            subprocess.run([sys.executable, "-m", "benchmarks", name, *_flags(args)], check=True)
        subprocess.run([sys.executable, "-m", "benchmarks.report"], check=True)
        return
    measure(args.cases[0], args)


def _flags(args: argparse.Namespace) -> list[str]:
    flags = [f"--threads={args.threads}", f"--device={args.device}", f"--seconds={args.seconds}"]
    flags += [f"--tokens={args.tokens}", f"--steps={args.steps}"]
    return flags + ([f"--model={args.model}"] if args.model else [])


def _model(args: argparse.Namespace) -> Any:
    if args.model is None:
        return bench_model(args.device)
    return thin_model(args.device) if args.model == THIN else real_model(args.model, args.device)


def measure(name: str, args: argparse.Namespace) -> None:
    """Run one case in this process and save its result."""
    if name in WITHOUT_MODEL:
        save(name, {"case": name, "machine": machine("cpu"), **WITHOUT_MODEL[name]()})
        return
    torch.set_num_threads(args.threads)
    file = name if args.threads == 2 else f"{name}-{args.threads}-threads"
    file += f"-{args.model}" if args.model else ""
    if name in TIMED:
        measured, table = TIMED[name]
        facts = measured(args)
        save(file, {"case": name, "machine": machine(args.device), **facts})
        print(table(facts), flush=True)
        return
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    facts = CASES[name](_model(args), args)
    save(file, {"case": name, "model": args.model, "machine": machine(args.device), **facts})
    if name in TABLES:
        print(TABLES[name](facts), flush=True)


if __name__ == "__main__":
    main()
