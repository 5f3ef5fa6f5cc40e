"""Findings as JSON for scripts, as JUnit XML and as SARIF.

The form of the JSON is an interface: see `docs/findings/README.md`.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as Xml

from flexinspect.analysis.reports import collect
from flexinspect.core import __version__
from flexinspect.core.text import escape_unprintable, format_ranges
from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.engine import FindingKind
from flexinspect.trace.codec import float_name, simplify

REPORT_VERSION = 1  # increases when a key is removed or changes its meaning


def as_json(report: collect.Report) -> dict[str, Any]:
    """Return the report as one object of plain values; NaN and infinities are strings."""
    pairs = zip(report.findings, report.position_texts, strict=True)
    return {
        "version": REPORT_VERSION,
        "trace": str(report.trace),
        "state": report.state,
        "rules": [rule.name for rule in report.rules],
        "ids": sorted(report.kinds),
        "counts": {str(severity): report.count(severity) for severity in Severity},
        "findings": [
            _finding_dict(finding, texts) | _ranks_dict(report, at)
            for at, (finding, texts) in enumerate(pairs)
        ],
        "rules_off": list(report.disabled_rules),
        "notes": list(report.notes),
    }


def _finding_dict(finding: Finding, texts: collect.PositionTexts) -> dict[str, Any]:
    text_of = dict(texts)
    positions = [{"pos": pos, "text": text_of.get(pos)} for pos in finding.positions]
    fields = {**simplify(finding, float_name), "positions": positions}
    del fields["series"]
    return {**fields, "page": collect.finding_page(finding.id)}


def _ranks_dict(report: collect.Report, at: int) -> dict[str, list[int]]:
    """Return the ranks on which a finding holds, in a report on several."""
    return {"ranks": list(report.ranks[at])} if report.ranks else {}


def as_junit(report: collect.Report, threshold: Severity | None) -> str:
    """Return a JUnit XML document of one suite, with a test case per finding id.

    Findings at least as severe as `threshold` are failures, others the output of their test case.
    """
    rule_of = {id_: rule.name for rule in report.rules for id_ in rule.findings}
    by_id: dict[str, list[Finding]] = {id_: [] for id_ in sorted(rule_of)}
    for finding in report.findings:
        by_id.setdefault(finding.id, []).append(finding)
    order = list(Severity)
    failing = order[: order.index(threshold) + 1] if threshold is not None else []
    trace = escape_unprintable(report.trace.name)
    suite = Xml.Element("testsuite", name=trace, errors="0", skipped="0")
    for id_, found in by_id.items():
        rule = rule_of.get(id_, "unknown")
        case = Xml.SubElement(suite, "testcase", classname=f"flexinspect.{rule}", name=id_)
        ranks = dict(zip(map(id, report.findings), report.ranks, strict=False))
        bad = [finding for finding in found if finding.severity in failing]
        others = [finding for finding in found if finding.severity not in failing]
        if bad:
            message = escape_unprintable(bad[0].sentence)
            failure = Xml.SubElement(case, "failure", type=str(bad[0].severity), message=message)
            failure.text = "\n\n".join(_failure_text(one, ranks.get(id(one))) for one in bad)
        if others:
            texts = (_failure_text(one, ranks.get(id(one))) for one in others)
            Xml.SubElement(case, "system-out").text = "\n\n".join(texts)
    suite.set("tests", str(len(by_id)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suites = Xml.Element("testsuites", {k: v for k, v in suite.attrib.items() if k != "skipped"})
    suites.append(suite)
    Xml.indent(suites)
    return Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _failure_text(finding: Finding, ranks: tuple[int, ...] | None = None) -> str:
    lines = [f"{finding.severity}: {finding.sentence}", f"at {collect.describe_place(finding)}"]
    lines += [f"on ranks {format_ranges(ranks)}"] if ranks else []
    texts = {name: getattr(finding, name) for name in ("why", "confirm", "fix", "query")}
    lines += [f"{name}: {text}" for name, text in texts.items() if text]
    return "\n".join(map(escape_unprintable, [*lines, f"see {collect.finding_page(finding.id)}"]))


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: collect.Report) -> dict[str, Any]:
    """Return a SARIF log of one run: ids are rules, the trace is the artifact, findings results."""
    # The kind of a rule that is not installed is made from its finding.
    others = {f.id: FindingKind(f.severity, f.id, f.why, f.confirm, f.fix) for f in report.findings}
    kinds, places = {**others, **report.kinds}, _LogicalLocations()
    ids, trace = list(kinds), report.trace.as_uri()
    results = [_result_dict(one, ids.index(one.id), places, trace) for one in report.findings]
    for at, result in enumerate(results):
        result["properties"] |= _ranks_dict(report, at)
    messages = ({"text": escape_unprintable(text)} for text in report.disabled_rules)
    off = [{"level": "warning", "message": message} for message in messages]
    rules = [_rule_dict(id_, kind) for id_, kind in kinds.items()]
    run = {
        "tool": {"driver": {"name": "flexinspect", "version": __version__, "rules": rules}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": off}],
        "artifacts": [{"location": {"uri": trace}, "roles": ["analysisTarget"]}],
        "logicalLocations": places.entries,
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule_dict(id_: str, kind: FindingKind) -> dict[str, Any]:
    help_ = [*filter(None, (kind.confirm, kind.fix)), f"See {collect.finding_page(id_)}."]
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
        full = ""
        for kind, number in collect.finding_places(finding):
            name = f"{kind} {number}"
            full = f"{full}/{name}".lstrip("/")
            if full not in self._known:
                self._known[full] = len(self.entries)
                entry = {"name": name, "fullyQualifiedName": full, "kind": kind}
                self.entries.append(entry | ({} if parent is None else {"parentIndex": parent}))
            parent = self._known[full]
        return {"index": parent, "fullyQualifiedName": full}


def _result_dict(
    finding: Finding, rule: int, places: _LogicalLocations, trace: str
) -> dict[str, Any]:
    where = places.location_of(finding)
    artifact = {"artifactLocation": {"uri": trace, "index": 0}}
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": str(finding.severity),
        "message": {"text": escape_unprintable(finding.sentence)},
        "locations": [{"physicalLocation": artifact, "logicalLocations": [where]}],
        "occurrenceCount": max(finding.times, 1),
        "partialFingerprints": {
            "place/v1": f"{finding.id}/{where['fullyQualifiedName']}/{finding.series}"
        },
        "properties": {
            "positions": list(finding.positions),
            "layers": list(finding.layers),
            "lastStep": finding.last_step,
            "evidence": simplify(dict(finding.evidence), float_name),
            "query": finding.query,
        },
    }
