"""State of the interface between sessions: the layout, the theme, and recently opened traces.

A small JSON file in the user's state folder (`XDG_STATE_HOME`, else `~/.local/state`, on Windows
`LOCALAPPDATA`). A file that cannot be read or written is ignored without a message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, fields, replace

from flexinspect.core.environment import replace_file, user_folder
from flexinspect.core.errors import TraceError, TruncatedTraceError
from flexinspect.trace.file.connections import check_header

N_RECENT = 12
DEFAULT_PANELS = ("mask", "logits", "tokens", "attention")


class InterfaceState(Struct, frozen=True):
    """The saved state.

    `panels` are names by slot, `slots` the number shown (0: as many as fit), `recent` the traces,
    newest first, and `solved_exhibits` the names of broken runs whose fault the user named.
    """

    panels: tuple[str, ...] = DEFAULT_PANELS
    slots: int = 0
    theme: str = ""
    recent: tuple[str, ...] = ()
    solved_exhibits: tuple[str, ...] = ()


def state_file() -> Path | None:
    """Return the path of the file, which may not exist; None without a home folder."""
    root = user_folder("XDG_STATE_HOME", "LOCALAPPDATA", ".local/state")
    return None if root is None else root / "flexinspect" / "state.json"


def load_state() -> InterfaceState:
    """Return the saved state, with defaults for missing and invalid values."""
    file = state_file()
    data: Any = {}
    if file is not None:
        with suppress(OSError, ValueError, RecursionError):
            data = json.loads(file.read_text("utf-8"))
    values: dict[str, Any] = {}
    for one in fields(InterfaceState) if isinstance(data, dict) else ():
        with suppress(KeyError, ValidationError):
            values[one.name] = convert(data[one.name], one.type)
    state = InterfaceState(**values)
    slots, panels = min(max(state.slots, 0), 4), state.panels or DEFAULT_PANELS
    return replace(state, slots=slots, panels=panels)


def save_state(**changes: Any) -> None:
    """Save changed fields of `InterfaceState`. The file is replaced atomically."""
    file = state_file()
    if file is None:
        return
    text = json.dumps(asdict(replace(load_state(), **changes)), indent=2)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), 0o600)


def add_recent_trace(path: Path) -> None:
    """Save a trace as the one opened last."""
    mine = str(path.absolute())
    save_state(recent=tuple(dict.fromkeys((mine, *load_state().recent)))[:N_RECENT])


def add_solved_exhibit(name: str) -> int:
    """Save that a broken run of the museum was solved, and return how many are."""
    solved = tuple(dict.fromkeys([*load_state().solved_exhibits, name]))
    save_state(solved_exhibits=solved)
    return len(solved)


def known_traces(folder: Path | None = None) -> Sequence[Path]:
    """Return recently opened traces that still exist, then those of a folder, newest first.

    `folder` defaults to the current one.
    """
    try:
        in_folder = [*(folder or Path.cwd()).absolute().glob("*.flextrace")]
    except OSError:
        in_folder = []
    newest = sorted(in_folder, key=lambda path: -_modified_at(path))[:N_RECENT]
    traces = dict.fromkeys([*map(Path, load_state().recent), *newest])
    return [path for path in traces if _is_trace(path)][: 2 * N_RECENT]


def _is_trace(path: Path) -> bool:
    """Return whether a file is a trace, by its header; also one that is cut short."""
    try:
        check_header(path)
    except TruncatedTraceError:
        return True
    except TraceError:
        return False
    return True


def _modified_at(path: Path) -> float:
    """Return when a file was changed, 0 without one."""
    try:
        return path.stat().st_mtime if path.is_file() else 0.0
    except (OSError, ValueError):
        return 0.0
