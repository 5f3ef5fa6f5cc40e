"""Replacing a file: its permissions, and what a failure leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexinspect.core.environment import replace_file


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_replaced_file_has_the_mode_that_was_asked_for(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    replace_file(file, b"new", mode)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", mode)
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.skipif(os.name != "posix", reason="the error of POSIX")
def test_a_file_that_cannot_be_replaced_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        replace_file(folder, b"new")
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("variable", [None, "2"])
def test_numpy_starts_no_pool_of_threads_and_children_inherit_nothing(variable: str | None) -> None:
    code = """
import os, sys
from flexinspect.core.environment import import_numpy
before = len(os.listdir("/proc/self/task"))
import_numpy()
assert "numpy" in sys.modules
print(len(os.listdir("/proc/self/task")) - before, os.environ.get("OPENBLAS_NUM_THREADS"))
"""
    given = {} if variable is None else {"OPENBLAS_NUM_THREADS": variable}
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"} | given
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    n_threads, left = ran.stdout.split()
    assert left == str(variable)
    if variable is None:
        assert n_threads == "0"


def test_an_interruption_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(file, b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"
