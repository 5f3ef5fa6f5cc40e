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
    positions of the sequence; `layers` are all layers it is about where they are several (`layer`
    is then the first of them). Findings of one generation and branch with the same `id` and
    `series` (unless it is empty) are one: the first is kept, and counts in `times` and `last_step`
    how often and until when the trouble was met again. Of a kind that grows, sentence and evidence
    are those of the last. `why` says why it matters, `confirm` how
    to see for oneself, `fix` what usually mends it, and `query` is the SQL that finds the
    evidence in the trace; all four are empty where nothing was said.
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
    layers: tuple[int, ...] = ()
    series: str = ""
    last_step: int | None = None
    times: int = 1
    why: str = ""
    confirm: str = ""
    fix: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A finding of a series that was met again, in this step.

    It lies in `generation` (None: in that of the step). `sentence` and `evidence` take the place
    of its own, where they are given.
    """

    id: str
    series: str
    generation: int | None = None
    sentence: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def sort_by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity, those of one severity in the order given."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
