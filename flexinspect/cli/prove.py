"""`flexinspect prove`: run a model and test its behaviour, independent of the declared mask."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

from flexinspect.cli.flags import n_threads, positive_int
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.records.job import Job

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
_DEFAULT_NEW_TOKENS = {"isolation": 4, "order": 1, "kernel": 2, "cache": 16}
_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    from flexinspect.analysis.proof_results import PROOF_KINDS
    from flexinspect.cli import run as run_

    parser.description = (
        "Run a paraphrase-ensemble generation under FlexAttention and prove one property of it.\n"
        "isolation: changing the tokens of a segment changes no row that must not attend to it,\n"
        "in any layer. order: the next token's logits stay the same when paraphrases are swapped.\n"
        "kernel: the attention weights recovered from each call equal those that are displayed.\n"
        "cache: decode steps equal a full recompute. Given a program of your own, it runs up to\n"
        "its first call of a model with a whole prompt, and the proof is run on that call, with\n"
        "everything that the program has patched by then."
    )
    parser.argument_default = argparse.SUPPRESS
    parser.epilog = EXAMPLES
    parser.add_argument(
        "proof", choices=PROOF_KINDS, metavar="|".join(PROOF_KINDS), help="what to prove"
    )
    run_.add_program_flags(parser)
    run_.add_model_flags(parser)
    run_.add_data_flags(parser)
    run_.add_attention_flags(parser)
    group = parser.add_argument_group("the proof")
    tokens = ", ".join(f"{kind} {n}" for kind, n in _DEFAULT_NEW_TOKENS.items())
    group.add_argument(
        "--max-new-tokens",
        type=positive_int,
        help=f"decode steps after the prompt (default: {tokens})",
    )
    group.add_argument(
        "--cache-check",
        type=positive_int,
        metavar="N",
        help="cache: a full recompute every N steps, and at the last one (default: 1)",
    )
    group.add_argument(
        "--call",
        type=positive_int,
        metavar="N",
        help="of a program: the N-th call with a whole prompt (default: 1)",
    )
    group.add_argument(
        "--add-to", metavar="TRACE", help="store the findings in this finished trace"
    )
    group.add_argument("--threads", default=None, type=n_threads, help="CPU threads")
    group.add_argument(
        "--json", default=False, action="store_true", help="print the result as JSON"
    )
    parser.set_defaults(run=run, out="", level="basic", layers=None, overwrite=False)
    parser.set_defaults(**_RUN_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Run the proof; return 1 when it does not hold."""
    try:
        return _run(args)
    except FlexInspectError as error:
        if args.json:
            facts = {"exit_code": error.exit_code, "error": error.message, "hint": error.hint}
            print(json.dumps({"proofs": [], **facts}, indent=2))
        raise


def _run(args: argparse.Namespace) -> int:
    from flexinspect.cli.output import Output

    console = Output()
    proofs = []
    is_program = hasattr(args, "program") or hasattr(args, "module")
    for proof in _program_proofs(args) if is_program else _generation_proofs(args, _job(args)):
        proofs.append(proof)
        if not args.json:
            _show(proof, console)
        if hasattr(args, "add_to"):
            proof.add_to(args.add_to)
    holds = all(proof.holds for proof in proofs)
    if args.json:
        facts = {"proofs": [proof.as_json() for proof in proofs], "exit_code": int(not holds)}
        json.dump(facts, sys.stdout, ensure_ascii=False, indent=2)
        sys.stdout.write("\n")
    return int(not holds)


def _job(args: argparse.Namespace) -> Job:
    """Return the generation that the flags describe. Raises `FlexInspectError`."""
    from flexinspect.cli.run import check_job, job_of

    _check_cache_flag(args)
    for name in ("declare", "call"):
        if hasattr(args, name):
            raise UsageError(
                f"--{name} needs a program of your own.",
                hint="Name it last: flexinspect prove KIND --declare FILE SCRIPT.py",
            )
    job = job_of(args)
    if not hasattr(args, "max_new_tokens"):
        job = replace(job, max_new_tokens=_DEFAULT_NEW_TOKENS[args.proof])
    check_job(job)
    return job


