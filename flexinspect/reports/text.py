"""Findings for people, in a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from flexinspect.findings import Finding, Severity
from flexinspect.reports.collect import Group, Report, Words, page, place_words, thousands
from flexinspect.text import visible
from flexinspect.trace.values import plain_json

MOST_MORE = 4
"""Sentences of a group that are told beside the first."""
MOST_FACTS = 12
_LONGEST = 160
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold"}


def print_report(report: Report, console: Console) -> None:
    """Print all groups, worst first, with what to make of them, and the counts at the end."""
    words = dict(zip(map(id, report.findings), report.words, strict=True))
    for group in report.groups():
        _print(console, _head(group))
        for text in _body(group, words.get(id(group.findings[0]), ())):
            _print(console, text, indent=2)
        console.print()
    for said in (*report.off, *report.notes):
        _print(console, Text(f"! {visible(said)}", style="yellow"))
    _print(console, _total(report))


def _print(console: Console, text: Text, *, indent: int = 0) -> None:
    """Print a paragraph, its lines without blanks at their ends."""
    for line in text.wrap(console, max(console.width - indent, 20)):
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True)


def _head(group: Group) -> Text:
    head = Text(f"{group.severity}", style=_STYLES[group.severity])
    head = Text.assemble(head, (f"  {visible(group.id)}", "bold"))
    return head.append(f"  {visible(group.extent_words())}", style="dim")


def _body(group: Group, words: Words) -> Iterator[Text]:
    first = group.findings[0]
    yield Text(visible(first.sentence))
    yield from (_line(name, text) for name, text in _facts(first, words))
    yield from _more(group)
    for name in ("why", "confirm", "fix", "query"):
        if said := getattr(first, name):
            yield _line(name, visible(said))
    yield _line("page", page(visible(group.id)))


def _line(name: str, text: str) -> Text:
    return Text.assemble((f"{name}  ", "cyan"), text)


def _facts(finding: Finding, words: Words) -> Iterator[tuple[str, str]]:
    yield "at", place_words(finding)
    if words:
        named = ", ".join(f"{pos} “{visible(text)}”" if text else str(pos) for pos, text in words)
        more = len(finding.positions) - len(words)
        yield "positions", named + (f" and {thousands(more)} more" if more > 0 else "")
    facts = []
    for key, value in list(finding.evidence.items())[:MOST_FACTS]:
        shown = value if isinstance(value, str) else plain_json(value)
        facts.append(f"{key} {visible(shown)[:_LONGEST]}")
    if facts:
        yield "evidence", " · ".join(facts)


def _more(group: Group) -> list[Text]:
    """Tell what else was found: sentences that differ from the first, each once."""
    first, *rest = group.findings
    by_sentence = {one.sentence: one for one in reversed(rest) if one.sentence != first.sentence}
    others = list(reversed(by_sentence.values()))
    lines = [
        Text(f"also: {visible(one.sentence)} ({place_words(one)})", style="dim")
        for one in others[:MOST_MORE]
    ]
    if len(others) > MOST_MORE:
        lines.append(Text(f"and {thousands(len(others) - MOST_MORE)} more", style="dim"))
    return lines


def _total(report: Report) -> Text:
    counts = [
        f"{thousands(n)} {severity}{'' if n == 1 else 's'}"
        for severity in Severity
        if (n := report.count(severity))
    ]
    if counts:
        return Text(", ".join(counts), style="bold")
    names = ", ".join(visible(rule.name) for rule in report.rules)
    looked = f"{len(report.rules)} rules looked ({names})" if names else "no rule has looked"
    return Text(f"No finding: {looked}.")
