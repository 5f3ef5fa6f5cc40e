"""Whole tables of a trace in batches of rows, for programs that take tables.

Columns are those of `docs/trace-format.md` without blobs. Lists are lists, other JSON stays text.
Memory is bounded by the size of a batch, however long the table is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flexinspect.trace import codec, schema
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.schema import Table

BATCH_ROWS = 16_384
"""Rows of a batch: as Python objects some 20 MB of the widest table."""

_TEXT_KINDS = {"json": "text", "object": "text", "object?": "text?"}
_LOGITS_COLUMNS = schema.STEPS.names[schema.STEPS.names.index("entropy") :]


def batch_columns(table: Table) -> Mapping[str, str]:
    """Return the kinds of the columns that batches of a table have, by name."""
    return {name: kind for name, kind in table.kinds.items() if kind != "blob"}


def count_rows(reader: TraceReader, table: Table, generation: int | None = None) -> int:
    """Return the number of rows of a table, or those of one generation."""
    where, params = _of_generation(table, generation)
    return int(reader._query(f"SELECT count(*) FROM {table.name} WHERE {where}", params)[0][0])


def read_batches(
    reader: TraceReader,
    table: Table,
    generation: int | None = None,
    *,
    n_rows: int = BATCH_ROWS,
) -> Iterator[dict[str, list[Any]]]:
    """Yield the rows of a table, or those of one generation, as columns, in the order of the key.

    A table without a column `generation` is read as a whole. In a step without logits the columns
    from `entropy` on are None. Raises `TraceError` for damaged values.
    """
    kinds = batch_columns(table)
    where, params = _of_generation(table, generation)
    # With a fixed generation the rest of the key is compared, so that its index is used for both.
    rest = [name for name in table.key if generation is None or name != "generation"]
    key = rest or list(table.key)
    after = f"AND ({', '.join(key)}) > ({', '.join('?' * len(key))})"
    order = f"ORDER BY {', '.join(key)} LIMIT ?"
    select = f"SELECT {', '.join(kinds)} FROM {table.name} WHERE {where}"
    indexes = [list(kinds).index(name) for name in key]
    rows = reader._query(f"{select} {order}", (*params, n_rows))
    while rows:
        yield _decode_columns(reader, table, kinds, rows)
        if len(rows) < n_rows:
            return
        last = [rows[-1][index] for index in indexes]
        rows = reader._query(f"{select} {after} {order}", (*params, *last, n_rows))


def _of_generation(table: Table, generation: int | None) -> tuple[str, tuple[int, ...]]:
    if generation is None or "generation" not in table.kinds:
        return "true", ()
    return "generation = ?", (generation,)


def _decode_columns(
    reader: TraceReader, table: Table, kinds: Mapping[str, str], rows: list[Any]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    with reader._damage_as_error():
        for (name, kind), stored in zip(kinds.items(), zip(*rows, strict=True), strict=True):
            read_as = [_TEXT_KINDS.get(kind, kind)] * len(stored)
            columns[name] = codec.decode_values(read_as, stored, table.name)
    if table is schema.STEPS:  # NULL means NaN, but not where no logits were captured
        absent = [row for row, chosen in enumerate(columns["chosen_id"]) if chosen is None]
        for name in _LOGITS_COLUMNS:
            for row in absent:
                columns[name][row] = None
    return columns
