"""SARIF and JUnit as readers take them: required properties, allowed ones, enumerations, order.

The part of the SARIF 2.1.0 schema that our logs use is written out here, from the standard: every
object is closed, as in the official schema. The JUnit part is what Jenkins and GitLab read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from jsonschema import Draft7Validator
from support.traces import sample_trace

from flexinspect.cli.main import main
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import RuleReview, append_reviews

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
LEVEL: Schema = {"enum": ["none", "note", "warning", "error"]}


def closed(required: Sequence[str], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": {name.rstrip("_"): value for name, value in properties.items()},
        "additionalProperties": False,
    }


def several(item: Schema, *, unique: bool = False) -> Schema:
    return {"type": "array", "items": item, "uniqueItems": unique}


def whole(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


MESSAGE = closed(["text"], text=TEXT)
ARTIFACT = closed([], uri={"type": "string", "pattern": r"^[a-z]+:\S*$"}, index=whole(-1))
ROLE: Schema = {"enum": ["analysisTarget", "attachment", "resultFile", "standardStream"]}
LOGICAL = closed(
    [],
    **dict.fromkeys(("name", "fullyQualifiedName", "decoratedName", "kind"), TEXT),
    index=whole(-1),
    parentIndex=whole(-1),
)
RULE = closed(
    ["id"],
    id=TEXT,
    shortDescription=MESSAGE,
    fullDescription=MESSAGE,
    help=MESSAGE,
    defaultConfiguration=closed([], level=LEVEL),
)
RESULT = closed(
    ["message"],
    ruleId=TEXT,
    ruleIndex=whole(-1),
    level=LEVEL,
    message=MESSAGE,
    locations=several(
        closed(
            [],
            physicalLocation=closed([], artifactLocation=ARTIFACT),
            logicalLocations=several(LOGICAL, unique=True),
        )
    ),
    occurrenceCount=whole(1),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
    properties={"type": "object"},
)
NOTIFICATION = closed(["message"], level=LEVEL, message=MESSAGE)
RUN = closed(
    ["tool"],
    tool=closed(
        ["driver"],
        driver=closed(["name"], name=TEXT, version=TEXT, rules=several(RULE, unique=True)),
    ),
    invocations=several(
        closed(
            ["executionSuccessful"],
            executionSuccessful={"type": "boolean"},
            toolExecutionNotifications=several(NOTIFICATION),
        )
    ),
    artifacts=several(closed([], location=ARTIFACT, roles=several(ROLE, unique=True)), unique=True),
    logicalLocations=several(LOGICAL, unique=True),
    results=several(RESULT),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
)
SARIF = closed(
    ["version", "runs"], **{"$schema": TEXT, "version": {"enum": ["2.1.0"]}, "runs": several(RUN)}
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace with findings of all kinds: in heads, without a step, of no known rule."""
    path = sample_trace(tmp_path / "run with a space.flextrace")
    nan = {"worst": float("nan"), "by": [float("inf"), 1]}
    found = (
        Finding("own.rule", Severity.NOTE, 'Odd: <&> "é" \x1b[31m', step=2, layer=1, head=3),
        Finding("own.rule", Severity.ERROR, "Nowhere.", evidence=nan),
        Finding("mask.leak", Severity.WARNING, "So.", step=0, layers=(0, 1), times=4, last_step=3),
    )
    off = (EventRecord("rule-disabled", "The rule 'own' failed.", 1.0, 0, 2),)
    append_reviews(path, [RuleReview("own", 0, found, off, 1.0, 1.0)])
    return path


def test_a_sarif_log_keeps_to_the_schema(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", str(trace), "--sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    problems = [error.message for error in Draft7Validator(SARIF).iter_errors(log)]
    assert problems == []
    (ran,) = log["runs"]
    named = [rule["id"] for rule in ran["tool"]["driver"]["rules"]]
    assert len(named) == len(set(named))
    levels = {(one["ruleId"], one["level"]) for one in ran["results"]}
    assert {("own.rule", "note"), ("own.rule", "error"), ("mask.leak", "warning")} <= levels
    for result in ran["results"]:
        assert named[result["ruleIndex"]] == result["ruleId"]


def test_the_schema_refuses_what_is_none() -> None:
    for log in ({"version": "2.1.0"}, {"version": "2.0", "runs": []}):
        assert not Draft7Validator(SARIF).is_valid(log)
    bad = {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "x"}}, "extra": 1}]}
    assert not Draft7Validator(SARIF).is_valid(bad)


SUITES = {"name", "tests", "failures", "errors", "disabled", "time"}
SUITE = {*SUITES, "skipped", "timestamp", "hostname", "id", "package"}
CASE = {"name", "classname", "time", "status", "assertions"}
IN_CASE = ["skipped", "error", "failure", "system-out", "system-err"]


@pytest.mark.parametrize("bar", ["error", "note", "never"])
def test_a_junit_report_keeps_to_the_common_schema(
    trace: Path, bar: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["findings", str(trace), "--junit", "--fail-on", bar])
    root = Xml.fromstring(capsys.readouterr().out)
    assert (root.tag, code) == ("testsuites", int(bar != "never"))
    assert set(root.attrib) <= SUITES
    (suite,) = root
    assert suite.tag == "testsuite"
    assert {"name", "tests"} <= set(suite.attrib) <= SUITE
    assert [case.tag for case in suite] == ["testcase"] * int(suite.attrib["tests"])
    for case in suite:
        assert {"name", "classname"} <= set(case.attrib) <= CASE
        places = [IN_CASE.index(child.tag) for child in case]
        assert places == sorted(places)
        assert all(set(one.attrib) == {"type", "message"} for one in case.iter("failure"))
    failed = [case for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.attrib["failures"]) == int(root.attrib["failures"])
    assert bool(failed) == (bar != "never")
