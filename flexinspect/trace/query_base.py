"""The base of all queries of the reader: from SQL to records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flexinspect.core.errors import TraceError
from flexinspect.trace import codec
from flexinspect.trace.codec import RowFormat
from flexinspect.trace.file.connections import TraceConnections
from flexinspect.trace.schema import Table, select_sql

T = TypeVar("T")

WHERE_BRANCH = "WHERE generation = ? AND branch = ?"
WHERE_STEP = "WHERE generation = ? AND branch = ? AND step = ?"
OPEN_END = 1 << 62
"""Stands for the end of a range that is open: no step and no position is as large."""


def place_condition(generation: int | None, branch: int, step: int | None) -> tuple[str, list[int]]:
    """Return the SQL condition for all rows, one branch or one step of it, and its parameters."""
    if generation is None:
        return "", []
    if step is None:
        return WHERE_BRANCH, [generation, branch]
    return WHERE_STEP, [generation, branch, step]


class TraceQueries:
    """Queries of the trace at `path`; raise `TraceError` when it is damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._connections = TraceConnections(self.path)

    def _records(self, rows: RowFormat[T], rest: str, params: Sequence[Any] = ()) -> list[T]:
        """Return the records of the rows that `rest` (behind FROM) selects."""
        return self._made(rows.decode, rows.table, rest, params, skip=rows.skip)

    def _records_of_step(
        self, rows: RowFormat[T], generation: int, step: int, branch: int
    ) -> list[T]:
        """Return the records of a step, in the order of their key."""
        order = ", ".join(rows.table.key[2:])
        return self._records(rows, f"{WHERE_STEP} ORDER BY {order}", (generation, branch, step))

    def _made(
        self,
        make: Callable[[Sequence[Any]], T],
        table: Table,
        rest: str,
        params: Sequence[Any] = (),
        *,
        skip: int = 0,
        stop: int | None = None,
    ) -> list[T]:
        """Return what `make` makes of the cleaned columns of each row."""
        rows = self._select(table, rest, params, skip=skip, stop=stop)
        return [self._decode(make, row) for row in rows]

    def _select(
        self,
        table: Table,
        rest: str,
        params: Sequence[Any] = (),
        *,
        skip: int = 0,
        stop: int | None = None,
    ) -> list[list[Any]]:
        sql = select_sql(table, rest, skip=skip, stop=stop)
        return [self._decode_row(table, row, skip) for row in self._query(sql, params)]

    def _query(self, sql: str, params: Sequence[Any]) -> list[Any]:
        return self._connections.query(sql, params)

    def _query_int(self, sql: str, params: Sequence[Any] = ()) -> int | None:
        """Return the integer that a query selects, None when it has no row."""
        rows = self._query(sql, params)
        return self._decode(codec.decode_int, rows[0][0]) if rows else None

    def _decode_row(self, table: Table, row: Sequence[Any], skip: int) -> list[Any]:
        return self._decode(lambda values: codec.decode_row(table, values, skip=skip), row)

    def _decode(self, make: Callable[[Any], T], row: Any) -> T:
        try:
            return make(row)
        except codec.DamagedValueError as damage:
            raise TraceError(
                f"{self.path} is damaged: {damage}.",
                hint="Other steps may still be readable; copy the file again if you can.",
            ) from None
