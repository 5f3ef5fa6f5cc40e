"""Debug configurations for VS Code, merged into the user's `launch.json`.

The user's text is kept unchanged; new configurations are inserted at the end of the list.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.core.environment import command_output, replace_file
from flexinspect.core.errors import OutputFileError, UsageError

PORT = 5678
"""The port of debugpy in the configurations; `--debugpy 5678` makes a run listen on it."""

_COMMON = {"type": "debugpy", "justMyCode": False}
_LAUNCH = {**_COMMON, "request": "launch", "console": "integratedTerminal"}


def _run_configuration(name: str, *args: str) -> Mapping[str, Any]:
    options = {"module": "flexinspect", "pythonArgs": ["-Xfrozen_modules=off"], "args": [*args]}
    # subProcess: the model runs in a process of its own
    return {"name": f"flexinspect: {name}", **_LAUNCH, **options, "subProcess": True}


def _debug_configuration(name: str, *args: str) -> Mapping[str, Any]:
    """Return a configuration with the name that users of the self-ensemble project know."""
    return {**_run_configuration("", "run", "--model", "demo", *args), "name": name}


def _attach_configuration(name: str, **how: Any) -> Mapping[str, Any]:
    return {"name": f"flexinspect: {name}", **_COMMON, "request": "attach", **how}


CONFIGURATIONS: tuple[Mapping[str, Any], ...] = (
    _run_configuration("run a generation", "run", "--model", "demo", "--max-samples", "2"),
    _run_configuration("run this file", "run", "${file}"),
    _debug_configuration("Debug FlexAttention", "--dataset", "demo", "--num_paraphrases", "3"),
    _debug_configuration(
        "Debug FlexAttention (Debug Script)",
        *("--dataset", "demo", "--max-samples", "2", "--verbose"),
    ),
    _attach_configuration("attach to a run", connect={"host": "127.0.0.1", "port": PORT}),
    _attach_configuration("attach by process id", processId="${command:pickProcess}"),
    {"name": "flexinspect: tests", **_LAUNCH, "module": "pytest", "args": ["tests"]},
)
"""Configurations to launch a run, with its capture process under the debugger, and to attach."""


GDB_SYMBOL_FILTER = ("PYDEVD_GDB_SCAN_SHARED_LIBRARIES", "libdl,libltdl,libc,libfreebl3")
"""Environment variable and value that keep gdb from reading the symbols of all of torch."""

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CPUINFO = Path("/proc/cpuinfo")

_MIN_GDB_WITH_AMX = 14
"""The first version of gdb that asks the processor for the size of its register state.

