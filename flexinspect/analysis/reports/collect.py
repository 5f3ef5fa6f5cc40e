"""Collect the findings of a trace and the context that a report shows with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_ranges
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.records.imported import imported_facts
from flexinspect.trace.codec import plain_json
from flexinspect.trace.queries import NumberRange, lineage
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.rules.engine import FindingKind, Rule

MAX_POSITION_TEXTS = 12  # positions of a finding whose token texts are read at most

PositionTexts = tuple[tuple[int, str], ...]


class FindingFilter(NamedTuple):
    """Which findings to report; empty or None selects all."""

    generation: int | None = None
    ids: tuple[str, ...] = ()
    severities: tuple[Severity, ...] = ()

    def matches(self, finding: Finding) -> bool:
        """Tell whether a finding is selected."""
        return (
            self.generation in (None, finding.generation)
            and (not self.ids or any(fnmatchcase(finding.id, name) for name in self.ids))
            and (not self.severities or finding.severity in self.severities)
        )


class ReportGroup(NamedTuple):
    """All findings of one id and severity, in order."""

    id: str
    severity: Severity
    findings: tuple[Finding, ...]

    @property
    def times(self) -> int:
        """The number of occurrences, including repetitions of a series."""
        return sum(finding.times for finding in self.findings)

    def describe_extent(self) -> str:
        """Return "layers 0-27, steps 3-40: 1 064 times", with the places that the findings have."""
        layers = {n for f in self.findings for n in (*f.layers, f.layer) if n is not None}
        starts = {f.step for f in self.findings if f.step is not None}
        steps = starts | {f.last_step for f in self.findings if f.last_step is not None}
        n_steps = max(len(steps), *(f.times for f in self.findings))
        generations = {finding.generation for finding in self.findings}
        parts = [("layer", layers, len(layers))] if layers else []
        parts += [("step", steps, n_steps)] if starts else []
        if max(generations) > 0 or not parts:
            parts.append(("generation", generations, len(generations)))
        texts = (NumberRange(min(of), max(of), n).describe(what) for what, of, n in parts)
        return f"{', '.join(texts)}: {format_times(self.times)}"


class Report(Struct, frozen=True):
    """A trace's findings, worst first, and the rules that ran.

    `position_texts` are the token texts of the first positions of each of `findings`, in the same
    order. `rules` are those that ran and `kinds` the findings that they can report;
    `disabled_rules` are the messages of rules that failed, `notes` remarks for the user.
    `is_undeclared` says that a mask could not be compared with the intended one. `ranks` are those
    on which each of `findings` holds, in a report on a run of several; `trace` is their folder.
    `left_out` are the findings that the filter does not select.
    """

    trace: Path
    state: str
    findings: tuple[Finding, ...]
    position_texts: tuple[PositionTexts, ...]
    rules: tuple[Rule, ...]
    kinds: Mapping[str, FindingKind]
    disabled_rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_undeclared: bool = False
    ranks: tuple[tuple[int, ...], ...] = ()
    left_out: tuple[Finding, ...] = ()

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def reaches(self, threshold: Severity | None) -> bool:
        """Tell whether a finding is at least as severe as `threshold`; never for None."""
        order = list(Severity)
        failing = order[: order.index(threshold) + 1] if threshold is not None else []
        return any(finding.severity in failing for finding in self.findings)

    def groups(self) -> list[ReportGroup]:
        """Return the findings by severity and id, worst first."""
        groups = groupby(self.findings, key=attrgetter("id", "severity"))
        return [ReportGroup(*key, tuple(findings)) for key, findings in groups]


def _sort(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings in the order of `queries.finding_groups`, each kind together.

    The worst come first, and of one severity the kind with the earliest place: a cause is then
    above its effects.
    """
    kinds: defaultdict[tuple[Severity, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.severity, finding.id].append(finding)
    groups = sorted(kinds.values(), key=_earliest_place)  # equal places: in order of writing
    return sort_by_severity(
        finding for group in groups for finding in sorted(group, key=attrgetter("generation"))
    )


def _earliest_place(group: Iterable[Finding]) -> tuple[int, ...]:
    """Return the lowest generation, step and layer of a group; -1 where no finding names one."""
    places = zip(*((f.generation, f.step, f.layer) for f in group), strict=True)
    return tuple(min((n for n in numbers if n is not None), default=-1) for numbers in places)


def collect_report(
    reader: TraceReader,
    finding_filter: FindingFilter,
    rules: Iterable[Rule],
    notes: Iterable[str] = (),
) -> Report:
    """Read a report. Raises `UsageError` for a generation that the trace does not have."""
    generations = reader.generations()
    if finding_filter.generation not in (None, *(row.generation for row in generations)):
        known = f"0 to {len(generations) - 1}" if generations else "none"
        what = f"The trace has no generation {finding_filter.generation}."
        raise UsageError(what, hint=f"It has {known}.")
    selected: list[Finding] = []
    left_out: list[Finding] = []
    for finding in reader.findings():
        (selected if finding_filter.matches(finding) else left_out).append(finding)
    findings = _sort(selected)
    # The findings panel shares this module, and needs no rules to show its first screen.
    from flexinspect.analysis.offline_rules import live_rule_names

    rules, events = tuple(rules), (row.event for row in reader.events())
    names = live_rule_names(reader.run(), rules) | {rule for rule, _ in reader.reviews()}
    ran = tuple(rule for rule in rules if rule.name in names)
    return Report(
        trace=reader.path,
        state=reader.state,
        findings=findings,
        position_texts=tuple(read_position_texts(reader, finding) for finding in findings),
        rules=ran,
        kinds={id_: kind for rule in ran for id_, kind in rule.findings.items()},
        disabled_rules=tuple(one.text for one in events if one.kind == "rule-disabled"),
        notes=tuple(notes),
        is_undeclared=is_undeclared(reader),
        left_out=tuple(left_out),
    )


def merge_reports(trace: Path, reports: Mapping[int, Report], notes: Iterable[str]) -> Report:
    """Return one report on the ranks of a run: each finding once, with the ranks it holds for.

    Findings of several ranks are one if they have the same id and place; its sentence and evidence
    are those of the first rank.
    """
    merged: dict[tuple[object, ...], tuple[Finding, PositionTexts, list[int]]] = {}
    for rank, report in reports.items():
        for finding, texts in zip(report.findings, report.position_texts, strict=True):
            merged.setdefault(_identity(finding), (finding, texts, []))[2].append(rank)
    by_id = {id(finding): (texts, ranks) for finding, texts, ranks in merged.values()}
    findings = _sort(finding for finding, _, _ in merged.values())
    every = [*reports.values()]
    left_out = {_identity(finding): finding for report in every for finding in report.left_out}
    states = dict.fromkeys(report.state for report in every)
    rules = {rule.name: rule for report in every for rule in report.rules}
    return Report(
        trace=trace,
        state=", ".join(states),
        findings=findings,
        position_texts=tuple(by_id[id(finding)][0] for finding in findings),
        rules=tuple(rules.values()),
        kinds={id_: kind for report in every for id_, kind in report.kinds.items()},
        disabled_rules=tuple(dict.fromkeys(t for report in every for t in report.disabled_rules)),
        notes=(*notes, *_notes_of_ranks(reports)),
        is_undeclared=any(report.is_undeclared for report in every),
        ranks=tuple(tuple(dict.fromkeys(by_id[id(finding)][1])) for finding in findings),
        left_out=tuple(left_out.values()),
    )


def _identity(finding: Finding) -> tuple[object, ...]:
    """Return what findings of several ranks have in common if they are one."""
    place = (finding.generation, finding.branch, finding.step, finding.layer, finding.head)
    return (finding.id, finding.severity, *place)


def _notes_of_ranks(reports: Mapping[int, Report]) -> Iterator[str]:
    """Yield each note once, with the ranks that it is about unless these are all."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        for note in report.notes:
            ranks[note].append(rank)
    for note, own in ranks.items():
        yield note if len(own) == len(reports) else f"Rank {format_ranges(own)}: {note}"


UNDECLARED = (
    "No mask was declared, so the executed mask was not compared with an intended one. To declare "
    "it, use run --declare FILE or the arguments of watch."
)


def describe_import(run: Mapping[str, Any]) -> str:
    """Return where an imported trace comes from and what could not be checked; "" for others."""
    facts = imported_facts(run)
    if facts is None:
        return ""
    lacks = facts.lacks(imported.RECORD_KINDS)
    text = f"Imported from {facts.source}. Not in the dump, so not checked: {', '.join(lacks)}."
    if imported.MASKS in facts.holds:
        text += " The masks were not compared with an intended one, because none is declared."
    return text


def is_undeclared(reader: TraceReader) -> bool:
    """Tell whether a generation of tokens declares no mask, of a trace that is not imported.

    Raises `TraceError`.
    """
    if imported_facts(reader.run()) is not None:
        return False
    # It loads numpy, which the first screen does not need.
    from flexinspect.masks.mask_presets import declared_spec

    declarations = (row.declared for row in reader.generations())
    return any("training" not in one and declared_spec(one) is None for one in declarations)


def read_position_texts(reader: TraceReader, finding: Finding) -> PositionTexts:
    """Return the first positions of a finding with the text of their tokens, one look-up each."""
    branches = lineage(reader, finding.generation, finding.branch)
    found = []
    for pos in finding.positions[:MAX_POSITION_TEXTS]:
        tokens = (
            token
            for branch, _, _ in branches
            for token in reader.tokens(finding.generation, branch, pos, pos + 1)
        )
        text = next((token.text or token.token for token in tokens), "")
        found.append((pos, text.replace("\n", "↵")))
    return tuple(found)


def describe_place(finding: Finding) -> str:
    """Return "generation 0, step 3, layer 2", with the places that the finding has."""
    return ", ".join(f"{name} {number}" for name, number in finding_places(finding))


def finding_places(finding: Finding) -> list[tuple[str, int]]:
    """Return (name, number) of the places that a finding has, from the outermost to the innermost.

    Branch 0 is left out.
    """
    names = ("generation", "branch", "step", "layer", "head")
    places = ((name, getattr(finding, name)) for name in names)
    return [(name, n) for name, n in places if n is not None and (n or name != "branch")]


def format_evidence(value: object) -> str:
    """Return a value of a finding's evidence in words: numbers and texts, lists, and named values.

    Its text is not escaped.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_evidence(each)}" for name, each in value.items())
    if isinstance(value, list | tuple) and value:
        is_nested = any(isinstance(each, list | tuple | Mapping) for each in value)
        return ("; " if is_nested else ", ").join(map(format_evidence, value))
    return plain_json(value, ensure_ascii=False)


def format_times(n: int) -> str:
    """Return "once" or "1 064 times"."""
    return "once" if n == 1 else f"{format_thousands(n)} times"


def format_thousands(n: int) -> str:
    """Return 1064 as "1 064"."""
    return f"{n:,}".replace(",", " ")


def finding_page(id_: str) -> str:
    """Return the page of the documentation about an id."""
    return f"docs/findings/{id_}.md"
