"""Discovery of running captures: each one has a JSON file and a socket in a folder of the user.

The folder is `flexinspect` in `XDG_RUNTIME_DIR`, otherwise `flexinspect-UID` in the system's folder
for temporary files, or in `/tmp` if that path is too long for a socket. Only the user can enter it.
The next `running()` removes the files of captures that were killed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from flexinspect.control.messages import Kind, Message, from_json, to_json
from flexinspect.core.addresses import is_loopback, parse_address
from flexinspect.core.environment import replace_file
from flexinspect.core.errors import ControlError, UsageError
from flexinspect.core.parsing import parse_json

LONGEST_SOCKET = 100  # longest path of a socket in bytes: Linux accepts 108, macOS 104
TOKEN_VARIABLE = "FLEXINSPECT_TOKEN"
MIN_TOKEN_LENGTH = 16
_NAME_ONE = "Name one with --pid or --trace."


class Address(Message, frozen=True):
    """Address of a control server: a Unix socket, or the `url` of `--serve` with its token."""

    socket: str = ""
    url: str = ""
    token: str = ""


class CaptureEntry(Message, frozen=True):
    """A running capture: `title` describes the run, `trace` is the absolute path of its file."""

    pid: int
    started_at: float
    address: Address
    trace: str
    title: str = ""
    kind: Kind = "generation"

    def is_recording(self, path: Path) -> bool:
        """Return whether `path` is the file being written, also through a link."""
        mine = Path(self.trace)
        try:
            return mine.samefile(path)
        except OSError:
            return mine == path.absolute()


def runtime_folder() -> Path:
    """Return the folder of the sockets, created with mode 0700 if it does not exist.

    Raises `ControlError` if it is another user's or cannot be created, and on Windows.
    """
    if not hasattr(os, "getuid"):
        raise ControlError("This system has no Unix sockets, so runs cannot be controlled here.")
    folder = _choose_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise ControlError(f"The folder {folder} cannot be created: {error.strerror}.") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        text = f"{folder} is not a folder that you own, so no socket is created in it."
        hint = "Remove it, or set XDG_RUNTIME_DIR to a folder that only you can enter."
        raise ControlError(text, hint=hint)
    if stat.S_IMODE(info.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _choose_folder() -> Path:
    base, name = os.environ.get("XDG_RUNTIME_DIR"), f"flexinspect-{os.getuid()}"
    folders = [Path(base) / "flexinspect"] if base else []
    folders += [Path(tempfile.gettempdir()) / name, Path("/tmp") / name]
    max_length = LONGEST_SOCKET - len("/4194304-99.sock")
    return next((one for one in folders if len(os.fsencode(one)) <= max_length), folders[-1])


def new_socket_path(folder: Path) -> Path:
    """Return a free socket path for a new capture; a process may have several captures."""
    paths = (folder / f"{os.getpid()}-{number}.sock" for number in count())
    return next(path for path in paths if not path.exists())


def register(entry: CaptureEntry) -> None:
    """Write the file that announces a capture, next to its socket. Raises `ControlError`."""
    file = Path(entry.address.socket).with_suffix(".json")
    try:
        replace_file(file, json.dumps(to_json(entry)).encode(), 0o600)
    except OSError as error:
        raise ControlError(f"{file} cannot be written: {error.strerror}.") from error


def unregister(path: Path) -> None:
    """Remove the file and the socket of a capture; `path` is one of the two."""
    for suffix in (".json", ".sock"):
        with suppress(OSError):
            path.with_suffix(suffix).unlink()


def running() -> Sequence[CaptureEntry]:
    """Return the running captures of this user, newest first, and remove files of dead ones."""
    from flexinspect.core.environment import is_recorder_alive

    entries, folder = [], runtime_folder()
    for file in folder.glob("*.json"):
        entry = _read_entry(file)
        if entry is not None and is_recorder_alive(msgspec.structs.asdict(entry)):
            entries.append(entry)
        else:
            unregister(file)
    for socket in folder.glob("*-*.sock"):
        pid = socket.name.partition("-")[0]
        is_announced = socket.with_suffix(".json").exists() or not pid.isdecimal()
        # A process may end between binding its socket and `register`.
        if not (is_announced or is_recorder_alive({"pid": int(pid), "started_at": math.inf})):
            unregister(socket)
    return sorted(entries, key=lambda entry: -entry.started_at)


def _read_entry(file: Path) -> CaptureEntry | None:
    """Return the entry of a file, None if it is damaged or its socket is gone."""
    try:
        entry = from_json(CaptureEntry, parse_json(file.read_text("utf-8")), str(file))
    except (OSError, ValueError, ControlError):
        return None
    return entry if Path(entry.address.socket).exists() else None


def find_capture(
    pid: int | None = None, trace: Path | None = None, *, hint: str = _NAME_ONE
) -> CaptureEntry:
    """Return the capture of a process or a trace, by default the only one.

    Raises `UsageError` if there is none or more than one; `hint` tells how to choose.
    """
    entries = running()
    if pid is not None:
        entries = [entry for entry in entries if entry.pid == pid]
    if trace is not None:
        entries = [entry for entry in entries if entry.is_recording(trace)]
    if len(entries) == 1:
        return entries[0]
    if entries:
        listed = "; ".join(f"{one.pid} {one.title} → {one.trace}" for one in entries)
        raise UsageError(f"{len(entries)} captures are running: {listed}.", hint=hint)
    selection = f" of process {pid}" if pid is not None else ""
    selection += f" that records {trace}" if trace is not None else ""
    hint = "Start one with flexinspect run; flexinspect attach --list shows running captures."
    raise UsageError(f"No capture{selection} is running.", hint=hint)


def capture_address(
    url: str | None, token: str | None, pid: int | None, trace: Path | None
) -> Address:
    """Return the address of `url`, or of the selected capture.

    Over TCP the token defaults to `FLEXINSPECT_TOKEN`. Raises `UsageError` for flags that exclude
    each other, and if no capture or more than one matches.
    """
    if url is None:
        if token is not None:
            raise UsageError("--token goes with --url.")
        return Address(find_capture(pid, trace).address.socket)
    if pid is not None or trace is not None:
        raise UsageError("--url already selects the capture; remove --pid and --trace.")
    return Address(url=url, token=token or os.environ.get(TOKEN_VARIABLE, ""))


class ServeOptions(NamedTuple):
    """Where to listen over TCP (port 0: any free port), and the token that every request needs."""

    host: str
    port: int
    token: str


def parse_serve_address(text: str, *, insecure: bool) -> ServeOptions:
    """Parse `--serve HOST:PORT`; the token is `FLEXINSPECT_TOKEN` or a new one.

    Raises `UsageError` for an invalid address, and for an address that other machines can reach
    unless `insecure` is set.
    """
    try:
        host, port = parse_address(text, default_host="")
    except ValueError:
        hint = "For example --serve 127.0.0.1:8421; port 0 picks a free port."
        raise UsageError(f"--serve {text} is not HOST:PORT.", hint=hint) from None
    if not is_loopback(host) and not insecure:
        sentence = f"--serve {text} would let other machines control this run, unencrypted."
        hint = "Use 127.0.0.1 and an SSH tunnel, or add --insecure-bind if that is intended."
        raise UsageError(sentence, hint=hint)
    return ServeOptions(host, port, _read_token())


def _read_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        return secrets.token_urlsafe(24)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        text = f"{TOKEN_VARIABLE} must hold at least {MIN_TOKEN_LENGTH} printable ASCII characters."
        raise UsageError(text, hint="Unset it to get a random token.")
    return token
