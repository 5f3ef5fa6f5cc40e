"""The way to a finding: the next one, its place, and the panel with its evidence."""

from __future__ import annotations

from flexinspect.panels.base import Navigate, TracePlace
from flexinspect.records.finding import Finding
from flexinspect.trace import queries
from flexinspect.trace.query_results import FindingRow
from flexinspect.trace.reader import TraceReader

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