On a processor with AMX, whose register state is larger than expected, gdb 13.1 cannot call a
function in another process: "Couldn't write extended state status: Bad address". The commit "x86:
Add an x86_xsave_layout structure to handle variable XSAVE layouts" of gdb, from 2023, replaced the
fixed sizes.
"""


def attach_problems() -> list[str]:
    """Return sentences about what prevents attaching by process id here (Linux only)."""
    if sys.platform != "linux":
        return []
    problems = []
    if shutil.which("gdb") is None:
        problems.append("Attaching by process id needs gdb, which is not installed: install it.")
    scope = _PTRACE_SCOPE.read_text("ascii").strip() if _PTRACE_SCOPE.exists() else "0"
    if scope != "0" and os.geteuid() != 0:
        problems.append(
            f"Attaching by process id needs {_PTRACE_SCOPE} to be 0, and it is {scope}: "
            "an administrator can write 0 to it."
        )
    if not problems and _has_amx() and (version := _gdb_version()) < _MIN_GDB_WITH_AMX:
        problems.append(
            f"Attaching by process id needs gdb {_MIN_GDB_WITH_AMX} or later on a processor with "
            f"AMX, and gdb is {version}: install a later one, or start the run with --debugpy."
        )
    return problems


def _has_amx() -> bool:
    try:
        return " amx_tile" in _CPUINFO.read_text("ascii", "replace")
    except OSError:
        return False


def _gdb_version() -> int:
    """Return the major version of gdb, or a sufficient one when it cannot be determined."""
    output = command_output("gdb", "--version", timeout_s=10) or ""
    match = re.search(r"(\d+)\.\d+", output.partition("\n")[0])
    return int(match[1]) if match else _MIN_GDB_WITH_AMX


def attach_notes() -> list[str]:
    """Return sentences to read before attaching by process id on this machine."""
    name, value = GDB_SYMBOL_FILTER
    slow = (
        "Attaching by process id is slow and may exceed debugpy's limit of 60 s, because gdb reads "
        f"all of torch's symbols first: start VS Code with {name}={value} in its environment."
    )
    needs_filter = sys.platform == "linux" and name not in os.environ
    return attach_problems() or ([slow] if needs_filter else [])


class MergedLaunch(Struct, frozen=True):
    """A merged text, with the names of added configurations and of those that it had before."""

    text: str
    added: tuple[str, ...]
    kept: tuple[str, ...]


def merge(
    text: str, configurations: Sequence[Mapping[str, Any]] = CONFIGURATIONS, *, name: str = ""
) -> MergedLaunch:
    """Return a launch.json with the configurations that it lacks, by name, added at the end.

    `name` is the name of the file in error messages. Raises `UsageError` with line and column for
    a text that is not JSON with comments, or whose configurations are not a list.
    """
    import json5

    names = tuple(str(entry["name"]) for entry in configurations)
    if not text.strip():
        new = _format_json({"version": "0.2.0", "configurations": list(configurations)}, "  ")
        return MergedLaunch(new + "\n", added=names, kept=())
    root, entries = _parse(text, name or "launch.json")
    document = json5.loads(text)
    existing = document.setdefault("configurations", [])
    known = {str(entry.get("name")) for entry in existing if isinstance(entry, dict)}
    missing = [entry for entry in configurations if entry["name"] not in known]
    merged = _with_added(text, root, entries, missing) if missing else text
    existing += missing
    if missing and json5.loads(merged) != document:
        what = "The configurations could not be added without changing others."
        hint = "Add them by hand: flexinspect vscode --dry-run prints them for an empty folder."
        raise OutputFileError(what, hint=hint)
    added = tuple(str(entry["name"]) for entry in missing)
    return MergedLaunch(merged, added, tuple(name for name in names if name not in added))


def _parse(text: str, name: str) -> tuple[Any, Any]:
    """Return the object of a launch.json and its list of configurations, None if it has none.

    Both are nodes of json5 with their positions in the text.
    """
    from json5.loader import ModelLoader, loads
    from json5.model import JSONArray, JSONObject
    from json5.utils import JSON5DecodeError

    def parse_error(at: int, what: str) -> UsageError:
        before = text[:at]
        line, column = before.count("\n") + 1, at - before.rfind("\n")
        where = f"{name}, line {line}, column {column}"
        return UsageError(f"{where}: {what}.", hint="Correct it first; nothing was written.")

    try:
        root = loads(text, loader=ModelLoader()).value
    except JSON5DecodeError as error:
        raise parse_error(*_first_error(error, len(text))) from None
    if not isinstance(root, JSONObject):
        raise parse_error(root._tok.index, "an object is expected here")
    entries: Any = None
    for key, value in zip(root.keys, root.values, strict=True):
        if getattr(key, "characters", getattr(key, "name", None)) == "configurations":
            entries = value
    if entries is not None and not isinstance(entries, JSONArray):
        raise parse_error(entries._tok.index, '"configurations" is expected to be a list')
    return root, entries


def _first_error(error: ValueError, end: int) -> tuple[int, str]:
    """Return position and text of the first error of the parser; `end` without a position."""
    text = str(error).replace("There were multiple errors parsing the JSON5 document.", "")
    text = re.sub(r"\s*The primary error was:\s*", "", text)
    position = re.search(r"\(char (\d+)\)", text)
    message = re.split(r" at: line | in or near|\n| \(line ", text.strip())[0].rstrip(". ")
    return int(position[1]) if position else end, message or "it is not JSON"


def _with_added(
    text: str, root: Any, entries: Any, configurations: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text with `configurations` at the end of the list, created if missing.

    The new lines stand before the closing bracket of the list, or of the object, and follow the
    indentation and the line endings of the file.
    """
    match = re.search(r'\n([ \t]+)"', text)
    unit = match[1] if match else "  "
    node = root if entries is None else entries
    if entries is None:
        block = '"configurations": ' + _format_json(configurations, unit)
    else:
        block = ",\n".join(_format_json(entry, unit) for entry in configurations)
    end = node._end_tok.index
    line = text.rfind("\n", 0, end) + 1
    before = text[line:end]
    outer = before[: len(before) - len(before.lstrip())]
    lines = textwrap.indent(block, outer + unit) + "\n"
    if node.values and node.trailing_comma is not None:
        lines = lines[:-1] + ",\n"
    if before.strip():
        head, tail = text[:end], f"\n{lines}{outer}{text[end:]}"
    else:
        head, tail = text[:line], lines + text[line:]
    if node.values and node.trailing_comma is None:
        last = node.values[-1]._end_tok.end
        head = head[:last] + "," + head[last:]
    return head + (re.sub(r"(?<!\r)\n", "\r\n", tail) if "\r\n" in text else tail)


def _format_json(value: Any, unit: str) -> str:
    """Return JSON with lists of strings on one line."""
    text = json.dumps(value, indent=unit, ensure_ascii=False)

    def join_lines(match: re.Match[str]) -> str:
        return re.sub(r"\s*\n\s*", " ", f"[{match[1].strip()}]")

    return re.sub(r"\[\s+((?:\"[^\"]*\",?\s*)*?)\s*\]", join_lines, text)


def write_launch(folder: Path, *, dry_run: bool = False) -> tuple[Path, MergedLaunch]:
    """Merge our configurations into a folder's `.vscode/launch.json`, created if missing.

    The file is replaced atomically, and not written when nothing is missing. Raises `UsageError`
    for a folder that does not exist and a file that cannot be read or written.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Give --folder an existing one.")
    path = folder / ".vscode" / "launch.json"
    old = _read(path)
    text = old.removeprefix("\ufeff")  # the byte order mark
    merged = merge(text, name=str(path))
    if merged.added and not dry_run:
        target = path.resolve()  # of a symbolic link, which stays
        data = (old[: len(old) - len(text)] + merged.text).encode()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = target.stat().st_mode & 0o7777 if target.exists() else 0o644
            replace_file(target, data, mode)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
    return path, merged


def _read(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}.", hint="Nothing was written.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
