"""`flexinspect dump`: a trace as text, or as JSON for programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """Print a trace: the manifest, then for each generation its segments, tokens and
steps with candidates, attention calls, layer statistics and memory, then masks, findings and
events. Works on a finished trace and on one that is being recorded."""

EXAMPLES = """examples:
  flexinspect dump run.flextrace | less
  flexinspect dump run.flextrace --step 3
  flexinspect dump run.flextrace --generation 1 --json | jq '.steps[].candidates[0].text'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace file")
    parser.add_argument("--generation", metavar="N", type=int, help="only this generation")
    parser.add_argument("--step", metavar="N", type=int, help="only this step (0 is the prefill)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the trace, or the selected part of it, on stdout.

    Raises `UsageError` for a step or generation that does not exist, and `TraceError`.
    """
    from flexinspect.trace.reader import open_trace
    from flexinspect.trace.trace_dump import DumpSelection, dump_json, dump_text

    with open_trace(args.trace) as reader, reader.snapshot():
        selection = DumpSelection(reader, generation=args.generation, step=args.step)
        sys.stdout.writelines(dump_json(selection) if args.json else dump_text(selection))
        sys.stdout.flush()
    return 0
