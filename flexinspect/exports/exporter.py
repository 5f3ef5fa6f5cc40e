"""What an exporter is, how exporters are found, and how their results are put in place.

An exporter writes a trace as a file or a folder of another tool. Built-in exporters are named in
`core.plugins.BUILT_IN`; other packages register theirs as entry points of `flexinspect.exports`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from flexinspect.core import __version__, plugins
from flexinspect.core.environment import check_free
from flexinspect.core.errors import FlexInspectError, OutputFileError, UsageError, summarize_error
from flexinspect.core.parsing import parse_json
from flexinspect.core.text import did_you_mean
from flexinspect.trace.reader import TraceReader

Progress = Callable[[int, int], None]
"""Receives how much is done, and of how much."""

MANIFEST = "flexinspect-export.json"
"""The file in an exported folder that lists its other files: only such a folder is replaced."""


class ExportOptions(Struct, frozen=True):
    """What to export: one generation, or all (None), and where the result will lie in the end."""

    destination: Path
    generation: int | None = None

    def generations(self, reader: TraceReader) -> list[int]:
        """Return the numbers of the generations to export."""
        every = [row.generation for row in reader.generations()]
        return every if self.generation is None else [self.generation]


class Exporter(Protocol):
    """Writes a trace in another format.

    `description` is a sentence for `flexinspect export --list`. The default name of the result is
    that of the trace with `suffix` for its ending; it is a folder if `is_folder`. `unit` is what
    the counts of `export` are: rows, events or cells.
    """

    name: str
    description: str
    suffix: str
    is_folder: bool
    unit: str

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write the file `target`, or files into the empty folder `target`.

        It is a temporary name beside `options.destination`, which it gets once it is complete.
        Return the counts of a folder's files by their paths in it, or that of a file as {"": n}.
        Raises `UsageError` when a library is missing, and `TraceError`.
        """


class ExportResult(Struct, frozen=True):
    """What was written: for each file its path in the folder ("" for a file), bytes and count."""

    path: Path
    files: tuple[tuple[str, int, int], ...]

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(size for _, size, _ in self.files)

    @property
    def count(self) -> int:
        """The rows, events or cells of all files."""
        return sum(count for *_, count in self.files)


def exporter_names() -> tuple[str, ...]:
    """Return the names of all exporters, the built-in ones first; imports none."""
    return tuple(point.name for point in plugins.registered(plugins.EXPORTS))


def load_exporter(name: str) -> Exporter:
    """Return the exporter with a name.

    Raises `UsageError` for an unknown one, and `FlexInspectError` for a plug-in that cannot be
    loaded or is no exporter.
    """
    if name not in exporter_names():
        known = exporter_names()
        raise UsageError(
            f"There is no export to '{name}'; the formats are {', '.join(known)}.",
            hint=did_you_mean(name, known, f"A plug-in registers in the group {plugins.EXPORTS}."),
        )
    factory = plugins.load(plugins.EXPORTS, name)
    keys = ("name", "description", "suffix", "unit")
    try:
        exporter: Exporter = plugins.make(plugins.EXPORTS, name, factory)
        texts = [getattr(exporter, key, None) for key in keys]
    except (Exception, SystemExit) as error:
        raise _invalid_plugin_error(name, summarize_error(error)) from error
    if not all(isinstance(text, str) for text in texts):
        raise _invalid_plugin_error(name, "it needs the texts name, description, suffix and unit")
    if not isinstance(getattr(exporter, "is_folder", None), bool):
        raise _invalid_plugin_error(name, "its is_folder is neither true nor false")
    if not callable(getattr(exporter, "export", None)):
        raise _invalid_plugin_error(name, "it has no method export")
    return exporter


def _invalid_plugin_error(name: str, why: str) -> FlexInspectError:
    return FlexInspectError(
        f"The plug-in '{name}' of {plugins.EXPORTS} is not an exporter: {why}.",
        hint="Update or remove the package that provides it; other formats are not affected.",
    )


def clean_text(text: str) -> str:
    """Return text that UTF-8 can encode: a lone surrogate, which JSON may hold, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def default_target(exporter: Exporter, trace: Path) -> Path:
    """Return the default name of the result, in the current folder."""
    return Path(trace.stem + exporter.suffix)


def write_export(
    exporter: Exporter,
    reader: TraceReader,
    options: ExportOptions,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> ExportResult:
    """Export a trace to `options.destination`, which is complete or not there.

    Raises `UsageError` if something is in the way, `TraceError`, and `FlexInspectError` if it
    cannot be written or the exporter fails.
    """
    target = options.destination
    _check_target(exporter, reader.path, target, overwrite=overwrite)
    try:
        with _temporary_sibling(target, exporter.is_folder) as part:
            counts = exporter.export(reader, part, options, progress)
            files = tuple((path, (part / path).stat().st_size, n) for path, n in counts.items())
            if exporter.is_folder:
                _write_manifest(exporter, reader.path, part, counts)
            _put_in_place(part, target.resolve(), exporter.is_folder)
    except FlexInspectError:
        raise
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror or error}."
        raise OutputFileError(what, hint="Name another place with -o.") from error
    except Exception as error:
        what = f"The export to {exporter.name} failed: {summarize_error(error)}."
        raise FlexInspectError(what, hint="Nothing was written.") from error
    return ExportResult(target, files)


def _check_target(exporter: Exporter, trace: Path, target: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` unless nothing, or an earlier export, is in the place of the target."""
    if not target.resolve().parent.is_dir():
        hint = "Create it, or name another place with -o."
        raise UsageError(f"There is no folder {target.parent}.", hint=hint)
    check_free(target, overwrite=overwrite)
    if not target.exists():
        return
    if target.samefile(trace):
        raise UsageError(f"{target} is the trace itself.", hint="Name another place with -o.")
    if exporter.is_folder and not (target.is_dir() and _is_earlier_export(target)):
        what = f"{target} is not a folder that only an earlier export wrote to; it is kept."
        raise UsageError(what, hint="Name another place with -o.")
    if not exporter.is_folder and not target.is_file():
        what = f"{target} is not a file, so the export does not replace it."
        raise UsageError(what, hint="Name a file with -o.")


def _is_earlier_export(folder: Path) -> bool:
    """Whether a folder has a manifest of an export, and no file besides those that it lists."""
    try:
        listed = {*parse_json((folder / MANIFEST).read_text("utf-8"))["files"], MANIFEST}
    except (OSError, ValueError, TypeError, KeyError):
        return False
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found} <= listed


@contextmanager
def _temporary_sibling(target: Path, is_folder: bool) -> Iterator[Path]:
    """Yield an empty folder, or an unused name, beside the target; remove what is left of it."""
    place = target.resolve()
    part = place.with_name(f".{place.name}.{os.urandom(4).hex()}.part")
    try:
        if is_folder:
            part.mkdir()
        yield part
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_manifest(
    exporter: Exporter, trace: Path, folder: Path, counts: Mapping[str, int]
) -> None:
    facts = {
        "format": exporter.name,
        "trace": trace.name,
        "flexinspect": __version__,
        "unit": exporter.unit,
        "files": dict(counts),
    }
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def _put_in_place(part: Path, target: Path, is_folder: bool) -> None:
    """Give the complete result its name; a folder in its place is removed afterwards."""
    if not (is_folder and target.exists()):
        part.replace(target)
        return
    old = part.with_suffix(".old")
    target.rename(old)
    try:
        part.rename(target)
    except BaseException:
        old.rename(target)
        raise
    _remove(old)
