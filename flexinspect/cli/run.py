"""`flexinspect run`: capture a generation or a program in its own process."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import astuple, replace

from flexinspect.cli.output import errors_as_json, print_lines
from flexinspect.cli.run_flags import configure
from flexinspect.core.addresses import format_address, is_loopback
from flexinspect.core.environment import SHARE_VARIABLE, check_free, git_state
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.rank_environment import rank_of_environment, rank_path
from flexinspect.core.text import capitalize, print_message
from flexinspect.records import job as jobs
from flexinspect.records.job import DebuggerOptions, Job, ScriptJob

if TYPE_CHECKING:
    from flexinspect.analysis.invariants.invariant import InvariantFile
    from flexinspect.launch.child_process import Capture

DESCRIPTION = (
    "Run a paraphrase-ensemble generation under FlexAttention, or a program of your own as\n"
    "Python would run it, in a separate process, and record every step of every model in a\n"
    "trace. The exit code of a program is passed on."
)
EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2 --no-ui --out run.flextrace
  flexinspect run --prompt "What is the capital of France?" --prompt "France's capital city?"
  flexinspect run --model llama3.2_3b_it --mask shared-prefix --instruction "Answer briefly."
  flexinspect run --model llama3.2_3b_it --weights random --device cuda --level extreme --layers 0-3
  flexinspect run --debugpy 5678 --wait-for-client --no-ui      # then attach from VS Code
  flexinspect run --mask my_masks:window --temperature 0.8 --top-p 0.9 --seed 7
  flexinspect run --grads --grads-steps 0-3             # which paraphrase affects each token
  flexinspect run --check-every 8                       # is the cached step what a recompute gives
  flexinspect run --break 'entropy > 3 and step > 2' --break 'finding mask.* [once]'
  flexinspect run --verbose --log-file flexattention_debug.log
  flexinspect run --interactive --no-ui                 # stop at each step and read commands
  flexinspect run --no-ui --hold --serve 127.0.0.1:8421      # then: flexinspect ctl --help
  flexinspect run train_or_generate.py                 # your own program, unchanged
  flexinspect run --invariants invariants.json train.py      # judged by what good runs do
  flexinspect run script.py -- --its-own flags         # everything after the script is for it
  flexinspect run --no-ui --out t.flextrace script.py < questions.txt > answers.txt
  flexinspect run --declare prompt.toml -m package.module 3
  flexinspect run --dataset q.jsonl --max-samples 500 --ray local --out answers   # docs/cluster.md
  flexinspect run --debugpy 5678 --remote-help          # from a laptop: see docs/remote.md
"""

_MAX_LAYERS = 1 << 20
SCRIPT_FLAGS = (
    *("--declare", "--level", "--layers", "--select", "--out", "--overwrite", "--share"),
    *("--max-size", "--audit-seconds", "--invariants"),
    *("--no-ui", "--json", "--verbose", "--log-file", "--threads", "--serve", "--no-control"),
    "--insecure-bind",
    "--low-bandwidth",
    *("--break", "--wait", "--interactive"),
    *("--debugpy", "--wait-for-client", "--debugpy-expose", "--pdb"),
)
"""Flags that can be used with a program of the user."""


def run(args: argparse.Namespace) -> int:
    """Run the job that the flags describe, and return its exit code."""
    if args.remote_help:
        return _print_remote_help(args)
    if args.ray is not None or args.ray_workers is not None:
        return _run_on_ray(args)
    with errors_as_json(args.json, trace=None, generations=[]):
        job = checked_job(args)
        check_log_file(args.log_file)
        invariants = _invariants_of(args)
        if args.share:
            os.environ[SHARE_VARIABLE] = "1"  # for the process that records
        if job.serving is not None:
            _print_serve_address(*job.serving)
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if is_terminal and not (args.no_ui or args.json or args.verbose):
        from flexinspect.cli.interface import inspect_run

        return judged(inspect_run(job, args.log_file), job, invariants)
    run: Job | Capture
    if isinstance(job, ScriptJob):
        from flexinspect.launch.child_process import ScriptProcess, forward_signals

        # It has our own streams; with --json its output goes to stderr.
        forward_signals(run := ScriptProcess(job, stdout=2 if args.json else 1))
    else:
        run = job
    # A program is already running: import meanwhile what prints its result.
    from flexinspect.cli.live_run import ShowOptions, show_run

    options = ShowOptions(args.json, args.verbose, job.interactive, args.wait, args.log_file)
    return show_run(run, options, lambda code: judged(code, job, invariants))


