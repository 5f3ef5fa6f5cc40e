"""How a table of the trace is described, and the SQL made from a description."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SQL_TYPES = {
    "int": "INTEGER NOT NULL",
    "int?": "INTEGER",
    "bool": "INTEGER NOT NULL",
    "real": "REAL",
    "real?": "ANY",
    "text": "TEXT NOT NULL",
    "text?": "TEXT",
    "json": "TEXT NOT NULL",
    "json?": "TEXT",
    "blob": "BLOB NOT NULL",
}
"""Kind of a column → its SQL type. SQLite cannot hold NaN, so NULL stands for it in a "real";
where NULL must also mean "none" ("real?"), NaN is the text 'nan'."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind (a key of `SQL_TYPES`) and what it holds, with the unit."""

    name: str
    kind: str
    meaning: str


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a table is a cache key per step
class Table:
    """A table of the trace. `key` is its primary key.

    `clustered` tables have no rowid: they lie in the order of their key, so the rows of a step
    are neighbours. Wide rows (arrays) are kept with a rowid, because a clustered table spills them
    to overflow pages four times as early.
    """

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    clustered: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    def kinds(self, *, skip: int = 0) -> tuple[str, ...]:
        """Return the kinds of the columns after the first `skip`."""
        return tuple(column.kind for column in self.columns[skip:])

    def create_sql(self) -> str:
        """Return the CREATE TABLE statement, with the meanings as comments."""
        lines = [
            f"  {column.name} {self._sql_type(column)}, -- {column.meaning}"
            for column in self.columns
        ]
        options = "STRICT, WITHOUT ROWID" if self.clustered else "STRICT"
        key = f"  PRIMARY KEY ({', '.join(self.key)})"
        return "\n".join([f"CREATE TABLE {self.name} (", *lines, key, f") {options}"])

    def _sql_type(self, column: Column) -> str:
        # INTEGER alone (not "INTEGER NOT NULL") is what makes a single key the rowid itself.
        return (
            "INTEGER"
            if (column.name,) == self.key and not self.clustered
            else (SQL_TYPES[column.kind])
        )


def define_table(
    name: str, key: str, meaning: str, columns: str, *, clustered: bool = True
) -> Table:
    parsed = (line.split(None, 2) for line in columns.strip().splitlines())
    return Table(
        name,
        meaning,
        tuple(key.split()),
        tuple(Column(name, kind, text) for name, kind, text in parsed),
        clustered,
    )


@cache
def insert_sql(table: Table, n_rows: int, *, skip: int = 0) -> str:
    """Return the INSERT of `n_rows` rows, leaving out the first `skip` columns.

    All rows of a table go in one statement: the interpreter lock is let go once for it, instead of
    once for each row, which matters beside a thread that runs a model.
    """
    names = table.names[skip:]
    row = f"({', '.join('?' * len(names))})"
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES {', '.join([row] * n_rows)}"


@cache
def select_sql(table: Table, rest: str = "", *, skip: int = 0, stop: int | None = None) -> str:
    """Return the SELECT of the columns `skip` to `stop`, with `rest` behind FROM."""
    return f"SELECT {', '.join(table.names[skip:stop])} FROM {table.name} {rest}"
