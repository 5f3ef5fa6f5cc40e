"""The command line: one file per subcommand, whose heavy imports wait until it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flexinspect import __version__
from flexinspect.errors import FlexInspectError

EXAMPLES = """\
examples:
  flexinspect run --model demo --dataset demo --max-samples 2
  flexinspect run --model llama3.2_3b_it --prompt "Who wrote Emma?" --prompt "Emma's author?"
  flexinspect dump run.flextrace --step 3
  flexinspect models

exit codes: 0 done, 1 the run failed, 2 it could not be done as asked, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from flexinspect.commands import dump, models, run

    parser = argparse.ArgumentParser(
        prog="flexinspect",
        description="The debugger for FlexAttention generation: it shows what ran.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flexinspect {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in (run, dump, models):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors are sentences on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(args.run(args))
    except FlexInspectError as error:
        print(f"flexinspect: {error.sentence()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flexinspect: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; point stdout at nothing so that exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