def _invariants_of(args: argparse.Namespace) -> InvariantFile | None:
    """Return the invariants to judge the run by. Raises `UsageError` for a file that is wrong."""
    if args.invariants is None:
        return None
    from flexinspect.analysis.invariants.invariant import read_invariants

    return read_invariants(args.invariants)


def judged(code: int, job: Job | ScriptJob, invariants: InvariantFile | None) -> int:
    """Judge the trace of a run by invariants, print what it breaks, and return the exit code.

    That is 1 for a run that ended with 0 and breaks one. Without invariants nothing is done, except
    that a program which refused its arguments may have received flags that were meant for us.
    """
    if isinstance(job, ScriptJob) and code == REFUSED_ARGUMENTS:
        _explain_passed_flags(job.args)
    if invariants is None:
        return code
    from flexinspect.analysis.invariants.judged_trace import judge_trace
    from flexinspect.cli.infer import violation_lines

    try:
        violations = judge_trace(Path(job.out), invariants)
    except FlexInspectError as error:
        print_message(f"The run was not judged by the invariants: {error.sentence()}")
        return code or error.exit_code
    for line in violation_lines(violations, f"flexinspect findings {job.out}"):
        print_message(f"invariant broken: {line}")
    return code or int(bool(violations))


REFUSED_ARGUMENTS = 2
"""The exit code of `argparse`, and of most programs, for arguments that they do not know."""


def _explain_passed_flags(arguments: Sequence[str]) -> None:
    names = dict.fromkeys(one.partition("=")[0] for one in arguments)
    if ours := [name for name in names if name in SCRIPT_FLAGS]:
        flags = ", ".join(ours)
        print_message(
            f"The program received {flags}, because everything after its name is passed to it. "
            f"To set {flags} of flexinspect, write it before the name of the program."
        )


