"""`flexinspect attach`: open the interface on a running capture."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from flexinspect.control.discovery import CaptureEntry

EXAMPLES = """\
examples:
  flexinspect attach                      # if only one capture is running
  flexinspect attach --list
  flexinspect attach 41230                # the capture of this process
  flexinspect attach run.flextrace        # the capture that records this trace

Closing the interface does not stop the run. Several interfaces can be attached at the same time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = (
        "Find your running captures on this machine, and open the interface on one of them."
    )
    parser.epilog = EXAMPLES
    parser.add_argument(
        "which", metavar="PID|TRACE", nargs="?", help="which capture, if several are running"
    )
    parser.add_argument("--list", action="store_true", help="list the captures and exit")
    parser.add_argument("--json", action="store_true", help="list them as JSON, with their tokens")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List captures, or open one."""
    if args.list or args.json:
        return _list(as_json=args.json)
    from flexinspect.cli.interface import open_trace_file
    from flexinspect.control.discovery import find_capture

    which = args.which
    is_pid = which is not None and which.isdecimal()
    entry = find_capture(
        pid=int(which) if is_pid else None,
        trace=Path(which) if which is not None and not is_pid else None,
        hint="Name one: flexinspect attach PID, or attach TRACE.",
    )
    return open_trace_file(Path(entry.trace))


def _list(*, as_json: bool) -> int:
    from flexinspect.control.discovery import running
    from flexinspect.control.messages import to_json

    captures = running()
    if as_json:
        print(json.dumps([to_json(entry) for entry in captures], indent=2))
        return 0
    for line in _table(captures):
        print(escape_unprintable(line))
    return 0


def _table(captures: Sequence[CaptureEntry]) -> list[str]:
    return [_table_line(entry) for entry in captures] or ["No capture is running."]


def _table_line(entry: CaptureEntry) -> str:
    state = _capture_state(entry)
    line = f"{entry.pid:>8}  {_format_age(entry.started_at):>8}  {state:<28}  {entry.title}"
    return "  ".join(filter(None, (line, entry.trace, entry.address.url)))


def _capture_state(entry: CaptureEntry) -> str:
    from flexinspect.control.client import ControlClient
    from flexinspect.control.discovery import Address
    from flexinspect.core.errors import ControlError

    try:
        return ControlClient(Address(entry.address.socket), timeout_s=1.0).status().description
    except ControlError:
        return "does not answer"


def _format_age(started_at: float) -> str:
    seconds = max(int(time.time() - started_at), 0)
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"
