"""`flexinspect run --log-file`: the run as lines of Python's logging, `time - name - level - text`.

The lines come from the trace, so they have the times of the capture process, and are the same with
and without the interface.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flexinspect.cli.step_lines import plan_line, step_lines, verdict_line
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.trace.queries import question_text
from flexinspect.trace.reader import TraceReader, open_trace

LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
_LEVELS = {
    Severity.ERROR: logging.ERROR,
    Severity.WARNING: logging.WARNING,
    Severity.NOTE: logging.INFO,
}


class RunLog:
    """Appends what is new in a trace to a log file. Raises `UsageError` if it cannot be opened."""

    def __init__(self, file: str | Path) -> None:
        try:
            self._handler = logging.FileHandler(file, encoding="utf-8")
        except OSError as error:
            what = f"The log file {file} cannot be written: {error.strerror}."
            raise UsageError(what, hint="Choose another --log-file.") from error
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT))
        self._reader: TraceReader | None = None
        self._last_event = self._last_finding = self._generation = self._next_step = 0
        self._is_announced, self._phase = False, ""

    def follow(self, recording: Path) -> None:
        """Write what is new in a trace that is being recorded; cheap when nothing is."""
        if self._reader is None:
            self._reader = TraceReader(recording)
        elif not self._reader.changed():
            return
        self._write_new(self._reader)

    def close(self, path: Path | None) -> None:
        """Write the rest from the trace that the run has left, if it left one."""
        if self._reader is not None:
            self._reader.close()
        try:
            if path is not None:
                with open_trace(path) as reader:
                    self._write_new(reader)
                    self._log("run", logging.INFO, f"the run is {reader.state}; trace {path}")
        except TraceError as error:
            self._log("run", logging.ERROR, error.sentence())
        self._handler.close()

    def _log(self, name: str, level: int, text: str, at: float | None = None) -> None:
        for line in text.splitlines():
            message = escape_unprintable(line.strip())
            record = logging.LogRecord(f"flexinspect.{name}", level, "", 0, message, (), None)
            if at is not None:
                record.created, record.msecs = at, at % 1 * 1000
            self._handler.emit(record)

    def _write_new(self, reader: TraceReader) -> None:
        with reader.snapshot():
            events = list(reader.events(self._last_event))
            for row in events:
                self._last_event = row.id
                self._log_event(row.event)
            while self._log_generation(reader):
                pass
            for found in reader.finding_rows(self._last_finding):
                self._last_finding = found.id
                finding = found.finding
                text = f"{finding.sentence} [{finding.id}]"
                self._log("finding", _LEVELS[finding.severity], text)

    def _log_event(self, event: EventRecord) -> None:
        level = logging.ERROR if event.kind == "error" else logging.INFO
        text = event.text
        if event.kind == "phase":
            if event.text == "plan":
                text = plan_line(event.data)
            elif event.text == "note":
                text = str(event.data.get("text", ""))
            elif text == self._phase:
                return  # only its progress
            self._phase = text
        self._log(event.kind, level, text, event.at)

    def _log_generation(self, reader: TraceReader) -> bool:
        """Log the new steps of the current generation; True if it ended and a next may follow."""
        rows = reader.generations()
        if len(rows) <= self._generation:
            return False
        row = rows[self._generation]
        if not self._is_announced:
            question = question_text(reader, row.generation)
            self._log("generation", logging.INFO, f"generation {row.generation}: {question}")
            self._is_announced = True
        for step in reader.steps(self._generation, start=self._next_step):
            self._next_step = step.step + 1
            at = step.started_at + step.wall_ms / 1e3
            for line in step_lines(step, reader):
                self._log("step", logging.DEBUG, line, at)
            if step.step == 0:
                self._log("mask", logging.INFO, verdict_line(step, reader), at)
        if row.state == "recording":
            return False
        text = f"generation {row.generation} {row.state}: {row.answer}"
        self._log("generation", logging.INFO, text)
        self._generation, self._next_step, self._is_announced = self._generation + 1, 0, False
        return True
