"""`flexinspect compare`: the differences between two runs, and where they begin."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexinspect.cli.output import print_json, print_lines
from flexinspect.core.errors import UsageError

DESCRIPTION = """Compare two traces step by step: prompts, tokens, logits, masks, kernel paths, and
the output of each layer with the layer's share of the difference. A difference from rounding grows
evenly over the layers; a different mask makes it jump in one of them."""

EXAMPLES = """examples:
  flexinspect compare float32.flextrace bfloat16.flextrace
  flexinspect compare mine.flextrace plain.flextrace --generation 0
  flexinspect compare a.flextrace b.flextrace --ui
  flexinspect compare a.flextrace b.flextrace --json | jq '.generations[].parted_at'

exit codes: 0 the same tokens and masks (numbers may differ by rounding, unless --exact is given),
            1 they differ, 2 a trace could not be read or the request is invalid
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a trace file")
    parser.add_argument("b", metavar="B", type=Path, help="the trace to compare it with")
    parser.add_argument("--generation", metavar="N", type=int, help="only this generation of both")
    parser.add_argument("--exact", action="store_true", help="count rounding as a difference")
    parser.add_argument("--ui", action="store_true", help="look at both side by side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 1 when the traces differ.

    Raises `UsageError` for a generation that neither trace has, and `TraceError`.
    """
    if args.ui:
        return _open_screen(args)
    from flexinspect.analysis import compare_traces as analysis
    from flexinspect.trace.reader import open_trace

    with open_trace(args.a) as a, open_trace(args.b) as b, a.snapshot(), b.snapshot():
        comparison = analysis.compare_traces(a, b, generation=args.generation)
    if args.json:
        print_json(comparison.as_json())
    else:
        print_lines(analysis.comparison_lines(comparison))
    failing = (analysis.DIFFERENT, *([analysis.ROUNDING] if args.exact else ()))
    return int(comparison.verdict in failing)


def _open_screen(args: argparse.Namespace) -> int:
    """Show both traces side by side. Raises `UsageError` without a terminal."""
    if args.json:
        raise UsageError("--ui and --json exclude each other.")
    from flexinspect.cli.interface import open_comparison

    return open_comparison(args.a, args.b, args.generation or 0)
