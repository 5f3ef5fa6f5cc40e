"""The control server: access, responses, error messages, and discovery of captures."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.controlled import wait_for

from flexinspect.control import discovery
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import Address, ServeOptions, parse_serve_address
from flexinspect.control.messages import EditMask, Fork, MaskEdit, Restore, StepRef
from flexinspect.core.errors import ControlError, UsageError
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.control.control_protocols import (
    AnomalyCounts,
    register_counter,
    unregister_counter,
)
from flexinspect_hooks.control.server import CaptureControl

TOKEN = "a-token-of-the-tests"


def send(
    url: str,
    path: str,
    *,
    method: str = "POST",
    body: bytes | Iterable[bytes] | None = None,
    host: str | None = None,
    token: str | None = TOKEN,
    chunked: bool = False,
) -> tuple[int, Any]:
    """Send a request without the client and return its status and JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    headers |= {} if host is None else {"Host": host}
    headers |= {"Transfer-Encoding": "chunked"} if chunked else {}
    connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
    response = connection.getresponse()
    payload = json.loads(response.read())
    assert response.getheader("content-type") == "application/json"
    connection.close()
    return response.status, payload


# -- access ----------------------------------------------------------------------------------------


def test_only_the_user_can_open_the_socket(served: Any, runtime_folder: Path) -> None:
    socket = Path(served.server.address.socket)
    assert socket.parent == runtime_folder
    assert stat.S_IMODE(runtime_folder.stat().st_mode) == 0o700
    for path in (socket, socket.with_suffix(".json")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", "\xff"])
def test_a_wrong_token_is_refused_without_effect(served: Any, token: str | None) -> None:
    status, payload = send(served.url, "/pause", token=token)
    assert status == 401
    assert "token" in payload["error"]
    assert served.client.status().state == "running"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_refused_even_with_the_token(served: Any, host: str) -> None:
    status, payload = send(served.url, "/pause", host=host)
    assert status == 403
    assert "Host" in payload["error"]
    assert served.client.status().state == "running"


@pytest.mark.parametrize("token", ["ключ-от-программы", "a-token-of-\xe9", TOKEN + "\n"])
def test_a_token_that_no_header_can_hold_is_a_control_error(served: Any, token: str) -> None:
    with pytest.raises(ControlError, match="The token has characters"):
        ControlClient(Address(url=served.url, token=token)).status()


def test_an_invalid_host_name_is_a_control_error() -> None:
    for host in ("a..b", "\xe9" * 70):
        with pytest.raises(ControlError, match="No capture responds at"):
            ControlClient(Address(url=f"http://{host}:1", token=TOKEN)).status()


def test_the_names_of_this_machine_are_allowed_hosts(served: Any) -> None:
    for host in ("localhost", "127.0.0.1", f"127.0.0.1:{urlsplit(served.url).port}", "[::1]:1"):
        assert send(served.url, "/status", method="GET", host=host)[0] == 200


def test_a_body_that_is_too_large_is_refused_with_and_without_content_length(served: Any) -> None:
    large = b'{"n": 1, "x": "' + b"x" * 100_000 + b'"}'
    assert send(served.url, "/step", body=large)[0] == 413
    pieces = [large[i : i + 1000] for i in range(0, len(large), 1000)]
    status, payload = send(served.url, "/step", body=iter(pieces), chunked=True)
    assert (status, payload["error"]) == (413, "The body is larger than 64 KiB.")
    assert served.client.status().state == "running"


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch, served: Any) -> None:
    monkeypatch.setattr("flexinspect_hooks.control.http_app.IDLE_S", 0.5)
    address = ("127.0.0.1", urlsplit(served.url).port)
    silent, unfinished = (socket.create_connection(address, timeout=10) for _ in range(2))
    unfinished.sendall(b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    for connection in (silent, unfinished):
        while connection.recv(1 << 12):
            pass
        connection.close()
    assert served.tcp.status().state == "running"


def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, served: Any) -> None:
    monkeypatch.setattr("flexinspect_hooks.control.http_app.MOST_CONNECTIONS", 2)
    address = ("127.0.0.1", urlsplit(served.url).port)
    with ExitStack() as opened:
        idle = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(5)]
        assert served.tcp.status().state == "running"
        assert idle[0].recv(1) == b""
        idle[-1].sendall(b"GET /status HTTP/1.1\r\nHost: evil\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 403"


def test_a_path_that_is_too_long_is_refused(served: Any) -> None:
    status, payload = send(served.url, "/breakpoints/" + "9" * 5000, method="DELETE")
    assert (status, payload["error"]) == (414, "The path is longer than 256 characters.")
    assert send(served.url, "/breakpoints/" + "9" * 200, method="DELETE")[0] < 500


def test_a_port_in_use_is_a_usage_error(served: Any) -> None:
    port = urlsplit(served.url).port
    assert port is not None
    with pytest.raises(UsageError, match=f"127.0.0.1:{port} is not available"):
        CaptureControl(served.server.targets, print, serving=ServeOptions("127.0.0.1", port, TOKEN))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8421", "not HOST:PORT"),
        ("127.0.0.1:x", "not HOST:PORT"),
        ("127.0.0.1:70000", "not HOST:PORT"),
        ("0.0.0.0:8421", "other machines"),
        ("192.168.0.7:8421", "other machines"),
        ("example.org:8421", "other machines"),
    ],
)
def test_an_address_that_other_machines_reach_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_serve_address(text, insecure=False)


