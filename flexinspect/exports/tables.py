"""The tables of a trace for formats that hold tables: which there are, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from flexinspect.exports.exporter import ExportOptions, Progress
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.schema import TABLES
from flexinspect.trace.table_batches import batch_columns, count_rows, read_batches


class TableWriter(Protocol):
    """Writes the batches of one table to a file; leaving its context completes the file."""

    def __enter__(self) -> TableWriter: ...

    def __exit__(self, *error: object) -> object: ...

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        """Write rows, given as columns of the same length."""


class OpenTable(Protocol):
    """Creates the file of a table, whose columns are given with their kinds."""

    def __call__(self, file: Path, kinds: Mapping[str, str]) -> TableWriter: ...


def write_tables(
    reader: TraceReader,
    folder: Path,
    suffix: str,
    open_table: OpenTable,
    options: ExportOptions,
    progress: Progress,
) -> dict[str, int]:
    """Write every table to a file of its own, also empty ones; return the rows of each file."""
    counts = {table.name: count_rows(reader, table, options.generation) for table in TABLES}
    total, done, written = sum(counts.values()), 0, {}
    for table in TABLES:
        name, n_rows = table.name + suffix, 0
        with open_table(folder / name, batch_columns(table)) as writer:
            for columns in read_batches(reader, table, options.generation):
                writer.write(columns)
                n_rows += _length(columns)
                progress(done + n_rows, total)
        written[name], done = n_rows, done + n_rows
    return written


def iterate_rows(columns: Mapping[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a batch."""
    return zip(*columns.values(), strict=True)


def _length(columns: Mapping[str, list[Any]]) -> int:
    return len(next(iter(columns.values())))
