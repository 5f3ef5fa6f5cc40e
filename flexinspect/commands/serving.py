"""The flags of `flexinspect run` that say who may control the run, and how."""

from __future__ import annotations

import argparse
import os
import sys

from flexinspect.errors import UsageError


def add_control_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of control."""
    group = parser.add_argument_group(
        "control", "flexinspect ctl and flexinspect attach reach a run while it goes on"
    )
    group.add_argument(
        "--hold",
        default=False,
        action="store_true",
        help="keep the model alive after the last generation, until ctl continue or Ctrl-C",
    )
    group.add_argument(
        "--serve",
        default=None,
        metavar="HOST:PORT",
        help="take commands over TCP too; every request needs the token that is printed",
    )
    group.add_argument(
        "--insecure-bind",
        default=False,
        action="store_true",
        help="let --serve listen where other machines reach it, unencrypted",
    )
    group.add_argument(
        "--no-control",
        dest="control",
        default=True,
        action="store_false",
        help="take no commands at all",
    )


def serve_options(args: argparse.Namespace) -> tuple[str, int, str] | None:
    """Return host, port and token of --serve, None without. Raises `UsageError`."""
    if args.serve is None:
        if args.insecure_bind:
            raise UsageError("--insecure-bind goes with --serve HOST:PORT.")
        return None
    if not args.control:
        raise UsageError("--serve and --no-control exclude each other.")
    from flexinspect.control.addresses import parse_serve_address

    serving = parse_serve_address(args.serve, insecure=args.insecure_bind)
    return serving.host, serving.port, serving.token


def print_serve_address(serving: tuple[str, int, str] | None) -> None:
    """Say on stderr how to reach a run over TCP, before it starts."""
    if serving is None:
        return
    from flexinspect.control.addresses import TOKEN_VARIABLE, is_loopback

    host, port, token = serving
    name = f"[{host}]" if ":" in host else host
    where = f"http://{name}:{port}" if port else "a port that flexinspect attach --list shows"
    given = "" if os.environ.get(TOKEN_VARIABLE) else f", {TOKEN_VARIABLE}={token}"
    print(f"flexinspect: commands will be taken at {where}{given}", file=sys.stderr)
    if not is_loopback(host):
        text = "other machines can reach it; what is sent, the token too, is not encrypted"
        print(f"flexinspect: {text}", file=sys.stderr)
