"""VSCode's `launch.json`: the configurations that flexinspect brings, merged into a user's file.

The user's text is kept as it is: ours is put in before the end of the list.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinspect.core.errors import FlexInspectError, UsageError

PORT = 5678
"""Where the configurations expect debugpy; `--debugpy 5678` lets it listen there."""

_COMMON = {"type": "debugpy", "justMyCode": False}
_LAUNCH = {**_COMMON, "request": "launch", "console": "integratedTerminal"}

CONFIGURATIONS: tuple[Mapping[str, Any], ...] = (
    {
        "name": "flexinspect: run a generation",
        **_LAUNCH,
        "module": "flexinspect",
        "pythonArgs": ["-Xfrozen_modules=off"],
        "args": ["run", "--model", "demo", "--max-samples", "2"],
        "subProcess": True,  # the model runs in a process of its own
    },
    {
        "name": "flexinspect: run this file",
        **_LAUNCH,
        "module": "flexinspect",
        "pythonArgs": ["-Xfrozen_modules=off"],
        "args": ["run", "${file}"],
        "subProcess": True,
    },
    {
        "name": "flexinspect: attach to a run",
        **_COMMON,
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": PORT},
    },
    {
        "name": "flexinspect: attach by process id",
        **_COMMON,
        "request": "attach",
        "processId": "${command:pickProcess}",
    },
    {
        "name": "flexinspect: tests",
        **_LAUNCH,
        "module": "pytest",
        "args": ["tests"],
    },
)
"""What is written: launches whose capture process is debugged too, and two ways to attach."""


GDB_SYMBOL_FILTER = ("PYDEVD_GDB_SCAN_SHARED_LIBRARIES", "libdl,libltdl,libc,libfreebl3")
"""Variable and value that spare gdb the symbols of all of torch's libraries."""

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CPUINFO = Path("/proc/cpuinfo")

_MIN_GDB_WITH_AMX = 14
"""The first gdb that asks the processor how long the state of its registers is.

gdb 13.1 on a processor with AMX, whose state is longer than it expects, calls nothing in another
process: "Couldn't write extended state status: Bad address". gdb's commit "x86: Add an
x86_xsave_layout structure to handle variable XSAVE layouts", of 2023, replaced the fixed sizes.
"""


def attach_problems() -> list[str]:
    """Return why no process can be attached to by its id here, a sentence each; Linux alone."""
    if sys.platform != "linux":
        return []
    lacks = []
    if shutil.which("gdb") is None:
        lacks.append("Attaching by process id needs gdb, which is not here: install it.")
    scope = _PTRACE_SCOPE.read_text("ascii").strip() if _PTRACE_SCOPE.exists() else "0"
    if scope != "0" and os.geteuid() != 0:
        lacks.append(
            f"Attaching by process id needs {_PTRACE_SCOPE} to be 0, and it is {scope}: "
            "an administrator may write 0 there."
        )
    if not lacks and _has_amx() and (version := _gdb_version()) < _MIN_GDB_WITH_AMX:
        lacks.append(
            f"Attaching by process id needs gdb {_MIN_GDB_WITH_AMX} or later on a processor with "
            f"AMX, and gdb is {version}: install a later one, or start the run with --debugpy."
        )
    return lacks


def _has_amx() -> bool:
    try:
        return " amx_tile" in _CPUINFO.read_text("ascii", "replace")
    except OSError:
        return False


