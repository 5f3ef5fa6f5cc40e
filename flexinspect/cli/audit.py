"""`flexinspect audit`: a program's steps beside an untouched copy of the model's architecture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flexinspect.cli import run_flags
from flexinspect.cli.flags import n_threads
from flexinspect.cli.output import errors_as_json, print_json, stdout_console
from flexinspect.core.errors import UsageError
from flexinspect.core.signals import is_signal_exit_code
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

Given a trace, the audit that was recorded in it is printed. Then the steps are judged
again: the model that the trace names is loaded, and runs over the tokens that were fed;
digests of the hidden states, which a trace has from level advanced on, are compared."""

EXAMPLES = """examples:
  flexinspect audit my_generation.py
  flexinspect audit --declare prompt.toml my_generation.py -- --its own --flags
  flexinspect audit --seconds 120 --reference-dtype float64 -m my_package.generate
  flexinspect audit run.flextrace
  flexinspect audit --stored run.flextrace                 # what was recorded, and no more
  flexinspect audit --model ./checkpoint run.flextrace     # weights that the trace does not name
  flexinspect audit --json my_generation.py | jq '.findings[].sentence'

docs/audit.md says what is compared, how noise is measured, and which faults are tried.

exit codes: 0 all judged steps agree, 1 one differs, or no step was judged (with
            --model: none of the trace again), 2 invalid request, 130 interrupted
"""
_DEFAULT_SECONDS = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [options] SCRIPT.py [--] [its arguments]\n"
        "       %(prog)s [options] -m MODULE [--] [its arguments]\n       %(prog)s [options] TRACE"
    )
    run_flags.add_program_flags(parser, 'the group "the audit"')
    _add_audit_flags(parser)


def _add_audit_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the audit of a program and of a trace."""
    add = parser.add_argument_group("the audit").add_argument
    seconds = f"for the audits of all generations (default: {_DEFAULT_SECONDS:g})"
    add("--seconds", type=float, default=_DEFAULT_SECONDS, metavar="S", help=seconds)
    dtype = "of the reference (default: float32)"
    add("--reference-dtype", choices=("float32", "float64"), default="float32", help=dtype)
    add("--out", metavar="FILE", help="the trace file (default: named after the program)")
    add("--threads", default=None, type=n_threads, help="CPU threads")
    add("--json", default=False, action="store_true", help="print the result as JSON")
    add = parser.add_argument_group("a trace").add_argument
    weights = "the weights of the run: demo, an alias, a folder or a hub id"
    # Not `model`, which is the flag of flexinspect's own generations.
    names = f"{weights} (default: what the trace names)"
    add("--model", dest="weights_of_trace", metavar="NAME", help=names)
    stored = "print only what the run's own audit said"
    add("--stored", default=False, action="store_true", help=stored)


def run(args: argparse.Namespace) -> int:
    """Print the audit; return 1 if a step differs, or if none was judged."""
    _take_flags_after_trace(args)
    with errors_as_json(args.json, audits=[], findings=[]):
        if not hasattr(args, "program") and not hasattr(args, "module"):
            raise UsageError("Name a script, -m MODULE or a trace to audit.")
        if not args.seconds > 0:
            raise UsageError("--seconds must be above 0.")
        path = _trace_of(args)
        judges_again = path is not None and not args.stored
        if judges_again and args.weights_of_trace is not None:
            _check_model(args.weights_of_trace)
        code = 0
        if path is None:
            path, code = _run_program(args)
        told = _stored(path)._replace(end_code=code, is_model_named=bool(args.weights_of_trace))
        if not args.json:
            if judges_again:
                _line("As the run's own audit found:")
            _show_stored(told)
        if judges_again:
            told = told._replace(again=_judge_trace(args, told.path))
    if args.json:
        _print_json(told)
    else:
        _show_again(told)
    return told.exit_code()


def _stored(path: Path) -> _Told:
    """Read what the run's own audit said."""
    from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AUDIT_SKIPPED_EVENT
    from flexinspect.trace.reader import open_trace

    with open_trace(path) as reader:
        kinds = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)
        audits = [row.event for row in reader.events() if row.event.kind in kinds]
        findings = [one for one in reader.findings() if one.id.startswith("audit.")]
        return _Told(path, audits, findings, _reason(reader))


def _trace_of(args: argparse.Namespace) -> Path | None:
    """Return the trace that was named instead of a program."""
    program = getattr(args, "program", None)
    if not program or not program[0].endswith(".flextrace"):
        return None
    if len(program) > 1:
        what = f"{escape_unprintable(program[1])} after the trace is unknown."
        raise UsageError(what, hint="Name one trace; flexinspect audit --help lists the flags.")
    return Path(program[0])


def _take_flags_after_trace(args: argparse.Namespace) -> None:
    """Move flags of ours that stand after a trace to `args`: it is no program to receive them."""
    program = getattr(args, "program", ())
    if program and program[0].endswith(".flextrace"):
        flags = argparse.ArgumentParser("flexinspect audit", add_help=False)
        _add_audit_flags(flags)
        _, args.program[1:] = flags.parse_known_args(program[1:], args)


