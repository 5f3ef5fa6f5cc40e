"""A trace as Parquet files, one per table, with typed columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexinspect.core.environment import require_library
from flexinspect.exports.exporter import ExportOptions, Progress, clean_text
from flexinspect.exports.tables import write_tables
from flexinspect.trace.reader import TraceReader


class ParquetExporter:
    """Writes the tables of `docs/trace-format.md` with pyarrow, compressed with Zstandard.

    Integers are int64, reals float64 (NaN stays NaN), lists are lists; JSON objects are strings.
    """

    name = "parquet"
    description = "A folder of Parquet files, one per table, for DuckDB, pandas, polars or Spark."
    suffix = "-parquet"
    is_folder = True
    unit = "rows"

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write the tables in batches; see `Exporter`."""
        require_library("pyarrow.parquet", "parquet", "This export")
        return write_tables(reader, target, ".parquet", _ParquetTable, options, progress)


class _ParquetTable:
    """A Parquet file with a row group for each batch."""

    def __init__(self, file: Path, kinds: Mapping[str, str]) -> None:
        import pyarrow
        from pyarrow import parquet

        types = {name: _arrow_type(pyarrow, kind) for name, kind in kinds.items()}
        fields = [pyarrow.field(n, t, nullable=_is_nullable(kinds[n])) for n, t in types.items()]
        self._schema, self._arrow, self._kinds = pyarrow.schema(fields), pyarrow, kinds
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")

    def __enter__(self) -> _ParquetTable:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        """Write rows as one row group."""
        arrays = [
            self._arrow.array(
                [list(map(clean_text, texts)) for texts in values]
                if self._kinds[name] == "texts"
                else values,
                self._schema.field(name).type,
            )
            for name, values in columns.items()
        ]
        batch = self._arrow.record_batch(arrays, schema=self._schema)
        self._writer.write_batch(batch, row_group_size=max(batch.num_rows, 1))


def _is_nullable(kind: str) -> bool:
    """Whether a column may hold NULL; a real may, in a step without logits."""
    return kind.endswith("?") or kind == "real"


def _arrow_type(pyarrow: Any, kind: str) -> Any:
    types = {
        "int": pyarrow.int64(),
        "length": pyarrow.int64(),
        "bool": pyarrow.bool_(),
        "real": pyarrow.float64(),
        "ints": pyarrow.list_(pyarrow.int64()),
        "floats": pyarrow.list_(pyarrow.float64()),
        "texts": pyarrow.list_(pyarrow.string()),
        "runs": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
    }
    return types.get(kind.removesuffix("?"), pyarrow.string())
