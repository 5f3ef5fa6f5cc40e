"""The exception hierarchy. A message is a sentence: what is wrong, where, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FlexInspectError(Exception):
    """Base class of all errors that flexinspect raises deliberately.

    `exit_code` is the exit code of a command that the error ends: 2 where it could not do what it
    was asked for (an invalid request, a file that cannot be read or written), 1 where it did that
    and it failed. `hint` is the next step for the user, printed on its own line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or None

    def sentence(self) -> str:
        """Return the message with its hint, as a command prints it."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def summarize_error(error: BaseException) -> str:
    """Return the type of a foreign exception and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_OUT_OF_MEMORY = (
    *("outofmemory", "out of memory", "memoryerror", "not enough memory"),
    *("can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed"),
)


def is_out_of_memory(text: str) -> bool:
    """Return whether the text of an exception, with its type, says that memory ran out."""
    lowered = text.lower()
    return any(part in lowered for part in _OUT_OF_MEMORY)


def exception_chain(error: BaseException) -> list[BaseException]:
    """Return an exception with all exceptions of its `__cause__` and `__context__` chains."""
    chain: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in chain:
            chain[id(link)] = link
            pending += [link.__cause__, link.__context__]
    return list(chain.values())


class UsageError(FlexInspectError):
    """The request is invalid: an unknown name, a bad flag, a missing file."""

    exit_code = 2


class ModelError(UsageError):
    """A model could not be loaded: unknown alias, no weights, no network, too little memory."""


class DatasetError(UsageError):
    """A dataset or a prompt could not be read."""


class MaskError(UsageError):
    """A `mask_mod` or a mask preset cannot be used."""


class TraceError(FlexInspectError):
    """A trace could not be read: damaged, another format, or an unknown version."""

    exit_code = 2


class TruncatedTraceError(TraceError):
    """The trace at `path` lacks its end.

    `flexinspect.trace.file.salvage` lists the readable parts.
    """

    def __init__(self, message: str, path: Path, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class OutputFileError(FlexInspectError):
    """A file that the user asked for could not be written."""

    exit_code = 2


class TraceWriteError(FlexInspectError):
    """A record could not be written to a trace, for example because the disk is full.

    When several records were written in one call, `stored` are the positions, from 0, of those
    that were stored, and `others` the messages of all further failures.
    """

    stored: tuple[int, ...] = ()
    others: tuple[str, ...] = ()


class TracePlaceError(TraceWriteError):
    """The trace cannot be written where it was asked for: a missing folder, a file there."""

    exit_code = 2


class ControlError(FlexInspectError):
    """A running capture refused a command or could not be reached."""


class AttentionCallError(FlexInspectError):
    """The attention call of a layer failed; there is no silent fallback."""
