"""The log of the debuggers: their logger, and its handlers: rotating files, or stderr."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from logging.handlers import RotatingFileHandler
from pathlib import Path

from flexinspect.core.errors import UsageError
from flexinspect_hooks.capture import argument_checks

LOGGER = "flexinspect.debugging"  # figures are DEBUG, anomalies WARNING, errors ERROR
log = logging.getLogger(LOGGER)
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
LEVEL_EMOJI = {"DEBUG": "🔍", "INFO": "✅", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "❌"}


class _EmojiFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{LEVEL_EMOJI.get(record.levelname, '·')} {super().format(record)}"


def debug_logging(
    file: str | Path | None = None,
    *,
    level: int = logging.DEBUG,
    max_bytes: int = 10_000_000,
    backups: int = 5,
    signs: bool = False,
) -> ExitStack:
    """Write the debuggers' log to `file`, or to stderr without one, until the result is closed.

    The file is rotated at `max_bytes`, and `backups` older ones are kept. `signs` puts an emoji for
    the level before each line. Records also have their figures as `record.facts`. The result is
    a context manager, and has `close`.

    Raises `UsageError` for a file that cannot be written, and for a level that is not a number of
    `logging`.
    """
    argument_checks.check_count(level, "level", 0)
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        try:
            handler = RotatingFileHandler(file, "a", max_bytes, backups, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The log {file} cannot be written: {error.strerror}.") from error
    handler.setFormatter((_EmojiFormatter if signs else logging.Formatter)(FORMAT))
    active = ExitStack()
    active.callback(handler.close)
    active.callback(log.setLevel, log.level)
    active.callback(log.removeHandler, handler)
    log.addHandler(handler)
    log.setLevel(level)
    return active
