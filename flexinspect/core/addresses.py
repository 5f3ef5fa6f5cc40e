"""Network addresses of servers in a run: HOST:PORT as text, and who can reach a host."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def parse_address(text: str, default_host: str = LOOPBACK) -> tuple[str, int]:
    """Return host and port of "PORT", "HOST:PORT" or "[::1]:PORT". Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or default_host
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ValueError(f"{text!r} is not [HOST:]PORT with a port from 0 to 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return "host:port", or "[::1]:5678" for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address; names are resolved by the system."""
    import ipaddress

    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in addresses)


def bind_problem(host: str, port: int) -> str | None:
    """Return why no server can listen there, None if one can; port 0 is always free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        if os.name == "posix":
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
