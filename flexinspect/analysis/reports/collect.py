"""The findings of a trace with all that a report says beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.core.errors import UsageError
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import TokenRecord
from flexinspect.trace.queries.range_queries import NumberRange, lineage
from flexinspect.trace.reader import TraceReader

if TYPE_CHECKING:
    from flexinspect.rules.engine import FindingKind, Rule

MAX_POSITION_TEXTS = 12
"""Positions of a finding whose words are given."""

PositionTexts = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class FindingFilter:
    """Which findings are asked for; what is empty or None chooses all."""

    generation: int | None = None
    ids: tuple[str, ...] = ()
    severities: tuple[Severity, ...] = ()

    def matches(self, finding: Finding) -> bool:
        """Tell whether a finding is among them."""
        return (
            self.generation in (None, finding.generation)
            and (not self.ids or any(fnmatchcase(finding.id, name) for name in self.ids))
            and (not self.severities or finding.severity in self.severities)
        )


@dataclass(frozen=True, slots=True)
class ReportGroup:
    """All findings of one id and severity, in order; an extent is None where none names one."""

    id: str
    severity: Severity
    findings: tuple[Finding, ...]

    @property
    def times(self) -> int:
        """How often it was met, findings of a series counted as often as they came."""
        return sum(finding.times for finding in self.findings)

    def describe_extent(self) -> str:
        """Return "layers 0-27, steps 3-40: 1 064 times", naming only what the findings name."""
        layers = {n for one in self.findings for n in (*one.layers, one.layer) if n is not None}
        steps = {one.step for one in self.findings if one.step is not None}
        ends = {one.last_step for one in self.findings if one.last_step is not None}
        n_steps = max(len(steps | ends), *(one.times for one in self.findings))
        parts = [_number_range(layers, len(layers)).describe("layer")] if layers else []
        if steps:
            parts.append(_number_range(steps | ends, n_steps).describe("step"))
        generations = {one.generation for one in self.findings}
        if max(generations) > 0 or not parts:
            parts.append(_number_range(generations, len(generations)).describe("generation"))
        return f"{', '.join(parts)}: {format_times(self.times)}"


@dataclass(frozen=True, slots=True)
class Report:
    """A trace's findings, worst first, and what is known of who looked.

    `words` are the texts of a finding's first positions, by its place in `findings`. `rules` are
    those that have looked and `kinds` what they can say, `off` the sentences of those that could
    not, `notes` what the reader of the report must know.
    """

    trace: Path
    state: str
    run: Mapping[str, Any]
    findings: tuple[Finding, ...]
    position_texts: tuple[PositionTexts, ...]
    rules: tuple[Rule, ...]
    kinds: Mapping[str, FindingKind]
    disabled_rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def count(self, severity: Severity) -> int:
        """Return how many findings of a severity there are."""
        return sum(finding.severity is severity for finding in self.findings)

    def reaches(self, threshold: Severity | None) -> bool:
        """Tell whether something as bad as `bar` was found; None is a bar that nothing reaches."""
        order = list(Severity)
        worst = min((order.index(one.severity) for one in self.findings), default=len(order))
        return threshold is not None and worst <= order.index(threshold)

    def groups(self) -> list[ReportGroup]:
        """Return the findings by severity and id, worst first."""
        found: dict[tuple[Severity, str], list[Finding]] = {}
        for one in self.findings:
            found.setdefault((one.severity, one.id), []).append(one)
        return [ReportGroup(id_, severity, tuple(same)) for (severity, id_), same in found.items()]


def collect_report(
    reader: TraceReader,
    finding_filter: FindingFilter,
    rules: Iterable[Rule],
    notes: Iterable[str] = (),
) -> Report:
    """Read a report. Raises `UsageError` for a generation that the trace does not have."""
    about = reader.generations()
    if finding_filter.generation not in (None, *(row.generation for row in about)):
        known = f"0 to {len(about) - 1}" if about else "none"
        raise UsageError(
            f"The trace has no generation {finding_filter.generation}.", hint=f"It has {known}."
        )
    order = list(Severity)
    found = [one for one in reader.findings() if finding_filter.matches(one)]
    found.sort(key=lambda one: (order.index(one.severity), one.id, one.generation))
    looked = rules_that_ran(reader, rules)
    return Report(
        trace=reader.path,
        state=reader.state,
        run=reader.run(),
        findings=tuple(found),
        position_texts=tuple(read_position_texts(reader, one) for one in found),
        rules=looked,
        kinds={id_: kind for rule in looked for id_, kind in rule.findings.items()},
        disabled_rules=tuple(
            row.event.text for row in reader.events() if row.event.kind == "rule-off"
        ),
        notes=tuple(notes),
    )


def rules_that_ran(reader: TraceReader, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules that have looked at the trace, live or afterwards."""
    rules = tuple(rules)
    # The findings panel shares this module, and needs no rules to show its first screen.
    from flexinspect.analysis.offline_rules import live_rule_names

    names = live_rule_names(reader.run(), rules) | {rule for rule, _ in reader.reviews()}
    return tuple(rule for rule in rules if rule.name in names)


def read_position_texts(
    reader: TraceReader, finding: Finding, limit: int = MAX_POSITION_TEXTS
) -> PositionTexts:
    """Return the first positions of a finding with the text of their tokens, one look-up each."""
    branches = lineage(reader, finding.generation, finding.branch)
    found = []
    for pos in finding.positions[:limit]:
        tokens = (
            token
            for branch, _, _ in branches
            for token in reader.tokens(finding.generation, branch, pos, pos + 1)
        )
        found.append((pos, _token_text(next(tokens, None))))
    return tuple(found)


def _token_text(token: TokenRecord | None) -> str:
    text = (token.text or token.token) if token is not None else ""
    return text.replace("\n", "↵")


def describe_place(finding: Finding) -> str:
    """Return "generation 0, step 3, layer 2", naming what the finding names."""
    named: tuple[tuple[str, Callable[[Finding], int | None]], ...] = (
        ("generation", lambda one: one.generation),
        ("branch", lambda one: one.branch or None),
        ("step", lambda one: one.step),
        ("layer", lambda one: one.layer),
        ("head", lambda one: one.head),
    )
    return ", ".join(f"{name} {n}" for name, get in named if (n := get(finding)) is not None)


def format_times(n: int) -> str:
    """Return "once" or "1 064 times"."""
    return "once" if n == 1 else f"{format_thousands(n)} times"


def format_thousands(n: int) -> str:
    """Return 1064 as "1 064"."""
    return f"{n:,}".replace(",", " ")


def finding_page(id_: str) -> str:
    """Return where an id is explained."""
    return f"docs/findings/{id_}.md"


def _number_range(numbers: set[int], n: int) -> NumberRange:
    return NumberRange(min(numbers), max(numbers), n)
