"""Opens the code of a mask in the user's editor."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from textual.app import SuspendNotSupported

from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import TracePlace
from flexinspect.trace.queries import branch_of_step
from flexinspect.trace.reader import TraceReader


def open_mask_mod(app: Any, reader: TraceReader | None, place: TracePlace) -> None:
    """Open the mask_mod of the place's layer in the user's editor. Raises `UsageError`."""
    from flexinspect.launch.editor import editor_command

    source = _find_mask_mod_source(reader, place) if reader is not None else None
    name, _, line = (source or "").rpartition(":")
    if source is None or not line.isdecimal():
        app.notify(f"No mask_mod of layer {place.layer} is recorded at this step.")
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


def _find_mask_mod_source(reader: TraceReader, place: TracePlace) -> str | None:
    """Return file and line of the mask_mod of the place's layer, None where none is known."""
    owner = branch_of_step(reader, place.generation, place.step, place.branch)
    calls = reader.calls(place.generation, place.step, owner)
    names = [call.mask for call in calls if call.layer == place.layer and call.mask]
    mask = reader.mask_summary(names[0]) if names else None
    return mask.mask_mod_source if mask is not None else None
