"""What the findings panel shows: one finding of a class in full, and all of it in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexinspect.findings import Finding, Severity
from flexinspect.reports.collect import describe_place, format_thousands, format_times
from flexinspect.rules.words import plural
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import FindingGroup, format_ranges
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import FindingRow
from flexinspect.trace.values import plain_json
from flexinspect.widgets.lines import clip_text

MAX_DETAILS = 12
"""Positions, and facts of the evidence, that are shown of one finding."""

MAX_QUERY_CHARS = 300

SEVERITY_STYLES = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "muted"}


@dataclass(frozen=True, slots=True)
class FindingsData:
    """The classes of findings, worst first, and one finding of the selected class with its words.

    `words` are (pos, text) of its first positions; `rules` are the names of those that have looked.
    """

    groups: tuple[FindingGroup, ...]
    selected: int = 0
    member: int = 0
    chosen: FindingRow | None = None
    tokens: tuple[tuple[int, str], ...] = ()
    rules: tuple[str, ...] = ()


def applied_rules(reader: TraceReader) -> tuple[str, ...]:
    """Return the names of the rules that have looked, live (if the manifest says) or afterwards."""
    rules = reader.run().get("rules")
    live = map(str, rules) if isinstance(rules, list) else ()
    return tuple(sorted({*live, *(rule for rule, _ in reader.reviews())}))


def format_extent(group: FindingGroup) -> str:
    """Return "layers 0-27, steps 3-40: 1 064 times", naming only what the findings name."""
    parts = []
    if group.layers is not None:
        parts.append(group.layers.describe("layer"))
    if group.steps is not None:
        parts.append(group.steps.describe("step"))
    if group.generations.high > 0 or not parts:
        parts.append(group.generations.describe("generation"))
    return f"{', '.join(parts)}: {format_times(group.times)}"


def describe_no_findings(data: FindingsData) -> list[str]:
    """Return what can be said honestly of a trace without findings."""
    if data.rules:
        names = ", ".join(map(escape_unprintable, data.rules))
        return [
            f"No finding so far: {plural(len(data.rules), 'rule')} looked at every step ({names})."
        ]
    return ["No findings are recorded in this trace."]


def describe_finding(data: FindingsData) -> Iterator[tuple[str, str]]:
    """Yield the lines about the selected finding with the names of their styles."""
    if data.chosen is None:
        return
    finding = data.chosen.finding
    group = data.groups[data.selected]
    yield finding.sentence, SEVERITY_STYLES[finding.severity]
    number = f" ({format_thousands(data.member + 1)} of {format_thousands(group.count)})"
    yield f"At {describe_place(finding)}{number if group.count > 1 else ''}.", "text"
    if data.tokens:
        yield _format_positions(data, finding), "text"
    for name in ("why", "confirm", "fix"):
        if text := getattr(finding, name):
            yield f"{name}: {text}", "text"
    for key, value in list(finding.evidence.items())[:MAX_DETAILS]:
        yield f"{key}: {value if isinstance(value, str) else plain_json(value)}"[:500], "muted"
    if finding.query:
        yield f"query: {clip_text(finding.query, MAX_QUERY_CHARS).rstrip()}", "muted"


def _format_positions(data: FindingsData, finding: Finding) -> str:
    words = ", ".join(f"{pos} “{text}”" if text else str(pos) for pos, text in data.tokens)
    more = len(finding.positions) - len(data.tokens)
    n_found, cut = finding.evidence.get("empty"), ""
    if isinstance(n_found, int) and n_found > len(finding.positions):
        more, cut = more + n_found - len(finding.positions), " …"
    listed = format_ranges(finding.positions[:10_000]) + cut
    also = f" and {format_thousands(more)} more ({listed})" if more else ""
    name = "Positions" if len(finding.positions) > 1 else "Position"
    return f"{name}: {words}{clip_text(also, 60).rstrip() if also else ''}"
