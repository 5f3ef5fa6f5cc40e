"""Options of a debugger for a run: where debugpy listens, or pdb on the user's terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flexinspect.core.errors import UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DebuggerOptions:
    """The requested debugger: `port` is None without debugpy, 0 for any free port.

    `wait` holds the run until a client is attached. `pdb` uses pdb on the terminal named `tty`.
    """

    host: str = LOOPBACK
    port: int | None = None
    wait: bool = False
    pdb: bool = False
    tty: str | None = None

    @property
    def is_requested(self) -> bool:
        """Whether any debugger is requested."""
        return self.pdb or self.port is not None

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any] | None) -> DebuggerOptions:
        """Read options back from a job's JSON. Raises `TypeError` for anything else."""
        return cls(**(facts or {}))


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "PORT", "HOST:PORT" or "[::1]:PORT". Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{text!r} is not [HOST:]PORT with a port from 0 to 65535")
    return host.strip("[]") or LOOPBACK, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address; names are resolved by the system."""
    import ipaddress
    import socket

    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in addresses)


def check_debugger(options: DebuggerOptions, *, is_exposed: bool) -> bool:
    """Check the options before the run; return whether other machines can reach the debugger.

    Raises `UsageError` for an address that other machines can reach unless `is_exposed`, for a port
    that is in use, for waiting without debugpy, and for pdb without a terminal or beside debugpy.
    """
    if options.wait and options.port is None:
        raise UsageError(
            "--wait-for-client waits for a client of debugpy, and --debugpy is not given.",
            hint="Add --debugpy 5678.",
        )
    if options.port is not None and options.pdb:
        raise UsageError(
            "--pdb and --debugpy exclude each other: one debugger traces the process.",
            hint="Leave one of them out.",
        )
    if options.pdb and options.tty is None:
        raise UsageError(
            "--pdb needs a terminal, and there is none here.",
            hint="Run it in a terminal, or attach with --debugpy 5678.",
        )
    if options.port is None:
        return False
    is_open = not is_loopback(options.host)
    if is_open and not is_exposed:
        raise UsageError(
            f"--debugpy {format_address(options.host, options.port)} would let other machines "
            "attach, and a client can run any code in the process.",
            hint="Use 127.0.0.1 (an SSH tunnel reaches it), or confirm with --debugpy-expose.",
        )
    check_port(options.host, options.port)
    return is_open


def check_port(host: str, port: int) -> None:
    """Raise `UsageError` when debugpy could not listen there; port 0 is always free."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        if os.name == "posix":
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            address, reason = format_address(host, port), error.strerror or error
            raise UsageError(
                f"--debugpy cannot listen on {address}: {reason}.",
                hint="Choose another port; --debugpy 0 takes any free one.",
            ) from error


def listening_message(host: str, port: int, *, waiting: bool) -> str:
    """Return the sentence where debugpy listens, and whether the run waits for a client."""
    wait = "; nothing runs before a client has attached" if waiting else ""
    return f"debugpy listens on {format_address(host, port)}{wait}"


def format_address(host: str, port: int) -> str:
    """Return "host:port", or "[::1]:5678" for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def controlling_terminal() -> str | None:
    """Return the name of the terminal of stdin and stderr, None when they are not on one."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    try:
        return os.ttyname(sys.stdin.fileno())
    except OSError:
        return None
