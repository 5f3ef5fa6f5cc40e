"""`flexinspect compare`: the differences between two runs, and where they begin."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Compare two traces step by step: prompts, tokens, logits, masks, kernel paths, and
the output of each layer with the layer's share of the difference. A difference from rounding grows
evenly over the layers; a different mask makes it jump in one of them."""

_EPILOG = """examples:
  flexinspect compare float32.flextrace bfloat16.flextrace
  flexinspect compare mine.flextrace plain.flextrace --generation 0
  flexinspect compare a.flextrace b.flextrace --json | jq '.generations[].parted_at'

exit codes: 0 the same tokens and masks (numbers may differ by rounding, unless --exact is given),
            1 they differ, 2 a trace could not be read or the request is invalid
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("a", metavar="A", type=Path, help="a trace file")
    parser.add_argument("b", metavar="B", type=Path, help="the trace to compare it with")
    parser.add_argument("--generation", metavar="N", type=int, help="only this generation of both")
    parser.add_argument("--exact", action="store_true", help="count rounding as a difference")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 1 when the traces differ.

    Raises `UsageError` for a generation that neither trace has, and `TraceError` for a file that is
    damaged or not a trace.
    """
    from flexinspect.analysis.compare_traces import (
        DIFFERENT,
        ROUNDING,
        compare_traces,
        comparison_lines,
    )
    from flexinspect.core.text import escape_unprintable
    from flexinspect.trace.reader import open_trace

    with open_trace(args.a) as a, open_trace(args.b) as b, a.snapshot(), b.snapshot():
        comparison = compare_traces(a, b, generation=args.generation)
    if args.json:
        json.dump(_json_safe(comparison.as_json()), sys.stdout, ensure_ascii=False, indent=2)
        sys.stdout.write("\n")
    else:
        for line in comparison_lines(comparison):
            print(escape_unprintable(line))
    failing = (DIFFERENT, ROUNDING) if args.exact else (DIFFERENT,)
    return int(comparison.verdict in failing)


def _json_safe(value: Any) -> Any:
    """Return a value that strict JSON can represent: NaN and infinities become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return value
