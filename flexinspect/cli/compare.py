"""`flexinspect compare`: what differs between two runs, and where it begins."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Compare two traces step by step: prompts, tokens, logits, masks, paths, and each
layer's output with what that layer added to the difference. Rounding grows evenly over the layers,
another mask jumps in one of them."""

_EPILOG = """examples:
  flexinspect compare float32.flextrace bfloat16.flextrace
  flexinspect compare mine.flextrace plain.flextrace --generation 0
  flexinspect compare a.flextrace b.flextrace --json | jq '.generations[].parted_at'

exit codes: 0 the same tokens and masks (numbers may differ by rounding; with --exact they may
            not), 1 they differ, 2 a trace cannot be read or the request makes no sense
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("a", metavar="A", type=Path, help="a trace file")
    parser.add_argument("b", metavar="B", type=Path, help="the other one")
    parser.add_argument("--generation", metavar="N", type=int, help="only this generation of both")
    parser.add_argument("--exact", action="store_true", help="let rounding count as a difference")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 when the two differ.

    Raises `UsageError` for a generation that neither has and `TraceError` for a file that is no
    trace or is damaged.
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
        found = compare_traces(a, b, generation=args.generation)
    if args.json:
        json.dump(_json_safe(found.as_json()), sys.stdout, ensure_ascii=False, indent=2)
        sys.stdout.write("\n")
    else:
        for line in comparison_lines(found):
            print(escape_unprintable(line))
    wrong = (DIFFERENT, ROUNDING) if args.exact else (DIFFERENT,)
    return int(found.verdict in wrong)


def _json_safe(value: Any) -> Any:
    """Return what JSON can hold: numbers that are none as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_safe(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(one) for one in value]
    return value
