"""`flexinspect export`: a trace as files of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.flags import add_number_flags, add_switches
from flexinspect.cli.output import print_json, print_lines
from flexinspect.cli.progress import progress_bar
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.text import ensure_printable, plural, print_message

if TYPE_CHECKING:
    from flexinspect.exports.exporter import Exporter, ExportResult
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Write a trace as files of another tool: a timeline for Perfetto, a log folder for
TensorBoard, a Parquet or CSV file per table, or a Jupyter notebook. Works on a finished trace, and
on what is there of one that is being recorded. The result is complete or absent."""

EXAMPLES = """examples:
  flexinspect export --list
  flexinspect export run.flextrace --to perfetto       (writes run.perfetto-trace)
  flexinspect export run.flextrace --to parquet -o tables
  duckdb -c "SELECT layer, path, count(*) FROM 'tables/calls.parquet' GROUP BY ALL"
  flexinspect export run.flextrace --to tensorboard && tensorboard --logdir run-tensorboard
  flexinspect export run.flextrace --to notebook --generation 1 --overwrite

exit codes: 0 success, 1 the export failed, 2 invalid request, a file that cannot be read or
            written, or a library is missing
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, nargs="?", help="the trace file")
    add(
        "--to", metavar="FORMAT", help="perfetto, tensorboard, parquet, csv, notebook, or a plug-in"
    )
    out = "the file or folder (default: named after the trace, in the current folder)"
    add("-o", "--out", metavar="PATH", type=Path, help=out)
    add_number_flags(parser, generation="only this generation (default: all)")
    add_switches(
        parser,
        overwrite="replace an existing file, or a folder that an export wrote",
        json="print what was written as JSON",
        list="list the formats",
    )


def run(args: argparse.Namespace) -> int:
    """Export the trace and print what was written.

    Raises `UsageError` for an invalid request, `TraceError`, and `FlexInspectError` if the result
    cannot be written.
    """
    if args.list:
        return _list(as_json=args.json)
    if args.trace is None:
        hint = "For instance: flexinspect export run.flextrace --to perfetto"
        raise UsageError("No trace is named.", hint=hint)
    if args.to is None:
        raise UsageError("No format is named.", hint="Add --to FORMAT; --list lists the formats.")
    from flexinspect.exports.exporter import default_target, load_exporter
    from flexinspect.trace.reader import open_trace

    exporter = load_exporter(args.to)
    with open_trace(args.trace) as reader, reader.snapshot():
        if args.generation is not None:
            reader.generation(args.generation)  # raises if there is none
        notes = _notes(reader)
        out = args.out or default_target(exporter, reader.path)
        result = _export(exporter, reader, out, args)
        facts = {"trace": str(args.trace), "state": reader.state, "generation": args.generation}
    if args.json:
        print_json({"format": args.to, **facts, "notes": notes, **_as_json(exporter, result)})
        return 0
    for note in notes:
        print_message(ensure_printable(note))
    print_lines(_lines(exporter, result))
    return 0


def _export(
    exporter: Exporter, reader: TraceReader, out: Path, args: argparse.Namespace
) -> ExportResult:
    from flexinspect.exports.exporter import ExportOptions, write_export

    options = ExportOptions(out, args.generation)
    with progress_bar(f"writing {out.name}") as update:
        return write_export(exporter, reader, options, update, overwrite=args.overwrite)


def _notes(reader: TraceReader) -> list[str]:
    """Return a sentence if the trace is not finished."""
    from flexinspect.core.environment import is_recorder_alive

    if reader.state != "recording":
        return []
    if is_recorder_alive(reader.run()):
        return ["The trace is still being recorded: the export holds what was written until now."]
    return ["The process that recorded the trace ended without finishing it: the end is missing."]


def _as_json(exporter: Exporter, result: ExportResult) -> dict[str, Any]:
    files = [
        {"path": str(result.path / path), "bytes": n_bytes, exporter.unit: count}
        for path, n_bytes, count in result.files
    ]
    total = {"bytes": result.n_bytes, exporter.unit: result.count}
    return {"path": str(result.path), **total, "files": files}


def _lines(exporter: Exporter, result: ExportResult) -> list[str]:
    def describe(n_bytes: int, count: int) -> str:
        unit = exporter.unit.removesuffix("s") if count == 1 else exporter.unit
        return f"{count:,} {unit}, {n_bytes:,} bytes"

    total = describe(result.n_bytes, result.count)
    if not exporter.is_folder:
        return [f"{result.path}: {total}"]
    filled = [entry for entry in result.files if entry[2]]
    empty = len(result.files) - len(filled)
    return [
        f"{result.path}: {plural(len(result.files), 'file')}, {total}",
        *(f"  {path}: {describe(n_bytes, count)}" for path, n_bytes, count in filled),
        *([f"  and {plural(empty, 'file')} without {exporter.unit}"] if empty else []),
    ]


def _list(*, as_json: bool) -> int:
    from flexinspect.exports.exporter import exporter_names, load_exporter

    entries = []
    for name in exporter_names():
        try:
            entries.append({"name": name, "description": load_exporter(name).description})
        except FlexInspectError as error:
            entries.append({"name": name, "description": f"not available: {error.message}"})
    if as_json:
        print_json(entries)
    else:
        print_lines(f"{entry['name']}: {entry['description']}" for entry in entries)
    return 0
