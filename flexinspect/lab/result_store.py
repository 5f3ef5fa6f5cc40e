"""Results of samples in a file that a killed run can continue: JSON lines, after a header.

The first line holds the settings, each further one a result. A result is on the disk
(`fsync`) before the next is accepted, so a kill or a power cut loses at most the line that was
being written, which the next run cuts off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Generic

import msgspec

from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.lab.sample_jobs import Result, SampleJob

FORMAT = "flexinspect results"
VERSION = 1


class ResultStore(Generic[Result]):
    """The results of one run, of type `kind`; open it with `with`, which closes the file.

    `settings` are plain data. They must equal those of the file, if it has a result. Raises
    `UsageError` for a file of other settings, of another format or command, in use by another run,
    or not writable.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any], kind: type[Result]) -> None:
        self.file = file
        self._kind = kind
        self._out = _open_for_update(file)
        try:
            _lock(self._out, file)
            self._results = self._read(msgspec.to_builtins(settings))
        except BaseException:
            self._out.close()
            raise

    def __enter__(self) -> ResultStore[Result]:
        return self

    def __exit__(self, *_error: object) -> None:
        self._out.close()

    @property
    def results(self) -> list[Result]:
        """The stored results in the order of their samples, the newest of each sample."""
        return [self._results[index] for index in sorted(self._results)]

    def finished(self) -> frozenset[int]:
        """Return the indices of the samples that need not run again (those without an error)."""
        return frozenset(index for index, one in self._results.items() if not one.error)

    def remaining(self, jobs: list[SampleJob]) -> list[SampleJob]:
        """Return the jobs that have no result yet. Raises `UsageError` if the data has changed."""
        for job in jobs:
            known = self._results.get(job.index)
            if known is not None and known.digest and known.digest != job.digest:
                what = f"Sample {job.index} ({job.sample.id}) is not the one that {self.file} has "
                what += "a result of: the dataset has changed."
                raise UsageError(what, hint="Name another --out for the new data.")
        finished = self.finished()
        return [job for job in jobs if job.index not in finished]

    def append(self, result: Result) -> None:
        """Add a result, and return when it is on the disk. Raises `FlexInspectError`."""
        try:
            self._write(msgspec.json.encode(result) + b"\n")
        except OSError as error:
            what = f"{self.file} cannot be written: {error.strerror or error}."
            hint = "The samples before are stored; run the same command again to continue."
            raise FlexInspectError(what, hint=hint) from error
        self._results[result.index] = result

    def _write(self, line: bytes) -> None:
        self._out.write(line)
        self._out.flush()
        os.fsync(self._out.fileno())

    def _read(self, settings: Mapping[str, Any]) -> dict[int, Result]:
        """Read the file, cut off an incomplete last line, and write the header of a new file."""
        data = self._out.read()
        complete = data.rfind(b"\n") + 1
        header = msgspec.json.encode(_header(settings)) + b"\n"
        lines = data[:complete].splitlines()
        if complete or not header.startswith(data):  # one that a kill cut off is written again
            stored = read_header(lines[0] if lines else data, self.file)
            if len(lines) > 1:
                _refuse_other(stored, settings, self.file)
            else:  # the run ended before its first result
                complete = 0
        if complete < len(data):
            self._out.truncate(complete)
        self._out.seek(complete)
        if not complete:
            self._write(header)
            return {}
        return dict(_results(lines[1:], self._kind, self.file))


def read_results(file: Path, kind: type[Result]) -> tuple[dict[str, Any], list[Result]]:
    """Return the settings of a file and its complete results, in the order of the samples.

    Raises `UsageError` for a file that is not there or not of this format.
    """
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror or error}."
        raise UsageError(what, hint="Name the folder that flexinspect lab has written.") from error
    complete = [line for line in lines if line.endswith(b"\n")]
    settings = read_header(complete[0] if complete else b"", file)
    results = dict(_results(complete[1:], kind, file))
    return settings, [results[index] for index in sorted(results)]


def read_header(line: bytes, file: Path) -> dict[str, Any]:
    """Return the settings of a first line. Raises `UsageError` for another format."""
    try:
        header = msgspec.json.decode(line)
    except msgspec.DecodeError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        hint = "Name another --out; nothing was changed."
        raise UsageError(f"{file} is no file of results of flexinspect.", hint=hint)
    if header.get("version") != VERSION:
        what = f"{file} has version {header.get('version')} of the format, and this flexinspect "
        raise UsageError(f"{what}reads version {VERSION}.", hint="Name another --out.")
    settings = header.get("settings")
    return settings if isinstance(settings, dict) else {}


def _header(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "settings": settings}


def _results(lines: list[bytes], kind: type[Result], file: Path) -> Iterator[tuple[int, Result]]:
    for number, line in enumerate(lines, start=2):
        try:
            result = msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError) and "$.kind" in str(error):
                raise _of_another_command(file) from error
            what = f"{file}:{number}: this line is no result ({error})."
            raise UsageError(what, hint="Remove the line; its sample then runs again.") from error
        yield result.index, result


def _of_another_command(file: Path) -> UsageError:
    what = f"{file} has results of another command: flexinspect run and flexinspect lab do not "
    return UsageError(f"{what}share a folder.", hint="Name another folder.")


def _refuse_other(stored: Mapping[str, Any], wanted: Mapping[str, Any], file: Path) -> None:
    if stored.keys().isdisjoint(wanted):
        raise _of_another_command(file)
    names = sorted({*_flat(stored), *_flat(wanted)})
    before, now = _flat(stored), _flat(wanted)
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        listed = ", ".join(
            f"{name} is {_shown(now.get(name))} and was {_shown(before.get(name))}"
            for name in changed[:3]
        )
        what = f"{file} has results of other settings: {listed}"
        what += f", and {len(changed) - 3} more." if changed[3:] else "."
        raise UsageError(what, hint="Give the same flags to continue it, or name another --out.")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level, with dots in the names."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = list(value) if isinstance(value, tuple) else value
    return out


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _open_for_update(file: Path) -> IO[bytes]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror or error}."
        raise UsageError(what, hint="Name an --out in a folder that you may write to.") from error


def _lock(out: IO[bytes], file: Path) -> None:
    """Hold the file for this run, until it is closed. Raises `UsageError` if another one does."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        what = f"Another run is writing {file}."
        raise UsageError(what, hint="Wait for it, or name another --out.") from error
    except OSError:  # a file system without locks
        return
