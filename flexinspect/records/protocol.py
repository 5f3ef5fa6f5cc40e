"""What the capture process says on its standard output: a few marked lines, and nothing else.

Everything about the run itself goes through the trace. These lines only say where the trace is and,
when there is none to read, why. Lines without the mark are the user's own prints. A user's program
has its standard streams to itself: for it, the lines go both ways through a socket of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MARK = "\x1eflexinspect "

TRACE = "trace"
"""The trace is open: `path` where it will be, `recording` where it is until the end, `note`."""

ERROR = "error"
"""The run ended with a sentence: `message`, `hint`, `exit_code`."""

FINISHED = "kept"
"""The run is over and the trace is at `path` (None when nothing was recorded)."""

STOPPED = "stopped"
"""The run pauses at a breakpoint: `text` says why, and how it goes on."""

DRAIN = "drain"
"""A user's program has ended, and what it printed is wanted to its end (see below)."""

OUTPUT = "output"
"""The other way, for a user's program: `items` that it printed, each [at, stream, text]."""

DRAINED = "drained"
"""The other way: all that was printed by now has been sent."""

TERMINAL = "terminal"
"""pdb wants the user's terminal, or has done with it (`wanted`); the other way: it may have it."""

DEBUGGER = "debugger"
"""What whoever debugs has to know at once is `text`: where debugpy listens, what it cannot do."""

GRANT_TERMINAL = b"."
"""The other way, on standard input: pdb may have the terminal."""

DETACH = b"detach\n"
"""The other way, on standard input: go on alone, whoever started the run closes its window."""


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
