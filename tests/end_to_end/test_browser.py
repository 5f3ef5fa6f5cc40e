"""`flexinspect open --web` in a real browser: headless Chromium, by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.browser import CHROMIUM, Page, open_browser
from support.patience import PATIENCE_S
from support.terminal_screen import TerminalScreen

from flexinspect.cli.open import is_local_request

pytest.importorskip("aiohttp", reason="textual-serve is not installed")


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


class TerminalPage(Page):
    """A page, and the screen that the frames of its web sockets draw."""

    def __init__(self, socket_: Any) -> None:
        super().__init__(socket_)
        self._terminal = TerminalScreen()

    def _read(self, message: dict[str, Any]) -> None:
        super()._read(message)
        if message.get("method") == "Network.webSocketFrameReceived":
            frame = message["params"]["response"]
            data = frame["payloadData"]
            if frame["opcode"] == 2:
                data = base64.b64decode(data).decode("utf-8", "replace")
            self._terminal.write(data)

    async def until_shown(self, text: str) -> None:
        """Wait until the screen shows the text. Only cells that changed arrive."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self._terminal.text():
                await self.listen()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_the_interface_works_in_a_browser(trace: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "flexinspect", "open", str(trace), "--web"]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert f"http://127.0.0.1:{port}" in server.stderr.readline()
        async with open_browser(tmp_path, 1000, 700, page_type=TerminalPage) as page:
            await asyncio.sleep(1)
            await page.call("Page.navigate", url=f"http://127.0.0.1:{port}")
            await page.until_shown("token 1 of 6")
            for kind in ("mousePressed", "mouseReleased"):
                where = {"x": 300, "y": 400, "button": "left", "clickCount": 1}
                await page.call("Input.dispatchMouseEvent", type=kind, **where)
            await page.press("ArrowRight")
            await page.until_shown("token 2 of 6")
            assert (await page.screenshot()).startswith(b"\x89PNG")
            viewers = psutil.Process(server.pid).children(recursive=True)
            assert viewers
            server.send_signal(signal.SIGINT)  # while the browser is connected
            await asyncio.to_thread(server.wait, 60)
            assert psutil.wait_procs(viewers, timeout=60)[1] == []
    finally:
        server.kill()
        server.wait()


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