def _check_model(name: str) -> None:
    """Raise `UsageError` if the weights that the user named are not on this machine."""
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.model_names import resolve

    if not name.strip():
        raise UsageError("--model needs a name.")
    if resolve(name, load_config()).where == "download":
        hint = f"Fetch it first: flexinspect fetch {name}"
        raise UsageError(f"The model {name} is not on this machine.", hint=hint)


def _judge_trace(args: argparse.Namespace, path: Path) -> Any:
    """Judge the steps of a trace by its digests, with progress on stderr."""
    from flexinspect.cli.live_run import ExperimentProgress
    from flexinspect.core import plugins
    from flexinspect.core.garbage_collection import no_garbage_collection

    progress = ExperimentProgress(quiet=args.json)
    with progress.shown:
        progress.show_phase("importing torch", {})
        with no_garbage_collection():
            audit = plugins.load(plugins.CAPTURE, "audit-trace")
        options = {"seconds": args.seconds, "dtype": args.reference_dtype}
        return audit(path, model=args.weights_of_trace, report=progress.report, **options)


def _run_program(args: argparse.Namespace) -> tuple[Path, int]:
    """Run the program under capture, with its output; return its trace and its exit code."""
    from msgspec.structs import replace

    from flexinspect.cli import run as run_command
    from flexinspect.cli.live_run import LiveRun, RunProgress
    from flexinspect.cli.output import stderr_console
    from flexinspect.launch.child_process import ScriptProcess, forward_signals
    from flexinspect.launch.crash import finish_trace
    from flexinspect.records.job import ScriptJob

    if args.weights_of_trace is not None or args.stored:
        raise UsageError("--model and --stored go with a trace, and a program was named.")
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
    return path, code if code >= 0 else 128 - code


def _reason(reader: TraceReader) -> str:
    """Return why a trace has no audit."""
    if reader.run().get("level") == "basic":
        return "Nothing was audited: at level basic no rows are kept."
    if reader.run().get("job") is not None:
        return "Nothing was audited: flexinspect's own generations are not, while they run."
    return "Nothing was audited: no model of transformers made a step, or the run was not audited."


class _Told(NamedTuple):
    """What the run's own audit said, and what `again` says: a `TraceAudit`, None if not asked."""

    path: Path
    audits: Sequence[EventRecord]
    findings: Sequence[Finding]
    reason: str
    again: Any = None
    end_code: int = 0
    """The exit code of the program that was run for the audit."""
    is_model_named: bool = False
    """Whether the user named the weights to judge the steps with."""

    def exit_code(self) -> int:
        """Return 1 if a step differs or none was judged, and 128 + n if signal n ended the run."""
        if is_signal_exit_code(self.end_code):
            return self.end_code
        audits, findings = list(self.audits), list(self.findings)
        if self.is_model_named:  # what the run's own audit judged is no answer
            audits.clear()
        if self.again is not None:
            audits += self.again.events
            findings += self.again.findings
        is_judged = any(event.data.get("steps") for event in audits)
        return int(not is_judged or any(one.severity is not Severity.NOTE for one in findings))


def _print_json(told: _Told) -> None:
    facts: dict[str, Any] = {
        "trace": str(told.path),
        "audits": [_event_facts(event) for event in told.audits],
        "findings": [_finding_facts(one) for one in told.findings],
        "steps_judged": _n_judged(told.audits),
    }
    if told.again is not None:
        facts["from_digests"] = {
            "audits": [_event_facts(event) for event in told.again.events],
            "findings": [_finding_facts(one) for one in told.again.findings],
            "steps_judged": _n_judged(told.again.events),
            "problems": [error.sentence() for error in told.again.problems],
        }
    print_json({**facts, "exit_code": told.exit_code()})


def _n_judged(audits: Sequence[EventRecord]) -> int:
    return sum(int(event.data.get("steps", 0)) for event in audits)


def _line(text: str) -> None:
    console = stdout_console()
    console.print(escape_unprintable(text), soft_wrap=True, markup=False, highlight=False)


def _show(audits: Sequence[EventRecord], findings: Sequence[Finding]) -> None:
    for one in sort_by_severity(findings):
        _line(f"{one.severity}  {one.id}  {one.sentence}")
    for event in audits:
        _line(event.text)


def _show_stored(told: _Told) -> None:
    _show(told.audits, told.findings)
    if not told.audits:
        _line(told.reason)


def _show_again(told: _Told) -> None:
    if told.again is not None:
        _line("From the digests of the trace:")
        _show(told.again.events, told.again.findings)
        for error in told.again.problems:
            _line(" ".join(filter(None, ("Not judged:", error.message, error.hint))))
    _line(f"trace {told.path}")


def _event_facts(event: EventRecord) -> Mapping[str, Any]:
    return {"generation": event.generation, "text": event.text, **event.data}


def _finding_facts(finding: Finding) -> Mapping[str, Any]:
    names = ("id", "sentence", "generation", "step", "layer", "positions", "evidence")
    facts = {name: getattr(finding, name) for name in names}
    return {**facts, "severity": str(finding.severity), "positions": list(finding.positions)}
