"""The control server: who gets in, what is answered, and that every refusal is a sentence."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.controlled import wait_for

from flexinspect.control import discovery
from flexinspect.control.client import ControlClient
from flexinspect.control.discovery import Address, ServeOptions, parse_serve_address
from flexinspect.control.messages import MaskEdit, StepRef
from flexinspect.core.errors import ControlError, UsageError
from flexinspect_hooks.control.running import CaptureControl
from flexinspect_hooks.control.server import ControlServer
from flexinspect_hooks.control.targets import AnomalyCounts, register_counter, unregister_counter

TOKEN = "a-token-of-the-tests"


def asked(
    url: str,
    path: str,
    *,
    method: str = "POST",
    body: bytes | Iterable[bytes] | None = None,
    host: str | None = None,
    token: str | None = TOKEN,
    chunked: bool = False,
) -> tuple[int, Any]:
    """Send a request as anybody could and return its status and JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    headers |= {} if host is None else {"Host": host}
    headers |= {"Transfer-Encoding": "chunked"} if chunked else {}
    connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    assert answer.getheader("content-type") == "application/json"
    connection.close()
    return answer.status, said


# -- who gets in -----------------------------------------------------------------------------------


def test_only_the_user_can_open_the_socket(served: Any, runtime_folder: Path) -> None:
    socket = Path(served.server.address.socket)
    assert socket.parent == runtime_folder
    assert stat.S_IMODE(runtime_folder.stat().st_mode) == 0o700
    for path in (socket, socket.with_suffix(".json")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", "\xff"])
def test_a_wrong_token_is_refused_and_nothing_is_obeyed(served: Any, token: str | None) -> None:
    status, said = asked(served.url, "/pause", token=token)
    assert status == 401
    assert "token" in said["error"]
    assert served.client.status().state == "running"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_refused_even_with_the_token(served: Any, host: str) -> None:
    status, said = asked(served.url, "/pause", host=host)
    assert status == 403
    assert "Host" in said["error"]
    assert served.client.status().state == "running"


@pytest.mark.parametrize("token", ["ключ-от-программы", "a-token-of-\xe9", TOKEN + "\n"])
def test_a_token_that_no_header_takes_is_a_sentence(served: Any, token: str) -> None:
    with pytest.raises(ControlError, match="The token holds characters"):
        ControlClient(Address(url=served.url, token=token)).status()


def test_a_host_that_no_name_service_takes_is_a_sentence() -> None:
    for host in ("a..b", "\xe9" * 70):
        with pytest.raises(ControlError, match="No capture answers at"):
            ControlClient(Address(url=f"http://{host}:1", token=TOKEN)).status()


def test_the_names_of_this_machine_are_no_foreign_hosts(served: Any) -> None:
    for host in ("localhost", "127.0.0.1", f"127.0.0.1:{urlsplit(served.url).port}", "[::1]:1"):
        assert asked(served.url, "/status", method="GET", host=host)[0] == 200


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(served: Any) -> None:
    large = b'{"n": 1, "x": "' + b"x" * 100_000 + b'"}'
    assert asked(served.url, "/step", body=large)[0] == 413
    pieces = [large[i : i + 1000] for i in range(0, len(large), 1000)]
    status, said = asked(served.url, "/step", body=iter(pieces), chunked=True)
    assert (status, said["error"]) == (413, "The body is larger than 64 KiB.")
    assert served.client.status().state == "running"


def test_connections_that_say_nothing_are_closed_and_no_more_than_some_are_kept(
    monkeypatch: pytest.MonkeyPatch, served: Any
) -> None:
    monkeypatch.setattr("flexinspect_hooks.control.server.IDLE_S", 1.0)
    monkeypatch.setattr("flexinspect_hooks.control.server.MOST_CONNECTIONS", 2)
    where, began = ("127.0.0.1", urlsplit(served.url).port), time.monotonic()
    silent = [socket.create_connection(where, timeout=10) for _ in range(3)]
    silent[0].sendall(b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    assert silent[2].recv(1) == b""
    assert time.monotonic() - began < 1.0
    for connection in silent:
        while connection.recv(1 << 12):
            pass
        connection.close()
    assert served.tcp.status().state == "running"


def test_a_path_that_is_too_long_is_refused(served: Any) -> None:
    status, said = asked(served.url, "/breakpoints/" + "9" * 5000, method="DELETE")
    assert (status, said["error"]) == (414, "The path is longer than 256 characters.")
    assert asked(served.url, "/breakpoints/" + "9" * 200, method="DELETE")[0] < 500


def test_a_taken_port_is_a_sentence(served: Any) -> None:
    port = urlsplit(served.url).port
    assert port is not None
    with pytest.raises(UsageError, match=f"127.0.0.1:{port} cannot be had"):
        ControlServer(
            served.server._parts, served.server._info, ServeOptions("127.0.0.1", port, TOKEN)
        )


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
def test_an_address_that_others_reach_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_serve_address(text, insecure=False)


def test_an_address_that_others_reach_can_be_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_serve_address("0.0.0.0:8421", insecure=True).host == "0.0.0.0"
    assert parse_serve_address("[::1]:0", insecure=False).host == "::1"
    monkeypatch.setenv("FLEXINSPECT_TOKEN", "short")
    with pytest.raises(UsageError, match="at least 16"):
        parse_serve_address("127.0.0.1:0", insecure=False)


def test_where_no_socket_can_be_made_the_run_goes_on_and_says_so(
    served: Any, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flexinspect_hooks.control.server.new_socket_path",
        lambda folder: folder / ("x" * 120 + ".sock"),
    )
    about, levels = served.server._info, served.server._parts.levels
    running = CaptureControl(about, levels, is_served=True, serving=None, report=lambda _: None)
    assert "cannot be made: AF_UNIX path too long" in running.note
    assert running.url == ""


def test_a_temporary_folder_with_a_long_path_holds_no_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 80)))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert discovery._temporary_folder() == Path("/tmp/flexinspect-4000000000")
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert discovery._temporary_folder() == Path("/var/tmp/flexinspect-4000000000")


