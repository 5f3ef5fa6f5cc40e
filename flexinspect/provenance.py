"""Where a run came from: the git state of the user's code."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_S = 2.0


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether there are changes; None outside of git or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
