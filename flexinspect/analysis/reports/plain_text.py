"""Findings as text for a terminal of any width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from flexinspect.analysis.reports import collect
from flexinspect.analysis.reports.collect import describe_place, format_thousands
from flexinspect.core.text import escape_unprintable, format_ranges, plural
from flexinspect.records.finding import Finding, Severity

MAX_OTHER_SENTENCES = 4  # sentences of a group that are printed besides the first
MAX_EVIDENCE = 12  # entries of a finding's evidence that are printed
_MAX_VALUE_LENGTH = 160
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold"}


def print_report(report: collect.Report, console: Console) -> None:
    """Print all groups, worst first, with their explanation, and the counts at the end."""
    texts = dict(zip(map(id, report.findings), report.position_texts, strict=True))
    ranks = dict(zip(map(id, report.findings), report.ranks, strict=False))
    for group in report.groups():
        heading = Text.assemble(
            (str(group.severity), _STYLES[group.severity]),
            (f"  {escape_unprintable(group.id)}", "bold"),
            (f"  {escape_unprintable(group.describe_extent())}", "dim"),
        )
        _print_paragraph(console, heading)
        own_ranks = [ranks.get(id(finding), ()) for finding in group.findings]
        for text in _group_lines(group, texts.get(id(group.findings[0]), ()), own_ranks):
            _print_paragraph(console, text, indent=2)
        console.print()
    for remark in (*report.disabled_rules, *report.notes):
        _print_paragraph(console, Text(f"! {escape_unprintable(remark)}", style="yellow"))
    _print_paragraph(console, _totals_line(report))
    if not report.findings and report.is_undeclared:
        _print_paragraph(console, Text(collect.UNDECLARED))


def _print_paragraph(console: Console, text: Text, *, indent: int = 0) -> None:
    """Print a wrapped paragraph without trailing spaces."""
    for line in text.wrap(console, max(console.width - indent, 20)):
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True)


def _group_lines(
    group: collect.ReportGroup, texts: collect.PositionTexts, ranks: Sequence[tuple[int, ...]]
) -> Iterator[Text]:
    first = group.findings[0]
    yield Text(escape_unprintable(first.sentence))
    if on_ranks := {rank for own in ranks for rank in own}:
        yield _labelled_line("ranks", format_ranges(on_ranks))
    yield from (_labelled_line(name, text) for name, text in _evidence_lines(first, texts))
    yield from _other_sentences(group)
    for name in ("why", "confirm", "fix", "query"):
        if text := getattr(first, name):
            yield _labelled_line(name, escape_unprintable(text))
    yield _labelled_line("more", f"flexinspect explain {escape_unprintable(group.id)}")


def _labelled_line(name: str, text: str) -> Text:
    return Text.assemble((f"{name}  ", "cyan"), text)


def _evidence_lines(finding: Finding, texts: collect.PositionTexts) -> Iterator[tuple[str, str]]:
    yield "at", describe_place(finding)
    if texts:
        named = ", ".join(
            f"{p} “{escape_unprintable(text)}”" if text else str(p) for p, text in texts
        )
        more = len(finding.positions) - len(texts)
        yield "positions", named + (f" and {format_thousands(more)} more" if more > 0 else "")
    facts = [f"{escape_unprintable(k)} {_value(v)}" for k, v in finding.evidence.items()]
    if facts:
        yield "evidence", " · ".join(facts[:MAX_EVIDENCE])


def _value(value: object) -> str:
    return escape_unprintable(collect.format_evidence(value))[:_MAX_VALUE_LENGTH]


def _other_sentences(group: collect.ReportGroup) -> list[Text]:
    """Return the sentences that differ from the first, each once."""
    first, *rest = group.findings
    by_sentence = {f.sentence: f for f in reversed(rest) if f.sentence != first.sentence}
    others = list(reversed(by_sentence.values()))
    lines = [
        Text(f"also: {escape_unprintable(other.sentence)} ({describe_place(other)})", style="dim")
        for other in others[:MAX_OTHER_SENTENCES]
    ]
    if (n_more := len(others) - MAX_OTHER_SENTENCES) > 0:
        lines.append(Text(f"and {format_thousands(n_more)} more", style="dim"))
    return lines


def _totals_line(report: collect.Report) -> Text:
    if report.findings:
        return Text(_counts(report.findings), style="bold")
    if report.left_out:
        return Text(f"No finding matches the filter. Without it: {_counts(report.left_out)}.")
    if not report.rules:
        return Text("No findings: no rule ran.")
    return Text(f"No problems found by {plural(len(report.rules), 'rule')}; --json lists them.")


def _counts(findings: Sequence[Finding]) -> str:
    """Return "1 error, 2 notes", the number of findings of each severity, worst first."""
    numbers = Counter(finding.severity for finding in findings)
    return ", ".join(
        f"{format_thousands(n)} {severity}{'' if n == 1 else 's'}"
        for severity in Severity
        if (n := numbers[severity])
    )
