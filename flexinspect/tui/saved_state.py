"""State of the interface between sessions: layouts, the theme, and recently opened traces.

A small JSON file in the user's state folder (`XDG_STATE_HOME`, else `~/.local/state`, on Windows
`LOCALAPPDATA`). A file that cannot be read or written is ignored without a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field, to_builtins
from msgspec.structs import fields, replace

from flexinspect.core.environment import replace_file, user_folder
from flexinspect.core.errors import TraceError, TruncatedTraceError
from flexinspect.core.parsing import parse_json
from flexinspect.trace.file.connections import check_header

N_RECENT = 12
MAX_SLOTS = 4


class Layout(Struct, frozen=True):
    """The names of panels by slot, and the number of slots shown (0: as many as fit)."""

    panels: Annotated[tuple[str, ...], Meta(min_length=1)]
    slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0


class InterfaceState(Struct, frozen=True):
    """The saved state.

    `layouts` are by kind of trace, `rail` is whether the side rail is shown (None: not chosen yet),
    `recent` are the traces, newest first, and `solved_exhibits` the names of broken runs whose
    fault the user named.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    theme: str = ""
    rail: bool | None = None
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
        with suppress(OSError, ValueError):
            data = parse_json(file.read_text("utf-8"))
    values: dict[str, Any] = {}
    for one in fields(InterfaceState) if isinstance(data, dict) else ():
        with suppress(KeyError, ValidationError):
            values[one.name] = convert(data[one.name], one.type)
    return InterfaceState(**values)


def save_state(**changes: Any) -> None:
    """Save changed fields of `InterfaceState`. The file is replaced atomically."""
    file = state_file()
    if file is None:
        return
    text = json.dumps(to_builtins(replace(load_state(), **changes)), indent=2)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), 0o600)


def save_layout(kind: str, layout: Layout) -> None:
    """Save the layout of a kind of trace."""
    save_state(layouts={**load_state().layouts, kind: layout})


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
