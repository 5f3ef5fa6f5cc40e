"""One invariant, what breaks it, and the file that holds the invariants of a program."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core import __version__
from flexinspect.core.conversion import convert, read_data
from flexinspect.core.environment import read_text, save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural, printable

FORMAT, VERSION = "flexinspect-invariants", 1
FILE_NAME = "invariants.json"

KindName = Literal[
    "part", "parameter", "output", "setting", "input", "contains", "before", "range", "median",
    "constant", "changes", "monotone", "falls", "total", "present", "together", "moves",
    "equal", "proportional", "at-most", "ranks-equal",
]  # fmt: skip


class Invariant(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A statement that held in all good runs.

    `part` is the training or generation, `subject` the channel, call, input or parameter, `other`
    the second one of a relation. It is judged in the steps from `first` to `last` (None: all).
    `low` and `high` are bounds (None: unbounded) around what was `observed`, `value` is what a
    constant or a setting is. `runs` and `samples` (steps, or parameters) support it.
    """

    part: str
    kind: KindName
    subject: str
    other: str = ""
    first: int = 0
    last: int | None = None
    low: float | None = None
    high: float | None = None
    observed: tuple[float, float] | None = None
    value: str | float | None = None
    runs: int = 0
    samples: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What two invariants of the same statement share."""
        return self.part, self.kind, self.subject, self.other, self.first

    @property
    def support(self) -> str:
        """The runs and steps in which it held, in words."""
        steps = f", {plural(self.samples, 'step')}" if self.samples else ""
        return f"in {plural(self.runs, 'good run')}{steps}"


class Violation(Struct, frozen=True):
    """An invariant that does not hold: first in `step` (None: of the whole run), on `rank`.

    `n_steps` are the steps in which it does not hold, `sentence` says what was found and what was
    learnt.
    """

    invariant: Invariant
    sentence: str
    step: int | None = None
    rank: int | None = None
    n_steps: int = 1


class InvariantFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file of invariants; `runs` are the good runs."""

    format: str
    version: int
    runs: tuple[str, ...] = ()
    made_by: str = ""
    invariants: tuple[Invariant, ...] = ()


_NEEDS = {
    "range": ("low", "high"),
    "median": ("low", "high"),
    "falls": ("high",),
    "constant": ("value",),
    "total": ("value",),
    "monotone": ("value",),
    "proportional": ("value",),
    "setting": ("value",),
    "input": ("value",),
    "parameter": ("value",),
    "output": ("value",),
    **dict.fromkeys(("before", "together", "moves", "equal", "at-most"), ("other",)),
}
"""The fields that an invariant of a kind cannot do without; of `low` and `high` one is enough."""
_WORDS = {"setting", "input", "parameter", "output", "monotone"}  # kinds whose value is a text


def read_invariants(file: Path) -> InvariantFile:
    """Read a file of invariants. Raises `UsageError` with what is wrong and where."""
    data = read_data(file, "file of invariants")
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        hint = "Learn invariants: flexinspect infer GOOD_RUN... -o invariants.json"
        raise UsageError(f"{file} does not contain invariants.", hint=hint)
    if data.get("version") != VERSION:
        raise UsageError(
            f"{file} has version {data.get('version')!r} of the format, not {VERSION}.",
            hint="Learn the invariants again, or use the flexinspect that wrote the file.",
        )
    rows = data.pop("invariants", [])
    contents = convert(InvariantFile, data, str(file))
    if not isinstance(rows, list):
        raise UsageError(f"{file} is not valid: invariants must be a list.")
    places = _places(file, len(rows))
    invariants = []
    for row, place in zip(rows, places, strict=True):
        one = convert(Invariant, row, f"{file}, {place},")
        if reason := _what_is_wrong(one):
            what = f"{printable(one.kind)} of {printable(one.subject)}"
            raise UsageError(f"{file}, {place}, is not valid ({what}): {reason}.")
        invariants.append(one)
    return replace(contents, invariants=tuple(invariants))


def _places(file: Path, n: int) -> list[str]:
    """Return where each of `n` invariants is: its line, or its number if lines hold several."""
    lines = read_text(file, "file of invariants").splitlines()
    starts = [
        number
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith(('{"', "[[invariants]]")) and number > 1
    ]
    is_each = len(starts) == n
    return [f"line {at}" for at in starts] if is_each else [f"invariant {i + 1}" for i in range(n)]


def _what_is_wrong(one: Invariant) -> str:
    needs = _NEEDS.get(one.kind, ())
    given = [name for name in needs if getattr(one, name) not in (None, "")]
    if not one.subject or (needs and not given):
        names = " or ".join(needs) if one.subject else "subject"
        return f"it needs {names}"
    if any(bound is not None and not math.isfinite(bound) for bound in (one.low, one.high)):
        return "a bound must be a finite number; leave it out for none"
    if one.first < 0:
        return f"first {one.first} is below 0"
    if one.low is not None and one.high is not None and one.low > one.high:
        return f"low {one.low:g} is above high {one.high:g}"
    if one.last is not None and one.first > one.last:
        return f"first {one.first} is above last {one.last}"
    if one.value is not None and isinstance(one.value, str) != (one.kind in _WORDS):
        return f"value must be {'a text' if one.kind in _WORDS else 'a number'}"
    if one.kind == "monotone" and one.value not in ("rises", "falls"):
        return 'value must be "rises" or "falls"'
    return ""


def write_invariants(file: Path, invariants: Sequence[Invariant], runs: Sequence[str]) -> None:
    """Write invariants, one a line, in place of the file. Raises `OutputFileError`."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": f"flexinspect {__version__}",
        "runs": [*runs],
    }
    lines = [json.dumps(_readable(one), ensure_ascii=False) for one in invariants]
    text = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}")
    body = ",\n  ".join(lines)
    save_file(file, f'{text},\n "invariants": [\n  {body}\n ]\n}}\n'.encode())


def _readable(one: Invariant) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(one)
    for name in ("low", "high"):
        if isinstance(value := data.get(name), float):
            data[name] = rounded(value)
    if one.observed is not None:
        data["observed"] = [*map(rounded, one.observed)]
    return data


def rounded(value: float) -> float:
    """Return a number with four digits, as sentences and files show bounds."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