def test_insecure_allows_an_address_that_other_machines_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse_serve_address("0.0.0.0:8421", insecure=True).host == "0.0.0.0"
    assert parse_serve_address("[::1]:0", insecure=False).host == "::1"
    monkeypatch.setenv("FLEXINSPECT_TOKEN", "short")
    with pytest.raises(UsageError, match="at least 16"):
        parse_serve_address("127.0.0.1:0", insecure=False)


def test_a_run_without_a_socket_continues_with_a_note(
    served: Any, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexinspect.control.discovery.new_socket_path",
        lambda folder: folder / ("x" * 120 + ".sock"),
    )
    running = CaptureControl(served.server.targets, print)
    assert "cannot be created: AF_UNIX path too long" in running.note
    assert running.address.url == ""


def test_a_temporary_folder_with_a_long_path_holds_no_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 80)))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert discovery._choose_folder() == Path("/tmp/flexinspect-4000000000")
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert discovery._choose_folder() == Path("/var/tmp/flexinspect-4000000000")


# -- responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/step", b"{", 400, "not JSON"),
        ("/step", b"", 400, "not JSON"),
        ("/step", b"[]", 400, "Expected `object`, got `array`"),
        ("/step", b'{"n": 0}', 400, "in n: Expected `int` >= 1"),
        ("/step", b'{"n": true}', 400, "Expected `int`, got `bool`"),
        ("/step", b'{"n": 1e999}', 400, "out of range"),
        ("/step", b'{"m": 1}', 400, "unknown field `m` (known: n)"),
        ("/run-to", b"{}", 400, "missing required field `step`"),
        (
            "/level",
            b'{"level": "loud"}',
            400,
            "in level: Invalid enum value 'loud' (known: basic, adv",
        ),
        ("/layers", b'{"layers": "9z"}', 409, "not a list of layers"),
        ("/fork", b'{"place": {"step": 1}}', 409, "token_id or a text"),
        ("/fork", b'{"place": {"step": 1}, "text": "\\ud800"}', 400, "not JSON"),
        ("/restore", b'{"place": {"step": 2000}}', 409, "not recorded"),
        ("/edit", b'{"place": {"step": 1}, "edits": []}', 409, "at least one"),
        (
            "/edit",
            b'{"place": {"step": 1}, "edits": [{"op": "x"}]}',
            400,
            "in edits.op: Invalid enum value 'x' (known: preset, drop",
        ),
        ("/breakpoints/7/enable", b"", 404, "no breakpoint 7"),
        ("/nowhere", b"", 404, "no route POST /nowhere"),
        ("/status", b"", 405, "no route POST /status"),
        ("/training-logs/debug/level/loud", b"", 404, "no level loud"),
    ],
)
def test_an_invalid_request_is_refused_with_a_message(
    served: Any, path: str, body: bytes, status: int, why: str
) -> None:
    found, payload = send(served.url, path, body=body)
    assert found == status
    assert why in payload["error"]


