"""Findings as JSON, for scripts. The shape is an interface: see `docs/findings/README.md`."""

from __future__ import annotations

from typing import Any

from flexinspect.findings import Finding, Severity
from flexinspect.reports.collect import PositionTexts, Report, finding_page
from flexinspect.trace.values import float_name, simplify

REPORT_VERSION = 1
"""Rises when a key changes its meaning or goes."""


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as one object of plain values; NaN and infinities are their names."""
    pairs = zip(report.findings, report.position_texts, strict=True)
    return {
        "version": REPORT_VERSION,
        "trace": str(report.trace),
        "state": report.state,
        "rules": [rule.name for rule in report.rules],
        "ids": sorted(report.kinds),
        "counts": {str(severity): report.count(severity) for severity in Severity},
        "findings": [_finding_dict(finding, words) for finding, words in pairs],
        "rules_off": list(report.disabled_rules),
        "notes": list(report.notes),
    }


def _finding_dict(finding: Finding, texts: PositionTexts) -> dict[str, Any]:
    text_of = dict(texts)
    return {
        "id": finding.id,
        "severity": str(finding.severity),
        "sentence": finding.sentence,
        "generation": finding.generation,
        "branch": finding.branch,
        "step": finding.step,
        "last_step": finding.last_step,
        "layer": finding.layer,
        "layers": list(finding.layers),
        "head": finding.head,
        "positions": [{"pos": pos, "text": text_of.get(pos)} for pos in finding.positions],
        "times": finding.times,
        "evidence": simplify(dict(finding.evidence), float_name),
        "why": finding.why,
        "confirm": finding.confirm,
        "fix": finding.fix,
        "query": finding.query,
        "page": finding_page(finding.id),
    }
