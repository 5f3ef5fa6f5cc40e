"""`flexinspect findings`: text, JSON, SARIF and JUnit, what fails a build, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from support.rules import Broken, Late, Slow
from support.traces import RUN, SEGMENTS, sample_step, sample_trace
from support.undeclared import TEXTS, write

from flexinspect.analysis.reports import collect
from flexinspect.analysis.reports.collect import FindingFilter, collect_report
from flexinspect.analysis.reports.plain_text import print_report
from flexinspect.cli import findings
from flexinspect.cli.main import main
from flexinspect.core import plugins
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import GenerationRecord, StepRecord
from flexinspect.rules.numerics.nan_and_inf import NumbersRule
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

Ran = tuple[int, str, str]


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules: one that ran live, and an offline one."""
    made = {"numbers": NumbersRule, "slow": Slow}
    monkeypatch.setattr(plugins, "load_all", lambda group: (made, {}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sample_trace(tmp_path / "sample.flextrace")


@pytest.fixture
def run(path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*args: str) -> Ran:
        code = main(["findings", str(path), *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_worst_comes_first_with_all_that_is_known_of_it(run: Callable[..., Ran]) -> None:
    code, out, err = run()
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "error  numbers.nan  layer 2, step 3: once"
    assert lines[1] == "  Layer 2 made the first NaN."
    assert "  at  generation 0, step 3, layer 2" in lines
    assert "  positions  16 “\\x1b[31m”" in lines
    assert "  evidence  n_nan 3" in lines
    assert "  more  flexinspect explain numbers.nan" in lines
    at = lines.index("warning  slow.long-token  3 steps of 0-3, generations 0-1: 6 times")
    assert lines[at + 1] == "  “ Jane” is long."
    assert "  why  It matters." in lines
    assert "  query  SELECT * FROM steps WHERE generation = 0 AND step = 0" in lines
    assert lines[-1] == "1 error, 2 warnings"


def test_no_line_is_longer_than_the_terminal_or_coloured_against_its_will(path: Path) -> None:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "60", "FORCE_COLOR": ""}
    args = [sys.executable, "-m", "flexinspect", "findings", str(path)]
    ran = subprocess.run(args, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 60


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((), 1),
        (("--fail-on", "never"), 0),
        (("--fail-on", "warning"), 1),
        (("--severity", "warning"), 0),
        (("--severity", "warning", "--fail-on", "warning"), 1),
        (("--id", "slow.*"), 0),
        (("--generation", "1"), 0),
        (("--generation", "1", "--fail-on", "note"), 1),
        (("--id", "nothing"), 0),
    ],
)
def test_the_exit_code_is_that_of_what_was_asked_for(
    run: Callable[..., Ran], args: tuple[str, ...], code: int
) -> None:
    assert run(*args)[0] == code


def test_json_has_a_stable_shape(run: Callable[..., Ran], path: Path) -> None:
    code, out, _ = run("--json")
    report = json.loads(out)
    assert code == 1
    assert [*report] == [
        *("version", "trace", "state", "rules", "ids", "counts", "findings", "rules_off", "notes")
    ]
    assert (report["version"], report["trace"], report["state"]) == (1, str(path), "finished")
    assert report["rules"] == ["numbers", "slow"]
    assert report["counts"] == {"error": 1, "warning": 2, "note": 0}
    assert report["findings"][1] == {
        "id": "slow.long-token",
        "severity": "warning",
        "sentence": "“ Jane” is long.",
        "generation": 0,
        "branch": 0,
        "step": 0,
        "last_step": 3,
        "layer": None,
        "layers": [],
        "head": None,
        "positions": [{"pos": 13, "text": " Jane"}],
        "times": 3,
        "evidence": {"letters": 5, "odds": "NaN"},
        "why": "It matters.",
        "confirm": "Count.",
        "fix": "Cut it.",
        "query": "SELECT * FROM steps WHERE generation = 0 AND step = 0",
        "page": "docs/findings/slow.long-token.md",
    }


# What SARIF 2.1.0 lets the objects have that we write, required properties first.
ALLOWED = {
    "log": ("version", "runs", "$schema"),
    "run": ("tool", "invocations", "artifacts", "logicalLocations", "results", "columnKind"),
    "driver": ("name", "version", "rules"),
    "rule": ("id", "shortDescription", "fullDescription", "help", "defaultConfiguration"),
    "result": (
        *("message", "ruleId", "ruleIndex", "level", "locations", "occurrenceCount"),
        *("partialFingerprints", "properties"),
    ),
    "place": ("name", "fullyQualifiedName", "kind", "parentIndex"),
}


def only(kind: str, thing: dict[str, Any]) -> dict[str, Any]:
    assert set(thing) <= set(ALLOWED[kind])
    assert ALLOWED[kind][0] in thing
    return thing


def test_sarif_names_the_rules_the_places_and_the_trace(
    run: Callable[..., Ran], path: Path
) -> None:
    log = only("log", json.loads(run("--sarif")[1]))
    assert log["version"] == "2.1.0"
    (ran,) = log["runs"]
    driver = only("driver", only("run", ran)["tool"]["driver"])
    ids = [only("rule", rule)["id"] for rule in driver["rules"]]
    assert sorted(ids) == ["numbers.inf", "numbers.nan", "slow.long-token", "slow.never"]
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    assert {rule["defaultConfiguration"]["level"] for rule in driver["rules"]} == {
        *("error", "warning", "note")
    }
    assert ran["artifacts"][0]["location"]["uri"] == path.as_uri()
    assert ran["invocations"][0]["executionSuccessful"] is True
    for result in (only("result", one) for one in ran["results"]):
        assert ids[result["ruleIndex"]] == result["ruleId"]
        (location,) = result["locations"]
        (where,) = location["logicalLocations"]
        named = ran["logicalLocations"][where["index"]]
        assert only("place", named)["fullyQualifiedName"] == where["fullyQualifiedName"]
        assert result["occurrenceCount"] >= 1
    worst = ran["results"][0]
    assert worst["level"] == "error"
    assert worst["message"]["text"] == "Layer 2 made the first NaN."
    assert worst["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == (
        "generation 0/step 3/layer 2"
    )
    chain, index = [], worst["locations"][0]["logicalLocations"][0]["index"]
    while index is not None:
        chain.append(ran["logicalLocations"][index]["kind"])
        index = ran["logicalLocations"][index].get("parentIndex")
    assert chain == ["layer", "step", "generation"]


def test_junit_has_a_case_for_each_id_and_fails_those_at_the_bar(run: Callable[..., Ran]) -> None:
    suites = ElementTree.fromstring(run("--junit")[1])
    (suite,) = suites.findall("testsuite")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert [*cases] == ["numbers.inf", "numbers.nan", "slow.long-token", "slow.never"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "0")
    failure = cases["numbers.nan"].find("failure")
    assert failure is not None
    assert failure.get("message") == "Layer 2 made the first NaN."
    assert "“ Jane” is long." in (cases["slow.long-token"].findtext("system-out") or "")
    assert [*cases["slow.never"]] == []
    harsh = ElementTree.fromstring(run("--junit", "--fail-on", "note")[1])
    assert [suite.get("failures") for suite in harsh] == ["2"]


def test_without_a_review_only_stored_findings_are_printed(
    run: Callable[..., Ran], path: Path
) -> None:
    before = path.read_bytes()
    assert json.loads(run("--no-review", "--json")[1])["rules"] == ["numbers"]
    assert path.read_bytes() == before
    assert json.loads(run("--json")[1])["counts"]["warning"] == 2
    assert json.loads(run("--no-review", "--json")[1])["counts"]["warning"] == 2


def test_findings_that_cannot_be_stored_are_printed(
    run: Callable[..., Ran], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinspect.trace.file.writer.os.access", lambda path, mode: False)
    code, out, _ = run()
    assert code == 1
    assert "  “ Jane” is long." in out.splitlines()
    # A long path is broken where it must be.
    sentence = f"! The findings are not stored in {path}: it is read-only."
    assert "".join(sentence.split()) in "".join(out.split())


def test_a_rule_that_fails_is_named(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ({"broken": Broken}, {"other": "It did not load."})
    monkeypatch.setattr(plugins, "load_all", lambda group: made)
    report = json.loads(run("--json")[1])
    assert report["notes"] == ["The rule 'other' could not run: It did not load."]
    assert report["rules_off"][0].startswith("The rule 'broken' failed at step 2")


def test_evidence_is_written_in_words() -> None:
    pairs = [{"segment": "one", "depends on": "two"}, {"segment": "two", "depends on": "three"}]
    assert collect.format_evidence(pairs) == (
        "segment one, depends on two; segment two, depends on three"
    )
    assert collect.format_evidence([[1, 2, "a"], (3, None)]) == "1, 2, a; 3, null"
    assert collect.format_evidence([0.5, True]) == "0.5, true"
    assert collect.format_evidence([]) == "[]"


class Quiet(Slow):
    """An offline rule that finds nothing."""

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        return ()


@pytest.mark.parametrize("args", [(), ("--id", "numbers.*")])
def test_a_clean_trace_counts_the_rules_that_ran(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
) -> None:
    made = {"numbers": NumbersRule, "slow": Quiet}
    monkeypatch.setattr(plugins, "load_all", lambda group: (made, {}))
    path = sample_trace(tmp_path / "clean.flextrace", nan_at=None)
    assert main(["findings", str(path), *args]) == 0
    assert capsys.readouterr().out == "No problems found by 2 rules; --json lists them.\n"


def test_a_filter_that_matches_nothing_says_what_it_left_out(run: Callable[..., Ran]) -> None:
    code, out, _ = run("--id", "masks.*", "--severity", "error")
    assert (code, out) == (0, "No finding matches the filter. Without it: 1 error, 2 warnings.\n")
    code, out, _ = run("--generation", "1", "--severity", "error")
    assert (code, out) == (0, "No finding matches the filter. Without it: 1 error, 2 warnings.\n")


def test_findings_that_the_filter_leaves_out_count_once_for_all_ranks(path: Path) -> None:
    with open_trace(path) as reader:
        report = collect_report(reader, FindingFilter(ids=("masks.*",)), ())
    merged = collect.merge_reports(path.parent, {0: report, 1: report}, ())
    assert [one.id for one in merged.left_out] == [one.id for one in report.left_out]
    console = Console(file=io.StringIO(), width=100)
    print_report(merged, console)
    assert "Without it: 1 error" in console.file.getvalue()


def test_a_clean_trace_without_a_declared_mask_says_what_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "causal.flextrace", np.tri(len(TEXTS), dtype=bool))
    assert main(["findings", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "No mask was declared, so the executed mask was not compared" in printed


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--generation", "7"), "The trace has no generation 7."),
        (("missing.flextrace",), "There is no trace at"),
    ],
)
def test_an_invalid_request_is_refused_with_a_message(
    path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], sentence: str
) -> None:
    trace = [] if args[0].endswith("flextrace") else [str(path)]
    assert main(["findings", *trace, *args]) == 2
    assert sentence in capsys.readouterr().err


def test_a_running_capture_is_shown_up_to_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    path = tmp_path / "live.flextrace"
    run = {**RUN, "pid": os.getpid(), "started_at": time.time(), "rules": ["numbers"]}
    with TraceWriter.create(path, run) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_step(sample_step(0))
        assert main(["findings", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rules"] == ["numbers"]
    assert report["notes"][0].startswith("The trace is still being recorded")


def test_many_findings_of_a_kind_are_one_group(tmp_path: Path) -> None:
    path = tmp_path / "many.flextrace"
    with TraceWriter.create(path, RUN) as writer:
        writer.begin_generation(GenerationRecord(0, "s", "", "", SEGMENTS, ()))
        writer.write_findings(
            Finding(
                "path.fallback", Severity.WARNING, f"Layer {layer} fell back.", 0, 0, step, layer
            )
            for step in range(3, 41)
            for layer in range(28)
        )
        writer.write_findings(
            [
                Finding(
                    *("mask.leak", Severity.ERROR, "All layers leak.", 0, 0, 1, 0),
                    layers=tuple(range(8)),
                    last_step=9,
                    times=9,
                )
            ]
        )
    out = io.StringIO()
    with open_trace(path) as reader:
        report = collect_report(reader, FindingFilter(), [Late()])
        print_report(report, Console(file=out, width=80, highlight=False))
    lines = out.getvalue().splitlines()
    assert "error  mask.leak  layers 0-7, steps 1-9: 9 times" in lines
    assert "warning  path.fallback  layers 0-27, steps 3-40: 1 064 times" in lines
    assert "  and 23 more" in lines
    assert len(lines) < 25


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["findings", "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit codes:" in out
    assert max(map(len, findings.EXAMPLES.splitlines())) <= 80
