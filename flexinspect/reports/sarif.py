"""Findings as SARIF 2.1.0, the format that code hosts and editors take results of analyses in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect import __version__
from flexinspect.findings import Finding
from flexinspect.reports.collect import Report, finding_page
from flexinspect.rules.base import FindingKind
from flexinspect.text import escape_unprintable
from flexinspect.trace.values import float_name, simplify

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """Return a log of one run: ids are its rules, the trace its artifact, findings its results."""
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
    """Return what each id stands for; of a rule that is not installed, what its finding says."""
    others = {
        one.id: FindingKind(one.severity, one.id, one.why, one.confirm, one.fix)
        for one in report.findings
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
    """The places that results name, each once, with what it lies in."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._known: dict[str, int] = {}

    def location_of(self, finding: Finding) -> dict[str, Any]:
        """Return the innermost place of a finding."""
        parent: int | None = None
        name = ""
        for kind, number in _location_path(finding):
            name = f"{name}/{kind} {number}".lstrip("/")
            parent = self._index(name, f"{kind} {number}", kind, parent)
        return {"index": parent, "fullyQualifiedName": name}

    def _index(self, full: str, name: str, kind: str, parent: int | None) -> int:
        if full not in self._known:
            self._known[full] = len(self.entries)
            inside = {} if parent is None else {"parentIndex": parent}
            self.entries.append({"name": name, "fullyQualifiedName": full, "kind": kind, **inside})
        return self._known[full]


def _location_path(finding: Finding) -> Sequence[tuple[str, int]]:
    named = (
        ("generation", finding.generation),
        ("branch", finding.branch or None),
        ("step", finding.step),
        ("layer", finding.layer),
        ("head", finding.head),
    )
    return [(kind, number) for kind, number in named if number is not None]


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
