"""Opens the code of a mask, or of a layer's attention, at its line in the user's editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from textual.app import SuspendNotSupported

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import TracePlace
from flexinspect.records.finding import Finding
from flexinspect.trace.queries import attention_source, branch_of_step
from flexinspect.trace.reader import TraceReader

_GOTO_EDITORS = ("code", "code-insiders", "codium", "vscodium", "cursor", "windsurf")
"""Take `--goto FILE:LINE`, and open a window of their own."""
_SUFFIX_EDITORS = ("hx", "helix", "subl", "zed")
"""Take `FILE:LINE`."""
_WINDOWED = (*_GOTO_EDITORS, "subl", "zed", "gedit", "kate", "gvim", "mate")


ABOUT_ATTENTION = ("path", "kernel", "graphs")
"""First words of the ids of findings about the code that computes attention, not about masks."""


class EditorCommand(NamedTuple):
    """The arguments of the command, and whether it needs the terminal while it runs."""

    arguments: list[str]
    needs_terminal: bool


def editor_command(file: Path, line: int, environ: Mapping[str, str]) -> EditorCommand:
    """Return the command that opens a file at a line, counted from 1.

    The editor is `VISUAL`, or `EDITOR`, or VS Code in its terminal or where nothing else is named.
    Raises `UsageError` without an editor.
    """
    named = environ.get("VISUAL") or environ.get("EDITOR") or ""
    try:
        words = shlex.split(named)
    except ValueError:
        words = [named]
    if not words and shutil.which("code", path=environ.get("PATH")):
        words = ["code"]
    if not words:
        hint = "Set EDITOR, for example: export EDITOR=vim"
        raise UsageError(f"No editor is known to open {file}:{line}.", hint=hint)
    name = Path(words[0]).stem.lower()
    if name in _GOTO_EDITORS:
        place = ["--goto", f"{file}:{line}"]
    elif name in _SUFFIX_EDITORS:
        place = [f"{file}:{line}"]
    else:  # as vi, nano, emacs, kak and micro have it
        place = [f"+{line}", str(file)]
    return EditorCommand([*words, *place], name not in _WINDOWED)


def open_code(
    app: Any, reader: TraceReader | None, place: TracePlace, finding: Finding | None
) -> None:
    """Open the code of the place's layer in the user's editor. Raises `UsageError`.

    It is the mask_mod, or the code of the user that computed the attention if there is none, or if
    the finding is about that.
    """
    source = _find_source(reader, place, finding) if reader is not None else None
    name, _, line = (source or "").rpartition(":")
    if source is None or not line.isdecimal():
        app.notify(f"No mask_mod and no forward of yours is recorded for layer {place.layer} here.")
        return
    file = Path(name)
    if not file.exists():
        message = f"{escape_unprintable(source)} does not exist on this machine."
        app.notify(message, severity="warning")
        return
    command = editor_command(file, int(line), os.environ)
    try:
        if command.needs_terminal:
            with app.suspend():
                subprocess.run(command.arguments, check=False)
        else:
            subprocess.Popen(command.arguments, stdin=subprocess.DEVNULL)
    except (OSError, SuspendNotSupported) as error:
        editor = escape_unprintable(command.arguments[0])
        reason = getattr(error, "strerror", None) or "this terminal cannot be suspended"
        app.notify(f"{editor} could not be started: {reason}.", severity="error")


def _find_source(reader: TraceReader, place: TracePlace, finding: Finding | None) -> str | None:
    """Return file and line of the code of the place's layer, None where none is known."""
    owner = branch_of_step(reader, place.generation, place.step, place.branch)
    calls = reader.calls(place.generation, place.step, owner)
    names = [call.mask for call in calls if call.layer == place.layer and call.mask]
    mask = reader.mask_summary(names[0]) if names else None
    sources = [
        None if mask is None else mask.mask_mod_source,
        attention_source(reader, place.layer),
    ]
    if finding is not None and finding.id.partition(".")[0] in ABOUT_ATTENTION:
        sources.reverse()
    return sources[0] or sources[1]
