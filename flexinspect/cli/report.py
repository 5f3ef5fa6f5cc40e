"""`flexinspect report`: a recorded run as one HTML file, to send to somebody."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from flexinspect.cli.flags import add_number_flags, add_switches
from flexinspect.cli.missing_rules import run_missing_rules
from flexinspect.cli.output import print_json, print_lines
from flexinspect.cli.progress import progress_bar
from flexinspect.core.text import ensure_printable, print_message

DESCRIPTION = """Write a recorded run to one HTML file that opens offline in any browser: the
findings first, then the text, masks, attention, probabilities, memory and kernel path of every
step, and the manifest. The file loads nothing from a network. Rules that have not checked the
trace yet run now, as with 'flexinspect findings'."""

EXAMPLES = """examples:
  flexinspect report run.flextrace                     (writes run.html)
  flexinspect report run.flextrace -o for-anna.html --title "One token off"
  flexinspect report run.flextrace --generation 3 --max-size 2
  flexinspect report run.flextrace --json | jq .bytes

exit codes: 0 success, 2 invalid request, a file is in the way, or the trace cannot be read or the
            report written
"""

DEFAULT_MAX_MB = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="the trace file")
    out = "the file (default: named after the trace, .html, in the current folder)"
    add("-o", "--out", metavar="FILE", type=Path, help=out)
    add("--title", metavar="TEXT", default="", help="the title (default: the name of the trace)")
    add_number_flags(parser, generation="only this generation (default: all)")
    size = (
        f"megabytes of the file (default: {DEFAULT_MAX_MB:g}); attention of some steps is left out"
    )
    add("--max-size", metavar="MB", type=_megabytes, default=DEFAULT_MAX_MB, help=size)
    add_switches(
        parser,
        overwrite="replace an existing report",
        no_review="only the stored findings; run no rules now",
        json="print file, size, notes and what was left out as JSON",
    )


def _megabytes(text: str) -> float:
    """Return a size above 0. Raises `ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of megabytes above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Write the report and return the exit code.

    Raises `UsageError` for an invalid request or a file in the way, and `TraceError`.
    """
    from flexinspect.exports.report.report_file import check_target, write_report
    from flexinspect.exports.report.trace_contents import ReportRequest
    from flexinspect.rules.engine import load_rules
    from flexinspect.trace.reader import open_trace

    out = args.out or Path(args.trace.with_suffix(".html").name)
    with open_trace(args.trace) as reader:
        check_target(out, overwrite=args.overwrite)
        if not args.no_review:
            run_missing_rules(reader, load_rules().rules)
        request = ReportRequest(args.title, args.generation, int(args.max_size * 1e6))
        with reader.snapshot(), progress_bar("reading the steps") as progress:
            written = write_report(reader, out, request, progress)
    for sentence in (*written.notes, *written.left_out):
        print_message(ensure_printable(sentence))
    if args.json:
        print_json(written)
    else:
        print_lines([f"{written.file} ({written.bytes / 1e6:.2f} MB)"])
    return 0
