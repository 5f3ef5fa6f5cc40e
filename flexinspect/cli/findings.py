"""`flexinspect findings`: the findings of a trace as text, or in formats for scripts and CI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.cli.missing_rules import run_missing_rules
from flexinspect.cli.output import print_json, stdout_console
from flexinspect.records.finding import Severity

if TYPE_CHECKING:
    from flexinspect.analysis.reports.collect import FindingFilter, Report
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Print the findings of a trace, most severe first, with the evidence, why
it matters, how to confirm it and what usually fixes it. Rules that have not
checked the trace yet (offline-only rules, and rules installed since) run now,
and their findings are stored in it."""

EXAMPLES = """examples:
  flexinspect findings run.flextrace
  flexinspect findings run.flextrace --id 'mask.*' --severity error
  flexinspect findings run.flextrace --json | jq -r '.findings[].sentence'
  flexinspect findings run.flextrace --fail-on warning --junit > findings.xml
  flexinspect findings run.flextrace --sarif > findings.sarif
  flexinspect findings traces/         # of the ranks of a distributed run

exit codes: 0 no finding as severe as --fail-on, 1 at least one,
            2 the trace could not be read or the request is invalid
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    severities = [str(severity) for severity in Severity]
    trace = "the trace file, or a folder with the traces of the ranks of a distributed run"
    add("trace", metavar="TRACE", type=Path, help=trace)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--sarif", action="store_true", help="print a SARIF 2.1.0 log")
    forms.add_argument("--junit", action="store_true", help="print JUnit XML")
    fails = "exit with 1 for a finding this severe or more (default: error)"
    add("--fail-on", choices=[*severities, "never"], default=str(Severity.ERROR), help=fails)
    add("--generation", metavar="N", type=int, help="only findings of this generation")
    only_ids = "only these ids, with shell wildcards: mask.*"
    add("--id", metavar="PATTERN", action="append", default=[], help=only_ids)
    only_severity = "only this severity (may be repeated)"
    add("--severity", choices=severities, action="append", default=[], help=only_severity)
    add("--no-review", action="store_true", help="only the stored findings; run no rules now")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when a finding is as severe as `--fail-on`.

    Raises `UsageError` for a generation that does not exist, and `TraceError`.
    """
    from flexinspect.analysis.reports.collect import FindingFilter

    selection = FindingFilter(args.generation, tuple(args.id), tuple(map(Severity, args.severity)))
    threshold = None if args.fail_on == "never" else Severity(args.fail_on)
    if args.trace.is_dir():
        report = _report_on_ranks(args, selection)
    else:
        report = _report_on_trace(args.trace, selection, reviews=not args.no_review)
    from flexinspect.analysis.reports import machine_formats, plain_text

    if args.json or args.sarif:
        print_json((machine_formats.as_json if args.json else machine_formats.as_sarif)(report))
    elif args.junit:
        sys.stdout.write(machine_formats.as_junit(report, threshold))
    else:
        plain_text.print_report(report, stdout_console())
    return 1 if report.reaches(threshold) else 0


def _report_on_trace(trace: Path, selection: FindingFilter, *, reviews: bool) -> Report:
    """Return the report on a trace; with `reviews`, rules that have not checked it run now."""
    from flexinspect.analysis.reports.collect import collect_report
    from flexinspect.rules.engine import load_rules
    from flexinspect.trace.reader import open_trace

    rules = load_rules()
    with open_trace(trace) as reader:
        notes = [f"The rule '{name}' could not run: {why}" for name, why in rules.failed.items()]
        notes += _state_notes(reader)
        if reviews:
            notes += run_missing_rules(reader, rules.rules)
        return collect_report(reader, selection, rules.rules, notes)


def _report_on_ranks(args: argparse.Namespace, selection: FindingFilter) -> Report:
    """Return one report on all ranks of the newest run in a folder."""
    from flexinspect.analysis.ranks.rank_run import find_run
    from flexinspect.analysis.reports.collect import merge_reports

    run, notes = find_run(args.trace)
    reports = {
        one.rank: _report_on_trace(one.path, selection, reviews=not args.no_review)
        for one in run.traces
    }
    return merge_reports(args.trace.absolute(), reports, notes)


def _state_notes(reader: TraceReader) -> list[str]:
    from flexinspect.analysis.reports.collect import describe_import
    from flexinspect.core.environment import is_recorder_alive

    if source := describe_import(reader.run()):
        return [source]
    if reader.state != "recording":
        return []
    if is_recorder_alive(reader.run()):
        checked = "offline rules have checked only the generations that have ended"
        return [f"The trace is still being recorded: {checked}."]
    return ["The process that recorded it ended without finishing the trace."]