def test_commands_return_before_the_step_ends(served: Any) -> None:
    response = served.client.pause()
    assert (response.message, response.status.state) == ("pausing after this step", "pausing")
    served.model.forward()
    assert served.client.status().description == "paused after step 0"
    assert served.client.step(2).message == "pausing after 2 more steps"
    served.model.settle()
    served.model.forward()
    assert served.client.status().until == "after the next step"


def test_two_clients_can_send_commands_at_once(served: Any) -> None:
    errors: list[BaseException] = []

    def run(client: ControlClient) -> None:
        try:
            for n in range(20):
                client.level("basic" if n % 2 else "extreme")
                client.pause()
                client.continue_()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(client,)) for client in (served.client, served.tcp)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert served.client.status().state == "running"
    assert served.client.status().level == "basic"


def test_a_rewind_command_returns_its_cost_and_reports_its_result(served: Any) -> None:
    client = served.client
    estimate = client.rewind(Restore(StepRef(0, 0, -1), dry_run=True))
    assert (estimate.rewind_number, estimate.message) == (None, "one forward")
    assert estimate.cost.bytes == 4096
    assert client.status().last_rewind is None
    assert not served.model.barrier.has_received_command  # a dry run is not a command
    edit = client.rewind(EditMask(StepRef(0, 0, -1), (MaskEdit("drop", segments=(1,)),)))
    assert edit.rewind_number == 1
    assert served.model.barrier.has_received_command
    with pytest.raises(ControlError, match="has not finished yet"):
        client.rewind(Fork(StepRef(0, 0, -1), text="Lyon"))
    served.model.forward()
    wait_for(lambda: client.status().last_rewind.state == "done")
    assert client.rewind(Fork(StepRef(0, 0, 900), token_id=3)).rewind_number == 2
    served.model.forward()
    wait_for(lambda: client.status().last_rewind.state == "failed")
    assert client.status().last_rewind.message == "That step is not recorded."


def test_breakpoints_can_be_added_disabled_listed_and_removed(served: Any) -> None:
    client = served.client
    added = client.add_breakpoint("entropy > 3", hits=2, once=True)
    assert (added.id, added.text, added.hits, added.once) == (1, "entropy > 3", 2, True)
    assert not client.enable_breakpoint(1, False).is_enabled
    assert client.status().n_breakpoints == 1
    assert list(client.remove_breakpoint(1)) == []
    with pytest.raises(ControlError, match="no breakpoint 1"):
        client.remove_breakpoint(1)


class _TrainingCounter:
    """The example of the specification: 1000 steps of training with 5 anomalies."""

    counts_now = AnomalyCounts(
        total_anomalies=5,
        debug_history_length=1000,
        total_steps=1000,
        anomaly_steps=5,
        gradient_explosions=2,
        gradient_vanishing=1,
        loss_anomalies=3,
    )

    def counts(self) -> AnomalyCounts:
        return self.counts_now

    def clear(self) -> None:
        self.counts_now = AnomalyCounts()


