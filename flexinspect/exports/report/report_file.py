"""Makes the report of a trace and writes it to a file."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.environment import check_free, save_file
from flexinspect.core.errors import UsageError
from flexinspect.exports.report.contents import ReportContents
from flexinspect.exports.report.page import render
from flexinspect.exports.report.size_budget import fit_size
from flexinspect.exports.report.trace_contents import Progress, ReportRequest, collect_contents
from flexinspect.panels.panel_source import Source
from flexinspect.trace.reader import TraceReader

GENERATOR = b'<meta name="generator" content="flexinspect '
"""By this a file is known to be a report, which --overwrite may replace."""

HEAD_BYTES = 4096
SCRIPT_TAG_BYTES = 200
"""Bytes of the tags around the packed data of a branch, and of sentences about what is left out."""


class WrittenReport(Struct, frozen=True):
    """A report that was written: its file and its size in bytes.

    `notes` say why the trace has no end, `left_out` what of the trace the report does not hold.
    """

    file: Path
    bytes: int
    generations: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


def make_page(
    reader: TraceReader, request: ReportRequest, progress: Progress
) -> tuple[str, ReportContents]:
    """Return the page and its contents, with what was left out to fit the size.

    Raises `UsageError` if not even the texts fit, and `TraceError`.
    """
    contents = collect_contents(Source(reader), request, progress)
    fixed = len(render(replace(contents, branches={})).encode("utf-8"))
    fixed += SCRIPT_TAG_BYTES * len(contents.branches)
    over = 0
    while True:
        branches, thinned = fit_size(contents.branches, request.max_bytes, fixed + over)
        left_out = tuple(dict.fromkeys((*contents.left_out, *thinned)))
        fitting = replace(contents, branches=branches, left_out=left_out)
        page = render(fitting)
        excess = len(page.encode("utf-8")) - request.max_bytes
        if excess <= 0:
            return page, fitting
        over += excess  # the sizes of parts are those of parts that are packed one by one


def check_target(file: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` if a file cannot be the report: a folder, or something else is there."""
    if file.is_dir():
        raise UsageError(f"{file} is a folder.", hint="Name a file in it, for instance run.html.")
    if not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", hint="Create it, or name another.")
    check_free(file, overwrite=overwrite)
    if file.exists() and not (file.is_file() and is_report(file)):
        hint = "Name another file, or remove this one yourself."
        raise UsageError(f"{file} is not a report, so it is not overwritten.", hint=hint)


def is_report(file: Path) -> bool:
    """Tell whether a file is a report, or empty. Raises `UsageError` if it cannot be read."""
    try:
        with file.open("rb") as opened:
            start = opened.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error
    return not start or GENERATOR in start


def write_report(
    reader: TraceReader, file: Path, request: ReportRequest, progress: Progress
) -> WrittenReport:
    """Write the report of a trace to `file`, which is complete or as it was before.

    Raises `UsageError` if the report cannot be made, `TraceError`, and `FlexInspectError` if the
    file cannot be written.
    """
    page, contents = make_page(reader, request, progress)
    data = page.encode("utf-8")
    save_file(file, data)
    n_generations = len(contents.generations)
    return WrittenReport(file, len(data), n_generations, contents.notes, contents.left_out)
