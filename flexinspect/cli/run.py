"""`flexinspect run`, whose flags `flexinspect prove` shares: capture a run in its own process."""

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

from flexinspect.cli.flags import add_low_bandwidth_flag, add_switches, n_threads, positive_int
from flexinspect.cli.output import errors_as_json, print_lines
from flexinspect.core.addresses import format_address, is_loopback, parse_address
from flexinspect.core.environment import check_free, git_state
from flexinspect.core.errors import UsageError
from flexinspect.core.text import capitalize, print_message
from flexinspect.records import job as jobs
from flexinspect.records.job import DebuggerOptions, Job, ScriptJob

if TYPE_CHECKING:
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
  flexinspect run --no-ui --hold --serve 127.0.0.1:8421      # then: flexinspect ctl --help
  flexinspect run train_or_generate.py                 # your own program, unchanged
  flexinspect run script.py -- --its-own flags         # everything after the script is for it
  flexinspect run --no-ui --out t.flextrace script.py < questions.txt > answers.txt
  flexinspect run --declare prompt.toml -m package.module 3
  flexinspect run --debugpy 5678 --remote-help          # from a laptop: see docs/remote.md
"""

_MAX_LAYERS = 1 << 20
SCRIPT_FLAGS = (
    *("--declare", "--level", "--layers", "--out", "--overwrite"),
    *("--no-ui", "--json", "--verbose", "--threads", "--serve", "--no-control"),
    "--low-bandwidth",
    *("--break", "--wait"),
    *("--debugpy", "--wait-for-client", "--debugpy-expose", "--pdb"),
)
"""Flags that can be used with a program of the user."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [options]\n       %(prog)s [options] SCRIPT.py [--] [its arguments]\n"
        "       %(prog)s [options] -m MODULE [--] [its arguments]"
    )
    add_program_flags(parser)
    add_generation_flags(parser)
    _add_decoding_flags(parser)
    _add_capture_flags(parser)
    _add_debugger_flags(parser)
    _add_control_flags(parser)


