"""`run --remote-help`: the command lines for the laptop."""

from __future__ import annotations

import getpass
import socket

import pytest

from flexinspect.cli.main import main


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> str:
    """The user and the host, as other machines name them."""
    monkeypatch.setattr(getpass, "getuser", lambda: "me")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return "me@gpu7"


def lines(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["run", *flags, "--remote-help"]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_the_chosen_ports_are_forwarded(login: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "--debugpy", "5700", "--serve", "127.0.0.1:8500")
    # VS Code's configuration always connects to port 5678.
    assert f"ssh -N -L 5678:127.0.0.1:5700 {login}" in found
    assert f"ssh -N -L 8500:127.0.0.1:8500 {login}" in found
    assert any("ctl --url http://127.0.0.1:8500 status" in line for line in found)
    assert any(line.startswith(f"ssh -t {login} /") and "attach" in line for line in found)


def test_a_free_port_is_a_placeholder(login: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tunnel,) = [line for line in lines(capsys, "--debugpy", "0") if "5678:" in line]
    assert tunnel.startswith(f"ssh -N -L 5678:127.0.0.1:PORT {login}")
    assert "printed when the run starts" in tunnel


def test_missing_flags_are_suggested(login: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = "\n".join(lines(capsys))
    assert "start the run with --debugpy 5678" in found
    assert "start the run with --serve" in found


def test_another_port_of_ssh_is_repeated(
    login: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.2 50000 10.0.0.1 2222")
    assert all(f"{login} -p 2222" in line for line in lines(capsys) if line.startswith("ssh"))
