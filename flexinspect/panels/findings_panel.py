"""The findings panel: what the rules said, worst first, each class once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.analysis.reports.collect import (
    describe_place,
    format_thousands,
    format_times,
    read_position_texts,
)
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.text_lines import Span, clip_text, line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Help, Navigate, Panel, Picture, Request, TracePlace
from flexinspect.panels.source import Source
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.codec import plain_json
from flexinspect.trace.queries.range_queries import (
    FIRST_POSITION,
    LAST_POSITION,
    FindingGroup,
    adjacent_finding,
    finding_groups,
    finding_in_group,
    finding_position,
    findings_counter,
    format_ranges,
    worst_finding,
)
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import FindingRow

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


MAX_GROUPS = 500
_SEVERITY_LETTERS = {Severity.ERROR: "E", Severity.WARNING: "W", Severity.NOTE: "N"}
_GROUP_BYTES = 400


@dataclass(frozen=True, slots=True)
class FindingsOptions:
    """The line that is selected, by its number, and by its class once it was chosen.

    `group` keeps the selection on its class while new findings arrive. `member` counts within the
    class, from 0.
    """

    selected: int = 0
    group: tuple[str, str] | None = None
    member: int = 0


class FindingsPanel(Panel[FindingsData, FindingsOptions]):
    """A list of classes of findings with the selected one in full."""

    name: ClassVar[str] = "findings"
    title: ClassVar[str] = "Findings"
    help: ClassVar[Help] = Help(
        "It shows what the rules found wrong in this trace, the worst first, with all findings of "
        "one kind on one line.",
        "Move with shift+up and shift+down, go through the findings of one kind with shift+left "
        "and shift+right, and press Enter to go to the step, layer and head.",
        "Look at the errors (E) first: they say in one sentence what is wrong, and their numbers "
        "say how to confirm it.",
    )
    actions: ClassVar[tuple[str, ...]] = (
        "cursor.up",
        "cursor.down",
        "cursor.left",
        "cursor.right",
        "cursor.enter",
    )

    def options(self) -> FindingsOptions:
        """Return the options: the worst class, its first finding."""
        return FindingsOptions()

    def load(self, source: Source, request: Request[FindingsOptions]) -> FindingsData:
        """Count the findings by class, and read the selected one."""
        reader, options = source.reader, request.options
        groups = load_groups(source)
        if not groups:
            return FindingsData((), rules=applied_rules(reader))
        names = [(group.severity.value, group.id) for group in groups]
        at = names.index(options.group) if options.group in names else options.selected
        at = max(0, min(at, len(groups) - 1))
        member = max(0, min(options.member, groups[at].count - 1))
        row = finding_in_group(reader, groups[at], member)
        words = read_position_texts(reader, row.finding) if row is not None else ()
        return FindingsData(groups, at, member, row, words)

    def describe(self, data: FindingsData) -> list[str]:
        """Return the classes with their counts and places, then the selected finding."""
        if not data.groups:
            return describe_no_findings(data)
        found = [summarize_groups(data.groups).counts() + "."]
        for group in data.groups[:50]:
            found.append(
                f"{group.severity.value} {escape_unprintable(group.id)}: {format_extent(group)}."
            )
        if len(data.groups) > 50:
            found.append(f"And {len(data.groups) - 50} more kinds.")
        return [*found, *(escape_unprintable(text) for text, _ in describe_finding(data))]

    def paint(self, data: FindingsData, request: Request[FindingsOptions], theme: Theme) -> Picture:
        """Draw the list, scrolled to the selected line, and the selected finding below it."""
        width, height = request.width, request.height
        if not data.groups:
            texts = describe_no_findings(data)
            lines = [s for text in texts for s in wrap_paragraph(text, width, theme.style("text"))]
            return Picture(lines[:height], "no findings")
        top, n_rows = _visible_rows(data, height)
        rows = range(top, min(top + n_rows, len(data.groups)))
        strips = [_draw_group(data, index, width, theme) for index in rows]
        rule = line([("─" * width, theme.style("muted"))], width)
        strips = [*strips, rule, *_draw_finding(data, width, theme)][:height]
        found = summarize_groups(data.groups)
        return Picture(strips, found.counts(), alarm=found.errors > 0)

    def on_action(
        self, action: str, data: FindingsData, request: Request[FindingsOptions]
    ) -> FindingsOptions | Navigate | None:
        """Move the selection, or go to the selected finding."""
        if not data.groups:
            return None
        if action == "cursor.enter":
            return navigate_to_finding(data.chosen.finding) if data.chosen is not None else None
        if action in ("cursor.up", "cursor.down"):
            return _selection_at(data, data.selected + (1 if action == "cursor.down" else -1))
        if action in ("cursor.left", "cursor.right"):
            member = data.member + (1 if action == "cursor.right" else -1)
            if not 0 <= member < data.groups[data.selected].count:
                return None
            return replace(_select_group(data, data.selected), member=member)
        return None

    def on_mouse(
        self, x: int, y: int, data: FindingsData, request: Request[FindingsOptions], *, click: bool
    ) -> FindingsOptions | Navigate | None:
        """Select the line that was clicked; a click on the selected one goes to its place."""
        if not click or not data.groups:
            return None
        top, n_rows = _visible_rows(data, request.height)
        index = top + y
        if not 0 <= y < n_rows or index >= len(data.groups):
            return None
        if index == data.selected and data.chosen is not None:
            return navigate_to_finding(data.chosen.finding)
        return _selection_at(data, index)


# -- for the screen ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindingSummary:
    """How many findings of each severity there are, and the one that matters here."""

    errors: int = 0
    warnings: int = 0
    notes: int = 0
    worst: Finding | None = None
    elsewhere: bool = False
    """Whether the worst finding is of another generation than the place."""

    def counts(self) -> str:
        """Return "2 errors, 1 warning", leaving out what there is none of."""
        pairs = (("error", self.errors), ("warning", self.warnings), ("note", self.notes))
        parts = [f"{format_thousands(n)} {name}{'' if n == 1 else 's'}" for name, n in pairs if n]
        return ", ".join(parts) or "no findings"

    def text(self) -> str:
        """Return the counts and the worst sentence, printable, in one line."""
        if self.worst is None:
            return self.counts()
        where = f" (generation {self.worst.generation})" if self.elsewhere else ""
        return f"{self.counts()}: {escape_unprintable(self.worst.sentence)}{where}"


def load_summary(source: Source, place: TracePlace) -> FindingSummary:
    """Return the counts of the whole trace, and the worst finding of the place's generation.

    A generation without any is told of the worst one of the trace. Raises `TraceError`.
    """
    groups = load_groups(source)
    if not groups:
        return FindingSummary()
    last, generation = findings_counter(source.reader), place.generation
    row = source.get_or_create(
        ("findings.worst", last, generation),
        lambda: worst_finding(source.reader, generation),
        lambda _: _GROUP_BYTES,
    )
    here = row if row is not None else finding_in_group(source.reader, groups[0], 0)
    return summarize_groups(
        groups, here.finding if here is not None else None, elsewhere=row is None
    )


def summarize_groups(
    groups: Sequence[FindingGroup], worst: Finding | None = None, *, elsewhere: bool = False
) -> FindingSummary:
    """Return the counts of classes of findings."""
    counts = dict.fromkeys(Severity, 0)
    for group in groups:
        counts[group.severity] += group.count
    errors, warnings, notes = (counts[severity] for severity in Severity)
    return FindingSummary(errors, warnings, notes, worst, elsewhere)


def next_finding(
    reader: TraceReader, place: TracePlace, direction: int, after: FindingRow | None = None
) -> FindingRow | None:
    """Return the nearest finding after (1) or before (-1) a place; from the end, the first again.

    They are walked by generation, branch, step, layer, head; None means that there are none at
    all. `after` is the finding that was gone to last: where it still is at `place`, the walk goes
    on from it, so that several at one place are met one by one. A few bounded look-ups; raises
    `TraceError`.
    """
    if after is not None and _is_at(after.finding, place):
        here = finding_position(after)
    else:
        past = 1 << 62 if direction > 0 else -1
        here = (place.generation, place.branch, place.step, place.layer, place.head, past)
    found = adjacent_finding(reader, here, direction)
    return found or adjacent_finding(
        reader, FIRST_POSITION if direction > 0 else LAST_POSITION, direction
    )


def navigate_to_finding(finding: Finding) -> Navigate:
    """Return where a finding is; what it does not name stays as it is, its first token shown."""
    return Navigate(
        finding.generation,
        finding.branch,
        finding.step,
        finding.layer,
        finding.head,
        finding.positions[0] if finding.positions else None,
    )


def load_groups(source: Source) -> tuple[FindingGroup, ...]:
    """Return the classes of findings, worst first; counted again only when there are new ones."""
    last = findings_counter(source.reader)
    if last == 0:
        return ()
    return source.get_or_create(
        ("findings", last),
        lambda: tuple(finding_groups(source.reader, limit=MAX_GROUPS)),
        lambda groups: _GROUP_BYTES * len(groups),
    )


def _is_at(finding: Finding, place: TracePlace) -> bool:
    named = (
        (finding.generation, place.generation),
        (finding.branch, place.branch),
        (finding.step, place.step),
        (finding.layer, place.layer),
        (finding.head, place.head),
    )
    return all(mine is None or mine == here for mine, here in named)


# -- drawing -------------------------------------------------------------------------------------


def _select_group(data: FindingsData, selected: int) -> FindingsOptions:
    group = data.groups[selected]
    return FindingsOptions(selected, (group.severity.value, group.id))


def _selection_at(data: FindingsData, selected: int) -> FindingsOptions | None:
    return _select_group(data, selected) if 0 <= selected < len(data.groups) else None


def _visible_rows(data: FindingsData, height: int) -> tuple[int, int]:
    """Return the first line of the list and how many lines it has: half of the height at most."""
    n_rows = min(len(data.groups), max(height // 2 - 1, 1))
    return max(0, min(data.selected - n_rows // 2, len(data.groups) - n_rows)), n_rows


def _draw_group(data: FindingsData, index: int, width: int, theme: Theme) -> Strip:
    group = data.groups[index]
    chosen = index == data.selected
    name, where = escape_unprintable(group.id), format_extent(group)
    if width < 60:
        where = where.rpartition(": ")[2]
    else:
        longest = max(len(escape_unprintable(each.id)) for each in data.groups)
        name = f"{clip_text(name, min(longest, 28))}  {escape_unprintable(group.sentence)}"
    room = max(width - cell_len(where) - 5, 4)
    pieces: list[Span] = [
        ("▸" if chosen else " ", theme.style("chosen")),
        (f"{_SEVERITY_LETTERS[group.severity]} ", theme.style(SEVERITY_STYLES[group.severity])),
        (clip_text(name, room), theme.style("cursor" if chosen else "text")),
        (f"  {where}", theme.style("muted")),
    ]
    return line(pieces, width, theme.style("text"))


def _draw_finding(data: FindingsData, width: int, theme: Theme) -> list[Strip]:
    return [
        strip
        for text, style in describe_finding(data)
        for strip in wrap_paragraph(text, width, theme.style(style))
    ]
