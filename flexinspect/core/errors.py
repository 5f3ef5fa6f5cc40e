"""The one tree of errors. Each message is a sentence: what is wrong, where, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FlexInspectError(Exception):
    """Base of everything flexinspect raises on purpose.

    `exit_code` is what a command returns when the error ends it; `hint` is the next step for the
    user, shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def sentence(self) -> str:
        """Return the message with its hint, as a command prints it."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def summarize_error(error: BaseException) -> str:
    """Return what somebody else's exception says: its kind and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class UsageError(FlexInspectError):
    """The user asked for something that cannot be: unknown name, bad flag, missing file."""

    exit_code = 2


class ModelError(UsageError):
    """A model cannot be had: unknown alias, no weights, no network, too little memory."""


class DatasetError(UsageError):
    """A dataset or a prompt cannot be read."""


class MaskError(UsageError):
    """A mask rule or preset cannot be used."""


class TraceError(FlexInspectError):
    """A trace cannot be read: damaged, foreign, or of a version this program does not know."""

    exit_code = 2


class TruncatedTraceError(TraceError):
    """The trace at `path` lacks its end; `flexinspect.trace.file.salvage` tells what is left of it."""

    def __init__(self, message: str, path: Path, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class TraceWriteError(FlexInspectError):
    """The trace cannot be written any further (full disk, read-only folder).

    `stored` are the places, from 0, of what was stored all the same, of several given together,
    and `others` the messages of those that were refused beside the one that is named.
    """

    stored: tuple[int, ...] = ()
    others: tuple[str, ...] = ()


class ControlError(FlexInspectError):
    """A running capture refused a command, or cannot be reached."""


class AttentionCallError(FlexInspectError):
    """The attention call of a layer failed; nothing falls back in silence."""
