"""The entry point: interrupts during start-up, unknown commands, and what each start imports."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flexinspect import __main__
from flexinspect.cli import main
from flexinspect.core import signals


def test_ctrl_c_before_a_command_runs_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "main", interrupted)
    monkeypatch.setattr(signals, "raise_on_end_signals", lambda: None)
    assert __main__.main() == 130
    assert capsys.readouterr().err == "flexinspect: interrupted\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_end_cleans_up_unless_it_is_ignored(name: str, tmp_path: Path) -> None:
    command = (
        "import os, sys, time, signal, flexinspect.cli.main as cli\n"
        f"number = signal.{name}\n"
        "if sys.argv[1:]: signal.signal(number, signal.SIG_IGN)  # as nohup does\n"
        "def slow():\n"
        "    try: os.kill(os.getpid(), number); time.sleep(len(sys.argv) < 2 and 60)\n"
        "    finally: print('cleaned')\n"
        "    return 0\n"
        "cli.main = slow\n"
        "from flexinspect.__main__ import main; sys.exit(main())"
    )
    for words, code in (([], 128 + getattr(signal, name)), (["nohup"], 0)):
        argv = [sys.executable, "-c", command, *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (code, "cleaned\n")
        assert done.stderr == ("flexinspect: interrupted\n" if code else "")


def test_ctrl_c_during_the_imports_prints_one_line(tmp_path: Path) -> None:
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
    message = (
        "flexinspect: The dtype 'float8' is unknown.\nUse float32, bfloat16 or float16. Or auto.\n"
    )
    assert (done.returncode, done.stderr) == (2, message)  # no line about importing or loading


def modules_after(code: str) -> set[str]:
    """Return the modules that are imported in a new process after `code` has run."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('modules', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def commands_of(modules: set[str]) -> set[str]:
    """Return the subcommands whose modules are imported."""
    return {name for name in main.COMMANDS if main.module_name(name) in modules}


MAIN = """
from flexinspect.cli.main import main
try:
    main({argv})
except SystemExit as end:
    assert end.code == {code}
"""


@pytest.mark.parametrize(
    ("argv", "code"), [(["--version"], 0), (["--help"], 0), ([], 0), (["unknown"], 2)]
)
def test_without_a_command_only_the_standard_library_is_imported(
    argv: list[str], code: int
) -> None:
    modules = modules_after(MAIN.format(argv=argv, code=code))
    assert commands_of(modules) == set()
    assert not {"numpy", "rich", "textual", "asyncio", "dataclasses"} & modules


@pytest.mark.parametrize("name", main.COMMANDS)
def test_a_command_imports_no_other_command(name: str) -> None:
    modules = modules_after(MAIN.format(argv=[name, "--help"], code=0))
    shared = {"run"} if name in ("prove", "lab") else set()  # the flags of a generation
    assert commands_of(modules) == {name, *shared}
    assert not {"torch", "transformers", "textual", "flexinspect_hooks"} & modules


def test_help_lists_the_commands_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, help_text in main.COMMANDS.items():
        assert f" {name} {help_text} " in text
        assert callable(importlib.import_module(main.module_name(name)).configure)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["opne", "a.flextrace"], "there is no command 'opne'. Did you mean open?"),
        (["zzz"], "there is no command 'zzz'. The commands are run, open, "),
        (["run", "--modle", "demo"], "unrecognized arguments: --modle. Did you mean --model?"),
        (["show", "a.flextrace", "--zzz"], "unrecognized arguments: --zzz."),
    ],
)
def test_a_mistyped_word_is_refused_with_the_nearest_one(
    args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(args)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_the_interface_does_not_import_what_its_first_screen_does_not_show() -> None:
    modules = modules_after("import flexinspect.tui.app")
    later = {
        "flexinspect.analysis.offline_rules",
        "flexinspect.breakpoints",
        "flexinspect.control.client",
        "flexinspect.control.messages",
        "flexinspect.launch.child_process",
        "flexinspect.rules.engine",
        "flexinspect.trace.file.writer",
        "flexinspect.tui.screens.start_screen",
        "importlib.metadata",
        "numpy",
        "psutil",
        "urllib.request",
    }
    assert later & modules == set()
