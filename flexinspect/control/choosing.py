"""Which running capture is meant: the only one, or the one that was named."""

from __future__ import annotations

import os
from pathlib import Path

from flexinspect.control import registry
from flexinspect.control.addresses import TOKEN_VARIABLE
from flexinspect.control.registry import Address, CaptureEntry
from flexinspect.errors import UsageError


def find_capture(
    pid: int | None = None,
    trace: Path | None = None,
    *,
    hint: str = "Name one with --pid or --trace.",
) -> CaptureEntry:
    """Return the capture of a process or a trace, or the only one there is.

    Raises `UsageError` when there is none or several, naming them; `hint` says how one is named.
    """
    found = registry.running()
    if pid is not None:
        found = [entry for entry in found if entry.pid == pid]
    if trace is not None:
        found = [entry for entry in found if entry.is_recording(trace)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{len(found)} captures run: {'; '.join(map(capture_label, found))}.",
            hint=hint,
        )
    named = f" of process {pid}" if pid is not None else ""
    named += f" that records {trace}" if trace is not None else ""
    raise UsageError(
        f"No capture{named} is running.",
        hint="flexinspect run begins one; flexinspect attach --list shows them.",
    )


def capture_label(entry: CaptureEntry) -> str:
    """Return a capture in a few words."""
    return f"{entry.pid} {entry.title} → {entry.trace}"


def capture_address(
    url: str | None, token: str | None, pid: int | None, trace: Path | None
) -> Address:
    """Return the address of `url`, or that of the capture chosen. Raises `UsageError`.

    Over TCP the token comes from the environment unless it is given.
    """
    if url is None:
        if token is not None:
            raise UsageError("--token goes with --url.")
        return Address(find_capture(pid, trace).address.socket)
    if pid is not None or trace is not None:
        raise UsageError("--url names the capture already; leave --pid and --trace out.")
    return Address(url=url, token=token or os.environ.get(TOKEN_VARIABLE, ""))
