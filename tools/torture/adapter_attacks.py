"""Attacks on the debug adapter of a run (`--debugpy`), which has no password and is on loopback.

Each seed runs a small model under a debugger, attacks it in several ways, and lets it end: the
model goes on after each attack, its tokens are those of a run alone, and every step is recorded.
What is not promised: a client of debugpy that was cut off may leave it unable to accept another.
"""

from __future__ import annotations

import importlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tools.torture import warm
from tools.torture.results import Failure

N_ATTACKS = 6
PATIENCE_S = 20.0
MARK = "attacked"
"""The file that an expression makes which a web page asks to evaluate."""
EVALUATE = f"open('{MARK}', 'w').close()"
N_FIRST_STEPS = 5
"""Steps before the loop of the program, which counts its own."""
Attack = Callable[[int, random.Random], None]


def prepare(folder: Path) -> str:
    """Start the process from which programs are forked; return what the program prints alone."""
    warm.prepare(folder)
    debugged: Any = importlib.import_module("support.debugged")
    alone = folder / "alone"
    (alone / "site-packages").mkdir(parents=True)
    (alone / "program.py").write_text(debugged.PROGRAM, "utf-8")
    (alone / "site-packages" / "watcher.py").write_text(debugged.WATCHER, "utf-8")
    return str(debugged.plain_output(alone / "program.py"))


def attempt(expected: str, seed: int, folder: Path) -> list[Failure]:
    """Attack one run."""
    debugged: Any = importlib.import_module("support.debugged")
    rng, done, wrong = random.Random(seed), list[str](), list[str]()
    with debugged.Debugged(folder) as run:
        port = run.port()
        debugged.eventually(run.count)
        wrong += _open_ports(run.process.pid)
        for attack in rng.choices(ATTACKS, k=N_ATTACKS):
            done.append((attack.__doc__ or "").strip("."))
            with suppress(OSError):  # refused or cut off
                attack(port, rng)
            if not _goes_on(run):
                wrong.append("the model does not go on")
                break
        if not wrong:
            wrong += _judge(run, expected)
    if (folder / MARK).exists():
        wrong.append("an expression of a web page was evaluated")
    return [Failure("debug adapter", each, "; ".join(done)) for each in wrong]


def _goes_on(run: Any) -> bool:
    before, until = run.count(), time.monotonic() + PATIENCE_S
    while run.count() <= before + 1:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _open_ports(pid: int) -> list[str]:
    """Return the ports of a process and its children that are not on loopback."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = {one.laddr for each in tree for one in each.net_connections("inet") if not one.raddr}
    return [f"listens on {at.ip}:{at.port}" for at in found if at.ip not in ("127.0.0.1", "::1")]


def _judge(run: Any, expected: str) -> list[str]:
    """Let the run end, and check what it printed and recorded."""
    from flexinspect.trace.reader import open_trace

    printed, code = run.finish()
    wrong = [] if code == 0 else [f"the run ended with {code}: {run.stderr_text()[-300:]!a}"]
    if not printed.startswith(expected.splitlines()[0]):
        wrong.append(f"the program printed {printed[:200]!a}")
    with open_trace(run.trace) as reader:
        n_steps = sum(reader.n_steps(row.generation) for row in reader.generations())
        if reader.state != "finished":
            wrong.append(f"the trace is {reader.state}")
    if n_steps != run.count() + N_FIRST_STEPS:
        wrong.append(f"{n_steps} steps of {run.count() + N_FIRST_STEPS} are recorded")
    return wrong


# -- attacks ---------------------------------------------------------------------------------------


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def _framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def _request(seq: int, command: str, **arguments: Any) -> bytes:
    return _framed({"seq": seq, "type": "request", "command": command, "arguments": arguments})


def _cut_off(connection: socket.socket) -> None:
    """Close a connection with a reset, as a program does that is killed with unread data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _hear(connection: socket.socket, seconds: float = 0.3) -> None:
    connection.settimeout(seconds)
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


def garbage(port: int, rng: random.Random) -> None:
    """Bytes that are no message."""
    odd = (b"Content-Length: -1\r\n\r\n", b"Content-Length: x\r\n\r\n{}", b"\r\n\r\n", b"\0" * 4096)
    with _connect(port) as connection:
        connection.sendall(rng.choice((*odd, rng.randbytes(rng.choice((1, 100, 100_000))))))
        _hear(connection)


def odd_messages(port: int, rng: random.Random) -> None:
    """Messages that are JSON, but no request."""
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    odd: tuple[Any, ...] = (
        None,
        3,
        [],
        {},
        deep,
        {"seq": "x"},
        {"type": "request"},
        {"seq": 1, "type": "event"},
    )
    with _connect(port) as connection:
        for message in rng.choices(odd, k=3):
            connection.sendall(_framed(message))
        _hear(connection)


def half_a_message(port: int, rng: random.Random) -> None:
    """A message that is announced and never comes."""
    connection = _connect(port)
    length = rng.choice((b"100", b"999999999999", b"0" * 5000))
    connection.sendall(b"Content-Length: " + length + rng.choice((b"", b"\r\n\r\n", b"\r\n\r\n{")))
    _hear(connection)
    rng.choice((_cut_off, socket.socket.close))(connection)


def slow(port: int, rng: random.Random) -> None:
    """A request that arrives byte by byte."""
    message = _request(1, "initialize", adapterID="slow")
    with _connect(port) as connection:
        for at in range(rng.randrange(20, len(message))):
            connection.sendall(message[at : at + 1])
            time.sleep(0.002)


def many_connections(port: int, rng: random.Random) -> None:
    """Many connections that say nothing."""
    with ExitStack() as opened:
        for _ in range(rng.choice((20, 100))):
            opened.enter_context(_connect(port))
        time.sleep(0.2)


def wrong_order(port: int, rng: random.Random) -> None:
    """Requests in an order that no client has."""
    commands = ("attach", "configurationDone", "evaluate", "threads", "initialize", "stackTrace")
    with _connect(port) as connection:
        for seq, command in enumerate(rng.choices(commands, k=6), 1):
            connection.sendall(_request(seq, command, expression="1 +"))
        _hear(connection)


def web_page(port: int, rng: random.Random) -> None:
    """What a page in a browser can send: one HTTP request, whose body is a message."""
    command = rng.choice(("initialize", "attach", "evaluate", "disconnect"))
    body = _request(1, command, expression=EVALUATE).partition(b"\r\n\r\n")[2]
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://evil.example\r\n"
    with _connect(port) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        _hear(connection)


def killed_while_paused(port: int, rng: random.Random) -> None:
    """A client that pauses the model and is killed."""
    connection = _connect(port)
    connection.sendall(_request(1, "initialize", adapterID="x", clientID="x"))
    connection.sendall(_request(2, "attach"))
    time.sleep(0.5)
    connection.sendall(_request(3, "configurationDone"))
    if rng.random() < 0.7:
        connection.sendall(_request(4, "pause", threadId=1))
    _hear(connection, 0.5)
    rng.choice((_cut_off, socket.socket.close))(connection)


ATTACKS: tuple[Attack, ...] = (
    *(garbage, odd_messages, half_a_message, slow, many_connections, wrong_order, web_page),
    killed_while_paused,
)