def _gdb_version() -> int:
    """Return the first number of gdb's version, that of none too old where it does not tell."""
    try:
        said = subprocess.run(
            ["gdb", "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return _MIN_GDB_WITH_AMX
    found = re.search(r"(\d+)\.\d+", said.partition("\n")[0])
    return int(found[1]) if found else _MIN_GDB_WITH_AMX


def attach_notes() -> list[str]:
    """Return what is to be known before attaching by process id here, a sentence each."""
    name, value = GDB_SYMBOL_FILTER
    slow = (
        "Attaching by process id is slow, and may run into debugpy's limit of 60 s, as gdb reads "
        f"all of torch's symbols first: start VSCode with {name}={value} in its environment."
    )
    needs_it = sys.platform == "linux" and name not in os.environ
    return attach_problems() or ([slow] if needs_it else [])


@dataclass(frozen=True, slots=True)
class MergedLaunch:
    """A merged text, and the names that were added and that were there already."""

    text: str
    added: tuple[str, ...]
    kept: tuple[str, ...]


def merge(
    text: str, configurations: Sequence[Mapping[str, Any]] = CONFIGURATIONS, *, name: str = ""
) -> MergedLaunch:
    """Return a launch.json with the configurations that it lacks, by name, put at the end.

    `name` is what the file is called in an error. Raises `UsageError` with line and column for a
    text that is broken, or whose configurations are no list.
    """
    if not text.strip():
        whole = _format_json({"version": "0.2.0", "configurations": list(configurations)}, "  ")
        return MergedLaunch(whole + "\n", tuple(str(one["name"]) for one in configurations), ())
    found = _Document(text, name)
    there = found.names()
    missing = [one for one in configurations if one["name"] not in there]
    merged = found.with_added(missing) if missing else text
    _check_merge(text, merged, missing)
    names = tuple(str(one["name"]) for one in configurations)
    return MergedLaunch(
        merged,
        tuple(one for one in names if one not in there),
        tuple(one for one in names if one in there),
    )


def _check_merge(before: str, after: str, added: Sequence[Mapping[str, Any]]) -> None:
    """Raise `FlexInspectError` rather than write a text that does not say what it should."""
    import json5

    wanted = json5.loads(before)
    wanted["configurations"] = [*wanted.get("configurations", []), *added]
    if json5.loads(after) != wanted:
        raise FlexInspectError(
            "The configurations could not be put in without changing others.",
            hint="Add them by hand: flexinspect vscode --dry-run prints them for an empty folder.",
        )


class _Document:
    """A parsed text and the places in it."""

    def __init__(self, text: str, name: str) -> None:
        from json5.loader import ModelLoader, loads
        from json5.model import JSONArray, JSONObject
        from json5.utils import JSON5DecodeError

        self.text, self.name = text, name
        try:
            root = loads(text, loader=ModelLoader()).value
        except JSON5DecodeError as error:
            raise self._parse_error(*_first_error(error, len(text))) from None
        if not isinstance(root, JSONObject):
            raise self._parse_error(root._tok.index, "an object is expected here")
        self.root = root
        self.list: Any = None
        for key, value in zip(root.keys, root.values, strict=True):
            if getattr(key, "characters", getattr(key, "name", None)) == "configurations":
                self.list = value
        if self.list is not None and not isinstance(self.list, JSONArray):
            raise self._parse_error(
                self.list._tok.index, '"configurations" is expected to be a list'
            )

    def _parse_error(self, at: int, what: str) -> UsageError:
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        return UsageError(
            f"{self.name or 'launch.json'}, line {line}, column {column}: {what}.",
            hint="Mend it first; nothing was written.",
        )

    def names(self) -> set[str]:
        """Return the names of the configurations that are there."""
        import json5

        found = json5.loads(self.text).get("configurations", [])
        return {str(one.get("name")) for one in found if isinstance(one, dict)}

    def with_added(self, configurations: Sequence[Mapping[str, Any]]) -> str:
        """Return the text with these at the end of the list, which is made if there is none."""
        unit = self._indent_unit()
        if self.list is None:
            block = '"configurations": ' + _format_json(configurations, unit)
            return self._insert(self.root, block, unit)
        blocks = [_format_json(one, unit) for one in configurations]
        return self._insert(self.list, ",\n".join(blocks), unit)

    def _insert(self, node: Any, block: str, unit: str) -> str:
        """Put lines before the closing bracket of a list or an object."""
        text, end = self.text, node._end_tok.index
        line = text.rfind("\n", 0, end) + 1
        own_line = not text[line:end].strip()
        indent = _indent(text, end) + unit
        lines = "".join(f"{indent}{row}\n" for row in block.split("\n"))
        if node.values and node.trailing_comma is not None:
            lines = lines[:-1] + ",\n"
        if own_line:
            head, tail = text[:line], lines + text[line:]
        else:
            head, tail = text[:end], "\n" + lines + indent.removesuffix(unit) + text[end:]
        if node.values and node.trailing_comma is None:
            last = node.values[-1]._end_tok.end
            head = head[:last] + "," + head[last:]
        return _with_newlines(head, tail, text)

    def _indent_unit(self) -> str:
        """Return one level of the file's indentation."""
        found = re.search(r'\n([ \t]+)"', self.text)
        return found[1] if found else "  "


def _with_newlines(head: str, tail: str, text: str) -> str:
    """Join, with the line breaks that the file has."""
    if "\r\n" in text:
        tail = re.sub(r"(?<!\r)\n", "\r\n", tail)
    return head + tail


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]


def _format_json(value: Any, unit: str) -> str:
    """Return our own JSON, with lists of words on one line, as people write them."""
    text = json.dumps(value, indent=unit, ensure_ascii=False)
    return re.sub(
        r"\[\s+((?:\"[^\"]*\",?\s*)*?)\s*\]",
        lambda found: f"[{_on_one_line(found[1]).strip()}]",
        text,
    )


def _on_one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


def _first_error(error: ValueError, end: int) -> tuple[int, str]:
    """Return place and words of the first error that a parser told of; `end` for no place."""
    said = str(error).replace("There were multiple errors parsing the JSON5 document.", "")
    said = re.sub(r"\s*The primary error was:\s*", "", said)
    place = re.search(r"\(char (\d+)\)", said)
    words = re.split(r" at: line | in or near|\n| \(line ", said.strip())[0].rstrip(". ")
    return int(place[1]) if place else end, words or "it is not JSON"


def write_launch(folder: Path, *, dry_run: bool = False) -> tuple[Path, MergedLaunch]:
    """Merge our configurations into a folder's `.vscode/launch.json`, which is made if need be.

    It is replaced at once or not at all, and not touched when nothing is missing. Raises
    `UsageError` for a folder that is not there and a file that cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Give --folder an existing one.")
    path = folder / ".vscode" / "launch.json"
    old, mark = _read(path)
    merged = merge(old, name=str(path))
    if merged.added and not dry_run:
        _write(path, mark + merged.text)
    return path, merged


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file, nothing for none, and the mark that it begins with, if any."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return "", ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}.", hint="Nothing was written.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    return text.removeprefix(mark), mark


def _write(path: Path, text: str) -> None:
    """Replace a file at once; a link stays a link, and the mode stays."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=target.parent, prefix="launch-", suffix=".json")
        with os.fdopen(number, "wb") as file:
            file.write(text.encode("utf-8"))
        part = Path(name)
        part.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o644)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