def test_the_training_log_routes_return_zeros_until_a_counter_is_registered(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_protocols, "_counters", {})  # of debuggers in earlier tests
    prefix = "/training-logs/debug"
    empty = served.client.request("GET", f"{prefix}/summary")
    assert empty == {
        "training_debugger": {
            "total_anomalies": 0,
            "debug_history_length": 0,
            "total_steps": 0,
            "anomaly_rate": 0.0,
            "gradient_explosion_rate": 0.0,
        },
        "diffusion_debugger": {"total_anomalies": 0, "debug_history_length": 0},
        "general_debugger": {"total_anomalies": 0, "debug_history_length": 0},
    }
    training = _TrainingCounter()
    register_counter("training", training)
    try:
        assert served.client.request("GET", f"{prefix}/training/summary") == {
            "total_steps": 1000,
            "anomaly_steps": 5,
            "gradient_explosions": 2,
            "gradient_vanishing": 1,
            "loss_anomalies": 3,
            "anomaly_rate": 0.005,
            "loss_anomaly_rate": 0.003,
            "gradient_explosion_rate": 0.002,
            "gradient_vanishing_rate": 0.001,
        }
        summary = served.client.request("GET", f"{prefix}/summary")["training_debugger"]
        assert (summary["total_anomalies"], summary["anomaly_rate"]) == (5, 0.005)
        assert served.client.request("POST", f"{prefix}/clear") == empty
    finally:
        unregister_counter("training", training)
    assert served.client.request("POST", f"{prefix}/level/extreme")["status"]["level"] == "extreme"


# -- discovery ------------------------------------------------------------------------------------


def test_a_capture_is_listed_while_it_is_served(served: Any) -> None:
    (entry,) = discovery.running()
    assert (entry.pid, entry.title) == (os.getpid(), "no model")
    assert entry.address == served.server.address
    served.server.close()
    assert discovery.running() == []
    with pytest.raises(ControlError, match="No capture responds"):
        served.client.status()


def test_files_of_a_dead_capture_are_removed(served: Any, runtime_folder: Path) -> None:
    socket = Path(served.server.address.socket)
    lines = socket.with_suffix(".json").read_text()
    for name, text in {
        "7-0": lines.replace(f'"pid": {os.getpid()}', '"pid": 4194303'),
        "8-0": "{",
        "9-0": lines.replace(str(socket), str(runtime_folder / "gone.sock")),
    }.items():
        (runtime_folder / f"{name}.json").write_text(text)
        (runtime_folder / f"{name}.sock").touch()
    (runtime_folder / "4194303-0.sock").touch()  # ended before `register`
    starting = runtime_folder / f"{os.getppid()}-0.sock"
    starting.touch()
    assert [entry.pid for entry in discovery.running()] == [os.getpid()]
    assert {path.name for path in runtime_folder.iterdir()} == {
        socket.name,
        socket.with_suffix(".json").name,
        starting.name,
    }


def test_a_folder_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flexinspect").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(discovery, "LONGEST_SOCKET", 1000)
    with pytest.raises(ControlError, match="not a folder that you own"):
        discovery.runtime_folder()


def test_an_address_without_a_capture_is_a_control_error() -> None:
    with pytest.raises(ControlError, match="not the URL"):
        ControlClient(Address(url="ftp://x")).status()
    with pytest.raises(ControlError, match="No capture responds"):
        ControlClient(Address(url="http://127.0.0.1:9")).status()


def test_a_server_that_cannot_load_is_reported_and_unregistered(
    monkeypatch: pytest.MonkeyPatch, served: Any
) -> None:
    served.client.status()  # its own libraries are loaded by now
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if a file of the user shadowed it
    monkeypatch.delitem(sys.modules, "flexinspect_hooks.control.http_app", raising=False)
    reports: list[str] = []
    server = CaptureControl(served.server.targets, reports.append)
    server.start()
    wait_for(lambda: bool(reports))
    assert reports[0].startswith("This run cannot be controlled: ModuleNotFoundError: ")
    assert [entry.address for entry in discovery.running()] == [served.server.address]
    server.close()
