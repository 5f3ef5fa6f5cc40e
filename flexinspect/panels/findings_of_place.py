"""The findings of a trace for a place: their numbers, the worst one, the next one, its panel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from flexinspect.analysis.reports import collect
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace import queries
from flexinspect.trace.query_results import FindingRow
from flexinspect.trace.reader import TraceReader

MAX_GROUPS = 500


class FindingSummary(Struct, frozen=True):
    """The number of findings of each severity, and the most relevant one for a place."""

    errors: int = 0
    warnings: int = 0
    notes: int = 0
    row: FindingRow | None = None
    elsewhere: bool = False
    """Whether the worst finding is of another generation than the place."""

    @property
    def worst(self) -> Finding | None:
        """The worst finding."""
        return self.row.finding if self.row is not None else None

    def counts(self) -> str:
        """Return "2 errors, 1 warning", without severities that have no finding."""
        pairs = (("error", self.errors), ("warning", self.warnings), ("note", self.notes))
        parts = [
            f"{collect.format_thousands(n)} {name}{'' if n == 1 else 's'}" for name, n in pairs if n
        ]
        return ", ".join(parts) or "no findings"

    def text(self) -> str:
        """Return the counts and the sentence of the worst finding in one printable line."""
        if self.worst is None:
            return self.counts()
        where = f" (generation {self.worst.generation})" if self.elsewhere else ""
        return f"{self.counts()}: {escape_unprintable(self.worst.sentence)}{where}"


def load_summary(source: Source, place: TracePlace) -> FindingSummary:
    """Return the counts of the whole trace, and the worst finding of the place's generation.

    For a generation without findings it is the worst one of the trace. Raises `TraceError`.
    """
    groups = load_groups(source)
    if not groups:
        return FindingSummary()
    key = ("findings.worst", queries.findings_counter(source.reader), place.generation)
    own = source.get_or_create(key, lambda: queries.worst_finding(source.reader, place.generation))
    worst = own or queries.finding_in_group(source.reader, groups[0], 0)
    return summarize_groups(groups, worst, elsewhere=own is None)


def summarize_groups(
    groups: Sequence[queries.FindingGroup],
    worst: FindingRow | None = None,
    *,
    elsewhere: bool = False,
) -> FindingSummary:
    """Count the findings of all classes by severity."""
    errors, warnings, notes = (
        sum(group.count for group in groups if group.severity is severity) for severity in Severity
    )
    return FindingSummary(errors, warnings, notes, worst, elsewhere)


def load_groups(source: Source) -> tuple[queries.FindingGroup, ...]:
    """Return the classes of findings, worst first; cached until there are new findings."""
    counter = queries.findings_counter(source.reader)
    if counter == 0:
        return ()
    read = partial(queries.finding_groups, source.reader, limit=MAX_GROUPS)
    return source.get_or_create(("findings", counter), lambda: tuple(read()))


# -- the way to a finding -------------------------------------------------------------------------

PLACE_FIELDS = ("generation", "branch", "step", "layer", "head")


def next_finding(
    reader: TraceReader, place: TracePlace, direction: int, after: FindingRow | None = None
) -> FindingRow | None:
    """Return the next finding after (direction 1) or before (-1) a place, cyclically.

    Findings are ordered by generation, branch, step, layer and head; None means that the trace has
    none. `after` is the finding that was last navigated to: if it is at `place`, the search starts
    from it, so that several findings at one place are visited in turn. Takes a few bounded
    queries. Raises `TraceError`.
    """
    if after is not None and all(
        getattr(after.finding, name) in (None, getattr(place, name)) for name in PLACE_FIELDS
    ):
        position = queries.finding_position(after)
    else:
        past = 1 << 62 if direction > 0 else -1
        position = (place.generation, place.branch, place.step, place.layer, place.head, past)
    return queries.adjacent_finding(reader, position, direction) or queries.adjacent_finding(
        reader, queries.FIRST_POSITION if direction > 0 else queries.LAST_POSITION, direction
    )


def navigate_to_finding(finding: Finding) -> Navigate:
    """Return the place of a finding and its first position; what it does not name is unchanged."""
    place = {name: getattr(finding, name) for name in PLACE_FIELDS}
    return Navigate(**place, pos=finding.positions[0] if finding.positions else None)


EVIDENCE_PANELS = {
    "attention": "attention",
    "decode": "mask",
    "gradient": "gradients",
    "graphs": "path",
    "kernel": "path",
    "mask": "mask",
    "memory": "memory",
    "numbers": "layers",
    "path": "path",
    "positions": "tokens",
    "reach": "mask",
    "segments": "mask",
    "text": "tokens",
    "training": "training",
}
"""The panel that shows the evidence of a finding, by the first word of its id."""


def evidence_panel(finding: Finding) -> str:
    """Return the panel that shows what a finding says, "" for none in particular."""
    return EVIDENCE_PANELS.get(finding.id.partition(".")[0], "")
