"""The result of one check."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Status(StrEnum):
    """How a check ended. `NOTE` is a fact without a judgement, or says that an option is absent."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


SIGNS = {Status.OK: "✓", Status.NOTE: "·", Status.WARNING: "!", Status.ERROR: "✗"}

STYLES = {
    Status.OK: "green",
    Status.NOTE: "dim",
    Status.WARNING: "yellow",
    Status.ERROR: "bold red",
}


class Check(Struct, frozen=True):
    """What was checked, the figure that was found, and what to do if that is not good.

    `details` are further facts, printed with `--verbose`. Passed checks of one `group` share a line
    without it.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    details: tuple[str, ...] = ()
    group: str = ""


def ok(name: str, found: str, *details: str, group: str = "") -> Check:
    """Return a check that is passed."""
    return Check(name, Status.OK, found, details=details, group=group)


def note(name: str, found: str, fix: str = "", *details: str) -> Check:
    """Return a check that only reports a fact."""
    return Check(name, Status.NOTE, found, fix, details)


def warning(name: str, found: str, fix: str, *details: str) -> Check:
    """Return a check that found something that may cause trouble."""
    return Check(name, Status.WARNING, found, fix, details)


def error(name: str, found: str, fix: str, *details: str) -> Check:
    """Return a check that found something that prevents a run."""
    return Check(name, Status.ERROR, found, fix, details)
