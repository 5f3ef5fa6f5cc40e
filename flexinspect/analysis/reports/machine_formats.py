"""Findings as JSON for scripts, as JUnit XML and as SARIF.

The form of the JSON is an interface: see `docs/findings/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as Xml

from flexinspect.analysis.reports.collect import (
    PositionTexts,
    Report,
    describe_place,
    finding_page,
    finding_places,
)
from flexinspect.core import __version__
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.engine import FindingKind
from flexinspect.trace.codec import float_name, simplify

REPORT_VERSION = 1  # increases when a key is removed or changes its meaning


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as one object of plain values; NaN and infinities are strings."""
    pairs = zip(report.findings, report.position_texts, strict=True)
    return {
        "version": REPORT_VERSION,
        "trace": str(report.trace),
        "state": report.state,
        "rules": [rule.name for rule in report.rules],
        "ids": sorted(report.kinds),
        "counts": {str(severity): report.count(severity) for severity in Severity},
        "findings": [_finding_dict(finding, texts) for finding, texts in pairs],
        "rules_off": list(report.disabled_rules),
        "notes": list(report.notes),
    }


def _finding_dict(finding: Finding, texts: PositionTexts) -> dict[str, Any]:
    text_of = dict(texts)
    fields = {
        **asdict(finding),
        "severity": str(finding.severity),
        "layers": list(finding.layers),
        "positions": [{"pos": pos, "text": text_of.get(pos)} for pos in finding.positions],
        "evidence": simplify(dict(finding.evidence), float_name),
        "page": finding_page(finding.id),
    }
    del fields["series"]
    return fields


def as_junit(report: Report, threshold: Severity | None) -> str:
    """Return a JUnit XML document of one suite, with a test case per finding id.

    Findings at least as severe as `threshold` are failures, others the output of their test case.
    """
    rule_of = {id_: rule.name for rule in report.rules for id_ in rule.findings}
    by_id: dict[str, list[Finding]] = {id_: [] for id_ in sorted(rule_of)}
    for finding in report.findings:
        by_id.setdefault(finding.id, []).append(finding)
    suite = Xml.Element(
        "testsuite", name=escape_unprintable(report.trace.name), errors="0", skipped="0"
    )
    for id_, found in by_id.items():
        suite.append(_test_case(id_, rule_of.get(id_, "unknown"), found, threshold))
    suite.set("tests", str(len(by_id)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suites = Xml.Element("testsuites", {k: v for k, v in suite.attrib.items() if k != "skipped"})
    suites.append(suite)
    Xml.indent(suites)
    return Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _test_case(
    id_: str, rule: str, found: list[Finding], threshold: Severity | None
) -> Xml.Element:
    case = Xml.Element("testcase", classname=f"flexinspect.{rule}", name=id_)
    order = list(Severity)
    bad: list[Finding] = []
    others: list[Finding] = []
    for finding in found:
        fails = threshold is not None and order.index(finding.severity) <= order.index(threshold)
        (bad if fails else others).append(finding)
    if bad:
        first = bad[0]
        failure = Xml.SubElement(
            case, "failure", type=str(first.severity), message=escape_unprintable(first.sentence)
        )
        failure.text = "\n\n".join(map(_failure_text, bad))
    if others:
        Xml.SubElement(case, "system-out").text = "\n\n".join(map(_failure_text, others))
    return case


def _failure_text(finding: Finding) -> str:
    lines = [f"{finding.severity}: {finding.sentence}", f"at {describe_place(finding)}"]
    for name in ("why", "confirm", "fix", "query"):
        text = getattr(finding, name)
        lines += [f"{name}: {text}"] if text else []
    return "\n".join(
        escape_unprintable(line) for line in [*lines, f"see {finding_page(finding.id)}"]
    )


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """Return a SARIF log of one run: ids are rules, the trace is the artifact, findings results."""
    kinds = _finding_kinds(report)
    places = _LogicalLocations()
    ids, trace = list(kinds), report.trace.as_uri()
    results = [_result_dict(one, ids.index(one.id), places, trace) for one in report.findings]
    off = [
        {"level": "warning", "message": {"text": escape_unprintable(text)}}
        for text in report.disabled_rules
    ]
    run = {
        "tool": {
            "driver": {
                "name": "flexinspect",
                "version": __version__,
                "rules": [_rule_dict(id_, kind) for id_, kind in kinds.items()],
            }
        },
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": off}],
        "artifacts": [{"location": {"uri": trace}, "roles": ["analysisTarget"]}],
        "logicalLocations": places.entries,
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _finding_kinds(report: Report) -> Mapping[str, FindingKind]:
    """Return the kind of each id; for a rule that is not installed, made from its finding."""
    others = {
        finding.id: FindingKind(
            finding.severity, finding.id, why=finding.why, confirm=finding.confirm, fix=finding.fix
        )
        for finding in report.findings
    }
    return {**others, **report.kinds}


def _rule_dict(id_: str, kind: FindingKind) -> dict[str, Any]:
    help_ = [*filter(None, (kind.confirm, kind.fix)), f"See {finding_page(id_)}."]
    return {
        "id": id_,
        "shortDescription": {"text": kind.meaning},
        "fullDescription": {"text": kind.why or kind.meaning},
        "help": {"text": " ".join(help_)},
        "defaultConfiguration": {"level": str(kind.severity)},
    }


class _LogicalLocations:
    """The logical locations of results, each once, with its parent."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._known: dict[str, int] = {}

    def location_of(self, finding: Finding) -> dict[str, Any]:
        """Return the innermost location of a finding."""
        parent: int | None = None
        name = ""
        for kind, number in finding_places(finding):
            name = f"{name}/{kind} {number}".lstrip("/")
            parent = self._index(name, f"{kind} {number}", kind, parent)
        return {"index": parent, "fullyQualifiedName": name}

    def _index(self, full: str, name: str, kind: str, parent: int | None) -> int:
        if full not in self._known:
            self._known[full] = len(self.entries)
            inside = {} if parent is None else {"parentIndex": parent}
            self.entries.append({"name": name, "fullyQualifiedName": full, "kind": kind, **inside})
        return self._known[full]


def _result_dict(
    finding: Finding, rule: int, places: _LogicalLocations, trace: str
) -> dict[str, Any]:
    facts = {
        "positions": list(finding.positions),
        "layers": list(finding.layers),
        "lastStep": finding.last_step,
        "evidence": simplify(dict(finding.evidence), float_name),
        "query": finding.query,
    }
    where = places.location_of(finding)
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": str(finding.severity),
        "message": {"text": escape_unprintable(finding.sentence)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": trace, "index": 0}},
                "logicalLocations": [where],
            }
        ],
        "occurrenceCount": max(finding.times, 1),
        "partialFingerprints": {
            "place/v1": f"{finding.id}/{where['fullyQualifiedName']}/{finding.series}"
        },
        "properties": facts,
    }
