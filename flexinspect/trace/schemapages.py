"""The pages of a trace that hold its schema, which a file that is cut short may have lost.

SQLite writes them between the first pages of the tables, and without one of them it reads nothing
of a file. They are the same in each trace of one build, so those that are lost are made again.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache

from flexinspect.trace import schema

_HEADER_BYTES = 100
"""Bytes of the first page that differ from file to file."""

_SCHEMA_COOKIE = slice(40, 44)
"""Those that count the statements that made the schema."""

_INTERIOR_PAGE, _LEAF_PAGE = 5, 13
"""Types of a table's pages."""


class UnknownSchemaError(Exception):
    """A schema page is lost, and the others are not those that this build writes."""


def missing_schema_pages(available: bytes, page: int) -> dict[int, bytes]:
    """Return by number, from 1, the pages of the schema that lie behind `kept`, made again.

    `kept` is the beginning of a trace, in whole pages of `page` bytes. Raises `UnknownSchemaError`
    for a trace of another build that lost one.
    """
    wanted = _schema_page_numbers(available[:page])
    if wanted is not None and max(wanted) * page <= len(available):
        return {}
    ours = _empty_trace()
    numbers = _schema_page_numbers(ours[:page])
    alike = all(
        available[part] == ours[part] for part in (_SCHEMA_COOKIE, slice(_HEADER_BYTES, page))
    )
    if wanted is None or wanted != numbers or not alike:
        raise UnknownSchemaError
    made = {number: ours[(number - 1) * page : number * page] for number in numbers}
    held = {number for number in made if number * page <= len(available)}
    if any(available[(n - 1) * page : n * page] != made[n] for n in held):
        raise UnknownSchemaError
    return {number: data for number, data in made.items() if number not in held}


@cache
def _empty_trace() -> bytes:
    """Return an empty trace, as this build begins each."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute("BEGIN")
        for sql in schema.create_statements():
            db.execute(sql)
        db.execute("COMMIT")
        return db.serialize()


def _schema_page_numbers(first: bytes) -> list[int] | None:
    """Return the numbers of the pages below a file's first one; None if that says none."""
    if len(first) <= _HEADER_BYTES + 12 or first[_HEADER_BYTES] not in (_INTERIOR_PAGE, _LEAF_PAGE):
        return None
    if first[_HEADER_BYTES] == _LEAF_PAGE:
        return [1]
    n_cells = _read_int(first, _HEADER_BYTES + 3, 2)
    cells = (_read_int(first, _HEADER_BYTES + 12 + 2 * index, 2) for index in range(n_cells))
    return [*(_read_int(first, cell, 4) for cell in cells), _read_int(first, _HEADER_BYTES + 8, 4)]


def _read_int(page: bytes, start: int, size: int) -> int:
    return int.from_bytes(page[start : start + size], "big")
