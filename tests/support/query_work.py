"""Counts what the queries of a trace cost: instructions of SQLite's virtual machine, not time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexinspect.trace.file.connections import TraceConnections, trace_errors

_RESOLUTION = 10
"""Instructions between two calls of the counter."""


class QueryWork:
    """The queries since the last `reset`: their number, instructions, and rows returned."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all queries."""
        self.n_queries = self.n_ops = self.n_rows = 0


@contextmanager
def counted_queries() -> Iterator[QueryWork]:
    """Count the queries of the readers that are opened while entered."""
    work, original = QueryWork(), TraceConnections.query

    def count() -> None:
        work.n_ops += _RESOLUTION

    def query(self: TraceConnections, sql: str, params: Sequence[Any] = ()) -> list[Any]:
        handle = self._thread_connection()
        with handle.lock, trace_errors(self.path):
            self._open_connection(handle).set_progress_handler(count, _RESOLUTION)
            rows = original(self, sql, params)
        work.n_queries += 1
        work.n_rows += len(rows)
        return rows

    TraceConnections.query = query  # type: ignore[method-assign]
    try:
        yield work
    finally:
        TraceConnections.query = original  # type: ignore[method-assign]
