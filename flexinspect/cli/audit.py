"""`flexinspect audit`: a program's steps beside an untouched copy of the model's architecture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli import run_flags
from flexinspect.cli.flags import n_threads
from flexinspect.cli.output import errors_as_json, print_json, stdout_console
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Severity, sort_by_severity

if TYPE_CHECKING:
    from flexinspect.records.finding import Finding
    from flexinspect.records.step import EventRecord
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Run a program of your own, and compare the numbers of its own steps with an
untouched copy of the model's architecture: same weights, the ids that were fed, at
positions 0 to n-1, the declared mask or the architecture's own, no cache, eager, eval.
The first quantity that differs beyond measured noise is reported, and faults are put
into the copy until one gives the program's numbers. What was not judged is listed.
Given a trace, the audit that was recorded in it is printed."""

EXAMPLES = """examples:
  flexinspect audit my_generation.py
  flexinspect audit --declare prompt.toml my_generation.py -- --its own --flags
  flexinspect audit --seconds 120 --reference-dtype float64 -m my_package.generate
  flexinspect audit run.flextrace
  flexinspect audit --json my_generation.py | jq '.findings[].sentence'

docs/audit.md says what is compared, how noise is measured, and which faults are tried.

exit codes: 0 all judged steps agree, 1 one differs, or no step was judged,
            2 invalid request, 130 interrupted
"""
_DEFAULT_SECONDS = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [options] SCRIPT.py [--] [its arguments]\n"
        "       %(prog)s [options] -m MODULE [--] [its arguments]\n       %(prog)s TRACE"
    )
    run_flags.add_program_flags(parser)
    add = parser.add_argument_group("the audit").add_argument
    seconds = f"for the audits of all generations (default: {_DEFAULT_SECONDS:g})"
    add("--seconds", type=float, default=_DEFAULT_SECONDS, metavar="S", help=seconds)
    dtype = "of the reference (default: float32)"
    add("--reference-dtype", choices=("float32", "float64"), default="float32", help=dtype)
    add("--out", metavar="FILE", help="the trace file (default: named after the program)")
    add("--threads", default=None, type=n_threads, help="CPU threads")
    add("--json", default=False, action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the audit; return 1 if a step differs, or if none was judged."""
    with errors_as_json(args.json, audits=[], findings=[]):
        if not hasattr(args, "program") and not hasattr(args, "module"):
            raise UsageError("Name a script, -m MODULE or a trace to audit.")
        path = _trace_of(args)
        if path is None:
            path = _run_program(args)
    from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AUDIT_SKIPPED_EVENT
    from flexinspect.trace.reader import open_trace

    with open_trace(path) as reader:
        kinds = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)
        audits = [row.event for row in reader.events() if row.event.kind in kinds]
        findings = [one for one in reader.findings() if one.id.startswith("audit.")]
        return _print(args, path, audits, findings, _reason(reader))


def _trace_of(args: argparse.Namespace) -> Path | None:
    """Return the trace that was named instead of a program."""
    program = getattr(args, "program", None)
    if not program or not program[0].endswith(".flextrace"):
        return None
    if len(program) > 1:
        raise UsageError("A trace takes no arguments.", hint="Name one trace, or a script.")
    return Path(program[0])


def _run_program(args: argparse.Namespace) -> Path:
    """Run the program under capture, with its output, and return its trace."""
    from msgspec.structs import replace

    from flexinspect.cli import run as run_command
    from flexinspect.cli.live_run import LiveRun, RunProgress
    from flexinspect.cli.output import stderr_console
    from flexinspect.launch.child_process import ScriptProcess, forward_signals
    from flexinspect.launch.crash import finish_trace
    from flexinspect.records.job import ScriptJob

    if not args.seconds > 0:
        raise UsageError("--seconds must be above 0.")
    options = run_command.program_options(args)
    job = ScriptJob(
        out=args.out or "",
        threads=args.threads,
        audit_seconds=args.seconds,
        audit_dtype=args.reference_dtype,
        **options,
    )
    if not job.out:
        job = replace(job, out=run_command.new_trace(Path(job.program).stem))
    run_command.check_trace(job)
    forward_signals(process := ScriptProcess(job, stdout=2 if args.json else 1))
    progress = RunProgress(stderr_console(), quiet=True)
    with progress:
        code = LiveRun(process, progress).watch()
    path = finish_trace(process, code)
    if path is None:
        reason = process.state.error or process.describe_exit(code)
        raise UsageError(f"The program left no trace: {reason}")
    return path


def _reason(reader: TraceReader) -> str:
    """Return why a trace has no audit."""
    if reader.run().get("level") == "basic":
        return "Nothing was audited: at level basic no rows are kept."
    return "Nothing was audited: no model of transformers made a step, or the run was not audited."


def _print(
    args: argparse.Namespace,
    path: Path,
    audits: Sequence[EventRecord],
    findings: Sequence[Finding],
    reason: str,
) -> int:
    n_judged = sum(int(event.data.get("steps", 0)) for event in audits)
    code = int(not n_judged or any(one.severity is not Severity.NOTE for one in findings))
    if args.json:
        print_json(
            {
                "trace": str(path),
                "audits": [_event_facts(event) for event in audits],
                "findings": [_finding_facts(one) for one in findings],
                "steps_judged": n_judged,
                "exit_code": code,
            }
        )
        return code
    console = stdout_console()

    def line(text: str) -> None:
        console.print(escape_unprintable(text), soft_wrap=True, markup=False, highlight=False)

    for one in sort_by_severity(findings):
        line(f"{one.severity}  {one.id}  {one.sentence}")
    for event in audits:
        line(event.text)
    if not audits:
        line(reason)
    line(f"trace {path}")
    return code


def _event_facts(event: EventRecord) -> Mapping[str, Any]:
    return {"generation": event.generation, "text": event.text, **event.data}


def _finding_facts(finding: Finding) -> Mapping[str, Any]:
    names = ("id", "sentence", "generation", "step", "layer", "positions", "evidence")
    facts = {name: getattr(finding, name) for name in names}
    return {**facts, "severity": str(finding.severity), "positions": list(finding.positions)}
