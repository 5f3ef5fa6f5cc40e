"""The findings panel: the findings of the rules, one line per class, worst first."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.analysis.reports import collect
from flexinspect.core.text import escape_unprintable, format_ranges, plural
from flexinspect.drawing.text_lines import Pen, clip_text, visible
from flexinspect.drawing.theme import Theme
from flexinspect.panels import base
from flexinspect.panels.base import Picture, Request
from flexinspect.panels.findings_of_place import load_groups, navigate_to_finding, summarize_groups
from flexinspect.panels.panel_source import Source
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace import queries
from flexinspect.trace.query_results import FindingRow
from flexinspect.trace.reader import TraceReader

MAX_DETAILS = 12
"""Maximum number of evidence values that are shown of one finding."""

MAX_QUERY_CHARS = 300
MAX_DESCRIBED_GROUPS = 50

SEVERITY_STYLES = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "muted"}
_SEVERITY_LETTERS = {Severity.ERROR: "E", Severity.WARNING: "W", Severity.NOTE: "N"}


class Coverage(Struct, frozen=True):
    """What was checked in a trace: the names of the rules that ran, live or on the stored trace.

    `level` is that of the recording. `is_undeclared`: see `collect.Report`. `source` says where an
    imported trace comes from, and what could not be checked in it.
    """

    rules: tuple[str, ...] = ()
    level: str = ""
    is_undeclared: bool = False
    is_training: bool = False
    source: str = ""


class FindingsData(Struct, frozen=True):
    """The classes of findings, worst first, and one finding of the selected class.

    `tokens` are (pos, text) of its first positions. `coverage` is read without any finding.
    """

    groups: tuple[queries.FindingGroup, ...]
    selected: int = 0
    member: int = 0
    chosen: FindingRow | None = None
    tokens: collect.PositionTexts = ()
    coverage: Coverage | None = None


def format_extent(group: queries.FindingGroup) -> str:
    """Return "layers 0-27, steps 3-40: 1 064 times" for the places that the findings name."""
    named = ((group.layers, "layer"), (group.steps, "step"))
    parts = [span.describe(name) for span, name in named if span is not None]
    if group.generations.high > 0 or not parts:
        parts.append(group.generations.describe("generation"))
    return f"{', '.join(parts)}: {collect.format_times(group.times)}"


def load_coverage(reader: TraceReader) -> Coverage:
    """Return what was checked. Raises `TraceError`."""
    run = reader.run()
    live = run.get("rules")
    names = {*map(str, live if isinstance(live, list) else ()), *(r for r, _ in reader.reviews())}
    is_training = bool(run.get("watch_training"))
    level = str(run.get("level", ""))
    is_undeclared, source = collect.is_undeclared(reader), collect.describe_import(run)
    return Coverage(tuple(sorted(names)), level, is_undeclared, is_training, source)


def describe_coverage(coverage: Coverage) -> Iterator[tuple[str, str]]:
    """Yield what was checked in a trace without findings, and what was not, with styles."""
    if not coverage.rules:
        yield "No findings are recorded in this trace.", "text"
    else:
        n_rules = plural(len(coverage.rules), "rule")
        yield f"No problems found: {n_rules} checked every recorded step.", "good"
    if coverage.source:
        yield escape_unprintable(coverage.source), "text"
    elif coverage.is_undeclared:
        yield collect.UNDECLARED, "text"
    elif coverage.level != "basic" and not coverage.is_training and coverage.rules:
        yield "The executed mask was compared with the declared one.", "text"
    if coverage.level == "basic" and not coverage.is_training:
        yield NOT_CHECKED_AT_BASIC, "text"
    if coverage.rules:
        yield f"The rules: {', '.join(map(escape_unprintable, coverage.rules))}.", "muted"


NOT_CHECKED_AT_BASIC = (
    "Level basic records no mask cells and no values of layers, so they were not checked. To check "
    "them, record at level advanced."
)


HEADINGS = {"fix": "Fix", "confirm": "How to confirm", "why": "Why it matters"}
"""The texts of a finding that explain it, by their names, the fix first."""


def describe_finding(
    finding: Finding, tokens: collect.PositionTexts = (), which: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a finding, each with the name of its style.

    `tokens` are the texts of its first positions, and `which` its number among others.
    """
    yield finding.sentence, SEVERITY_STYLES[finding.severity]
    yield f"At {collect.describe_place(finding)}{which}.", "text"
    if tokens:
        yield _format_positions(tokens, finding), "text"
    for name, heading in HEADINGS.items():
        if text := getattr(finding, name):
            yield f"{heading}: {text}", "text"
    for key, value in list(finding.evidence.items())[:MAX_DETAILS]:
        yield f"{key}: {collect.format_evidence(value)}"[:500], "muted"
    if finding.query:
        yield f"query: {clip_text(finding.query, MAX_QUERY_CHARS).rstrip()}", "muted"


