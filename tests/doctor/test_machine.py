"""Checks of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexinspect.doctor import machine
from flexinspect.doctor.check import Status
from flexinspect.trace.file import location


@pytest.mark.parametrize(
    ("free", "status"),
    [(1_000_000_000, Status.WARNING), (5_000_000_000, Status.WARNING), (16_000_000_000, Status.OK)],
)
def test_little_memory_is_a_warning_with_what_runs_in_it(free: int, status: Status) -> None:
    check = machine.check_memory(free)
    assert check.status is status
    assert check.found == f"{free / 1e9:.1f} GB free"


def test_more_threads_than_cores_are_a_warning_with_the_variable_to_set() -> None:
    check = machine.check_threads({"OMP_NUM_THREADS": "16"}, 4)
    assert (check.status, check.found) == (Status.WARNING, "16 on 4 cores, by OMP_NUM_THREADS")
    assert "export OMP_NUM_THREADS=4" in check.fix


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "0"}])
def test_without_the_variable_the_cores_are_a_fact(given: dict[str, str]) -> None:
    check = machine.check_threads(given, 4)
    assert check.status is Status.NOTE
    assert check.found.startswith("4 cores")


def test_a_full_disk_is_a_warning_that_names_the_variable_to_move_the_cache(tmp_path: Path) -> None:
    assert machine.check_disk(tmp_path, 50_000_000_000).status is Status.OK
    full = machine.check_disk(tmp_path, 3_000_000_000)
    assert full.status is Status.WARNING
    assert "HF_HOME" in full.fix


def test_the_cache_of_the_hub_is_found_as_huggingface_hub_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert machine.hub_cache() == Path.home() / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert machine.hub_cache() == tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert machine.hub_cache() == tmp_path / "elsewhere"


def test_a_network_file_system_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine.check_trace_folder(tmp_path).status is Status.OK
    monkeypatch.setattr(location, "_mounts", lambda: [(Path("/"), "nfs4")])
    check = machine.check_trace_folder(tmp_path)
    assert check.status is Status.WARNING
    assert "nfs4" in check.found


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    check = machine.check_trace_folder(tmp_path / "missing")
    assert check.status is Status.ERROR
    assert "--out" in check.fix


def test_a_clock_that_is_not_set_is_a_warning() -> None:
    assert machine.check_clock().status is Status.OK
    assert machine.check_clock(0.0).status is Status.WARNING


def test_a_machine_without_a_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = machine.check_compiler()
    assert check.status is Status.WARNING
    assert "apt install g++" in check.fix
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\necho 'clang version 19.1'\necho more\n")
    compiler.chmod(0o755)
    assert machine.check_compiler().found == "clang version 19.1"


class Terminal:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "environment", "status", "words"),
    [
        ((120, 40), {"COLORTERM": "truecolor"}, Status.OK, "120×40, true colour, utf-8"),
        ((100, 30), {"TERM": "xterm-256color"}, Status.OK, "100×30, 256 colours, utf-8"),
        ((100, 30), {"NO_COLOR": "1"}, Status.OK, "100×30, no colours (NO_COLOR), utf-8"),
        ((79, 24), {}, Status.WARNING, "79×24, 16 colours, utf-8"),
    ],
)
def test_the_terminal_is_described(
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    environment: dict[str, str],
    status: Status,
    words: str,
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size(size))
    check = machine.check_terminal(environment)
    assert (check.status, check.found) == (status, words)
