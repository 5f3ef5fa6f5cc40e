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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from flexinspect.core.errors import UsageError
from flexinspect.trace import codec, schema

Library: TypeAlias = Literal["pandas", "polars"]
FRAME_LIBRARIES = ("pandas", "polars")  # supported libraries, the preferred one first


def read_frame(
    query: Callable[[str, Sequence[Any]], Sequence[Any]],
    name: str,
    library: Library | None,
    place: Mapping[str, int | None],
) -> Any:
    """Return the rows of a table at `place` (None there means all) as a data frame, without blobs.

    Without `library` the first installed one builds it. Raises `UsageError` for an unknown table,
    for a place that its columns do not have, and when no library is installed.
    """
    tables = {table.name: table for table in schema.TABLES}
    if name not in tables:
        raise UsageError(f"A trace has no table {name!r}; it has {', '.join(tables)}.")
    table = tables[name]
    where = {column: number for column, number in place.items() if number is not None}
    unknown = next((column for column in where if column not in table.names), None)
    if unknown is not None:
        raise UsageError(f"The table {name} has no column {unknown}; leave {unknown} out.")
    module = _find_library(library)
    kinds = {column: kind for column, kind in table.kinds.items() if kind != "blob"}
    condition = f" WHERE {' AND '.join(f'{column} = ?' for column in where)}" if where else ""
    sql = f"SELECT {', '.join(kinds)} FROM {name}{condition} ORDER BY {', '.join(table.key)}"
    rows = query(sql, tuple(where.values()))
    by_column = zip(*rows, strict=True) if rows else ((),) * len(kinds)
    pairs = zip(kinds.items(), by_column, strict=True)
    values = {}
    for (column, kind), stored in pairs:
        is_json = kind.removesuffix("?") in schema.JSON_KINDS
        read_as = f"text{'?' * kind.endswith('?')}" if is_json else kind
        values[column] = codec.decode_values([read_as] * len(stored), stored, name)
    build = _pandas_array if module.__name__ == "pandas" else _polars_series
    return module.DataFrame({c: build(module, kinds[c], each) for c, each in values.items()})


def _find_library(library: Library | None) -> Any:
    if library is not None and library not in FRAME_LIBRARIES:
        known = " or ".join(FRAME_LIBRARIES)
        raise UsageError(f"{library!r} is not a library for data frames: choose {known}.")
    for name in FRAME_LIBRARIES if library is None else (library,):
        try:
            if name == "pandas":
                import pandas

                return pandas
            import polars

            return polars
        except ModuleNotFoundError as error:
            if error.name != name:
                raise  # it is installed and lacks a dependency, which is another error
    raise UsageError(
        "A data frame needs pandas or polars, and neither is installed: pip install pandas."
        if library is None
        else f"{library} is not installed: pip install {library}."
    )


def _pandas_array(pandas: Any, kind: str, values: list[Any]) -> Any:
    if kind == "real?":  # pandas.array would take NaN for a missing value
        none = np.array([value is None for value in values], np.bool_)
        floats = np.array([0.0 if value is None else value for value in values], np.float64)
        return pandas.arrays.FloatingArray(floats, none)
    dtypes = {"int": "int64", "int?": "Int64", "bool": "bool", "bool?": "boolean"}
    return pandas.array(values, dtype="float64" if kind == "real" else dtypes.get(kind, "string"))


def _polars_series(polars: Any, kind: str, values: list[Any]) -> Any:
    dtypes = {"int": polars.Int64, "real": polars.Float64, "bool": polars.Boolean}
    return polars.Series(values, dtype=dtypes.get(kind.removesuffix("?"), polars.String))
