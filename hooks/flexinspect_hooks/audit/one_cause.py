"""One cause, one finding: which divergences follow from what a rule, or another row, has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect.records.finding import Finding, Severity
from flexinspect.rules.numerics.audit_findings import finding_id
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.audit.program_audit import Verdict, verdict_data


def causes_of(reader: TraceReader, verdict: Verdict) -> list[Finding]:
    """Return what rules found before a divergence, or at its place, that may be its cause.

    A warning counts if the fault that gives the numbers is of its kind, since the numbers prove it.
    """
    found = verdict.divergence
    if found is None:
        return []
    layer = found.point[1]
    explanation = verdict.search.explanation if verdict.search is not None else None
    name = explanation.edits[0].name if explanation is not None else ""
    return [
        one
        for one in reader.findings()
        if one.generation == verdict.generation and not one.id.startswith("audit.")
        if one.severity is Severity.ERROR or _is_proven(one, name)
        if one.step is not None and one.step <= found.step
        if one.layer is None or layer is None or one.layer <= layer
        if _may_cause(one.id, name)
    ]


def failed_checks_of(reader: TraceReader, verdict: Verdict) -> list[Finding]:
    """Return the failed checks of recorded attention that a divergence is the reason of.

    Attention that is not what its record says gives other numbers, which the audit has judged: in
    the layers of the fault that explains them, or from the first layer that differs on.
    """
    found = verdict.divergence
    if found is None or found.point[1] is None:
        return []
    explanation = verdict.search.explanation if verdict.search is not None else None
    faulty = (found.point[1],) if explanation is None else explanation.layers
    return [
        one
        for one in reader.findings()
        if one.id == "observer.check-failed" and one.generation == verdict.generation
        if one.severity is not Severity.NOTE
        if faulty is None or found.point[1] in (layers := _layers_of(one)) or layers <= {*faulty}
    ]


def _layers_of(finding: Finding) -> set[int]:
    return {*finding.layers} or {-1 if finding.layer is None else finding.layer}


_CAUSES = {
    "mask": ("mask", "decode", "segments", "path", "cache", "lengths"),
    "padding": ("mask", "positions"),
    "rope": ("positions", "cache", "lengths"),
    "positions": ("positions", "cache", "lengths"),
    "cache": ("cache", "decode", "lengths"),
    "": ("mask", "decode", "segments", "path", "cache", "lengths", "positions", "numbers"),
}
"""Beginnings of the names of faults, and of the findings that may be their cause."""


def _is_proven(finding: Finding, fault: str) -> bool:
    """Whether a fault that gives the numbers says that a warning about position ids is right."""
    is_positions = finding.id.startswith("positions.") and fault.startswith("positions.")
    return is_positions and finding.severity is Severity.WARNING


def _may_cause(finding: str, fault: str) -> bool:
    """Whether a finding may say the same as a fault that gives the numbers ("" for none)."""
    if finding == "mask.none":  # a program may apply a mask that its layers did not receive
        return fault == "mask.none"
    return finding.startswith(_CAUSES.get(fault.partition(".")[0], ("attention",)))


def rows_of_one_cause(verdicts: Sequence[Verdict]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return which batch rows diverge by the fault of another row of the same generation.

    The keys are (generation, batch row); the values are the other row and the id of its finding, as
    `follows` of the event's data. A row that a fault reproduces counts before one without.
    """
    groups: dict[tuple[Any, ...], list[Verdict]] = {}
    for one in verdicts:
        if one.divergence is not None:
            groups.setdefault(_mechanism(one), []).append(one)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for same in groups.values():
        first = min(same, key=lambda one: (not _is_explained(one), one.batch))
        follows = {"batch": first.batch, "id": finding_id(verdict_data(first))}
        found |= {(one.generation, one.batch): follows for one in same if one is not first}
    return found


def _is_explained(verdict: Verdict) -> bool:
    return verdict.search is not None and verdict.search.explanation is not None


def _mechanism(verdict: Verdict) -> tuple[Any, ...]:
    """Return what divergences of one cause have in common: the place, and the fault or its look."""
    found, facts = verdict.divergence, verdict.facts
    assert found is not None
    if facts.get("other_rows_mask"):
        return verdict.generation, found.step, "mask"
    place = verdict.generation, found.step, found.point
    explanation = verdict.search.explanation if verdict.search is not None else None
    if explanation is not None:
        return *place, tuple(edit.name for edit in explanation.edits), explanation.layers
    heads = verdict.search.heads if verdict.search is not None else None
    return *place, None if heads is None else heads.agree, _signature(facts)


def _signature(facts: Mapping[str, Any]) -> str:
    """Return the facts of an unexplained divergence that do not depend on the row."""
    modules = [(one["name"], one["shape"]) for one in facts.get("modules") or ()]
    names = ("shape", "agreeing", "replaced", "function", "hooks", "training")
    return str([modules, *(facts.get(name) for name in names)])
