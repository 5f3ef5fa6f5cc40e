"""Tables of a trace as pandas or polars data frames; both libraries are optional.

| kind of column | pandas | polars |
|---|---|---|
| int, bool, real | int64, bool, float64 | Int64, Boolean, Float64 |
| int, bool that may be NULL | Int64, boolean | Int64, Boolean |
| real where NULL means "none" | Float64: NaN stays NaN, none is NA | Float64: NaN, null |
| text, and JSON as text | string | String |

The types follow from the schema alone, so that a frame without rows has them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from flexinspect.core.errors import UsageError
from flexinspect.trace import codec, schema
from flexinspect.trace.schema import Column, Table

Library: TypeAlias = Literal["pandas", "polars"]
ColumnValues: TypeAlias = list[tuple[Column, list[Any]]]

FRAME_LIBRARIES = ("pandas", "polars")
"""Supported libraries, the preferred one first."""


@dataclass(frozen=True, slots=True)
class FrameQuery:
    """The query for a table, without its blobs."""

    table: Table
    columns: tuple[Column, ...]
    sql: str
    params: tuple[int, ...]

    def values(self, rows: Sequence[Sequence[Any]]) -> ColumnValues:
        """Return the values of each column. Raises `DamagedValueError` for a wrong type."""
        name = self.table.name
        by_column = zip(*rows, strict=True) if rows else ((),) * len(self.columns)
        return [
            (column, codec.decode_column(column.kind, values, name))
            for column, values in zip(self.columns, by_column, strict=True)
        ]


def frame_query(name: str, **place: int | None) -> FrameQuery:
    """Return the query for the rows of a table at `place`; None there means all.

    Raises `UsageError` for an unknown table, and for a place that its columns do not have.
    """
    table = _find_table(name)
    conditions = {column: number for column, number in place.items() if number is not None}
    unknown = next((column for column in conditions if column not in table.names), None)
    if unknown is not None:
        raise UsageError(f"The table {name} has no column {unknown}; leave {unknown} out.")
    columns = tuple(column for column in table.columns if column.kind != "blob")
    where = " AND ".join(f"{column} = ?" for column in conditions)
    sql = f"SELECT {', '.join(column.name for column in columns)} FROM {name}"
    sql += f"{f' WHERE {where}' if where else ''} ORDER BY {', '.join(table.key)}"
    return FrameQuery(table, columns, sql, tuple(conditions.values()))


def frame_builder(library: Library | None) -> Callable[[ColumnValues], Any]:
    """Return a function that builds a data frame with `library`, or the first installed one.

    Raises `UsageError` when none is installed.
    """
    if library is not None and library not in FRAME_LIBRARIES:
        raise UsageError(
            f"{library!r} is not a library for data frames: choose {' or '.join(FRAME_LIBRARIES)}."
        )
    for name in FRAME_LIBRARIES if library is None else (library,):
        module = _import_library(name)
        if module is not None:
            return partial(_build_pandas if name == "pandas" else _build_polars, module)
    raise UsageError(
        "A data frame needs pandas or polars, and neither is installed: pip install pandas."
        if library is None
        else f"{library} is not installed: pip install {library}."
    )


def _find_table(name: str) -> Table:
    for table in schema.TABLES:
        if table.name == name:
            return table
    known = ", ".join(table.name for table in schema.TABLES)
    raise UsageError(f"A trace has no table {name!r}; it has {known}.")


def _import_library(name: str) -> Any:
    try:
        if name == "pandas":
            import pandas

            return pandas
        import polars

        return polars
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise  # it is installed and lacks a dependency, which is another error


def _build_pandas(pandas: Any, values: ColumnValues) -> Any:
    return pandas.DataFrame(
        {column.name: _pandas_array(pandas, column.kind, v) for column, v in values}
    )


def _pandas_array(pandas: Any, kind: str, values: list[Any]) -> Any:
    if kind == "real?":  # pandas.array would take NaN for a missing value
        none = np.array([value is None for value in values], np.bool_)
        floats = np.array([0.0 if value is None else value for value in values], np.float64)
        return pandas.arrays.FloatingArray(floats, none)
    dtypes = {
        "int": "int64",
        "int?": "Int64",
        "bool": "bool",
        "bool?": "boolean",
        "real": "float64",
    }
    return pandas.array(values, dtype=dtypes.get(kind, "string"))


def _build_polars(polars: Any, values: ColumnValues) -> Any:
    dtypes = {
        **dict.fromkeys(("int", "int?"), polars.Int64),
        **dict.fromkeys(("real", "real?"), polars.Float64),
        **dict.fromkeys(("bool", "bool?"), polars.Boolean),
    }
    return polars.DataFrame(
        [
            polars.Series(column.name, found, dtypes.get(column.kind, polars.String))
            for column, found in values
        ]
    )
