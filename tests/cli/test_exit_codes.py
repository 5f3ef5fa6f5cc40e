"""All commands keep one rule: 0 success, 1 a problem was found, 2 it was not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import sample_trace

from flexinspect.cli.main import COMMANDS, main

READS_A_TRACE = {
    "open": (),
    "findings": (),
    "declare": (),
    "show": (),
    "report": (),
    "dump": (),
    "export": ("--to", "perfetto"),
}
NOT_READ = [
    *([name, "absent.flextrace", *rest] for name, rest in READS_A_TRACE.items()),
    ["diff", "absent.flextrace", "clean.flextrace"],
    ["diff", "clean.flextrace", "clean.flextrace", "--noise", "absent.flextrace"],
    ["import", "absent"],
    ["mask", "absent.flextrace"],
    ["flowchart", "--trace", "absent.flextrace"],
    ["kernels", "--table", "absent.toml"],
    ["kernels", "--check", "absent.json"],
    ["run", "absent.py"],
]
FILE = "no/such/folder/file"
NOT_WRITTEN = [
    ["report", "clean.flextrace", "-o", f"{FILE}.html"],
    ["export", "clean.flextrace", "--to", "perfetto", "-o", f"{FILE}.json"],
    ["show", "clean.flextrace", "--panel", "tokens", "--export", f"{FILE}.svg"],
    ["flowchart", "--out", f"{FILE}.svg"],
    ["mask", "small", "--out", f"{FILE}.svg"],
    ["kernels", "-o", f"{FILE}.png"],
    ["kernels", "--save", f"{FILE}.json"],
    ["import", "dump", "-o", f"{FILE}.flextrace"],
    ["run", "--model", "demo", "--no-ui", "--out", f"{FILE}.flextrace"],
    ["vscode", "--folder", "no/such/folder"],
]
FOUND = [
    (["findings", "clean.flextrace"], 0),
    (["findings", "nan.flextrace"], 1),
    (["diff", "clean.flextrace", "clean.flextrace"], 0),
    (["diff", "clean.flextrace", "nan.flextrace"], 1),
    (["mask", "small", "--verify"], 0),
    (["dump", "clean.flextrace"], 0),
    (["explain", "numbers.nan"], 0),
    (["glossary", "margin"], 0),
    (["models"], 0),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace without findings, one with a NaN, and a dump."""
    monkeypatch.chdir(tmp_path)
    sample_trace(tmp_path / "clean.flextrace", nan_at=None)
    sample_trace(tmp_path / "nan.flextrace")
    return tmp_path


def code_of(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_an_invalid_request(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"explain": ["x"], "diff": ["a", "b"], "prove": ["order"], "ctl": ["pause"]}
    takes_a_file = ["file"] if command in {*READS_A_TRACE, "import"} else []
    argv = [command, *words.get(command, takes_a_file), "--no-such-flag"]
    assert code_of(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("argv", NOT_READ, ids=" ".join)
def test_a_file_that_cannot_be_read_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(argv) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize("argv", NOT_WRITTEN, ids=" ".join)
def test_a_file_that_cannot_be_written_exits_with_2_and_leaves_nothing(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from support.dumps import described_folder

    described_folder(folder / "dump")
    assert code_of(argv) == 2
    assert "no/such/folder" in capsys.readouterr().err
    assert not (folder / "no").exists()


@pytest.mark.parametrize(("argv", "code"), FOUND, ids=lambda part: str(part))
def test_a_problem_exits_with_1_and_success_with_0(argv: list[str], code: int) -> None:
    assert code_of(argv) == code


def test_too_little_memory_exits_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("flexinspect.cli.dump.run", fail)
    assert main(["dump", "clean.flextrace"]) == 2
    assert capsys.readouterr().err == "flexinspect: There is not enough memory for this command.\n"
