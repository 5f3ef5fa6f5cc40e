"""Run a piece of the program as a user would, and judge how it ended."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable

MAX_S = 5.0
"""Seconds of CPU time that it may take."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OWN_FAULT = "This is a bug in the panel"
"""What the program says of an error that no decoder has refused."""

NO_MEMORY = "not enough memory"
"""Part of what the program says when an allocation has failed."""


class Problem(Struct, frozen=True):
    """What is wrong with the end of a command."""

    kind: str
    detail: str


class TooSlow(BaseException):
    """It took longer than `MAX_S`."""


def problem_of(call: Callable[[], object], *, may_lack_memory: bool = True) -> Problem | None:
    """Run `call` in this process; return what is wrong with how it ended, None if nothing.

    It may return an exit code, raise an error with a sentence, or exit with 0, 1 or 2. Unless it
    `may_lack_memory`, it may not say that memory does not suffice.
    """
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_S)
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call()
    except TooSlow:
        return Problem("slow", f"more than {MAX_S} s")
    except FlexInspectError as error:  # the command line escapes it
        err.write(escape_unprintable(error.sentence()))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
    except BaseException as error:
        return Problem("traceback", f"{type(error).__name__}: {error!s:.200} at {_place(error)}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if isinstance(code, int) and code not in (0, 1, 2):
        return Problem("exit code", str(code))
    found = _said_wrongly(out.getvalue(), err.getvalue())
    if found is None and not may_lack_memory and NO_MEMORY in err.getvalue():
        return Problem("memory", f"more than the limit: {err.getvalue().strip()[:200]}")
    return found


def _said_wrongly(printed: str, complained: str) -> Problem | None:
    said = printed + complained
    if found := CONTROL.search(said):
        return Problem("control character", ascii(found[0]))
    if "Traceback (most recent" in complained:  # a recorded program may have printed one
        return Problem("traceback", "printed")
    if OWN_FAULT in said:
        before = said[: said.index(OWN_FAULT)]
        return Problem("own fault", before.rsplit("The panel", 1)[-1].strip()[:200])
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "flexinspect" in frame.filename][-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in own)


def _stop(*_: object) -> None:
    raise TooSlow
