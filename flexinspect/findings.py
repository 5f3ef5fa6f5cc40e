"""What a rule says: findings with severity and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about what is wrong, where, and the numbers that show it.

    `id` is stable and names the class, for instance `mask.empty-row`. `positions` are token
    positions of the sequence.
    """

    id: str
    severity: Severity
    sentence: str
    generation: int = 0
    branch: int = 0
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    positions: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity, those of one severity in the order given."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
