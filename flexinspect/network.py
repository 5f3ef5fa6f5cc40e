"""Whether the model hub answers, asked in a fraction of a second.

The hub client retries a dead connection for 20 to 80 seconds before it says so.
"""

from __future__ import annotations

import contextlib
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator

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
