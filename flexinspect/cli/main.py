"""The command line: a table of commands, of which only the one asked for is imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexinspect.core import __version__
from flexinspect.core.errors import FlexInspectError, OutputFileError, TruncatedTraceError
from flexinspect.core.signals import exit_code_of
from flexinspect.core.text import did_you_mean, escape_unprintable, print_message

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2
  flexinspect run --model llama3.2_3b_it --prompt "Who wrote Emma?" --prompt "Emma's author?"
  flexinspect run my_generation.py        (or train.py: a program of your own, as it is)
  flexinspect open run.flextrace          ("open" is optional)
  flexinspect attach                      (to a running capture)
  flexinspect ctl pause
  flexinspect findings run.flextrace
  flexinspect explain segments.shifted
  flexinspect glossary margin
  flexinspect declare run.flextrace
  flexinspect show run.flextrace --panel mask --step 2
  flexinspect report run.flextrace -o run.html
  flexinspect flowchart --trace run.flextrace
  flexinspect diff a.flextrace b.flextrace
  flexinspect ranks traces                (of a run under torchrun)
  flexinspect infer good-*.flextrace -o invariants.json
  flexinspect audit my_generation.py
  flexinspect prove isolation --model demo --dataset demo
  flexinspect lab --max-samples 100 --num-paraphrases 1-5 --out lab-1-5
  flexinspect kernels --kernel my_kernel:attention --config all
  flexinspect dump run.flextrace --step 3
  flexinspect doctor
  flexinspect fetch --model llama3.2_3b_it
  flexinspect export run.flextrace --to perfetto
  flexinspect redact run.flextrace
  flexinspect import debug_tree/ -o run.flextrace
  flexinspect mask small --verify
  flexinspect models
  flexinspect tour
  flexinspect museum
  flexinspect vscode

exit codes: 0 success; 1 a problem was found: a violation, a difference, a run that failed;
2 invalid request, or a file that cannot be read or written; 3 a breakpoint ended the run;
130 interrupted, 143 ended by SIGTERM
"""


COMMANDS = {
    "run": "run a generation under FlexAttention, or your own program, and record every step",
    "open": "step through a trace in the terminal",
    "attach": "open the interface on a running capture",
    "ctl": "pause, step, stop and change a running capture",
    "findings": "print what is wrong in a trace (exit code 1 if there is an error)",
    "explain": "say what the id of a finding stands for, and what to do about it",
    "glossary": "say what the words of the interface mean",
    "declare": "write the segments that a run did not declare to a file for run --declare",
    "show": "print a panel as text, or save its picture, without the interface",
    "report": "write a run to one HTML file that opens offline in any browser",
    "flowchart": "draw the way from a question to an answer, also with the numbers of a run",
    "diff": "print the first place where two runs differ beyond noise (alias: compare)",
    "ranks": "compare the ranks of a distributed run: what differs, who is late, who stopped",
    "infer": "learn invariants from good runs of a training, and judge a run by them",
    "audit": "compare the steps of your program with an untouched copy of its model",
    "prove": "test a property of a generation by running it: isolation, order, kernel or cache",
    "lab": "compare ways to use paraphrases on a dataset: accuracy, whose token won, order",
    "kernels": "compare attention kernels with float64, explain differences, and time them",
    "dump": "print a trace as text or JSON",
    "doctor": "check this machine: packages, FlexAttention, GPU, memory, disk and the hub",
    "fetch": "download models and datasets, and look after the cache",
    "export": "write a trace for Perfetto, TensorBoard, DuckDB, spreadsheets or Jupyter",
    "redact": "write a copy of a trace without its texts, for a public report",
    "import": "make a trace of what transformers' debugger, SGLang or your own code has dumped",
    "mask": "draw, analyse and verify a mask: a preset, an expression, your code, or a trace",
    "models": "list the models: size, and whether they are local, cached or need a download",
    "tour": "learn the interface in two minutes, on a run with one planted bug",
    "museum": "runs with one known fault each, as tutorials",
    "vscode": "write the debug configurations for VS Code",
}
"""The help of all subcommands, in the order of `flexinspect --help`.

The module of the same name (see `module_name`) has `DESCRIPTION` and `EXAMPLES`,
`configure(parser)`, which adds the arguments, and `run`: a function from the parsed arguments to
the exit code.
"""
ALIASES = {"compare": "diff"}
"""Other names of commands."""

