"""The command line: one file per subcommand, whose heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flexinspect.core import __version__
from flexinspect.core.errors import FlexInspectError, TruncatedTraceError
from flexinspect.core.signals import exit_code_of
from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2
  flexinspect run --model llama3.2_3b_it --prompt "Who wrote Emma?" --prompt "Emma's author?"
  flexinspect open run.flextrace          (open may be left out)
  flexinspect attach                      (to a run that goes on)
  flexinspect ctl pause
  flexinspect findings run.flextrace
  flexinspect show run.flextrace --panel mask --step 3
  flexinspect compare a.flextrace b.flextrace
  flexinspect prove isolation --model demo --dataset demo
  flexinspect dump run.flextrace --step 3
  flexinspect models
  flexinspect museum
  flexinspect vscode

exit codes: 0 done, 1 the run failed or what was to be proved is not so,
2 it could not be done as asked, 3 a breakpoint ended the run, 130 interrupted,
143 ended by SIGTERM
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from flexinspect.cli import (
        attach,
        compare,
        ctl,
        dump,
        findings,
        models,
        museum,
        prove,
        run,
        show,
        vscode,
    )
    from flexinspect.cli import open as open_

    parser = argparse.ArgumentParser(
        prog="flexinspect",
        description="The debugger for FlexAttention generation: it shows what ran.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flexinspect {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands = (
        run,
        open_,
        attach,
        ctl,
        findings,
        show,
        compare,
        prove,
        dump,
        models,
        museum,
        vscode,
    )
    for command in commands:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are sentences on stderr."""
    _make_output_safe()
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].endswith(".flextrace"):  # no command ends so
        words.insert(0, "open")
    args = parser.parse_args(words)
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
    except BrokenPipeError:
        # The reader of our output is gone; point stdout at nothing so that exit stays quiet.
        _drop_output()
        return 0
    except OSError as error:
        # Commands turn what they expect into sentences; what is left is our own output failing.
        _drop_output()
        _print_error(f"Writing the output failed: {error.strerror or error}.")
        return 1


def _run_without_command(parser: argparse.ArgumentParser) -> int:
    """Without a command: ask what to do on a terminal, print the help anywhere else."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.print_help()
        return 0
    from flexinspect.cli.open import open_start_screen

    return open_start_screen()


def _print_error(sentence: str) -> None:
    lines = [escape_unprintable(line) for line in sentence.splitlines()]
    print("flexinspect: " + "\n".join(lines), file=sys.stderr)


def _print_remaining_parts(path: Path) -> None:
    """Say what a trace that is cut short still holds, and how to see it."""
    from flexinspect.trace.file.salvage import describe_readable, is_repairable

    for line in describe_readable(path)[1:]:
        print(line, file=sys.stderr)
    if is_repairable(path):
        print(f"To see that: flexinspect open {escape_unprintable(str(path))}", file=sys.stderr)
    else:
        print("It cannot be opened without the part that is missing.", file=sys.stderr)


def _make_output_safe() -> None:
    """Let no character end a run: what a terminal cannot show is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Started with its output closed: what is printed goes nowhere.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
