"""The flags of `flexinspect run` that let a debugger come to the run."""

from __future__ import annotations

import argparse
import sys

from flexinspect.debugger import (
    DebuggerOptions,
    check_debugger,
    controlling_terminal,
    parse_address,
)

DEBUG_FLAGS = ("--debugpy", "--wait-for-client", "--debugpy-expose", "--pdb")


def add_debugger_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, as a group of their own."""
    group = parser.add_argument_group(
        "debugger",
        "rules of an uncompiled FlexAttention then run as plain Python, so that breakpoints in a "
        "mask_mod are hit: values stay the same, a breakpoint costs what its lines cost",
    )
    group.add_argument(
        "--debugpy",
        default=None,
        type=_parse_address,
        metavar="[HOST:]PORT",
        help="let VSCode attach to the capture process here (0: any free port)",
    )
    group.add_argument(
        "--wait-for-client",
        default=False,
        action="store_true",
        help="run nothing until a client has attached",
    )
    group.add_argument(
        "--debugpy-expose",
        default=False,
        action="store_true",
        help="let HOST be an address that other machines reach",
    )
    group.add_argument(
        "--pdb",
        "--interactive",
        default=False,
        action="store_true",
        help="plain pdb on this terminal at a breakpoint() or an exception",
    )


def debugger_of(args: argparse.Namespace) -> DebuggerOptions:
    """Return what the flags ask for, checked; tells on stderr of a port that others can reach.

    Raises `UsageError`.
    """
    host, port = args.debugpy or (DebuggerOptions().host, None)
    tty = controlling_terminal() if args.pdb else None
    options = DebuggerOptions(host, port, args.wait_for_client, args.pdb, tty)
    if check_debugger(options, is_exposed=args.debugpy_expose):
        print(
            f"flexinspect: whoever reaches {host}:{port} can run any code in this run.",
            file=sys.stderr,
        )
    return options


def _parse_address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
