"""What is written in brackets after an expression: `[hits=3 once log off]`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.words import OPTION_HELP

_BRACKETS = re.compile(r"(?:^|\s)\[([^\[\]\"']*)\]\s*$")
_OPTION = re.compile(r"[^\s,]+")
_MAX_HITS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BreakpointOptions:
    """How a breakpoint stops: from the hit `hits` on (0 and 1: the first), then always.

    `once` switches it off after its first stop, `log` records an event in place of a stop, and
    `off` begins switched off.
    """

    hits: int = 0
    once: bool = False
    log: bool = False
    off: bool = False

    def to_text(self) -> str:
        """Return them as they are written, empty for none."""
        said = [f"hits={self.hits}"] if self.hits > 1 else []
        said += [name for name in ("once", "log", "off") if getattr(self, name)]
        return f"[{' '.join(said)}]" if said else ""


def split_options(text: str) -> tuple[str, BreakpointOptions]:
    """Return an expression without its options, and these. Raises `ExpressionError`."""
    found = _BRACKETS.search(text)
    if found is None:
        return text, BreakpointOptions()
    hits, switches = 0, set()
    for word in _OPTION.finditer(found[1]):
        start = found.start(1) + word.start()
        name, equals, number = word[0].partition("=")
        if not equals and name in ("once", "log", "off"):
            switches.add(name)
        elif equals and name in ("hits", "ignore"):
            hits = _parse_hits(text, start, word[0], number) + (name == "ignore")
        else:
            raise _unknown_option(text, start, word[0])
    given = {name: name in switches for name in ("once", "log", "off")}
    return text[: found.start()], BreakpointOptions(hits, **given)


def _parse_hits(text: str, start: int, word: str, number: str) -> int:
    if number.isascii() and number.isdigit() and len(number) < 10 and int(number) < _MAX_HITS:
        return int(number)
    raise ExpressionError(
        "After = stands a whole number.", text, start, start + len(word), hint="As in hits=3."
    )


def _unknown_option(text: str, start: int, word: str) -> ExpressionError:
    known = [name.rstrip("=") for name in OPTION_HELP]
    near = difflib.get_close_matches(word.partition("=")[0], known, 1)
    hint = f"Did you mean {near[0]}?" if near else "Known are hits=N, ignore=N, once, log, off."
    return ExpressionError(
        f"{word} is no option of a breakpoint.", text, start, start + len(word), hint=hint
    )
