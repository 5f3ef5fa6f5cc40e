"""Findings: what a rule reports, with severity and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct, field


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, frozen=True):
    """One sentence about what is wrong and where, and the numbers that show it.

    `id` is stable and names the kind of finding, for instance `mask.empty-row`. `positions` are
    token positions of the sequence. If several layers are concerned, `layers` lists them all and
    `layer` is the first of them. Findings of one generation and branch with the same `id` and
    `series` (unless it is empty) are one finding: the first is stored, and its `times` and
    `last_step` count the repetitions. If its sentence and evidence grow, they are those of the
    last repetition. `why` is why it matters, `confirm` how to verify it, `fix` the usual fix, and
    `query` the SQL that selects the evidence in the trace; each may be empty.
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


class Repeat(Struct, frozen=True):
    """A repetition, in this step, of a finding of a series.

    The finding belongs to `generation` (None: that of the step). If they are not empty, `sentence`
    and `evidence` replace those of the finding.
    """

    id: str
    series: str
    generation: int | None = None
    sentence: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def sort_by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings sorted by severity, worst first; the sort is stable."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