# -- what is answered ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/step", b"{", 400, "not JSON"),
        ("/step", b"", 400, "not JSON"),
        ("/step", b"[]", 400, "JSON object"),
        ("/step", b'{"n": 0}', 400, "at least 1"),
        ("/step", b'{"n": true}', 400, "whole number"),
        ("/step", b'{"n": 1e999}', 400, "whole number"),
        ("/step", b'{"m": 1}', 400, "'m', which is unknown"),
        ("/run-to", b"{}", 400, "lacks 'step'"),
        ("/level", b'{"level": "loud"}', 400, "one of basic"),
        ("/layers", b'{"layers": "9z"}', 409, "no list of layers"),
        ("/fork", b'{"place": {"step": 1}}', 409, "token_id or a text"),
        ("/fork", b'{"place": {"step": 1}, "text": "\\ud800"}', 400, "a text"),
        ("/restore", b'{"place": {"step": 2000}}', 409, "not recorded"),
        ("/edit", b'{"place": {"step": 1}, "edits": []}', 409, "at least one"),
        ("/edit", b'{"place": {"step": 1}, "edits": [{"op": "x"}]}', 400, "one of preset"),
        ("/breakpoints/7/enable", b"", 404, "no breakpoint 7"),
        ("/nowhere", b"", 404, "nothing that a capture does"),
        ("/status", b"", 405, "nothing that a capture does"),
        ("/training-logs/debug/level/loud", b"", 404, "no level loud"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    served: Any, path: str, body: bytes, status: int, why: str
) -> None:
    found, said = asked(served.url, path, body=body)
    assert found == status
    assert why in said["error"]


def test_commands_are_answered_before_the_model_has_taken_its_step(served: Any) -> None:
    answer = served.client.pause()
    assert (answer.said, answer.status.state) == ("pausing after this step", "pausing")
    served.model.forward()
    assert served.client.status().says == "paused after step 0"
    assert served.client.step(2).said == "pausing after 2 more steps"
    served.model.settle()
    served.model.forward()
    assert served.client.status().until == "after 1 more step"


