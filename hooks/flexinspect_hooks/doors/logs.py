"""Where the debuggers' log goes: the standard `logging`, to a rotating file or to stderr."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from flexinspect.errors import UsageError
from flexinspect_hooks import given

LOGGER = "flexinspect.debugging"
"""The logger of all debuggers; figures are DEBUG, anomalies WARNING, errors ERROR."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
LEVEL_EMOJI = {"DEBUG": "🔍", "INFO": "✅", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "❌"}


class _EmojiFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Put the level's sign before the line."""
        return f"{LEVEL_EMOJI.get(record.levelname, '·')} {super().format(record)}"


class DebugLog:
    """A handler of the debuggers' log, from when it is made until `close` or the block's end."""

    def __init__(self, handler: logging.Handler, level: int) -> None:
        self._handler = handler
        self._logger = logging.getLogger(LOGGER)
        self._level_before = self._logger.level
        self._logger.addHandler(handler)
        self._logger.setLevel(level)

    def close(self) -> None:
        """Take the handler out, put the level back, and close the file."""
        if self._handler in self._logger.handlers:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(self._level_before)
        self._handler.close()

    def __enter__(self) -> DebugLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def debug_logging(
    file: str | Path | None = None,
    *,
    level: int = logging.DEBUG,
    max_bytes: int = 10_000_000,
    backups: int = 5,
    signs: bool = False,
) -> DebugLog:
    """Write what the debuggers say to `file`, or to stderr without one; returns what ends it.

    The file is rotated at `max_bytes`, and `backups` older ones are kept. `signs` puts an emoji for
    the level before each line. Records have their figures as `record.facts` too.

    Raises `UsageError` for a file that cannot be written, and for a level that is no number of
    `logging`.
    """
    given.check_count(level, "level", 0)
    handler: logging.Handler
    try:
        handler = (
            logging.StreamHandler()
            if file is None
            else RotatingFileHandler(
                file, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"
            )
        )
    except OSError as error:
        raise UsageError(f"The log {file} cannot be written: {error.strerror}.") from error
    handler.setFormatter((_EmojiFormatter if signs else logging.Formatter)(FORMAT))
    return DebugLog(handler, level)
