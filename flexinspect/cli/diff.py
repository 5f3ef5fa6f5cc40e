"""`flexinspect diff`, also `compare`: what differs between two runs, and the first place."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flexinspect.cli.output import print_json, print_lines
from flexinspect.cli.progress import ProgressLine
from flexinspect.core.errors import UsageError

if TYPE_CHECKING:
    from flexinspect.analysis.run_diff.bisection import Bisection
    from flexinspect.analysis.run_diff.traces import Comparison

SLOW_BYTES = 40_000_000
"""The size of two traces together that are compared in about a second."""

DESCRIPTION = """Compare two traces that need not share a machine, a dtype or a kernel: generations
are aligned by prompt, then steps, layers and quantities. The report names the first place beyond
noise: step, layer, quantity, how much, and why. Noise comes from the dtypes of both, or from
repeats. Of two trainings, losses, learning rates and gradient norms are compared."""

EXAMPLES = """examples:
  flexinspect diff float32.flextrace bfloat16.flextrace
  flexinspect diff mine.flextrace plain.flextrace --generation 0
  flexinspect diff a.flextrace b.flextrace --noise a-again.flextrace
  flexinspect diff a.flextrace b.flextrace --ui
  flexinspect diff a.flextrace b.flextrace --bisect      # which module makes the difference
  flexinspect diff a.flextrace b.flextrace --json | jq '.generations[].first'

exit codes: 0 the same within noise (with --exact: in all bits), 1 they differ,
            2 a trace could not be read or the request is invalid
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a trace file")
    parser.add_argument("b", metavar="B", type=Path, help="the trace to compare it with")
    generation = "only this generation of A, with that of B which has the same prompt"
    parser.add_argument("--generation", metavar="N", type=int, help=generation)
    noise = "another recording of the same run as A: how it differs from A is noise"
    parser.add_argument("--noise", metavar="REPEAT", type=Path, help=noise)
    parser.add_argument("--exact", action="store_true", help="count noise as a difference")
    bisect = "run B again with A's tensors (level extreme), and name the module that differs"
    parser.add_argument("--bisect", action="store_true", help=bisect)
    parser.add_argument("--ui", action="store_true", help="look at both side by side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 1 when the traces differ.

    Raises `UsageError` for a generation that neither trace has, and `TraceError`.
    """
    if args.ui:
        return _open_screen(args)
    from flexinspect.analysis.run_diff import difference_text
    from flexinspect.analysis.run_diff.bisection import bisection_lines
    from flexinspect.analysis.run_diff.generations import DIFFERENT, ROUNDING
    from flexinspect.analysis.run_diff.traces import compare_traces
    from flexinspect.trace.reader import open_trace

    opened_repeat = nullcontext() if args.noise is None else open_trace(args.noise)
    opened = open_trace(args.a), open_trace(args.b), opened_repeat
    with (
        opened[0] as a,
        opened[1] as b,
        opened[2] as repeat,
        a.snapshot(),
        b.snapshot(),
        _progress(args),
    ):
        comparison = compare_traces(a, b, generation=args.generation, repeat=repeat)
    if args.json:
        bisection = {"bisection": _bisect(comparison, args).as_json()} if args.bisect else {}
        print_json({**comparison.as_json(), **bisection})
    else:
        print_lines(difference_text.comparison_lines(comparison))
        if args.bisect:
            print_lines(bisection_lines(_bisect(comparison, args)))
    if args.exact and comparison.verdict == ROUNDING and not args.json:
        print_lines(["With --exact, that is a difference."])
    failing = (DIFFERENT, *([ROUNDING] if args.exact else ()))
    return int(comparison.verdict in failing)


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[None]:
    """Show on a terminal that traces are read which take more than a second."""
    n_bytes = sum(path.stat().st_size for path in (args.a, args.b))
    with ProgressLine(is_shown=not args.json and n_bytes >= SLOW_BYTES) as line:
        line.show(f"comparing {n_bytes / 1e6:,.0f} MB of traces")
        yield


def _bisect(comparison: Comparison, args: argparse.Namespace) -> Bisection:
    """Run B again with A's tensors. Raises `UsageError` where that is not possible."""
    from flexinspect.analysis.run_diff.bisection import bisect_request
    from flexinspect.cli.live_run import ExperimentProgress
    from flexinspect.core import plugins

    request, progress = bisect_request(comparison), ExperimentProgress(quiet=args.json)
    with progress.shown:
        progress.show_phase("importing torch", {})
        bisect = plugins.load(plugins.CAPTURE, "bisect-runs")
        found = bisect(request, load_report=progress.show_phase, report=progress.report)
    return cast("Bisection", found)


def _open_screen(args: argparse.Namespace) -> int:
    """Show both traces side by side. Raises `UsageError` without a terminal."""
    for flag in ("json", "bisect", "noise"):
        if getattr(args, flag):
            raise UsageError(f"--ui and --{flag} exclude each other.")
    from flexinspect.cli.interface import open_comparison

    return open_comparison(args.a, args.b, args.generation or 0)
