"""`flexinspect attach`: open the inspector on a run that goes on."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexinspect.core.text import escape_unprintable

EXAMPLES = """\
examples:
  flexinspect attach                      # to the only run that goes on
  flexinspect attach --list
  flexinspect attach 41230                # to that of a process
  flexinspect attach run.flextrace        # to the one that records this trace

Closing the interface leaves the run going, and any number may look at once.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Set the description and the arguments of this command."""
    parser.description = (
        "Find the captures of yours that run on this machine, and open the inspector "
        "on one of them."
    )
    parser.epilog = EXAMPLES
    parser.add_argument("which", metavar="PID|TRACE", nargs="?", help="which one, if several run")
    parser.add_argument("--list", action="store_true", help="list them, and open nothing")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON, tokens too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List captures, or open one."""
    if args.list or args.json:
        return _list(as_json=args.json)
    from flexinspect.cli.interface import open_trace_file
    from flexinspect.control.discovery import find_capture

    which = args.which
    is_pid = which is not None and which.isdecimal()
    trace = Path(which) if which is not None and not is_pid else None
    hint = "Name one: flexinspect attach PID, or attach TRACE."
    entry = find_capture(int(which) if is_pid else None, trace, hint=hint)
    return open_trace_file(Path(entry.trace))


def _list(*, as_json: bool) -> int:
    from flexinspect.control.discovery import running
    from flexinspect.control.messages import to_json

    found = running()
    if as_json:
        print(json.dumps([to_json(entry) for entry in found], indent=2))
        return 0
    for line in _table(found):
        print(escape_unprintable(line))
    return 0


def _table(found: Sequence[Any]) -> list[str]:
    if not found:
        return ["No capture is running."]
    states = [_capture_state(entry) for entry in found]
    return [
        f"{entry.pid:>8}  {_format_age(entry.started_at):>8}  {state:<28}  {entry.title}  {entry.trace}"
        + (f"  {entry.address.url}" if entry.address.url else "")
        for entry, state in zip(found, states, strict=True)
    ]


def _capture_state(entry: Any) -> str:
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
