"""The program from its first moment, before any command is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexinspect import __main__
from flexinspect.cli import main


def test_ctrl_c_before_a_command_runs_is_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "main", interrupted)
    assert __main__.main() == 130
    assert capsys.readouterr().err == "flexinspect: interrupted\n"


def test_ctrl_c_while_the_commands_load_is_a_word(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from flexinspect.__main__ import main; sys.exit(main())",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "flexinspect: interrupted\n")


def test_an_unknown_dtype_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexinspect", "run", "--dtype", "float8", "--no-ui"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = (
        "flexinspect: The dtype 'float8' is unknown.\nUse float32, bfloat16 or float16. Or auto.\n"
    )
    assert (done.returncode, done.stderr) == (2, said)  # and nothing of importing or loading
