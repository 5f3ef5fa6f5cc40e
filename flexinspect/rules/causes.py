"""One cause, one complaint: what follows from another finding of the same step becomes a note.

A layer that fell back to another kernel has lost its mask, and a mask whose borders are off by one
leaks: each is said by a rule of its own, and both are true. The consequence names its cause, and
the cause is at least as bad as what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexinspect.findings import Finding, Severity

_PATH_FINDINGS = ("path.fallback", "path.unpatched-layer", "path.bypass")
_BORDER_FINDINGS = ("segments.shifted", "segments.drift", "segments.merged")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "mask.not-applied": _PATH_FINDINGS,
    "mask.lost": (*_PATH_FINDINGS, *_BORDER_FINDINGS),
    "mask.leak": (*_PATH_FINDINGS, *_BORDER_FINDINGS),
    "mask.none": _PATH_FINDINGS,
    "mask.layers-differ": _PATH_FINDINGS,
}
"""By consequence, what may have caused it where both are about one layer of one step."""

_SEVERITY_ORDER = list(Severity)


def link_causes(found: Sequence[Finding]) -> list[Finding]:
    """Return findings of one step, consequences as notes that name what caused them."""
    out = list(found)
    for index, one in enumerate(found):
        at = _find_cause(one, found)
        if at is None or one.severity is Severity.NOTE:
            continue
        cause = out[at]
        if cause.severity is Severity.NOTE:
            continue
        worse = min(cause.severity, one.severity, key=_SEVERITY_ORDER.index)
        out[at] = replace(cause, severity=worse)
        said = f"{one.sentence} This follows from {cause.id}."
        evidence = {**one.evidence, "cause": cause.id}
        out[index] = replace(one, severity=Severity.NOTE, sentence=said, evidence=evidence)
    return out


def _find_cause(one: Finding, found: Sequence[Finding]) -> int | None:
    """Return where the cause of a finding stands, None where there is none."""
    causes = CAUSES.get(one.id, ())
    for index, other in enumerate(found):
        if other.id in causes and _finding_layers(one) & _finding_layers(other):
            return index
    return None


def _finding_layers(finding: Finding) -> set[int | None]:
    return set(finding.layers) or {finding.layer}