class _RaisingParser(argparse.ArgumentParser):
    """Raises `UsageError` instead of ending the process, which an interface must not do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{capitalize(message)}.", hint="See flexinspect run --help.")


def _print_remote_help(args: argparse.Namespace) -> int:
    from flexinspect.cli.remote_help import remote_help

    debugpy = args.debugpy[1] if args.debugpy else None
    serving = _serve_options(args)
    print_lines(remote_help(debugpy, serving[1] if serving else None))
    return 0


def _run_on_ray(args: argparse.Namespace) -> int:
    from flexinspect.cli.ray_options import ray_options
    from flexinspect.cli.ray_run import check_ray_flags, run_on_ray

    with errors_as_json(args.json, trace=None, generations=[]):
        device = getattr(args, "device", Job(out="").device)
        options = ray_options(args, device)
        assert options is not None
        check_ray_flags(args)
        out, args.out = args.out, None
        job = checked_job(args)
        assert isinstance(job, Job)
        return run_on_ray(job, options, out=out, as_json=args.json)


_CAPTURE_FLAGS = ("level", "layers", "threads", "overwrite", "max_size")


def job_from_argv(argv: Sequence[str]) -> Job | ScriptJob:
    """Return the job of a command line ("run", "--model", ...). Raises `FlexInspectError`."""
    command, *arguments = argv
    parser = _RaisingParser(f"flexinspect {command}", add_help=False)
    configure(parser)
    return replace(checked_job(parser.parse_args(arguments)), argv=("flexinspect", *argv))


def checked_job(args: argparse.Namespace) -> Job | ScriptJob:
    """Return the job of parsed flags. Raises `FlexInspectError` for anything wrong with them."""
    capture: dict[str, Any] = {
        **{name: getattr(args, name) for name in _CAPTURE_FLAGS},
        "select": tuple(args.select),
        "breakpoints": _breakpoints_of(args),
        "on_break": _on_break(args),
        "interactive": _is_interactive(args),
        "control": args.control,
        "serving": _serve_options(args),
        "argv": tuple(sys.argv),
    }
    job: Job | ScriptJob
    if hasattr(args, "program") or hasattr(args, "module"):
        program = program_options(args, ["--hold"] if args.hold else [])
        seconds = {"audit_seconds": args.audit_seconds}
        job = ScriptJob(out="", **program, **capture, **seconds, git=git_state(Path.cwd()))
        jobs.parse_layers(job.layers, _MAX_LAYERS)
        stem = Path(job.program).stem
    else:
        check_program_flags(args, "declare")
        job = Job(out="", **generation_options(args), **capture, hold=args.hold)
        check_job(job)
        stem = f"{Path(job.model).name}-{job.mask}"
    job = replace(job, out=new_trace(stem) if args.out is None else _own_path(args.out))
    check_trace(job)
    return replace(job, debugger=_debugger_of(args))


def _breakpoints_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the breakpoints of settings and flags. Raises `ExpressionError` for an invalid one."""
    from flexinspect.breakpoints.grammar import ExpressionError
    from flexinspect.breakpoints.store import BreakpointStore
    from flexinspect.inputs.config import load_config
    from flexinspect.rules.engine import load_rules

    store = BreakpointStore(finding_ids=lambda: load_rules().finding_kinds)
    for condition in args.breakpoints:
        try:
            store.add(condition)
        except ExpressionError as error:
            raise error.with_location("--break") from None
    return (*load_config().breakpoints.values(), *args.breakpoints)


def _on_break(args: argparse.Namespace) -> jobs.OnBreak:
    """Return whether a hit pauses the run, or ends it where no client would see the pause.

    Raises `UsageError` for --wait with --no-control.
    """
    if args.wait and not args.control:
        text = "--wait pauses the run until a command comes, and --no-control accepts none."
        raise UsageError(text, hint="Leave one of them out.")
    is_watched = (sys.stderr.isatty() and not args.json) or args.interactive
    is_watched = is_watched or args.pdb or args.debugpy is not None
    return "wait" if args.wait or is_watched else "stop"


def _is_interactive(args: argparse.Namespace) -> bool:
    """Return whether the run stops at each step. Raises `UsageError` if no command can come."""
    if not args.interactive:
        return False
    if not args.control:
        text = "--interactive stops until a command comes, and --no-control accepts none."
        raise UsageError(text, hint="Leave one of them out.")
    is_program = hasattr(args, "program") or hasattr(args, "module")
    if is_program and not args.wait and jobs.controlling_terminal() is None:
        text = "--interactive reads its commands from a terminal, and there is none here: the "
        text += "standard input belongs to the program."
        raise UsageError(text, hint="Add --wait to send them with flexinspect ctl.")
    return True


def _debugger_of(args: argparse.Namespace) -> DebuggerOptions:
    """Return the checked debugger options; warn on stderr about a port that others can reach.

    Raises `UsageError` for options that exclude each other or an address that is not allowed.
    """
    host, port = args.debugpy or (DebuggerOptions().host, None)
    tty = jobs.controlling_terminal() if args.pdb else None
    options = DebuggerOptions(host, port, args.wait_for_client, args.pdb, tty)
    if jobs.check_debugger(options, is_exposed=args.debugpy_expose):
        print_message(f"anyone who can reach {host}:{port} can run any code in this run.")
    return options


