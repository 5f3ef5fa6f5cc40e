"""Flags that several commands share, and the options that they select."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexinspect.core.addresses import format_address, is_loopback, parse_address
from flexinspect.core.errors import UsageError

if TYPE_CHECKING:
    from flexinspect.records.job import DebuggerOptions, OnBreak


def add_switches(group: Any, switches: Mapping[str, str]) -> None:
    """Add flags that take no value to a parser or a group of it, each with its help."""
    for name, text in switches.items():
        group.add_argument(name, action="store_true", help=text)


def add_number_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add flags that take a number from 0 on, such as those of a place, each with its help."""
    for name, text in flags.items():
        parser.add_argument(name, metavar="N", type=non_negative_int, help=text)


def add_break_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of breakpoints."""
    group = parser.add_argument_group("breakpoints", "docs/breakpoints.md describes the language")
    group.add_argument(
        "--break",
        dest="breakpoints",
        action="append",
        metavar="EXPR",
        help="stop when this holds: 'entropy > 3 and step > 2', 'nan @ layers.*.self_attn', "
        "'finding mask.* [once]' (may be repeated)",
    )
    wait = "pause at a breakpoint even without a terminal, instead of ending with exit code 3"
    add_switches(group, {"--wait": wait})


def breakpoints_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the breakpoints of the settings and of the flags.

    Raises `ExpressionError` for a condition with a syntax error.
    """
    from flexinspect.breakpoints.grammar import ExpressionError
    from flexinspect.breakpoints.store import BreakpointStore
    from flexinspect.inputs.config import load_config
    from flexinspect.rules.engine import load_rules

    conditions: list[str] = args.breakpoints or []
    store = BreakpointStore(finding_ids=lambda: load_rules().finding_kinds)
    for condition in conditions:
        try:
            store.add(condition)
        except ExpressionError as error:
            raise error.with_location("--break") from None
    return (*load_config().breakpoints.values(), *conditions)


def on_break(args: argparse.Namespace) -> OnBreak:
    """Return what a hit of a breakpoint does: pause the run, or end it.

    A run ends where nobody would see the pause: without a terminal or with --json, and without a
    debugger. Raises `UsageError` for --wait with --no-control, which would wait for ever.
    """
    if args.wait and not args.control:
        raise UsageError(
            "--wait pauses the run until a command comes, and --no-control accepts none.",
            hint="Leave one of them out.",
        )
    is_watched = (sys.stderr.isatty() and not args.json) or args.pdb or args.debugpy is not None
    return "wait" if args.wait or is_watched else "stop"


def add_debugger_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of debuggers."""
    group = parser.add_argument_group(
        "debugger",
        "an uncompiled FlexAttention then runs each mask_mod as plain Python, so that breakpoints "
        "in it are hit; the values stay the same",
    )
    group.add_argument(
        "--debugpy",
        type=_parse_address,
        metavar="[HOST:]PORT",
        help="let VSCode attach to the capture process at this address (0: any free port)",
    )
    switches = {
        "--wait-for-client": "wait for a client before anything runs",
        "--debugpy-expose": "allow a HOST that other machines can reach",
    }
    add_switches(group, switches)
    pdb = "start pdb on this terminal at a breakpoint() or an exception"
    group.add_argument("--pdb", "--interactive", action="store_true", help=pdb)


def debugger_of(args: argparse.Namespace) -> DebuggerOptions:
    """Return the checked debugger options; warn on stderr about a port that others can reach.

    Raises `UsageError` for options that exclude each other or an address that is not allowed.
    """
    from flexinspect.records.job import (
        DebuggerOptions,
        check_debugger,
        controlling_terminal,
    )

    host, port = args.debugpy or (DebuggerOptions().host, None)
    tty = controlling_terminal() if args.pdb else None
    options = DebuggerOptions(host, port, args.wait_for_client, args.pdb, tty)
    if check_debugger(options, is_exposed=args.debugpy_expose):
        text = f"anyone who can reach {host}:{port} can run any code in this run."
        print(f"flexinspect: {text}", file=sys.stderr)
    return options


def _parse_address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of control by `flexinspect ctl` and `flexinspect attach`."""
    group = parser.add_argument_group(
        "control", "flexinspect ctl and flexinspect attach control a run while it is running"
    )
    group.add_argument(
        "--serve",
        metavar="HOST:PORT",
        help="accept commands over TCP too; every request needs the token that is printed",
    )
    switches = {
        "--hold": "keep the model alive after the last generation, until ctl continue or Ctrl-C",
        "--insecure-bind": "let --serve listen on an address that other machines can reach, "
        "unencrypted",
    }
    add_switches(group, switches)
    off = "accept no commands"
    group.add_argument("--no-control", dest="control", action="store_false", help=off)


def serve_options(args: argparse.Namespace) -> tuple[str, int, str] | None:
    """Return host, port and token of --serve, None without it. Raises `UsageError`."""
    if args.serve is None:
        if args.insecure_bind:
            raise UsageError("--insecure-bind needs --serve HOST:PORT.")
        return None
    if not args.control:
        raise UsageError("--serve and --no-control exclude each other.")
    from flexinspect.control.discovery import parse_serve_address

    serving = parse_serve_address(args.serve, insecure=args.insecure_bind)
    return serving.host, serving.port, serving.token


def print_serve_address(serving: tuple[str, int, str] | None) -> None:
    """Print on stderr how to reach a run over TCP, before it starts."""
    if serving is None:
        return
    from flexinspect.control.discovery import TOKEN_VARIABLE

    host, port, token = serving
    shown_port = "a port that flexinspect attach --list shows"
    where = f"http://{format_address(host, port)}" if port else shown_port
    token_text = "" if os.environ.get(TOKEN_VARIABLE) else f", {TOKEN_VARIABLE}={token}"
    print(f"flexinspect: commands will be accepted at {where}{token_text}", file=sys.stderr)
    if not is_loopback(host):
        text = "other machines can reach it; the connection, token included, is not encrypted"
        print(f"flexinspect: {text}", file=sys.stderr)


MAX_THREADS = 1024
"""Limit of --threads: OpenMP creates as many as requested, until the system runs out."""


def positive_int(text: str) -> int:
    """Return a whole number above 0. Raises `ArgumentTypeError`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def n_threads(text: str) -> int:
    """Return a number of CPU threads. Raises `ArgumentTypeError`."""
    value = positive_int(text)
    if value > MAX_THREADS:
        raise ArgumentTypeError(f"{value} threads are more than {MAX_THREADS}")
    return value


def non_negative_int(text: str) -> int:
    """Return a whole number that is 0 or greater. Raises `ArgumentTypeError`."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number that is 0 or greater")
    return int(text)
