"""`flexinspect attach`: open the interface on a running capture."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from flexinspect.cli.flags import add_low_bandwidth_flag, add_switches
from flexinspect.cli.output import print_json, print_lines
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import Address, CaptureEntry, find_capture, running
from flexinspect.control.messages import to_json
from flexinspect.core.errors import ControlError

DESCRIPTION = "Find your running captures on this machine, and open the interface on one of them."
EXAMPLES = """\
examples:
  flexinspect attach                      # if only one capture is running
  flexinspect attach --list
  flexinspect attach 41230                # the capture of this process
  flexinspect attach run.flextrace        # the capture that records this trace

Closing the interface does not stop the run. Several interfaces can be attached at the same time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    which = "which capture, if several are running"
    parser.add_argument("which", metavar="PID|TRACE", nargs="?", help=which)
    listing, as_json = "list the captures and exit", "list them as JSON, with their tokens"
    add_switches(parser, list=listing, json=as_json)
    add_low_bandwidth_flag(parser)


def run(args: argparse.Namespace) -> int:
    """List captures, or open one."""
    if args.json:
        print_json([to_json(entry) for entry in running()])
        return 0
    if args.list:
        print_lines([_table_line(entry) for entry in running()] or ["No capture is running."])
        return 0
    from flexinspect.cli.interface import open_trace_file

    is_pid = args.which is not None and args.which.isdecimal()
    pid = int(args.which) if is_pid else None
    trace = Path(args.which) if args.which is not None and not is_pid else None
    hint = "Name one: flexinspect attach PID, or attach TRACE."
    return open_trace_file(Path(find_capture(pid, trace, hint=hint).trace))


def _table_line(entry: CaptureEntry) -> str:
    try:
        client = ControlClient(Address(entry.address.socket), timeout_s=1.0)
        state = client.status().description
    except ControlError:
        state = "does not answer"
    line = f"{entry.pid:>8}  {_format_age(entry.started_at):>8}  {state:<28}  {entry.title}"
    return "  ".join(filter(None, (line, entry.trace, entry.address.url)))


def _format_age(started_at: float) -> str:
    minutes, seconds = divmod(max(int(time.time() - started_at), 0), 60)
    if not minutes:
        return f"{seconds} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