def _serve_options(args: argparse.Namespace) -> tuple[str, int, str] | None:
    """Return host, port and token of --serve, None without it. Raises `UsageError`."""
    if args.serve is None:
        if args.insecure_bind:
            raise UsageError("--insecure-bind needs --serve HOST:PORT.")
        return None
    if not args.control:
        raise UsageError("--serve and --no-control exclude each other.")
    from flexinspect.control.discovery import parse_serve_address

    return parse_serve_address(args.serve, insecure=args.insecure_bind)


def _print_serve_address(host: str, port: int, token: str) -> None:
    """Print on stderr how to reach a run over TCP, before it starts."""
    from flexinspect.control.discovery import TOKEN_VARIABLE

    shown_port = "a port that flexinspect attach --list shows"
    where = f"http://{format_address(host, port)}" if port else shown_port
    token_text = "" if os.environ.get(TOKEN_VARIABLE) else f", {TOKEN_VARIABLE}={token}"
    print_message(f"commands will be accepted at {where}{token_text}")
    if not is_loopback(host):
        text = "other machines can reach it; the connection, token included, is not encrypted"
        print_message(text)


def _field_names(kind: Any) -> set[str]:
    return {*kind.__struct_fields__}


_TEXT_ARGS = _field_names(jobs.PromptTexts)
_SAMPLING_ARGS = _field_names(jobs.SamplingOptions) - {"do_sample"} | {"sample"}
_JOB_ARGS = _field_names(Job) - _field_names(jobs.CaptureJob) - {"hold"}
_GENERATION_ARGS = _JOB_ARGS | _TEXT_ARGS | _SAMPLING_ARGS | {"prompt"}
"""Flags of our own generation, which are missing from the parsed flags unless they were given."""


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Job` that the flags of our own generation select."""
    flags = vars(args)
    if "prompt" in flags:
        hint = "Leave one of them out."
        if "dataset" in flags:
            what = "--prompt and --dataset exclude each other: both select the prompts."
            raise UsageError(what, hint=hint)
        if "paraphrases" in flags:
            what = "--paraphrases adds to the questions of a dataset, and --prompt gives them all."
            raise UsageError(what, hint=hint)
        if "max_samples" in flags:
            what = "--max-samples limits the samples of a dataset, and --prompt is a single sample."
            raise UsageError(what, hint=hint)
    # On a command line, \n and \t stand for the characters.
    texts = {
        name: flags[name].replace("\\n", "\n").replace("\\t", "\t")
        for name in _TEXT_ARGS
        if name in flags
    }
    given = {name: flags[name] for name in _SAMPLING_ARGS if name in flags}
    values = {name: value for name, value in given.items() if name != "sample"}
    sampling = jobs.SamplingOptions(do_sample=bool(given), **values)  # by any sampling flag
    sampling.check()
    return {
        **{name: flags[name] for name in _JOB_ARGS if name in flags},
        "prompts": tuple(flags.get("prompt", ())),
        "texts": jobs.PromptTexts(**texts),
        "sampling": sampling,
    }


def new_trace(stem: str) -> str:
    """Return a new trace in the current folder: `stem`, the time, and a number if needed."""
    stem = re.sub(r"[^\w.-]+", "-", stem).strip("-")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (path := Path(_own_path(_numbered(name, number)))).exists():
        number += 1
    return str(path)


def _numbered(name: str, number: int) -> str:
    return str(Path.cwd() / f"{name}{f'-{number}' if number > 1 else ''}.flextrace")


def _own_path(out: str) -> str:
    """Return the trace of this process: under `torchrun` each rank writes its own."""
    return str(rank_path(Path(out), rank_of_environment())) if out else out


def check_job(job: Job) -> None:
    """Raise `FlexInspectError` for a wrong model name, mask, dtype, text or seed; load no model."""
    from flexinspect.inputs import declarations, model_names
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.model_sizes import check_dtype
    from flexinspect.masks import mask_presets

    if not 0 <= job.seed < 1 << 63:
        raise UsageError("--seed must lie between 0 and 2^63 - 1.")
    for text in (*job.prompts, *astuple(job.texts)):
        if not text.isascii() and text.encode("utf-8", "ignore").decode() != text:
            raise UsageError(f"The text {text!a} is not valid UTF-8.")
    check_dtype(job.dtype)
    jobs.parse_steps(job.grads_steps)
    flags = {"--grads-steps": job.grads_steps != "all", "--detect-anomaly": job.detect_anomaly}
    for flag, is_given in flags.items():
        if is_given and job.grads is None:
            raise UsageError(f"{flag} needs gradients, and --grads is missing.", hint="Add it.")
    model_names.resolve(job.model, load_config())
    if ":" in job.mask:
        declarations.check_mask_mod_spec(job.mask)
    else:
        mask_presets.check_preset(job.mask)


def check_trace(job: Job | ScriptJob) -> None:
    """Raise `UsageError` for --layers or --select without extreme, and for an existing trace."""
    if job.layers and job.level != "extreme":
        text = "--layers selects whose activations are stored, and only level extreme stores any."
        raise UsageError(text, hint="Add --level extreme, or leave --layers out.")
    if job.select:
        from flexinspect.inputs.module_selectors import parse_selectors

        parse_selectors(job.select)
        if job.level != "extreme":
            text = "--select selects modules whose outputs level extreme stores."
            raise UsageError(text, hint="Add --level extreme, or leave --select out.")
    if not job.out:
        raise UsageError("--out is empty.", hint="Give a file name, or leave --out out.")
    check_free(Path(job.out), overwrite=job.overwrite)


def check_log_file(file: str | None) -> None:
    """Raise `UsageError` for a log file that cannot be written, before anything runs."""
    if file is not None:
        from flexinspect.cli.run_log import RunLog

        RunLog(file).close(None)


def check_program_flags(args: argparse.Namespace, *names: str) -> None:
    """Raise `UsageError` for one of these flags, which only a program can have."""
    for name in names:
        if hasattr(args, name):
            hint = "Name a script after the flags, or use --mask and --prompt."
            raise UsageError(f"--{name} needs a program of your own.", hint=hint)


def program_options(
    args: argparse.Namespace,
    other_flags: Sequence[str] = (),
    accepted: Sequence[str] = SCRIPT_FLAGS,
) -> dict[str, Any]:
    """Return the fields of `ScriptJob` that name the program.

    `accepted` are the flags of the command that go with a program, for the message.

    Raises `UsageError` for a flag of another kind of run, a missing program, a bad declaration.
    """
    is_module = hasattr(args, "module")
    command = [*getattr(args, "module", ()), *getattr(args, "program", ())]
    # "--" may stand before the program and between it and its arguments.
    program, *rest = command[1:] if command[0] == "--" else command
    rest = rest[1:] if rest[:1] == ["--"] else rest
    given = [f"--{name.replace('_', '-')}" for name in vars(args) if name in _GENERATION_ARGS]
    for flag in (*given, *other_flags):
        hint = f"A program accepts {', '.join(accepted)}; its own flags come after it."
        what = f"{flag} applies to generations of flexinspect (--model), not to {program}."
        raise UsageError(what, hint=hint)
    if not is_module:
        _check_file(program)
    declaration = jobs.Declaration()
    if hasattr(args, "declare"):
        from flexinspect.inputs.declarations import read_declaration

        declaration = read_declaration(Path(args.declare))
    facts = {"program": program, "is_module": is_module, "args": tuple(rest)}
    return {**facts, "declaration": declaration}


def _check_file(program: str) -> None:
    path = Path(program)
    if path.is_dir():
        hint = f"For a package: -m {path.name}."
        raise UsageError(f"{program} is a folder, not a script.", hint=hint)
    if not path.is_file():
        hint = "Give a file or -m MODULE; without a program, flexinspect runs its own generation."
        raise UsageError(f"There is no script {program}.", hint=hint)