def test_two_clients_at_once_are_both_obeyed(served: Any) -> None:
    errors: list[BaseException] = []

    def run(client: ControlClient) -> None:
        try:
            for n in range(20):
                client.level("basic" if n % 2 else "extreme")
                client.pause()
                client.continue_()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in (served.client, served.tcp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert served.client.status().state == "running"
    assert served.client.status().level == "basic"


def test_an_order_is_priced_accepted_and_its_result_told(served: Any) -> None:
    client = served.client
    priced = client.restore(StepRef(0, 0, -1), dry_run=True)
    assert (priced.order, priced.said, priced.cost.bytes) == (None, "one forward", 4096)
    assert client.status().order is None
    assert not served.model.gate.has_received_command  # nothing was, so far
    assert client.edit_mask(StepRef(0, 0, -1), [MaskEdit("drop", segments=(1,))]).order == 1
    assert served.model.gate.has_received_command
    with pytest.raises(ControlError, match="not done yet"):
        client.fork(StepRef(0, 0, -1), text="Lyon")
    served.model.forward()
    wait_for(lambda: client.status().order.state == "done")
    assert client.fork(StepRef(0, 0, 900), token_id=3).order == 2
    served.model.forward()
    wait_for(lambda: client.status().order.state == "failed")
    assert client.status().order.said == "That step is not recorded."


def test_breakpoints_are_set_listed_switched_and_removed(served: Any) -> None:
    client = served.client
    added = client.add_breakpoint("entropy > 3", hits=2, once=True)
    assert (added.id, added.text, added.hits, added.once) == (1, "entropy > 3", 2, True)
    assert not client.enable_breakpoint(1, False).is_enabled
    assert client.status().n_breakpoints == 1
    assert list(client.remove_breakpoint(1)) == []
    with pytest.raises(ControlError, match="no breakpoint 1"):
        client.remove_breakpoint(1)


class _Counted:
    """The example of the mission: 1000 steps of training with 5 anomalies."""

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


def test_the_routes_of_the_training_log_say_zero_until_somebody_counts(served: Any) -> None:
    where = "/training-logs/debug"
    empty = served.client.ask("GET", f"{where}/summary")
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
    training = _Counted()
    register_counter("training", training)
    try:
        assert served.client.ask("GET", f"{where}/training/summary") == {
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
        found = served.client.ask("GET", f"{where}/summary")["training_debugger"]
        assert (found["total_anomalies"], found["anomaly_rate"]) == (5, 0.005)
        assert served.client.ask("POST", f"{where}/clear") == empty
    finally:
        unregister_counter("training", training)
    assert served.client.ask("POST", f"{where}/level/extreme")["status"]["level"] == "extreme"


# -- where captures are found ----------------------------------------------------------------------


def test_a_capture_is_found_while_it_is_served_and_not_afterwards(served: Any) -> None:
    (entry,) = discovery.running()
    assert (entry.pid, entry.title) == (os.getpid(), "no model")
    assert entry.address == served.server.address
    served.server.close()
    assert discovery.running() == []
    with pytest.raises(ControlError, match="No capture answers"):
        served.client.status()


def test_what_a_dead_capture_left_is_removed(served: Any, runtime_folder: Path) -> None:
    socket = Path(served.server.address.socket)
    lines = socket.with_suffix(".json").read_text()
    for name, text in {
        "7-0": lines.replace(f'"pid": {os.getpid()}', '"pid": 4194303'),
        "8-0": "{",
        "9-0": lines.replace(str(socket), str(runtime_folder / "gone.sock")),
    }.items():
        (runtime_folder / f"{name}.json").write_text(text)
        (runtime_folder / f"{name}.sock").touch()
    (runtime_folder / "4194303-0.sock").touch()  # ended before it could be found
    begins = runtime_folder / f"{os.getppid()}-0.sock"
    begins.touch()
    assert [entry.pid for entry in discovery.running()] == [os.getpid()]
    assert {path.name for path in runtime_folder.iterdir()} == {
        socket.name,
        socket.with_suffix(".json").name,
        begins.name,
    }


def test_a_folder_that_is_somebody_elses_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flexinspect").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(discovery, "LONGEST_SOCKET", 1000)
    with pytest.raises(ControlError, match="not a folder of yours"):
        discovery.runtime_folder()


def test_what_is_no_capture_is_said_to_be_none() -> None:
    with pytest.raises(ControlError, match="not the URL"):
        ControlClient(Address(url="ftp://x")).status()
    with pytest.raises(ControlError, match="No capture answers"):
        ControlClient(Address(url="http://127.0.0.1:9")).status()


def test_a_server_that_cannot_load_is_told_and_the_capture_is_not_found(
    monkeypatch: pytest.MonkeyPatch, served: Any
) -> None:
    served.client.status()  # its own libraries are there by now
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as where the user's own file shadows it
    monkeypatch.delitem(sys.modules, "flexinspect_hooks.control.server", raising=False)
    told: list[Exception] = []
    server = ControlServer(served.server._parts, served.server._info)
    server.start(told.append)
    wait_for(lambda: bool(told))
    assert isinstance(told[0], ImportError)
    assert [entry.address for entry in discovery.running()] == [served.server.address]
    server.close()