_MODULES = {"import": "import_dump"}
"""Modules of commands that are keywords of Python: `flexinspect.cli.import` cannot be imported."""


def module_name(command: str) -> str:
    """Return the name of the module of a command."""
    return f"flexinspect.cli.{_MODULES.get(command, command)}"


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser with the arguments of one command; other modules are not imported."""
    raw: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    description = "The debugger for FlexAttention generation."
    parser = argparse.ArgumentParser("flexinspect", None, description, EXAMPLES, **raw)
    parser.add_argument("--version", action="version", version=f"flexinspect {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, **raw)
        if name == command:
            module = import_module(module_name(name))
            subparser.description, subparser.epilog = module.DESCRIPTION, module.EXAMPLES
            subparser.set_defaults(run=module.run, parser=subparser)
            module.configure(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors go to stderr."""
    _make_output_safe()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].endswith(".flextrace"):  # not the name of a command
        arguments.insert(0, "open")
    # No option of the main parser takes a value, so the first positional is the command.
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command in ALIASES:
        arguments[arguments.index(command)] = command = ALIASES[command]
    parser = build_parser(command)
    if command is not None and command not in COMMANDS:
        known = did_you_mean(command, COMMANDS, f"The commands are {', '.join(COMMANDS)}.")
        parser.error(f"there is no command '{escape_unprintable(command)}'. {known}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = did_you_mean(unknown[0], re.findall(r"--[a-z][\w-]+", args.parser.format_help()))
        text = escape_unprintable(" ".join(unknown))
        parser.error(f"unrecognized arguments: {text}. {known}".rstrip())
    try:
        return _run_without_command(parser) if args.command is None else int(args.run(args))
    except FlexInspectError as error:
        _print_error(error.sentence())
        if isinstance(error, TruncatedTraceError):
            _print_remaining_parts(error.path)
        return error.exit_code
    except KeyboardInterrupt as error:
        _print_error("interrupted")
        return exit_code_of(error)
    except MemoryError:
        _print_error("There is not enough memory for this command.")
        return OutputFileError.exit_code
    except OSError as error:
        # Commands convert the errors they expect; what remains is a failed write of our output.
        # Redirect stdout, so that the flush at exit succeeds.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            return 0
        what = f"{error.filename} cannot be used" if error.filename else "Writing the output failed"
        _print_error(f"{what}: {error.strerror or error}.")
        return OutputFileError.exit_code


def _run_without_command(parser: argparse.ArgumentParser) -> int:
    """Open the start screen on a terminal; print the help elsewhere."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.print_help()
        return 0
    from flexinspect.cli.interface import open_start_screen
    from flexinspect.cli.run import job_from_argv

    return open_start_screen(job_from_argv)


def _print_error(sentence: str) -> None:
    print_message("\n".join(map(escape_unprintable, sentence.splitlines())))


def _print_remaining_parts(path: Path) -> None:
    """Print what a truncated trace still contains, and how to open it."""
    from flexinspect.core.environment import command_path
    from flexinspect.trace.file.salvage import OFFER, describe_readable, is_repairable

    for line in describe_readable(path)[1:]:
        print(line, file=sys.stderr)
    if is_repairable(path):
        # The interface prints this too, so it says what to choose there.
        command = f"flexinspect open {command_path(path)}"
        print(f'To see that, in a terminal: {command}, then "{OFFER}".', file=sys.stderr)
    else:
        print("It cannot be opened without the missing part.", file=sys.stderr)


def _make_output_safe() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Started with this stream closed: discard what is printed.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