def _describe_chosen(data: FindingsData) -> Iterator[tuple[str, str]]:
    if data.chosen is None:
        return
    count = data.groups[data.selected].count
    number, of = map(collect.format_thousands, (data.member + 1, count))
    which = f" ({number} of {of})" if count > 1 else ""
    yield from describe_finding(data.chosen.finding, data.tokens, which)


def _format_positions(texts: collect.PositionTexts, finding: Finding) -> str:
    tokens = ", ".join(f"{pos} “{text}”" if text else str(pos) for pos, text in texts)
    more = len(finding.positions) - len(texts)
    n_empty, ellipsis = finding.evidence.get("empty"), ""
    if isinstance(n_empty, int) and n_empty > len(finding.positions):
        more, ellipsis = more + n_empty - len(finding.positions), " …"
    ranges = format_ranges(finding.positions[:10_000]) + ellipsis
    rest = f" and {collect.format_thousands(more)} more ({ranges})" if more else ""
    name = "Positions" if len(finding.positions) > 1 else "Position"
    return f"{name}: {tokens}{clip_text(rest, 60).rstrip() if rest else ''}"


class FindingsOptions(Struct, frozen=True):
    """The selected line by its number, and by its class (severity, id) once the user chose one.

    `group` keeps the selection on its class while new findings arrive. `member` counts within the
    class, from 0. `scroll` is the number of lines of the finding that are above the window.
    """

    selected: int = 0
    group: tuple[str, str] | None = None
    member: int = 0
    scroll: int = 0


class FindingsPanel(base.Panel[FindingsData, FindingsOptions]):
    """A list of the classes of findings, with all details of the selected finding."""

    name = "findings"
    title = "Findings"
    initial_options = FindingsOptions()
    help = base.Help(
        "It shows the problems that the rules found in this trace, the worst first, with all "
        "findings of one kind on one line.",
        "Read on with shift+down and back with shift+up, from one kind to the next; go through the "
        "findings of one kind with shift+left and shift+right, and press Enter to go to the step, "
        "layer and head.",
        "Start with the errors (E): each says in one sentence what is wrong, and lists the "
        "evidence and how to confirm it.",
    )
    actions = (*base.CURSOR_MOVES, "cursor.enter")

    def load(self, source: Source, request: Request[FindingsOptions]) -> FindingsData:
        """Count the findings by class, and read the selected one."""
        reader, options = source.reader, request.options
        groups = load_groups(source)
        if not groups:
            return FindingsData((), coverage=load_coverage(reader))
        classes = [(group.severity.value, group.id) for group in groups]
        chosen = options.group
        selected = classes.index(chosen) if chosen in classes else options.selected
        selected = max(0, min(selected, len(groups) - 1))
        member = max(0, min(options.member, groups[selected].count - 1))
        row = queries.finding_in_group(reader, groups[selected], member)
        tokens = collect.read_position_texts(reader, row.finding) if row is not None else ()
        return FindingsData(groups, selected, member, row, tokens)

    def describe(self, data: FindingsData) -> list[str]:
        """Return the classes with their counts and places, then the selected finding."""
        if data.coverage is not None:
            return [text for text, _ in describe_coverage(data.coverage)]
        lines = [summarize_groups(data.groups).counts() + "."]
        lines += [
            f"{group.severity.value} {escape_unprintable(group.id)}: {format_extent(group)}."
            for group in data.groups[:MAX_DESCRIBED_GROUPS]
        ]
        if len(data.groups) > MAX_DESCRIBED_GROUPS:
            lines.append(f"And {len(data.groups) - MAX_DESCRIBED_GROUPS} more kinds.")
        return [*lines, *(escape_unprintable(text) for text, _ in _describe_chosen(data))]

    def paint(self, data: FindingsData, request: Request[FindingsOptions], theme: Theme) -> Picture:
        """Draw the list, scrolled to the selected line, and the selected finding below it."""
        pen, height = Pen(theme, request.width), request.height
        if data.coverage is not None:
            lines = pen.paragraphs(describe_coverage(data.coverage))
            return Picture(lines[:height], "no problems")
        rows = _visible_groups(data, height)
        strips = [_draw_group(data, index, pen) for index in rows]
        strips.append(pen.line(("─" * pen.width, "muted")))
        strips += _draw_finding(data, request, pen)
        summary = summarize_groups(data.groups)

        def target(x: int, y: int) -> FindingsOptions | base.Navigate | None:
            """Select the line that was clicked; a click on the selected one goes to its place."""
            if not 0 <= y < len(rows):
                return None
            chosen = data.chosen if rows[y] == data.selected else None
            return navigate_to_finding(chosen.finding) if chosen else _select_group(data, rows[y])

        return Picture(strips[:height], summary.counts(), summary.errors > 0, target)

    def on_action(
        self, action: str, data: FindingsData, request: Request[FindingsOptions]
    ) -> FindingsOptions | base.Navigate | None:
        """Move the selection, or go to the selected finding."""
        if not data.groups:
            return None
        if action == "cursor.enter":
            return navigate_to_finding(data.chosen.finding) if data.chosen is not None else None
        down, across = base.CURSOR_MOVES.get(action, (0, 0))
        if down:
            return _read_on(data, request, down)
        return _select_group(data, data.selected, data.member + across) if across else None


