"""`flexinspect museum`: every fault is found, repaired runs are clean, and each is a tutorial."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import warm_python
from support.paths import DOCS

from flexinspect.analysis import broken_run_check
from flexinspect.analysis.broken_run_check import BrokenRunCheck, check_broken_runs
from flexinspect.cli.main import main
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun, cache_folder
from flexinspect.panels.panel_registry import panel_names
from flexinspect.rules.engine import load_rules
from flexinspect.trace.reader import open_trace

TABLE = DOCS / "findings" / "README.md"
NAMES = [run.name for run in BROKEN_RUNS]
SHORT = "ticked-picture"


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, BrokenRunCheck]:
    """The --check results of all broken runs, built once, in forked processes."""
    warm = SimpleNamespace(**{**vars(subprocess), "Popen": warm_python.Popen})
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(broken_run_check, "subprocess", warm)
        return {check.name: check for check in check_broken_runs()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", BROKEN_RUNS, ids=NAMES)
def test_the_fault_is_found_and_the_repaired_run_has_no_finding(
    run: BrokenRun, verdicts: Mapping[str, BrokenRunCheck]
) -> None:
    verdict = verdicts[run.name]
    assert verdict.error == ""
    assert verdict.false == ()
    if not set(run.expected) & set(load_rules().finding_kinds):
        pytest.skip("no rule for it is installed")
    assert verdict.is_good, verdict.to_line()


@pytest.mark.parametrize("run", BROKEN_RUNS, ids=NAMES)
def test_a_broken_run_is_a_tutorial(run: BrokenRun) -> None:
    assert all((run.title, run.story, run.answer, run.expected))
    assert run.question.endswith("?")
    assert run.panel in panel_names()
    assert re.search(r"\w#\d+|\w PR#\d+|self-ensemble", run.case), "no public case is named"
    for id_ in run.expected:
        assert f"[`{id_}`]" in TABLE.read_text(), f"no finding has the id {id_}"


def test_each_catalog_entry_has_a_function() -> None:
    from flexinspect_hooks.broken_runs.__main__ import run_function

    for name in NAMES:
        assert run_function(name).__name__.replace("_", "-") == name


def test_there_are_at_least_16_and_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 16


def test_the_list_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["museum"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert max(map(len, out.splitlines())) <= 80
    assert main(["museum", "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == NAMES


def test_a_built_run_prints_its_tutorial_and_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["museum", SHORT, "--no-ui"]) == 0
    (run,) = [run for run in BROKEN_RUNS if run.name == SHORT]
    captured = capsys.readouterr()
    printed = " ".join(captured.out.split())
    assert all(text in printed for text in (run.title, run.story, run.question, run.answer))
    assert captured.err.splitlines() == [
        "importing torch and transformers …",
        "running and recording the program …",
    ]
    path = cache_folder() / f"{SHORT}.flextrace"
    with open_trace(path) as reader:
        assert reader.state == "finished"
        assert reader.run()["exhibit"]["story"] == run.story
        assert reader.run()["exhibit"]["repaired"] is False
        (event,) = [row.event for row in reader.events() if row.event.kind == "exhibit"]
        assert run.question in event.text
        assert {"numbers", "rows"} <= {*reader.run()["rules"]}
        assert reader.n_steps(0) == 3
        labels = [segment.label for segment in reader.segments(0)]
        assert labels[1:4] == ["wording 1", "wording 2", "wording 3"]

    def refuse(*wanted: object, **options: object) -> None:
        raise AssertionError("it was built again")

    monkeypatch.setattr(broken_run_check, "_build_in_process", refuse)
    assert main(["museum", SHORT, "--no-ui"]) == 0
    assert str(path) in capsys.readouterr().out


def test_a_build_that_is_interrupted_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    def leave(stage: str) -> None:
        raise FlexInspectError(f"left at {stage}")

    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(broken_run_check, "subprocess", replaced)
    path = tmp_path / "a.flextrace"
    with pytest.raises(FlexInspectError, match="left at importing torch"):
        broken_run_check.build_exhibit(BROKEN_RUNS[0], path, leave)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert not path.exists()


def test_a_solved_run_is_marked_in_the_list_and_the_answer_is_printed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flexinspect.cli import interface
    from flexinspect.tui import saved_state

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "built.flextrace"
    path.touch()
    opened: list[Path] = []
    (run,) = [run for run in BROKEN_RUNS if run.name == SHORT]

    def open_trace_file(trace: Path, place: object) -> int:
        opened.append(trace)
        saved_state.add_solved_exhibit(SHORT)  # as the interface does for the right answer
        assert run.answer not in " ".join(capsys.readouterr().out.split())
        return 0

    monkeypatch.setattr(interface, "open_trace_file", open_trace_file)
    monkeypatch.setattr("flexinspect.inputs.broken_run_catalog.exhibit_path", lambda *a, **k: path)
    monkeypatch.setattr("builtins.input", lambda text: "")
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert main(["museum"]) == 0
    assert f"0 of {len(NAMES)} solved" in capsys.readouterr().out
    assert main(["museum", SHORT]) == 0
    assert opened == [path]
    assert run.answer in " ".join(capsys.readouterr().out.split())
    assert main(["museum"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[0] in " ✓" for line in lines[:-1] if line)  # wrapped titles are indented
    assert [line.split()[1] for line in lines if line.startswith("✓")] == [SHORT]
    assert lines[-1].startswith(f"1 of {len(NAMES)} solved")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orphan-separator"], "Did you mean orphan-separators?"),
        (["nothing-like-it"], "The museum has no exhibit 'nothing-like-it'."),
        (["--repaired"], "No exhibit is named."),
        ([SHORT, "--json"], "--json needs the list or --check, not a name."),
        ([SHORT, "--check"], "--check builds all exhibits."),
    ],
)
def test_an_invalid_request_is_refused_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["museum", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_existing_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.flextrace"
    path.write_text("mine")
    assert main(["museum", SHORT, "--no-ui", "--out", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


GOOD = BrokenRunCheck("a", ("x.y",), found=("x.y",))


@pytest.mark.parametrize(
    ("verdict", "code", "line"),
    [
        (GOOD, 0, "a  found x.y"),
        (BrokenRunCheck("a", ("x.y", "x.z")), 1, "a  missed; expected x.y or x.z"),
        (BrokenRunCheck("a", ("x.y",), ("x.y",), (), ("p.q",)), 1, "a  found x.y; false alarm p.q"),
        (BrokenRunCheck("a", ("x.y",), error="no room"), 1, "a  not built: no room"),
        (BrokenRunCheck("a", ("x.y",), ("x.y",), ("p.q",)), 0, "a  found x.y; also p.q"),
    ],
)
def test_a_miss_or_a_false_alarm_fails_the_check(
    verdict: BrokenRunCheck,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(broken_run_check, "check_broken_runs", lambda on_built: [verdict])
    assert main(["museum", "--check"]) == code
    assert capsys.readouterr().out.splitlines()[0] == line
    assert main(["museum", "--check", "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert result["good"] is (code == 0)
    assert result["exhibits"][0]["expected"] == list(verdict.expected)
