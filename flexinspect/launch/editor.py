"""The command that opens a file at a line in the user's editor."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flexinspect.core.errors import UsageError

_GOTO_EDITORS = ("code", "code-insiders", "codium", "vscodium", "cursor", "windsurf")
"""Take `--goto FILE:LINE`, and open a window of their own."""
_SUFFIX_EDITORS = ("hx", "helix", "subl", "zed")
"""Take `FILE:LINE`."""
_WINDOWED = (*_GOTO_EDITORS, "subl", "zed", "gedit", "kate", "gvim", "mate")


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
