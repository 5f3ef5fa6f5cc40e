"""A trace as CSV files, one per table (RFC 4180), which are safe to open in a spreadsheet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexinspect.exports.exporter import ExportOptions, Progress
from flexinspect.exports.tables import iterate_rows, write_tables
from flexinspect.trace.codec import float_name
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.schema import JSON_KINDS

FORMULA_STARTS = (*"=+-@＝＋－＠\t\r\n", "'")
"""Text that begins with one of these gets a `'` before it: a spreadsheet may take it for a formula
(https://owasp.org/www-community/attacks/CSV_Injection). The last one makes it reversible: taking
one leading `'` away restores every text."""


class CsvExporter:
    """Writes the tables of `docs/trace-format.md` as UTF-8 with CRLF at the end of each record.

    Text is quoted, so that an empty text ("") differs from no value (nothing). Lists are JSON.
    """

    name = "csv"
    description = "A folder of CSV files, one per table; text is escaped for spreadsheets."
    suffix = "-csv"
    is_folder = True
    unit = "rows"

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write the tables in batches; see `Exporter`."""
        return write_tables(reader, target, ".csv", _CsvTable, options, progress)


class _CsvTable:
    """A CSV file with a line of column names."""

    def __init__(self, file: Path, kinds: Mapping[str, str]) -> None:
        self._formats = [_FORMATS[kind.removesuffix("?")] for kind in kinds.values()]
        self._out = file.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        self._out.write(",".join(kinds) + "\r\n")

    def __enter__(self) -> _CsvTable:
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        """Write rows as lines."""
        formatted = {
            name: ["" if value is None else form(value) for value in values]
            for (name, values), form in zip(columns.items(), self._formats, strict=True)
        }
        self._out.writelines(",".join(row) + "\r\n" for row in iterate_rows(formatted))


def format_text(text: str) -> str:
    """Return text as a quoted field that no spreadsheet takes for a formula."""
    mark = "'" if text.startswith(FORMULA_STARTS) else ""
    return f'"{mark}{text}"' if '"' not in text else '"' + mark + text.replace('"', '""') + '"'


def _format_real(value: float) -> str:
    return repr(value) if math.isfinite(value) else float_name(value)


def _format_list(values: Any) -> str:
    plain = [float_name(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    return format_text(json.dumps(plain, ensure_ascii=False))


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(JSON_KINDS, _format_list),
    "json": format_text,
    "object": format_text,
    "text": format_text,
    "int": str,
    "length": str,
    "bool": lambda value: "true" if value else "false",
    "real": _format_real,
}