def _add_group(parser: argparse.ArgumentParser, title: str, text: str | None = None) -> Any:
    """Return a new group, whose flags are missing from the result unless they were given."""
    return parser.add_argument_group(title, text, argument_default=argparse.SUPPRESS)


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the user's program, and its declaration."""
    add = _add_group(
        parser,
        "a program of your own",
        "only the flags of this group and of the groups capture and output, debugger, breakpoints "
        "and control apply to it",
    ).add_argument
    # PARSER consumes all following arguments, flags included; it is required by default.
    own = {"nargs": argparse.PARSER}
    add("program", **own, metavar="SCRIPT.py", help="run this file, unchanged").required = False
    add("-m", dest="module", **own, metavar="MODULE", help="run this module")
    declare = "TOML or JSON: the segments of its prompts and the declared mask"
    add("--declare", metavar="FILE", help=declare)


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of our own generation: its model, prompts and attention."""
    from flexinspect.masks.algebra import PRESETS, SEPARATOR_MODES
    from flexinspect.records.prompt import POSITION_MODES

    add = (group := _add_group(parser, "model")).add_argument
    add("--model", help="demo, an alias, a hub id or a folder (default: demo)")
    add("--weights", choices=("pretrained", "random"), help="default: pretrained")
    add("--device", help="auto, cuda, cuda:N, cpu or mps")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--seed", type=int, help="seed of random weights and of sampling (default: 0)")
    add_switches(group, trust_remote_code="allow code that comes with the model to run")
    add = _add_group(parser, "data").add_argument
    names = "demo, webqa, myriadlama, FILE.jsonl or package.module:Class"
    add("--dataset", metavar="NAME", help=f"{names} (default: demo, unless --prompt is given)")
    add("--prompt", action="append", help="a paraphrase (may be repeated)")
    add("--max-samples", type=positive_int, help="default: 1")
    n_paraphrases = "default: the first five, or all of --indices"
    add("--num-paraphrases", "--num_paraphrases", type=positive_int, help=n_paraphrases)
    add("--indices", metavar="0,1,2", help="which paraphrases of each sample")
    add("--indexs", dest="indices", help=argparse.SUPPRESS)  # as scripts of self-ensemble spell it
    add("--instruction", help="shared text before the paraphrases")
    add("--separator", help="after each paraphrase (default: \\n)")
    add("--cue", help="before the answer (default: Answer:)")
    add = _add_group(parser, "attention").add_argument
    masks = f"{', '.join(PRESETS)}, or package.module:function (default: segment-isolation)"
    add("--mask", metavar="MASK", help=masks)
    rows = "attached to the segment before (default), or isolated: their rows attend to nothing"
    add("--separators", choices=SEPARATOR_MODES, help=rows)
    ids = "position ids; reset: every paraphrase starts at the same one (default: contiguous)"
    add("--positions", choices=POSITION_MODES, help=ids)
    compiles = "compile FlexAttention (default: on CUDA only)"
    add("--compile", action=argparse.BooleanOptionalAction, help=compiles)


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    from flexinspect.records.step import GRADIENT_TARGETS

    group = _add_group(parser, "decoding (greedy unless a sampling flag is given)")
    add = group.add_argument
    add("--max-new-tokens", type=positive_int, help="default: 32")
    add("--stop", choices=("newline", "eos"), help="where an answer ends (default: newline)")
    add_switches(group, sample="sample instead of greedy decoding")
    add("--temperature", type=float, help="divides the logits; enables sampling (default: 1.0)")
    add("--top-k", type=int, help="best tokens to keep; enables sampling (default: 0, all)")
    add("--top-p", type=float, help="probability to keep; enables sampling (default: 1.0, all)")
    add = (group := _add_group(parser, "gradients (computed after a generation)")).add_argument
    target = "gradients of each generated token's log-probability (default), or of its margin to "
    target += "the next best token; one forward and backward of the whole sequence per token"
    add("--grads", nargs="?", const="logprob", choices=GRADIENT_TARGETS, help=target)
    add("--grads-steps", metavar="0,5-7", help="only of these steps (default: all)")
    anomaly = "report the line of the forward whose backward produces NaN; twice as slow"
    add_switches(group, detect_anomaly=anomaly)
    add = _add_group(parser, "equivalence (checked while generating)").add_argument
    check = (
        "recompute the whole sequence every N steps, without a cache and by another kernel, and "
    )
    check += "report layers that differ; each costs a forward over the sequence"
    add("--check-every", type=positive_int, metavar="N", help=check)


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    add = (group := parser.add_argument_group("capture and output")).add_argument
    levels = "how much to record (default: advanced)"
    add("--level", default="advanced", choices=("basic", "advanced", "extreme"), help=levels)
    layers = "the layers whose activations level extreme stores (default: all)"
    add("--layers", metavar="0,3,5-7", help=layers)
    add("--out", metavar="FILE", help="the trace file (default: named after the run)")
    threads = "CPU threads (default: one less than cores; for your own program: unchanged)"
    add("--threads", type=n_threads, help=threads)
    add_switches(
        group,
        overwrite="replace an existing trace",
        no_ui="print plain output instead of opening the interface",
        json="print a summary as JSON on stdout",
        verbose="print lengths, kernel path and candidates of each step; no interface",
    )
    add_low_bandwidth_flag(group)


def _add_debugger_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "debugger",
        "an uncompiled FlexAttention then runs each mask_mod as plain Python, so that breakpoints "
        "in it are hit; the values stay the same",
    )
    address = "let VS Code attach to the capture process at this address (0: any free port)"
    group.add_argument("--debugpy", type=_address, metavar="[HOST:]PORT", help=address)
    expose = "allow a HOST that other machines can reach"
    first = "wait for a client before anything runs"
    add_switches(group, wait_for_client=first, debugpy_expose=expose)
    pdb = "start pdb on this terminal at a breakpoint() or an exception"
    group.add_argument("--pdb", "--interactive", action="store_true", help=pdb)
    group = parser.add_argument_group("breakpoints", "docs/breakpoints.md describes the language")
    condition = "stop when this holds: 'entropy > 3 and step > 2', 'nan @ layers.*.self_attn', "
    condition += "'finding mask.* [once]' (may be repeated)"
    many: dict[str, Any] = {"dest": "breakpoints", "action": "append", "default": []}
    group.add_argument("--break", **many, metavar="EXPR", help=condition)
    wait = "pause at a breakpoint even without a terminal, instead of ending with exit code 3"
    add_switches(group, wait=wait)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_control_flags(parser: argparse.ArgumentParser) -> None:
    title = "flexinspect ctl and flexinspect attach control a run while it is running"
    add = (group := parser.add_argument_group("control", title)).add_argument
    serve = "accept commands over TCP too; every request needs the token that is printed"
    add("--serve", metavar="HOST:PORT", help=serve)
    hold = "keep the model alive after the last generation, until ctl continue or Ctrl-C"
    insecure = "let --serve listen on an address that other machines can reach, unencrypted"
    add_switches(group, hold=hold, insecure_bind=insecure)
    add("--no-control", dest="control", action="store_false", help="accept no commands")
    remote = "print the command lines to use this run from another machine, and exit"
    add_switches(group, remote_help=remote)


def run(args: argparse.Namespace) -> int:
    """Run the job that the flags describe, and return its exit code."""
    if args.remote_help:
        return _print_remote_help(args)
    with errors_as_json(args.json, trace=None, generations=[]):
        job = checked_job(args)
        if job.serving is not None:
            _print_serve_address(*job.serving)
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if is_terminal and not (args.no_ui or args.json or args.verbose):
        from flexinspect.cli.interface import inspect_run

        return inspect_run(job)
    run: Job | Capture
    if isinstance(job, ScriptJob):
        from flexinspect.launch.child_process import ScriptProcess, forward_signals

        # It has our own streams; with --json its output goes to stderr.
        forward_signals(run := ScriptProcess(job, stdout=2 if args.json else 1))
    else:
        run = job
    # A program is already running: import meanwhile what prints its result.
    from flexinspect.cli.live_run import show_run

    return show_run(run, as_json=args.json, verbose=args.verbose)


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


def job_from_argv(argv: Sequence[str]) -> Job | ScriptJob:
    """Return the job of a command line ("run", "--model", ...). Raises `FlexInspectError`."""
    command, *arguments = argv
    parser = _RaisingParser(f"flexinspect {command}", add_help=False)
    configure(parser)
    return replace(checked_job(parser.parse_args(arguments)), argv=("flexinspect", *argv))


def checked_job(args: argparse.Namespace) -> Job | ScriptJob:
    """Return the job of parsed flags. Raises `FlexInspectError` for anything wrong with them."""
    capture: dict[str, Any] = {
        **{name: getattr(args, name) for name in ("level", "layers", "threads", "overwrite")},
        "breakpoints": _breakpoints_of(args),
        "on_break": _on_break(args),
        "control": args.control,
        "serving": _serve_options(args),
        "argv": tuple(sys.argv),
    }
    job: Job | ScriptJob
    if hasattr(args, "program") or hasattr(args, "module"):
        program = program_options(args, ["--hold"] if args.hold else [])
        job = ScriptJob(out="", **program, **capture, git=git_state(Path.cwd()))
        jobs.parse_layers(job.layers, _MAX_LAYERS)
        stem = Path(job.program).stem
    else:
        check_program_flags(args, "declare")
        job = Job(out="", **generation_options(args), **capture, hold=args.hold)
        check_job(job)
        stem = f"{Path(job.model).name}-{job.mask}"
    job = replace(job, out=_new_trace(stem) if args.out is None else args.out)
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
    is_watched = (sys.stderr.isatty() and not args.json) or args.pdb or args.debugpy is not None
    return "wait" if args.wait or is_watched else "stop"


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


def _new_trace(stem: str) -> str:
    """Return a new trace in the current folder: `stem`, the time, and a number if needed."""
    stem = re.sub(r"[^\w.-]+", "-", stem).strip("-")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while (path := Path.cwd() / f"{name}{f'-{number}' if number > 1 else ''}.flextrace").exists():
        number += 1
    return str(path)


def check_job(job: Job) -> None:
    """Raise `FlexInspectError` for a wrong model name, mask, dtype, text or seed; load no model."""
    from flexinspect.inputs import declarations, model_names
    from flexinspect.inputs.config import load_config
    from flexinspect.inputs.model_sizes import check_dtype
    from flexinspect.masks import algebra

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
        algebra.check_preset(job.mask)


def check_trace(job: Job | ScriptJob) -> None:
    """Raise `UsageError` for --layers without level extreme, and for an existing trace file."""
    if job.layers and job.level != "extreme":
        text = "--layers selects whose activations are stored, and only level extreme stores any."
        raise UsageError(text, hint="Add --level extreme, or leave --layers out.")
    if not job.out:
        raise UsageError("--out is empty.", hint="Give a file name, or leave --out out.")
    check_free(Path(job.out), overwrite=job.overwrite)


def check_program_flags(args: argparse.Namespace, *names: str) -> None:
    """Raise `UsageError` for one of these flags, which only a program can have."""
    for name in names:
        if hasattr(args, name):
            hint = "Name a script after the flags, or use --mask and --prompt."
            raise UsageError(f"--{name} needs a program of your own.", hint=hint)


def program_options(args: argparse.Namespace, other_flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of `ScriptJob` that name the program.

    Raises `UsageError` for a flag of another kind of run, a missing program, a bad declaration.
    """
    is_module = hasattr(args, "module")
    command = [*getattr(args, "module", ()), *getattr(args, "program", ())]
    # "--" may stand before the program and between it and its arguments.
    program, *rest = command[1:] if command[0] == "--" else command
    rest = rest[1:] if rest[:1] == ["--"] else rest
    given = [f"--{name.replace('_', '-')}" for name in vars(args) if name in _GENERATION_ARGS]
    for flag in (*given, *other_flags):
        hint = f"A program accepts {', '.join(SCRIPT_FLAGS)}; its own flags come after it."
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
