"""Where a run came from: the git state of the user's code.

The hub client retries a dead connection for 20 to 80 seconds before it says so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
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


_CONNECT_SECONDS = 5.0


def hub_endpoint() -> str:
    """Return the address of the hub: `HF_ENDPOINT`, or the public one."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_is_offline() -> bool:
    """Say whether the user switched the network off (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_answers() -> bool:
    """Say whether something accepts a connection there; True without a look behind a proxy."""
    if urllib.request.getproxies().keys() & {"http", "https", "all"}:
        return True
    parts = urllib.parse.urlsplit(hub_endpoint())
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    one_per_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    for address in one_per_family.values():
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return True
    return False


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Let the hub client look into its cache only, at once, while nothing answers."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


PACKAGE_DATA = Path(__file__).parents[1] / "data"
"""The files that the package ships: the demo model, architectures."""


def is_recorder_alive(run: Mapping[str, Any]) -> bool:
    """Tell from a manifest whether its process still runs, on this machine; True when unknown.

    A process number that was given to another process since then does not count.
    """
    pid, started = run.get("pid"), run.get("started_at")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or not isinstance(started, (int, float)):
        return True
    if pid == os.getpid():
        return True
    import psutil

    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return not gone and bool(process.create_time() <= started + 1)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
