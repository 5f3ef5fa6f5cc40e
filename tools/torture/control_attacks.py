"""Attacks on the control server of a capture, over TCP, with and without its token.

The server runs in this process beside a loop that passes its step barrier. After each attack it
still answers its user, and a request without the right to it has changed nothing.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from flexinspect.control.discovery import ServeOptions
from tools.torture.plain_data import LEAVES, changed
from tools.torture.results import Failure

TESTS = Path(__file__).parents[2] / "tests"
TOKEN = "a-token-of-the-torture"
ANSWER_S = 10.0
"""How long the user may wait for an answer during an attack; the machine may be busy."""
N_COMMANDS = 30
N_PAIRS = 150
MAX_Z = 6.0
"""Standard deviations of a coin by which one kind of wrong token may be slower more often."""
HOSTS = ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "0", "[::]", "", "a" * 300)


class Target(Struct, frozen=True):
    """The server under attack, the loop that it controls, and the routes of its document."""

    model: Any
    url: str
    document: dict[str, Any]


Kind = Callable[[Target, random.Random], list[str]]


def prepare(folder: Path) -> Target:
    """Start a server beside a loop."""
    from flexinspect_hooks.control.http_app import openapi_document
    from flexinspect_hooks.control.server import CaptureControl

    sys.path.append(str(TESTS))  # the loop that the tests of control use
    controlled = importlib.import_module("support.controlled")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    folder.chmod(0o700)
    model = controlled.FakeModel()
    model.settle()
    serving = ServeOptions("127.0.0.1", 0, TOKEN)
    server = CaptureControl(controlled.fake_targets(model), lambda _: None, serving=serving)
    server.start()
    return Target(model, server.address.url, openapi_document())


def attempt(target: Target, seed: int, folder: Path) -> list[Failure]:
    """Attack in one way, and check that the server is there for its user."""
    kind, rng = KINDS[seed % len(KINDS)], random.Random(seed)
    wrong = kind(target, rng)
    try:
        status, body = send(target, "GET", "/status")
        if status != 200:
            wrong.append(f"afterwards the user gets {status} {body!a}")
    except OSError as error:
        wrong.append(f"afterwards the user gets no answer: {error}")
    how = (kind.__doc__ or "").strip()
    return [Failure("control", each, how) for each in wrong]


def send(
    target: Target, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    """Send one request, with the token unless there is another one."""
    where = urlsplit(target.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=ANSWER_S)
    try:
        all_headers = {"Authorization": f"Bearer {TOKEN}", **headers}
        connection.request(method, path, body=body, headers=all_headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _connect(target: Target) -> socket.socket:
    where = urlsplit(target.url)
    return socket.create_connection((str(where.hostname), where.port), timeout=ANSWER_S)


# -- with the token --------------------------------------------------------------------------------


def command_sequence(target: Target, rng: random.Random) -> list[str]:
    """A sequence of commands, some of them malformed."""
    wrong, model = [], target.model
    for _ in range(N_COMMANDS):
        if rng.random() < 0.4 and model.is_at_forward.is_set():
            model.forward()
        path, method, operation = _operation(target.document, rng)
        if path == "/stop" and rng.random() < 0.8:
            continue
        data = _body(operation, target.document, rng)
        body = None if data is None else json.dumps(data).encode("utf-8", "surrogatepass")
        headers = {} if body is None else {"Content-Type": "application/json"}
        status, answer = send(target, method.upper(), path, body, **headers)
        said = f"{method} {path} {(body or b'')[:80]!a}: {status} {answer[:120]!a}"
        if status >= 500:
            wrong.append(said)
        elif str(status) not in operation["responses"] and status not in (404, 413, 414):
            wrong.append(f"not documented: {said}")
    send(target, "POST", "/continue")
    return wrong


def _operation(document: dict[str, Any], rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    path = rng.choice(sorted(document["paths"]))
    methods = document["paths"][path]
    method = rng.choice(sorted(key for key in methods if key in ("get", "post", "delete")))
    filled = path.replace("{number}", rng.choice(("0", "1", "2", "99", "9" * 50)))
    filled = filled.replace("{level}", rng.choice(("basic", "advanced", "extreme", "odd")))
    return filled, method, methods[method]


def _body(operation: dict[str, Any], document: dict[str, Any], rng: random.Random) -> Any:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None
    valid = _value(content["schema"], document, rng)
    return changed(valid, rng) if rng.random() < 0.5 else valid


def _value(
    schema: dict[str, Any], document: dict[str, Any], rng: random.Random, depth: int = 0
) -> Any:
    """Return a value that a JSON schema allows, in most cases."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return _value(document["components"]["schemas"][name], document, rng)
    if "anyOf" in schema:
        return _value(rng.choice(schema["anyOf"]), document, rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        fields = schema.get("properties", {})
        needed = set(schema.get("required", ()))
        chosen = [name for name in fields if name in needed or rng.random() < 0.5]
        return {name: _value(fields[name], document, rng) for name in chosen}
    if kind == "array":
        items = schema.get("items") or {}
        return [_value(items, document, rng) for _ in range(rng.randint(0, 3))]
    if kind == "integer":
        return rng.choice((0, 1, 2, 7, 999, 2**31))
    if kind == "number":
        return rng.choice((0.0, 0.5, -1.0, 1e9))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "string":
        return rng.choice(("entropy > 3", "causal", "x", "0:4", "mask.empty-row"))
    return rng.choice(LEAVES) if kind != "null" else None


# -- without it ------------------------------------------------------------------------------------


def wrong_token(target: Target, rng: random.Random) -> list[str]:
    """Commands with a wrong token, or none."""
    wrong: list[str] = []
    target.model.barrier.has_received_command = False
    for _ in range(10):
        size = rng.randrange(len(TOKEN) + 3)
        token = (TOKEN[:size] + "x" * rng.randrange(3))[:200]
        if token == TOKEN:
            continue
        scheme = rng.choice(("Bearer", "bearer", "Basic", ""))
        path = rng.choice(("/pause", "/stop", "/status", "/openapi.json", "/nowhere"))
        method = "GET" if path in ("/status", "/openapi.json") else "POST"
        status, answer = send(target, method, path, Authorization=f"{scheme} {token}")
        if status != 401 or b"no model" in answer:
            wrong.append(f"{method} {path} with the token {token!a}: {status} {answer[:80]!a}")
    return wrong + _commanded(target)


def _commanded(target: Target) -> list[str]:
    return ["a command was accepted"] if target.model.barrier.has_received_command else []


def other_host(target: Target, rng: random.Random) -> list[str]:
    """Requests under another host name (DNS rebinding), with the right token."""
    wrong: list[str] = []
    target.model.barrier.has_received_command = False
    for _ in range(5):
        host = rng.choice(HOSTS) + rng.choice(("", ":80", f":{urlsplit(target.url).port}"))
        status, _ = send(target, "POST", "/pause", Host=host)
        if status not in (400, 403):
            wrong.append(f"Host {host[:40]!a}: {status}")
    return wrong + _commanded(target)


def token_timing(target: Target, rng: random.Random) -> list[str]:
    """Whether a wrong token with a right beginning takes longer than another one."""
    near, far = TOKEN[:-1] + "!", "!" + TOKEN[1:]
    spent: dict[str, list[float]] = {near: [], far: []}
    where = urlsplit(target.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=ANSWER_S)
    for _ in range(N_PAIRS):
        for token in rng.sample((near, far), 2):
            started = time.perf_counter()
            connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
            connection.getresponse().read()
            spent[token].append(time.perf_counter() - started)
    connection.close()
    slower = sum(a > b for a, b in zip(spent[near], spent[far], strict=True))
    z = abs(slower - N_PAIRS / 2) / (N_PAIRS / 4) ** 0.5
    if z < MAX_Z:
        return []
    times = [f"{1e6 * median(each):.0f}" for each in spent.values()]
    return [f"near tokens took {times[0]} µs, far ones {times[1]} µs (z = {z:.1f})"]


# -- connections -----------------------------------------------------------------------------------


def idle_connections(target: Target, rng: random.Random) -> list[str]:
    """Many connections that send nothing, or a part of a request."""
    parts = (b"", b"G", b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    with ExitStack() as opened:
        for _ in range(rng.choice((10, 80, 150))):
            connection = opened.enter_context(_connect(target))
            with suppress(OSError):  # beyond 64, the server closes the one that is idle longest
                connection.sendall(rng.choice(parts))
        started = time.monotonic()
        status, _ = send(target, "GET", "/status")
        waited = time.monotonic() - started
    wrong = [] if status == 200 else [f"the user gets {status}"]
    return wrong + ([f"the user waited for {waited:.1f} s"] if waited > ANSWER_S / 2 else [])


def slow_connection(target: Target, rng: random.Random) -> list[str]:
    """A request that arrives byte by byte, or whose sender goes away."""
    request = f"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    stop = rng.randrange(len(request)) if rng.random() < 0.5 else len(request)
    with _connect(target) as connection:
        for at in range(stop):
            connection.sendall(request[at : at + 1].encode())
            if at % 16 == 0:
                time.sleep(0.002)
        if stop < len(request):
            if rng.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            return []
        answer = connection.recv(64)
    return [] if b" 200 " in answer else [f"answered {answer!a}"]


def garbage(target: Target, rng: random.Random) -> list[str]:
    """Bytes that are no request, or one that is malformed."""
    whole = bytearray(
        f"POST /step HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        'Content-Length: 8\r\n\r\n{"n": 1}'.encode()
    )
    odd = (
        *(b"\x16\x03\x01" + rng.randbytes(200), rng.randbytes(500), b"GET / HTTP/9.9\r\n\r\n"),
        *(
            b"GET /" + b"a" * 70_000,
            b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 6000 + b"\r\n\r\n",
        ),
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    )
    for _ in range(rng.choice((1, 3, 20))):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    with _connect(target) as connection:
        connection.settimeout(2.0)
        with suppress(OSError):  # closed, or waiting for the rest
            connection.sendall(rng.choice((bytes(whole), bytes(whole), *odd)))
            connection.shutdown(socket.SHUT_WR)
            first = connection.recv(200)
            if first.startswith(b"HTTP/1.1 5"):
                return [f"answered {first[:80]!a}"]
    return []


KINDS: tuple[Kind, ...] = (
    *(command_sequence, wrong_token, other_host, idle_connections, slow_connection, garbage),
    token_timing,
)