# -- drawing -------------------------------------------------------------------------------------


def _visible_groups(data: FindingsData, height: int) -> range:
    n_groups = len(data.groups)
    return range(n_groups)[visible(data.selected, max(height // 2 - 1, 1), n_groups)]


def _finding_room(data: FindingsData, height: int) -> int:
    """Return the number of lines below the list and its rule."""
    return max(height - len(_visible_groups(data, height)) - 1, 0)


def _draw_finding(data: FindingsData, request: Request[FindingsOptions], pen: Pen) -> list[Strip]:
    """Draw the lines of the selected finding that are in the window, and how many are outside."""
    strips, room = pen.paragraphs(_describe_chosen(data)), _finding_room(data, request.height)
    if len(strips) <= room:
        return strips
    top = min(request.options.scroll, len(strips) - room)
    shown, below = strips[top : top + room], len(strips) - room - top
    if room > 1 and top:
        shown[0] = pen.line((f"▲ {plural(top + 1, 'more line')}", "muted"))
    if room > 1 and below:
        shown[-1] = pen.line((f"▼ {plural(below + 1, 'more line')}", "muted"))
    return shown


def _read_on(
    data: FindingsData, request: Request[FindingsOptions], down: int
) -> FindingsOptions | None:
    """Scroll the selected finding by most of a window; at its end, select the next one."""
    room = _finding_room(data, request.height)
    pen = Pen(Theme("none"), request.width)
    hidden = max(len(pen.paragraphs(_describe_chosen(data))) - room, 0)
    scroll = min(request.options.scroll, hidden)
    if room > 1 and (scroll < hidden if down > 0 else scroll > 0):
        scroll += down * max(room - 2, 1)
        return replace(request.options, scroll=max(0, min(scroll, hidden)))
    return _select_group(data, data.selected + down)


def _select_group(data: FindingsData, selected: int, member: int = 0) -> FindingsOptions | None:
    if not 0 <= selected < len(data.groups) or not 0 <= member < data.groups[selected].count:
        return None
    group = data.groups[selected]
    return FindingsOptions(selected, (group.severity.value, group.id), member)


def _draw_group(data: FindingsData, index: int, pen: Pen) -> Strip:
    group = data.groups[index]
    selected = index == data.selected
    name, extent = escape_unprintable(group.id), format_extent(group)
    if pen.width < 60:
        extent = extent.rpartition(": ")[2]
    else:
        longest = max(len(escape_unprintable(other.id)) for other in data.groups)
        name = f"{clip_text(name, min(longest, 28))}  {escape_unprintable(group.sentence)}"
    room = max(pen.width - cell_len(extent) - 5, 4)
    return pen.line(
        ("▸" if selected else " ", "chosen"),
        (f"{_SEVERITY_LETTERS[group.severity]} ", SEVERITY_STYLES[group.severity]),
        (clip_text(name, room), "cursor" if selected else "text"),
        (f"  {extent}", "muted"),
    )
