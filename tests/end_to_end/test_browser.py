"""`flexinspect open --web` in a real browser: headless Chromium, by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.terminal_screen import TerminalScreen

from flexinspect.cli.open import is_local_request

aiohttp = pytest.importorskip("aiohttp", reason="textual-serve is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--window-size=1000,700"),
)


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"Host": "127.0.0.1:8422"}, True),
        ({"Host": "localhost:8422", "Origin": "http://127.0.0.1:8422"}, True),
        ({"Host": "rebound.example:8422"}, False),
        ({"Host": "127.0.0.1:8422", "Origin": "https://any.example"}, False),
        ({"Host": "127.0.0.1:8422", "Origin": "null"}, False),
        ({}, False),
    ],
)
def test_pages_of_other_sites_are_not_answered(headers: dict[str, str], is_let_in: bool) -> None:
    assert is_local_request(headers) is is_let_in


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Browser:
    """One page, and the screen that the frames of its web sockets draw."""

    def __init__(self, socket_: Any) -> None:
        self._socket = socket_
        self._number = 0
        self._answers: dict[int, Any] = {}
        self._terminal = TerminalScreen()

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        mine = self._number
        await self._socket.send_json({"id": mine, "method": method, "params": params})
        async with asyncio.timeout(20):
            while mine not in self._answers:
                await self.listen()
        return self._answers.pop(mine).get("result", {})

    async def listen(self) -> None:
        message = json.loads((await self._socket.receive()).data)
        if "id" in message:
            self._answers[message["id"]] = message
        if message.get("method") == "Network.webSocketFrameReceived":
            frame = message["params"]["response"]
            data = frame["payloadData"]
            if frame["opcode"] == 2:
                data = base64.b64decode(data).decode("utf-8", "replace")
            self._terminal.write(data)

    async def until(self, text: str) -> None:
        """Wait until the screen shows the text. Only cells that changed arrive."""
        async with asyncio.timeout(30):
            while text not in self._terminal.text():
                await self.listen()


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        line = ""
        async with asyncio.timeout(30):
            while "DevTools listening on" not in line:
                line = await loop.run_in_executor(None, process.stderr.readline)
        port = re.search(r":(\d+)/", line)[1]  # type: ignore[index]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as page:
                yield Browser(page)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_the_interface_works_in_a_browser(trace: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "flexinspect", "open", str(trace), "--web"]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert f"http://127.0.0.1:{port}" in server.stderr.readline()
        async with browser(tmp_path) as page:
            await page.call("Network.enable")
            await page.call("Page.enable")
            await asyncio.sleep(1)
            await page.call("Page.navigate", url=f"http://127.0.0.1:{port}")
            await page.until("token 1 of 6")
            for kind in ("mousePressed", "mouseReleased"):
                await page.call(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    button="left",
                    clickCount=1,
                    x=300,
                    y=400,
                )
            for kind in ("keyDown", "keyUp"):
                await page.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key="ArrowRight",
                    code="ArrowRight",
                    windowsVirtualKeyCode=39,
                )
            await page.until("token 2 of 6")
            shot = await page.call("Page.captureScreenshot")
            assert base64.b64decode(shot["data"]).startswith(b"\x89PNG")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=10)


def test_a_bad_trace_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "flexinspect", "open", "--web"]
    done = subprocess.run(
        [*command, str(tmp_path / "none.flextrace")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "There is no trace at" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_an_error_message(trace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-P", "-m", "flexinspect", "open", str(trace), "--web"]
        done = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert f"Port {port} cannot be used" in done.stderr
