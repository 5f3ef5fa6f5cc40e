"""`flexinspect vscode`: our configurations go in, and nothing of the user's is lost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import json5
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import REPOSITORY

from flexinspect.cli.main import main
from flexinspect.core.errors import UsageError
from flexinspect.launch import vscode_config
from flexinspect.launch.vscode_config import CONFIGURATIONS, merge, write_launch

NAMES = [one["name"] for one in CONFIGURATIONS]
USERS = """\
// how we debug
{
    "version": "0.2.0", // keep me
    /* two
       lines */
    "configurations": [
        {
            "name": "mine", "type": "node",   "args": ["a",],
        }, // after mine
        // the end
    ],
    "compounds": [],
}
"""


def named(text: str) -> list[str]:
    return [one["name"] for one in json5.loads(text)["configurations"]]


def test_the_repository_has_what_the_command_writes() -> None:
    own = REPOSITORY / ".vscode" / "launch.json"
    assert json.loads(own.read_text("utf-8"))["configurations"] == list(CONFIGURATIONS)


def test_an_empty_folder_gets_a_file_of_plain_json(tmp_path: Path) -> None:
    path, merged = write_launch(tmp_path)
    assert json.loads(path.read_text("utf-8"))["configurations"] == list(CONFIGURATIONS)
    assert list(merged.added) == NAMES


def test_a_file_of_the_users_keeps_every_line_and_gets_ours_after_theirs() -> None:
    text = merge(USERS).text
    assert named(text) == ["mine", *NAMES]
    lines = text.splitlines()
    kept = iter(lines)
    assert all(line in kept for line in USERS.splitlines())  # each of them, in this order
    assert lines[lines.index("        // the end") + 1] == "        {"


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    path, _ = write_launch(tmp_path)
    before = path.stat().st_mtime_ns
    _, merged = write_launch(tmp_path)
    assert (merged.added, list(merged.kept)) == ((), NAMES)
    assert path.stat().st_mtime_ns == before


def test_a_configuration_of_the_same_name_is_the_users() -> None:
    theirs = {"name": NAMES[2], "port": 1}
    merged = merge(json.dumps({"configurations": [theirs]}))
    assert json5.loads(merged.text)["configurations"][0] == theirs
    assert merged.kept == (NAMES[2],)
    assert sorted(named(merged.text)) == sorted(NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{ }",
        '{"configurations": []}',
        '{"configurations": [ /* none */ ]}',
        '{"configurations": [\n  // none\n]}',
        '{"configurations": [{"name": "a"}]}',
        '{"configurations": [{"name": "a"},]}',
        '{"configurations": [{"name": "a"} // x\n]}',
        '{"configurations": [{"name": "a"} /* , */ , ]}',
        '{\n\t"configurations": [\n\t\t{"name": "a"}\n\t]\n}',
        '{"version": "0.2.0"}',
        '{"version": "0.2.0", // x\n}',
        '{"inputs": [],\n  "configurations": [{"name": "]"}], "x": {"configurations": 3}}\n',
    ],
)
def test_whatever_the_layout_the_rest_stays(text: str) -> None:
    merged = merge(text).text
    before, after = json5.loads(text), json5.loads(merged)
    assert after.pop("configurations")[len(before.pop("configurations", [])) :] == list(
        CONFIGURATIONS
    )
    assert after == before
    assert merge(merged).text == merged


def test_line_breaks_and_the_mark_at_the_beginning_stay(tmp_path: Path) -> None:
    path = tmp_path / ".vscode" / "launch.json"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbf" + USERS.replace("\n", "\r\n").encode())
    write_launch(tmp_path)
    written = path.read_bytes()
    assert written.startswith(b"\xef\xbb\xbf//")
    assert written.count(b"\n") == written.count(b"\r\n")


texts = st.text(st.characters(codec="utf-8", exclude_characters="\u2028\u2029"), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(values, max_size=3),
    st.dictionaries(texts, values, max_size=3),
    st.sampled_from([None, 1, "\t"]),
)
def test_any_json_keeps_its_values(
    items: list[object], rest: dict[str, object], indent: object
) -> None:
    document = {**rest, "configurations": items}
    text = merge(json.dumps(document, indent=indent, ensure_ascii=False)).text  # type: ignore[arg-type]
    found = json5.loads(text)
    assert found["configurations"][: len(items)] == items
    assert {**found, "configurations": items} == document


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n  "configurations": [\n    {"name": "a" "b": 1}\n  ]\n}', "line 3, column 18"),
        ('{"configurations": 3}', "line 1, column 20"),
        ("[]", "line 1, column 1"),
        ('{"configurations": [', "line 1, column 21"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / ".vscode" / "launch.json"
    path.parent.mkdir()
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=place):
        write_launch(tmp_path)
    assert path.read_text("utf-8") == text
    assert [one.name for one in path.parent.iterdir()] == ["launch.json"]


def test_a_dry_run_prints_the_file_and_writes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vscode", "--folder", str(tmp_path), "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert named(captured.out) == NAMES
    assert "not written" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_the_mode_stays(tmp_path: Path) -> None:
    real, path = tmp_path / "shared.json", tmp_path / ".vscode" / "launch.json"
    path.parent.mkdir()
    real.write_text("{}", "utf-8")
    real.chmod(0o640)
    path.symlink_to(real)
    write_launch(tmp_path)
    assert path.is_symlink()
    assert (real.stat().st_mode & 0o777, named(real.read_text("utf-8"))) == (0o640, NAMES)


def test_a_missing_folder_is_an_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vscode", "--folder", "/no/such/folder"]) == 2
    assert "There is no folder /no/such/folder." in capsys.readouterr().err


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Stand in for a Linux machine with a gdb of a version and a processor with these flags."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(vscode_config, "_PTRACE_SCOPE", tmp_path / "absent")
    monkeypatch.setattr(vscode_config, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")

    def make(first_line: str, flags: str) -> None:
        (bin_ / "gdb").write_text(f"#!/bin/sh\necho '{first_line}'\n")
        (bin_ / "gdb").chmod(0o755)
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")

    return make


@pytest.mark.parametrize(
    ("first_line", "flags", "lacks"),
    [
        ("GNU gdb (Debian 13.1-3) 13.1", "fpu amx_bf16 amx_tile", True),
        ("GNU gdb (Debian 13.1-3) 13.1", "fpu avx512f", False),
        ("GNU gdb (GDB) 15.2", "fpu amx_tile", False),
        ("", "fpu amx_tile", False),
    ],
)
def test_an_old_gdb_on_a_processor_with_amx_attaches_to_nothing(
    machine: Callable[[str, str], None], first_line: str, flags: str, lacks: bool
) -> None:
    machine(first_line, flags)
    problems = vscode_config.attach_problems()
    assert ["gdb 14 or later" in one and "gdb is 13" in one for one in problems] == [True] * lacks


def test_a_kernel_that_forbids_tracing_is_named_with_its_switch(
    machine: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("GNU gdb (GDB) 15.2", "fpu")
    (tmp_path / "absent").write_text("1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (problem,) = vscode_config.attach_problems()
    assert "to be 0, and it is 1" in problem
