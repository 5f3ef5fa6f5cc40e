"""The messages between the capture process and its parent: a few marked lines.

Everything about the run itself goes through the trace. These lines only tell where the trace is or,
when there is none to read, why. They are sent on standard output, where lines without the mark are
printed output. A user's program keeps its standard streams; for it, the lines go both ways through
a separate socket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MARK = "\x1eflexinspect "

TRACE = "trace"
"""The trace is open: its final `path`, `recording` where it is until the end, and a `note`."""

ERROR = "error"
"""The run ended with an error: `message`, `hint`, `exit_code`."""

FINISHED = "kept"
"""The run is over and the trace is at `path` (None when nothing was recorded)."""

STOPPED = "stopped"
"""The run pauses at a breakpoint: `text` says why, and how to continue."""

DRAIN = "drain"
"""A user's program has ended, and the parent is to send the rest of its output (`OUTPUT`)."""

OUTPUT = "output"
"""From the parent, for a user's program: `items` of its output, each [at, stream, text]."""

DRAINED = "drained"
"""From the parent: all output so far has been sent."""

TERMINAL = "terminal"
"""pdb needs the user's terminal, or no longer does (`wanted`); from the parent: pdb may use it."""

DEBUGGER = "debugger"
"""A message for the user who debugs is `text`: where debugpy listens, or what it cannot do."""

GRANT_TERMINAL = b"."
"""From the parent, on standard input: pdb may use the terminal."""

DETACH = b"detach\n"
"""From the parent, on standard input: continue alone, because the parent closes its window."""


def format_message(kind: str, **facts: Any) -> str:
    """Return one marked line, without its line break."""
    return MARK + json.dumps({"kind": kind, **facts})


def parse_message(text: str) -> Mapping[str, Any] | None:
    """Return the facts of a marked line, None for anything else."""
    if not text.startswith(MARK):
        return None
    try:
        facts: Mapping[str, Any] = json.loads(text[len(MARK) :])
    except ValueError:
        return None
    return facts
