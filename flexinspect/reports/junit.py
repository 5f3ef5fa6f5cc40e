"""Findings as JUnit XML: a test case for each id that was looked for, failed where it was found."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from flexinspect.findings import Finding, Severity
from flexinspect.reports.collect import Report, describe_place, finding_page
from flexinspect.text import escape_unprintable


def as_junit(report: Report, threshold: Severity | None) -> str:
    """Return a document of one suite.

    Findings as bad as `bar` or worse are failures, others are the output of their test case.
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
        said = getattr(finding, name)
        lines += [f"{name}: {said}"] if said else []
    return "\n".join(
        escape_unprintable(line) for line in [*lines, f"see {finding_page(finding.id)}"]
    )
