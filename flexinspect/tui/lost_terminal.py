"""A terminal that is closed while the interface writes to it.

Textual writes in a thread, through a queue of bounded length. If a write fails, as after the
terminal's window was closed, the thread ends; once the queue is full, ending the interface waits
for that thread for ever (`textual.drivers._writer_thread`). So failed writes are ignored: SIGHUP,
or the end of the input, ends the interface.
"""

from __future__ import annotations

from contextlib import suppress
from typing import IO, Any

from textual.driver import Driver


class ForgivingFile:
    """A file whose failed writes are ignored."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write if that is possible."""
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def ignore_failed_writes(driver: type[Driver]) -> type[Driver]:
    """Return a driver that goes on where the terminal it writes to is gone."""

    class ForgivingDriver(driver):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if (file := getattr(self, "_file", None)) is not None:
                self._file = ForgivingFile(file)

    return ForgivingDriver
