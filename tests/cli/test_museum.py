"""`flexinspect museum`: every fault is found, no twin is blamed, and each is a tutorial."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.paths import DOCS

from flexinspect.analysis import broken_run_check
from flexinspect.analysis.broken_run_check import BrokenRunCheck, check_broken_runs
from flexinspect.cli.main import main
from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun, cache_folder
from flexinspect.panels.panel_registry import panel_names
from flexinspect.rules.engine import load_rules
from flexinspect.trace.reader import open_trace

TABLE = DOCS / "findings" / "README.md"
NAMES = [one.name for one in BROKEN_RUNS]
SHORT = "ticked-picture"


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, BrokenRunCheck]:
    """What --check says of all exhibits, built once."""
    return {one.name: one for one in check_broken_runs()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("about", BROKEN_RUNS, ids=NAMES)
def test_the_fault_is_found_and_the_twin_is_not_blamed(
    about: BrokenRun, verdicts: Mapping[str, BrokenRunCheck]
) -> None:
    verdict = verdicts[about.name]
    assert verdict.error == ""
    assert verdict.false == ()
    if not set(about.expected) & set(load_rules().finding_kinds):
        pytest.skip("no rule for it is installed")
    assert verdict.is_good, verdict.to_line()


@pytest.mark.parametrize("about", BROKEN_RUNS, ids=NAMES)
def test_an_exhibit_is_a_tutorial(about: BrokenRun) -> None:
    assert all((about.title, about.story, about.answer, about.expected))
    assert about.question.endswith("?")
    assert about.panel in panel_names()
    assert re.search(r"\w#\d+|\w PR#\d+|self-ensemble", about.case), "no public case is named"
    assert importlib.util.find_spec(f"flexinspect_hooks.broken_runs.{about.module}") is not None
    for id_ in about.expected:
        assert f"[`{id_}`]" in TABLE.read_text(), "it expects a finding that there is not"


def test_there_are_enough_of_them_and_no_two_of_a_name() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 16


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["museum"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert max(map(len, out.splitlines())) <= 80
    assert main(["museum", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == NAMES


def test_an_exhibit_tells_its_story_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["museum", SHORT, "--no-ui"]) == 0
    (about,) = [one for one in BROKEN_RUNS if one.name == SHORT]
    told = " ".join(capsys.readouterr().out.split())
    assert all(text in told for text in (about.title, about.story, about.question))
    path = cache_folder() / f"{SHORT}.flextrace"
    with open_trace(path) as reader:
        assert reader.state == "finished"
        assert reader.run()["exhibit"]["story"] == about.story
        assert reader.run()["exhibit"]["repaired"] is False
        (event,) = [row.event for row in reader.events() if row.event.kind == "exhibit"]
        assert about.question in event.text
        assert {"numbers", "rows"} <= {*reader.run()["rules"]}
        assert reader.n_steps(0) == 3
        assert [segment.label for segment in reader.segments(0)][1:4] == [
            *("wording 1", "wording 2", "wording 3")
        ]

    def refuse(*wanted: object) -> None:
        raise AssertionError("it was built before")

    monkeypatch.setattr(broken_run_check, "build_broken_runs", refuse)
    assert main(["museum", SHORT, "--no-ui"]) == 0
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["orphan-separator"], "Did you mean orphan-separators?"),
        (["nothing-like-it"], "The museum has no exhibit 'nothing-like-it'."),
        (["--repaired"], "No exhibit is named."),
        ([SHORT, "--json"], "--json needs the list or --check, not a name."),
        ([SHORT, "--check"], "--check builds all exhibits."),
    ],
)
def test_an_invalid_request_is_refused_with_a_message(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["museum", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_trace_in_the_way_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.flextrace"
    path.write_text("mine")
    assert main(["museum", SHORT, "--no-ui", "--out", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


GOOD = BrokenRunCheck("a", ("x.y",), found=("x.y",))


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
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
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(broken_run_check, "check_broken_runs", lambda told: [verdict])
    assert main(["museum", "--check"]) == code
    assert capsys.readouterr().out.splitlines()[0] == words
    assert main(["museum", "--check", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["good"] is (code == 0)
    assert said["exhibits"][0]["expected"] == list(verdict.expected)