def _check_cache_flag(args: argparse.Namespace) -> None:
    if hasattr(args, "cache_check") and args.proof != "cache":
        raise UsageError(f"--cache-check goes with prove cache, not with prove {args.proof}.")


_RUN_DEFAULTS = {
    "breakpoints": None,
    "wait": False,
    "pdb": False,
    "debugpy": None,
    "wait_for_client": False,
    "debugpy_expose": False,
    "hold": False,
    "control": False,
    "serve": None,
    "insecure_bind": False,
}
"""Values of the flags of `run` that a proof does not have: it never stops or takes commands."""

_PROGRAM_ARGS = ("declare", "program", "module", "call", "cache_check", "add_to")
_COMMON_ARGS = ("command", "proof", "run", "out", "level", "layers", "overwrite", "threads", "json")


def _program_proofs(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the proof of the user's program. With --json, the program's output goes to stderr."""
    from flexinspect.cli.run import script_job
    from flexinspect.core import plugins

    _check_cache_flag(args)
    allowed = (*_PROGRAM_ARGS, *_COMMON_ARGS, *_RUN_DEFAULTS)
    flags = [f"--{name.replace('_', '-')}" for name in vars(args) if name not in allowed]
    without_trace = argparse.Namespace(**{**vars(args), "out": None})  # a proof records nothing
    job = replace(script_job(without_trace, flags), threads=args.threads)
    if job.declaration.separators != "attached":
        raise UsageError('A proof supports only separators = "attached".')
    prove = plugins.load(plugins.CAPTURE, "prove-script")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        proof = prove(
            args.proof, job, call=getattr(args, "call", 1), every=getattr(args, "cache_check", 1)
        )
    yield proof


def _generation_proofs(args: argparse.Namespace, job: Job) -> Iterator[Any]:
    """Yield the proof of each sample as it completes, with progress on stderr."""
    from rich.console import Console

    from flexinspect.cli.run_progress import PlainProgress, RunProgress, TerminalProgress
    from flexinspect.records.step import EventRecord

    console = Console(stderr=True, highlight=False, markup=False)
    is_shown = console.is_terminal and not args.json
    progress: RunProgress = (
        TerminalProgress(console) if is_shown else PlainProgress(console, quiet=args.json)
    )

    def show_phase(phase: str, data: Mapping[str, Any]) -> None:
        progress.on_event(EventRecord("phase", phase, time.time(), data=data))

    def report(phase: str, fraction: float | None) -> None:
        if is_shown:  # a log file need not have the many small steps of a proof
            show_phase(phase, {} if fraction is None else {"fraction": fraction})

    with progress:
        show_phase("importing torch", {})
        from flexinspect.core import plugins

        prove = plugins.load(plugins.CAPTURE, "prove-run")
        every = getattr(args, "cache_check", 1)
        proofs = prove(args.proof, job, every=every, load_report=show_phase, report=report)
    while True:
        with progress:
            proof = next(proofs, None)
        if proof is None:
            return
        yield proof


def _show(proof: Any, console: Any) -> None:
    from rich.text import Text

    from flexinspect.core.text import escape_unprintable
    from flexinspect.records.finding import Severity, sort_by_severity

    for line in proof.lines:
        console.print(escape_unprintable(line), soft_wrap=True)
    for finding in sort_by_severity(proof.findings):
        label = Text(f"{finding.severity}: ", style=_STYLES[finding.severity])
        text = Text.assemble(label, escape_unprintable(finding.sentence), f" [{finding.id}]")
        console.print(text, soft_wrap=True)
        if finding.severity is Severity.ERROR:
            for name in ("why", "confirm", "fix"):
                console.print(
                    f"  {name}: {escape_unprintable(getattr(finding, name))}", soft_wrap=True
                )
