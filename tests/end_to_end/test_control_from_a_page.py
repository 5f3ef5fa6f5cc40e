"""A page in the user's browser cannot command a capture: not by a form, a fetch, or another name.

Nor can it use the debug adapter of a run.

The page is served from this machine, so that its requests reach the control server as those of a
hostile page do. The name evil.example resolves to this machine, as after DNS rebinding.
"""

from __future__ import annotations

import http.server
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support import browser
from support.browser import CHROMIUM, open_browser
from support.controlled import FakeModel, fake_targets
from support.debugged import Debugged, eventually

from flexinspect.control.discovery import ServeOptions
from flexinspect_hooks.control.server import CaptureControl

TOKEN = "a-token-of-the-tests"
PAGE = b"""<!doctype html><title>hostile</title><iframe name="sink"></iframe>
<form id="form" method="post" target="sink" enctype="text/plain"><input name="x" value="1"></form>
<script>
const tried = (request) => request.then((r) => r.type + " " + r.status, (e) => "refused");
async function attack(url, token) {
  const plain = {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}};
  const signed = {method: "POST", headers: {"Authorization": "Bearer " + token}};
  const found = [
    await tried(fetch(url + "/pause", {...plain, body: '{"n": 1}'})),
    await tried(fetch(url + "/stop", {...plain, credentials: "include"})),
    await tried(fetch(url + "/stop", signed)),
    await tried(fetch(url + "/status")),
    String(navigator.sendBeacon(url + "/stop", "x")),
  ];
  const form = document.getElementById("form");
  form.action = url + "/stop";
  form.submit();
  await new Promise((done) => { document.querySelector("iframe").onload = done; });
  return found;
}
async function attack_debugger(url) {
  const text = (command, facts) => JSON.stringify(
    {seq: 1, type: "request", command: command, arguments: facts});
  const code = {expression: "open('attacked', 'w').close()", context: "repl"};
  const bodies = [text("initialize", {adapterID: "x"}), text("attach", {}), text("evaluate", code),
                  text("disconnect", {terminateDebuggee: true})];
  const all = bodies.concat(bodies.map((one) => `Content-Length: ${one.length}\r\n\r\n${one}`));
  all.push(bodies.map((one) => `Content-Length: ${one.length}\r\n\r\n${one}`).join(""));
  const found = [];
  for (const body of all) {
    const plain = {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}};
    const limit = {signal: AbortSignal.timeout(200)};
    found.push(await tried(fetch(url, {...plain, ...limit, body: body})));
    navigator.sendBeacon(url, body);
  }
  const socket = new WebSocket(url.replace("http", "ws"));
  found.push(await new Promise((done) => {
    socket.onopen = () => done("open");
    socket.onerror = () => done("refused");
    setTimeout(() => done("no answer"), 500);
  }));
  return found;
}
</script>"""


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def page_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CaptureControl, FakeModel]]:
    with tempfile.TemporaryDirectory(prefix="fx") as folder:  # short, as sockets require
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        model = FakeModel()
        model.settle()
        serving = ServeOptions("127.0.0.1", 0, TOKEN)
        server = CaptureControl(fake_targets(model), lambda _: None, serving=serving)
        server.start()
        yield server, model
        server.close()
        model.end()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_a_hostile_page_commands_nothing_and_reads_nothing(
    served: tuple[CaptureControl, FakeModel],
    page_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    monkeypatch.setattr(browser, "FLAGS", (*browser.FLAGS, rules))
    server, model = served
    port = urlsplit(server.address.url).port
    async with open_browser(tmp_path) as page:
        await page.open(f"http://evil.example:{page_port}/", ready="window.attack")
        for name, token in (("127.0.0.1", "wrong"), ("127.0.0.1", TOKEN), ("evil.example", TOKEN)):
            url = f"http://{name}:{port}"
            found = await page.value(f"attack('{url}', '{token}')")
            # Opaque answers tell the page nothing; the others are refused by the browser.
            assert found == ["opaque 0", "opaque 0", "refused", "refused", "true"], url
            view = model.barrier.view()
            assert view.state == "running", url
        asked = [url for url in page.requests if f":{port}/" in url]
        assert len(asked) >= 12, "the attack never reached the server"
        # Under a name that resolves to this machine, the page has the server's own origin.
        await page.open(f"http://evil.example:{port}/status", ready="document.body")
        assert "Host header does not name this server" in await page.text("body")
    assert model.n_stops == 0
    assert model.barrier.view().state == "running"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_a_hostile_page_cannot_use_the_debug_adapter(page_port: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Debugged(tmp_path / "run") as run:
        port = run.port()
        eventually(run.count)
        async with open_browser(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{page_port}/", ready="window.attack_debugger")
            found = await page.value(f"attack_debugger('http://127.0.0.1:{port}')")
            asked = [url for url in page.requests if f":{port}/" in url]
        assert len(asked) >= 9, "the attack never reached the adapter"
        assert set(found) <= {"refused", "no answer"}
        assert run.goes_on()
        assert not run.is_traced()
        assert not (run.folder / "attacked").exists()
        assert run.finish()[1] == 0
