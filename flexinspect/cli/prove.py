"""`flexinspect prove`: run a model and test its behaviour, independent of the declared mask."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

from flexinspect.cli import run as run_command
from flexinspect.cli import run_flags
from flexinspect.cli.flags import n_threads, positive_int
from flexinspect.cli.output import errors_as_json, print_json, stdout_console
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Severity, sort_by_severity
from flexinspect.records.job import Job, ScriptJob

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = (
    "Run a paraphrase-ensemble generation under FlexAttention and prove one property of it.\n"
    "isolation: changing the tokens of a segment changes no row that must not attend to it,\n"
    "in any layer. order: the next token's logits stay the same when paraphrases are swapped.\n"
    "kernel: the attention weights recovered from each call equal those that are displayed.\n"
    "cache: decode steps equal a full recompute. Given a program of your own, it runs up to\n"
    "its first call of a model with a whole prompt, and the proof is run on that call, with\n"
    "everything that the program has patched by then."
)
EXAMPLES = """\
examples:
  flexinspect prove isolation --model demo --dataset demo
  flexinspect prove isolation --prompt "Who wrote Emma?" --prompt "Emma's author?" --mask document
  flexinspect prove kernel --model llama3.2_3b_it --device cuda --max-new-tokens 2
  flexinspect prove cache --mask shared-prefix --cache-check 4
  flexinspect prove order --positions reset
  flexinspect prove isolation --declare prompt.toml my_generation.py       # your own program
  flexinspect prove order --declare prompt.toml --add-to run.flextrace my_generation.py

In Python, with any patches of your own:
  flexinspect.prove("isolation", model, ids, segments=[(1, 7, "a"), (9, 15, "b")], run=my_forward)
docs/proofs.md describes each kind.

exit codes: 0 the proof holds, 1 it does not (or the run failed), 2 invalid request,
130 interrupted
"""
_PROGRAM_FLAGS = ("--declare", "--cache-check", "--call", "--add-to", "--threads", "--json")
_DEFAULT_NEW_TOKENS = {"isolation": 4, "order": 1, "kernel": 2, "cache": 16}


def configure(parser: argparse.ArgumentParser) -> None:
    from flexinspect.analysis.proof_results import PROOF_KINDS

    kinds = "|".join(PROOF_KINDS)
    parser.add_argument("proof", choices=PROOF_KINDS, metavar=kinds, help="what to prove")
    run_flags.add_program_flags(parser, 'the group "the proof"')
    run_flags.add_generation_flags(parser)
    add = parser.add_argument_group("the proof", argument_default=argparse.SUPPRESS).add_argument
    tokens = ", ".join(f"{kind} {n}" for kind, n in _DEFAULT_NEW_TOKENS.items())
    n_tokens = f"decode steps after the prompt (default: {tokens})"
    add("--max-new-tokens", type=positive_int, help=n_tokens)
    every = "cache: a full recompute every N steps, and at the last one (default: 1)"
    add("--cache-check", type=positive_int, metavar="N", help=every)
    call = "of a program: the N-th call with a whole prompt (default: 1)"
    add("--call", type=positive_int, metavar="N", help=call)
    add("--add-to", metavar="TRACE", help="store the findings in this finished trace")
    add("--threads", default=None, type=n_threads, help="CPU threads")
    add("--json", default=False, action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the proof; return 1 when it does not hold."""
    proofs = []
    console = stdout_console()
    with errors_as_json(args.json, proofs=[]):
        if hasattr(args, "cache_check") and args.proof != "cache":
            raise UsageError(f"--cache-check goes with prove cache, not with prove {args.proof}.")
        is_program = hasattr(args, "program") or hasattr(args, "module")
        for proof in _program_proofs(args) if is_program else _generation_proofs(args, _job(args)):
            proofs.append(proof)
            if not args.json:
                _show(proof, console)
            if hasattr(args, "add_to"):
                proof.add_to(args.add_to)
    exit_code = int(not all(proof.holds for proof in proofs))
    if args.json:
        print_json({"proofs": [proof.as_json() for proof in proofs], "exit_code": exit_code})
    return exit_code


def _job(args: argparse.Namespace) -> Job:
    run_command.check_program_flags(args, "declare", "call")
    options = run_command.generation_options(args)
    options.setdefault("max_new_tokens", _DEFAULT_NEW_TOKENS[args.proof])
    job = Job(out="", level="basic", threads=args.threads, **options)
    run_command.check_job(job)
    return job


def _program_proofs(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the proof of the user's program. With --json, the program's output goes to stderr."""
    from flexinspect.core import plugins

    options = run_command.program_options(args, accepted=_PROGRAM_FLAGS)
    job = ScriptJob(out="", threads=args.threads, **options)
    if job.declaration.separators != "attached":
        raise UsageError('A proof supports only separators = "attached".')
    prove = plugins.load(plugins.CAPTURE, "prove-script")
    call, every = getattr(args, "call", 1), getattr(args, "cache_check", 1)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        proof = prove(args.proof, job, call=call, every=every)
    yield proof


def _generation_proofs(args: argparse.Namespace, job: Job) -> Iterator[Any]:
    """Yield the proof of each sample as it completes, with progress on stderr."""
    from flexinspect.cli.live_run import ExperimentProgress
    from flexinspect.core import plugins

    progress = ExperimentProgress(quiet=args.json)
    with progress.shown:
        progress.show_phase("importing torch", {})
        prove = plugins.load(plugins.CAPTURE, "prove-run")
        reports = {"load_report": progress.show_phase, "report": progress.report}
        proofs = prove(args.proof, job, every=getattr(args, "cache_check", 1), **reports)
        proof = next(proofs, None)
    while proof is not None:
        yield proof
        with progress.shown:
            proof = next(proofs, None)


def _show(proof: Any, console: Console) -> None:
    from flexinspect.cli.run_summary import finding_text

    for line in proof.lines:
        console.print(escape_unprintable(line), soft_wrap=True)
    for finding in sort_by_severity(proof.findings):
        console.print(finding_text(finding), soft_wrap=True)
        if finding.severity is Severity.ERROR:
            for name in ("why", "confirm", "fix"):
                text = escape_unprintable(getattr(finding, name))
                console.print(f"  {name}: {text}", soft_wrap=True)
