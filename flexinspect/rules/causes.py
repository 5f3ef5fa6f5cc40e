"""One cause, one complaint: what follows from another finding of the same step becomes a note.

A layer that fell back to another kernel has lost its mask, and a mask whose borders are off by one
leaks: each is said by a rule of its own, and both are true. The consequence names its cause, and
the cause is at least as bad as what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexinspect.findings import Finding, Severity

_PATHS = ("path.fallback", "path.unpatched-layer", "path.bypass")
_BORDERS = ("segments.shifted", "segments.drift", "segments.merged")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "mask.not-applied": _PATHS,
    "mask.lost": (*_PATHS, *_BORDERS),
    "mask.leak": (*_PATHS, *_BORDERS),
    "mask.none": _PATHS,
    "mask.layers-differ": _PATHS,
}
"""By consequence, what may have caused it where both are about one layer of one step."""

_ORDER = list(Severity)


def with_causes(found: Sequence[Finding]) -> list[Finding]:
    """Return findings of one step, consequences as notes that name what caused them."""
    out = list(found)
    for index, one in enumerate(found):
        at = _cause_of(one, found)
        if at is None or one.severity is Severity.NOTE:
            continue
        cause = out[at]
        if cause.severity is Severity.NOTE:
            continue
        worse = min(cause.severity, one.severity, key=_ORDER.index)
        out[at] = replace(cause, severity=worse)
        said = f"{one.sentence} This follows from {cause.id}."
        evidence = {**one.evidence, "cause": cause.id}
        out[index] = replace(one, severity=Severity.NOTE, sentence=said, evidence=evidence)
    return out


def _cause_of(one: Finding, found: Sequence[Finding]) -> int | None:
    """Return where the cause of a finding stands, None where there is none."""
    causes = CAUSES.get(one.id, ())
    for index, other in enumerate(found):
        if other.id in causes and _layers(one) & _layers(other):
            return index
    return None


def _layers(finding: Finding) -> set[int | None]:
    return set(finding.layers) or {finding.layer}
