"""Addresses of `--serve`: read, and refused where others than this machine would reach them."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass

from flexinspect.errors import UsageError

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
