"""Findings as JUnit XML: a test case for each id that was looked for, failed where it was found."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from flexinspect.findings import Finding, Severity
from flexinspect.reports.collect import Report, page, place_words
from flexinspect.text import visible


def as_junit(report: Report, bar: Severity | None) -> str:
    """Return a document of one suite.

    Findings as bad as `bar` or worse are failures, others are the output of their test case.
    """
    rule_of = {id_: rule.name for rule in report.rules for id_ in rule.findings}
    by_id: dict[str, list[Finding]] = {id_: [] for id_ in sorted(rule_of)}
    for finding in report.findings:
        by_id.setdefault(finding.id, []).append(finding)
    suite = Xml.Element("testsuite", name=visible(report.trace.name), errors="0", skipped="0")
    for id_, found in by_id.items():
        suite.append(_case(id_, rule_of.get(id_, "unknown"), found, bar))
    suite.set("tests", str(len(by_id)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suites = Xml.Element("testsuites", {k: v for k, v in suite.attrib.items() if k != "skipped"})
    suites.append(suite)
    Xml.indent(suites)
    return Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(id_: str, rule: str, found: list[Finding], bar: Severity | None) -> Xml.Element:
    case = Xml.Element("testcase", classname=f"flexinspect.{rule}", name=id_)
    order = list(Severity)
    bad: list[Finding] = []
    others: list[Finding] = []
    for finding in found:
        fails = bar is not None and order.index(finding.severity) <= order.index(bar)
        (bad if fails else others).append(finding)
    if bad:
        first = bad[0]
        failure = Xml.SubElement(
            case, "failure", type=str(first.severity), message=visible(first.sentence)
        )
        failure.text = "\n\n".join(map(_text, bad))
    if others:
        Xml.SubElement(case, "system-out").text = "\n\n".join(map(_text, others))
    return case


def _text(finding: Finding) -> str:
    lines = [f"{finding.severity}: {finding.sentence}", f"at {place_words(finding)}"]
    for name in ("why", "confirm", "fix", "query"):
        said = getattr(finding, name)
        lines += [f"{name}: {said}"] if said else []
    return "\n".join(visible(line) for line in [*lines, f"see {page(finding.id)}"])
