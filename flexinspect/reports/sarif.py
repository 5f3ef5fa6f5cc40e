"""Findings as SARIF 2.1.0, the format that code hosts and editors take results of analyses in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect import __version__
from flexinspect.findings import Finding
from flexinspect.reports.collect import Report, page
from flexinspect.rules.base import FindingKind
from flexinspect.text import visible
from flexinspect.trace.values import float_name, simplify

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report) -> dict[str, Any]:
    """Return a log of one run: ids are its rules, the trace its artifact, findings its results."""
    kinds = _all_kinds(report)
    places = _Places()
    ids, trace = list(kinds), report.trace.as_uri()
    results = [_result(one, ids.index(one.id), places, trace) for one in report.findings]
    off = [{"level": "warning", "message": {"text": visible(text)}} for text in report.off]
    run = {
        "tool": {
            "driver": {
                "name": "flexinspect",
                "version": __version__,
                "rules": [_rule(id_, kind) for id_, kind in kinds.items()],
            }
        },
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": off}],
        "artifacts": [{"location": {"uri": trace}, "roles": ["analysisTarget"]}],
        "logicalLocations": places.listed,
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _all_kinds(report: Report) -> Mapping[str, FindingKind]:
    """Return what each id stands for; of a rule that is not installed, what its finding says."""
    others = {
        one.id: FindingKind(one.severity, one.id, one.why, one.confirm, one.fix)
        for one in report.findings
    }
    return {**others, **report.kinds}


def _rule(id_: str, kind: FindingKind) -> dict[str, Any]:
    help_ = [*filter(None, (kind.confirm, kind.fix)), f"See {page(id_)}."]
    return {
        "id": id_,
        "shortDescription": {"text": kind.meaning},
        "fullDescription": {"text": kind.why or kind.meaning},
        "help": {"text": " ".join(help_)},
        "defaultConfiguration": {"level": str(kind.severity)},
    }


class _Places:
    """The places that results name, each once, with what it lies in."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._known: dict[str, int] = {}

    def of(self, finding: Finding) -> dict[str, Any]:
        """Return the innermost place of a finding."""
        parent: int | None = None
        name = ""
        for kind, number in _path(finding):
            name = f"{name}/{kind} {number}".lstrip("/")
            parent = self._index(name, f"{kind} {number}", kind, parent)
        return {"index": parent, "fullyQualifiedName": name}

    def _index(self, full: str, name: str, kind: str, parent: int | None) -> int:
        if full not in self._known:
            self._known[full] = len(self.listed)
            inside = {} if parent is None else {"parentIndex": parent}
            self.listed.append({"name": name, "fullyQualifiedName": full, "kind": kind, **inside})
        return self._known[full]


def _path(finding: Finding) -> Sequence[tuple[str, int]]:
    named = (
        ("generation", finding.generation),
        ("branch", finding.branch or None),
        ("step", finding.step),
        ("layer", finding.layer),
        ("head", finding.head),
    )
    return [(kind, number) for kind, number in named if number is not None]


def _result(finding: Finding, rule: int, places: _Places, trace: str) -> dict[str, Any]:
    facts = {
        "positions": list(finding.positions),
        "layers": list(finding.layers),
        "lastStep": finding.last_step,
        "evidence": simplify(dict(finding.evidence), float_name),
        "query": finding.query,
    }
    where = places.of(finding)
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": str(finding.severity),
        "message": {"text": visible(finding.sentence)},
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
