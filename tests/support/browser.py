"""Headless Chromium by its DevTools protocol: one page, its keys, its pointer, and what it logs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from support.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-port=0",
)
KEY_CODES = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
}


REPORT_READY = "document.documentElement?.dataset.ready === 'true'"


class Page:
    """A page: `problems` are errors of its console, `requests` the addresses that it asked for."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, Any] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        mine = self._number
        await self._socket.send_json({"id": mine, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            while mine not in self._answers:
                await self.listen()
        answer = self._answers.pop(mine)
        assert "error" not in answer, answer
        return answer["result"]

    async def listen(self) -> None:
        """Wait for one message of the page."""
        self._read(json.loads((await self._socket.receive()).data))

    def _read(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        params = message.get("params", {})
        match message["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    async def open(self, address: str, ready: str = REPORT_READY) -> None:
        """Open an address and wait until an expression is true, by default of a report."""
        await self.call("Page.navigate", url=address)
        await self.until(ready)

    async def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(await self.value(f"document.querySelector({selector!r}).textContent.trim()"))

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.value(f"Boolean({expression})"):
                await asyncio.sleep(0.02)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, named as in `KeyboardEvent.key`, and wait for the next frame."""
        about: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        if key in KEY_CODES:
            about |= {"code": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        elif len(key) == 1:
            about["text"] = key
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **about)
        await self.value("new Promise(requestAnimationFrame)")

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send an event of the mouse at a point of the window."""
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        await self.value("new Promise(requestAnimationFrame)")

    async def click(self, x: float, y: float) -> None:
        """Click a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.mouse(kind, x, y, button="left", clickCount=1)

    async def screenshot(self, width: int = 0, height: int = 0) -> bytes:
        """Return a PNG of the window, or of so many pixels of its upper left corner."""
        scrolled = await self.value("[scrollX, scrollY]") if width else (0, 0)
        corner = {"x": scrolled[0], "y": scrolled[1], "width": width, "height": height, "scale": 1}
        clip = {"clip": corner} if width else {}
        shot = await self.call("Page.captureScreenshot", **clip)
        return base64.b64decode(shot["data"])


P = TypeVar("P", bound=Page)


class Browser:
    """A running Chromium, whose pages share nothing; `address` is that of its DevTools server."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        """Start it with its profile in `folder`."""
        assert CHROMIUM is not None
        profile = f"--user-data-dir={folder / 'profile'}"
        command = [CHROMIUM, *FLAGS, profile, f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stderr is not None
        found = None
        while found is None:
            line = self._process.stderr.readline()
            assert line, "Chromium ended"
            found = re.search(r"DevTools listening on ws://127.0.0.1:(\d+)/", line)
        self.address = f"127.0.0.1:{found[1]}"

    def end(self) -> None:
        """End it at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @asynccontextmanager
    async def page(self, page_type: type[P]) -> AsyncIterator[P]:
        """Yield an empty page without cookies or storage of other pages; close it afterwards."""
        import aiohttp

        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{self.address}/json/version") as answer:
                url = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(url) as socket:
                browser = Page(socket)
                context = await browser.call("Target.createBrowserContext", disposeOnDetach=True)
                target = await browser.call("Target.createTarget", url="about:blank", **context)
                url = f"ws://{self.address}/devtools/page/{target['targetId']}"
                async with session.ws_connect(url, max_msg_size=0) as one:
                    page = page_type(one)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
                await browser.call("Target.disposeBrowserContext", **context)


@asynccontextmanager
async def open_browser(
    folder: Path, width: int = 1280, height: int = 900, page_type: type[P] = Page
) -> AsyncIterator[P]:
    """Start Chromium with its profile in `folder`, and yield an empty page; end it afterwards."""
    browser = await asyncio.to_thread(Browser, folder, width, height)
    try:
        async with browser.page(page_type) as page:
            yield page
    finally:
        await asyncio.to_thread(browser.end)
