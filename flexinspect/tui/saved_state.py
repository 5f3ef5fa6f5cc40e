"""What the interface remembers between two sessions: the layout, and the traces opened last.

One small JSON file in the user's state folder (`XDG_STATE_HOME`, else `~/.local/state`, on Windows
`LOCALAPPDATA`). It is a convenience: a file that cannot be read or written is not worth a word.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

N_RECENT = 12
DEFAULT_PANELS = ("mask", "logits", "attention", "findings")


@dataclass(frozen=True, slots=True)
class InterfaceState:
    """What is remembered.

    `panels` by slot, `slots` shown (0: as many as fit well), the theme, traces newest first, and
    the panel that stands `alone` (empty: none does).
    """

    panels: tuple[str, ...] = DEFAULT_PANELS
    slots: int = 0
    theme: str = ""
    recent: tuple[str, ...] = ()
    alone: str = ""


def state_file() -> Path | None:
    """Return where the file lies (it may not exist), None without a home folder."""
    base = os.environ.get("XDG_STATE_HOME")
    if not base and sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    try:
        root = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return root / "flexinspect" / "state.json"


def load_state() -> InterfaceState:
    """Return what was remembered; defaults for whatever is missing or makes no sense."""
    file = state_file()
    found: Any = {}
    if file is not None:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(file.read_text("utf-8"))
    return _validate(found if isinstance(found, dict) else {})


def _validate(found: dict[str, Any]) -> InterfaceState:
    default = InterfaceState()
    values: dict[str, Any] = {}
    for field in fields(InterfaceState):
        value, fallback = found.get(field.name), getattr(default, field.name)
        if isinstance(fallback, tuple):
            good = isinstance(value, list) and all(isinstance(item, str) for item in value)
            values[field.name] = tuple(value) if good and value else fallback
        else:
            values[field.name] = value if type(value) is type(fallback) else fallback
    values["slots"] = min(max(values["slots"], 0), 4)
    return InterfaceState(**values)


def save_state(**changes: Any) -> None:
    """Change what is remembered: fields of `Remembered`. The file is replaced whole or not."""
    file = state_file()
    if file is None:
        return
    text = json.dumps(asdict(replace(load_state(), **changes)), indent=2)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".state-")
        with os.fdopen(handle, "w", encoding="utf-8") as part:
            part.write(text)
        Path(name).replace(file)


def add_recent_trace(path: Path) -> None:
    """Remember that a trace was opened."""
    mine = str(path.absolute())
    others = [name for name in load_state().recent if name != mine]
    save_state(recent=(mine, *others)[:N_RECENT])


def known_traces(folder: Path | None = None) -> Sequence[Path]:
    """Return the traces opened last that still exist, then those of a folder, newest first.

    The folder is the current one unless given.
    """
    here: list[Path] = []
    with suppress(OSError):
        here = sorted((folder or Path.cwd()).absolute().glob("*.flextrace"), key=_sort_key)[
            :N_RECENT
        ]
    found = [path for path in (*map(Path, load_state().recent), *here) if _exists(path)]
    return list(dict.fromkeys(found))[: 2 * N_RECENT]


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _sort_key(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
