"""Where running captures are found: one JSON file and one socket each, in a folder of the user's.

The folder is `flexinspect` below `XDG_RUNTIME_DIR`, else `flexinspect-UID` in the system's folder
for temporary files, or in `/tmp` where that one's path is too long for a socket; only the user may
enter it. What a capture that was killed left there is
removed by whoever looks next.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexinspect.control.messages import from_json, to_json
from flexinspect.core.errors import ControlError, UsageError

LONGEST_SOCKET = 100
"""Bytes of a socket's path: the system takes 108 at most, some 104."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a capture is controlled: a Unix socket, or the `url` of `--serve` with its token."""

    socket: str = ""
    url: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class CaptureEntry:
    """A capture that can be controlled.

    `title` says in a few words what it runs, `trace` is the file being written, absolute.
    """

    pid: int
    started_at: float
    address: Address
    trace: str
    title: str = ""
    kind: Literal["generation", "program", "watch"] = "generation"

    def is_recording(self, path: Path) -> bool:
        """Tell whether `path` leads to the file being written, by a link or another way too."""
        mine = Path(self.trace)
        try:
            return mine.samefile(path)
        except OSError:
            return mine == path.absolute()


def runtime_folder() -> Path:
    """Return the folder of sockets, made if need be, mode 0700.

    Raises `ControlError` when it belongs to somebody else or cannot be made, and on Windows.
    """
    if not hasattr(os, "getuid"):
        raise ControlError("This system has no Unix sockets, so runs take no commands here.")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "flexinspect" if base else _temporary_folder()
    if _is_too_long(folder):
        folder = _temporary_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise ControlError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ControlError(
            f"{folder} is not a folder of yours, so no socket is put there.",
            hint="Remove it, or set XDG_RUNTIME_DIR to a folder that only you can enter.",
        )
    if stat.S_IMODE(facts.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _temporary_folder() -> Path:
    name = f"flexinspect-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    return Path("/tmp") / name if _is_too_long(folder) else folder


def _is_too_long(folder: Path) -> bool:
    return len(os.fsencode(folder)) > LONGEST_SOCKET - len("/4194304-99.sock")


def new_socket_path(folder: Path) -> Path:
    """Return where a new capture of this process may put its socket: one may hold several."""
    number = 0
    while (path := folder / f"{os.getpid()}-{number}.sock").exists():
        number += 1
    return path


def register(entry: CaptureEntry) -> Path:
    """Let a capture be found; returns its file, beside its socket. Raises `ControlError`."""
    file = Path(entry.address.socket).with_suffix(".json")
    part = file.with_suffix(".part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(to_json(entry), out)
        part.replace(file)
    except OSError as error:
        raise ControlError(f"{file} cannot be written: {error.strerror}.") from error
    return file


def unregister(file: Path) -> None:
    """Remove a capture's file and its socket."""
    for path in (file, file.with_suffix(".sock")):
        with suppress(OSError):
            path.unlink()


def running() -> Sequence[CaptureEntry]:
    """Return the captures of this user that live, newest first; what dead ones left is removed."""
    found = []
    for file in runtime_folder().glob("*.json"):
        entry = _read_entry(file)
        if entry is None or not _is_alive(entry):
            unregister(file)
        else:
            found.append(entry)
    _remove_orphans()
    return sorted(found, key=lambda entry: -entry.started_at)


def _remove_orphans() -> None:
    """Remove sockets of processes that ended after they made one and before they could be found."""
    for socket in runtime_folder().glob("*-*.sock"):
        pid = socket.name.partition("-")[0]
        if (
            pid.isdecimal()
            and not socket.with_suffix(".json").exists()
            and not _process_exists(int(pid))
        ):
            with suppress(OSError):
                socket.unlink()


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _read_entry(file: Path) -> CaptureEntry | None:
    try:
        return from_json(CaptureEntry, json.loads(file.read_text("utf-8")), str(file))
    except (OSError, ValueError, ControlError):
        return None


def _is_alive(entry: CaptureEntry) -> bool:
    from flexinspect.core.environment import is_recorder_alive

    if not Path(entry.address.socket).exists():
        return False
    return is_recorder_alive({"pid": entry.pid, "started_at": entry.started_at})


def find_capture(
    pid: int | None = None,
    trace: Path | None = None,
    *,
    hint: str = "Name one with --pid or --trace.",
) -> CaptureEntry:
    """Return the capture of a process or a trace, or the only one there is.

    Raises `UsageError` when there is none or several, naming them; `hint` says how one is named.
    """
    found = running()
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


TOKEN_VARIABLE = "FLEXINSPECT_TOKEN"
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to listen over TCP, and the token that every request must bring. Port 0: a free one."""

    host: str
    port: int
    token: str


def parse_serve_address(text: str, *, insecure: bool) -> ServeOptions:
    """Return what `--serve HOST:PORT` asks for, with a token from the environment or a new one.

    Raises `UsageError` for what is no address, and for one that others than this machine reach
    unless `insecure` says that this is meant.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"--serve {text} is not HOST:PORT.",
            hint="Write for instance --serve 127.0.0.1:8421, or port 0 for a free one.",
        )
    if not is_loopback(host) and not insecure:
        raise UsageError(
            f"--serve {text} would let other machines control this run, unencrypted.",
            hint="Use 127.0.0.1 and an SSH tunnel, or add --insecure-bind if that is meant.",
        )
    return ServeOptions(host, int(port), _read_token())


def _read_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        return secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{TOKEN_VARIABLE} must hold at least {MIN_TOKEN_LENGTH} printable ASCII characters.",
            hint="Leave it unset to have one made.",
        )
    return token


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
