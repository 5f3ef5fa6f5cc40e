"""`flexinspect findings`: what is wrong in a trace, for people, for scripts and for CI."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.records.finding import Severity

if TYPE_CHECKING:
    from flexinspect.analysis.offline_rules import ProgressCallback
    from flexinspect.analysis.reports.collect import Report
    from flexinspect.rules.engine import Rule
    from flexinspect.trace.reader import TraceReader

_DESCRIPTION = """Print what the rules found wrong in a trace, the worst first, with the
numbers behind it, why it matters, how to confirm it and what usually fixes it.
Rules that have not looked at the trace yet (those that take too long for a
running model, and those installed since) look now, and what they say is stored
in it."""

_EPILOG = """examples:
  flexinspect findings run.flextrace
  flexinspect findings run.flextrace --id 'mask.*' --severity error
  flexinspect findings run.flextrace --json | jq -r '.findings[].sentence'
  flexinspect findings run.flextrace --fail-on warning --junit > findings.xml
  flexinspect findings run.flextrace --sarif > findings.sarif

exit codes: 0 nothing as bad as --fail-on, 1 something is,
            2 the trace cannot be read or the request makes no sense
"""

_PROGRESS_AFTER_S = 1.0
NEVER = "never"


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    add = parser.add_argument
    severities = [str(severity) for severity in Severity]
    add("trace", metavar="TRACE", type=Path, help="the trace file")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--sarif", action="store_true", help="print a SARIF 2.1.0 log")
    forms.add_argument("--junit", action="store_true", help="print JUnit XML")
    add(
        "--fail-on",
        choices=[*severities, NEVER],
        default=str(Severity.ERROR),
        help="exit with 1 when something this bad or worse is found (default: error)",
    )
    add("--generation", metavar="N", type=int, help="only of this generation")
    add("--id", metavar="PATTERN", action="append", help="only these ids, as in a shell: mask.*")
    add("--severity", choices=severities, action="append", help="only these (may be repeated)")
    add("--no-review", action="store_true", help="only what the trace holds; no rule looks now")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report and return 1 when something reaches the bar.

    Raises `UsageError` for a generation that does not exist and `TraceError` for a file that is no
    trace or is damaged.
    """
    from flexinspect.analysis.reports.collect import FindingFilter, collect_report
    from flexinspect.rules.engine import load_rules
    from flexinspect.trace.reader import open_trace

    wanted = FindingFilter(
        args.generation, tuple(args.id or ()), tuple(map(Severity, args.severity or ()))
    )
    bar = None if args.fail_on == NEVER else Severity(args.fail_on)
    known = load_rules()
    with open_trace(args.trace) as reader:
        notes = [f"The rule '{name}' cannot look: {why}" for name, why in known.failed.items()]
        notes += _state_notes(reader)
        if not args.no_review:
            notes += run_missing_rules(reader, known.rules)
        report = collect_report(reader, wanted, known.rules, notes)
    _print(args, report, bar)
    return 1 if report.reaches(bar) else 0


def run_missing_rules(reader: TraceReader, rules: Sequence[Rule]) -> list[str]:
    """Let rules look that have not yet; returns what there is to say about it.

    What they say and the trace cannot hold, the reader holds from then on.
    """
    from flexinspect.analysis.offline_rules import review
    from flexinspect.trace.file.writer import review_statements

    with _progress() as progress:
        done = review(reader, rules, progress=progress)
    if done.unstored:
        reader.add_reviews(review_statements(done.unstored))
    return [done.note] if done.note else []


def _state_notes(reader: TraceReader) -> list[str]:
    from flexinspect.core.environment import is_recorder_alive

    if reader.state != "recording":
        return []
    if is_recorder_alive(reader.run()):
        told = "rules that look afterwards have looked at generations that are over alone"
        return [f"The trace is still being recorded: {told}."]
    return ["The process that recorded it is gone without having ended it."]


@contextmanager
def _progress() -> Iterator[ProgressCallback | None]:
    """Show how far the rules are, on a terminal and once that takes longer than a second."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task, started = bar.add_task("rules look at the steps"), time.monotonic()

    def told(done: int, total: int) -> None:
        if bar.live.is_started or time.monotonic() - started > _PROGRESS_AFTER_S:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield told
    finally:
        if bar.live.is_started:
            bar.stop()


def _print(args: argparse.Namespace, report: Report, bar: Severity | None) -> None:
    if args.json or args.sarif:
        from flexinspect.analysis.reports.machine_formats import as_json, as_sarif

        said = as_json(report) if args.json else as_sarif(report)
        print(json.dumps(said, indent=2, allow_nan=False))
    elif args.junit:
        from flexinspect.analysis.reports.machine_formats import as_junit

        sys.stdout.write(as_junit(report, bar))
    else:
        from flexinspect.analysis.reports.plain_text import print_report
        from flexinspect.cli.output import Output

        print_report(report, Output())
