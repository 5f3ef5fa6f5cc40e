"""Flags of breakpoints, and those of the settings: checked before anything is loaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection

from flexinspect.errors import UsageError
from flexinspect.job import OnBreak


def add_break_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where a run stops by itself."""
    group = parser.add_argument_group("breakpoints", "docs/breakpoints.md has the language")
    group.add_argument(
        "--break",
        dest="breakpoints",
        action="append",
        default=None,
        metavar="EXPR",
        help="stop where this holds: 'entropy > 3 and step > 2', 'nan @ layers.*.self_attn', "
        "'finding mask.* [once]'; repeat it for more",
    )
    group.add_argument(
        "--wait",
        default=False,
        action="store_true",
        help="pause at a breakpoint also without a terminal, where a run ends with exit code 3",
    )


def breakpoints_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the breakpoints of the settings and of the flags.

    Raises `ExpressionError` for one that cannot be read.
    """
    from flexinspect.breaks import BreakpointStore, ExpressionError
    from flexinspect.config import load_config

    given: list[str] = args.breakpoints or []
    book = BreakpointStore(finding_ids=known_finding_ids)
    for text in given:
        try:
            book.add(text)
        except ExpressionError as error:
            raise error.with_location("--break") from None
    return (*load_config().breakpoints.values(), *given)


def known_finding_ids() -> Collection[str]:
    """Return the ids of all findings that the registered rules may tell of."""
    from flexinspect.rules.catalogue import load_rules

    return load_rules().finding_kinds.keys()


def on_break(args: argparse.Namespace) -> OnBreak:
    """Say what a hit does: without a terminal, or under --json, nobody would see the pause.

    With a debugger somebody does.

    Raises `UsageError` for --wait in a run that takes no commands: it would wait for ever.
    """
    if args.wait and not args.control:
        raise UsageError(
            "--wait pauses the run until a command comes, and --no-control takes none.",
            hint="Leave one of them out.",
        )
    is_watched = (sys.stderr.isatty() and not args.json) or args.pdb or args.debugpy is not None
    return "wait" if args.wait or is_watched else "stop"
