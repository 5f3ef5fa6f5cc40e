"""The summary of a trace: counts, the worst findings, and the command that opens it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from msgspec import Struct

from flexinspect.analysis.reports.collect import describe_place
from flexinspect.core.environment import command_path
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.trace.reader import TraceReader

MAX_FINDINGS = 5  # findings that a summary shows at most

# Each badge sets text and background colour, all else inherits: readable on light and dark pages.
_BADGES = {
    Severity.ERROR: "color: #fff; background: #b3261e",
    Severity.WARNING: "color: #000; background: #f2b705",
    Severity.NOTE: "color: #fff; background: #3b6ea5",
}
_CELL = "text-align: left; vertical-align: top; padding: 2px 10px 2px 0"


class TraceSummary(Struct, frozen=True):
    """The summary of a trace at `path`; `findings` are the worst of `n_findings`."""

    path: Path
    state: str
    n_generations: int
    n_steps: int
    n_findings: int
    findings: tuple[Finding, ...]

    def text(self) -> str:
        """Return the lines for a terminal, without control characters."""
        return "\n".join([f"{self._name()} {self._counts()}", *self.closing_lines()])

    def closing_lines(self) -> list[str]:
        """Return the lines of the findings, and the command that opens the trace."""
        lines = [
            f"  {f.severity}: {escape_unprintable(f.sentence)}  [{f.id}]" for f in self.findings
        ]
        return [*lines, *([f"  {self._more()}"] if self._more() else ()), *self._commands()]

    def html(self) -> str:
        """Return HTML for a notebook: everything is escaped, nothing is loaded from elsewhere."""
        commands = escape("\n".join(self._commands()))
        parts = [
            f"<div><strong>{escape(self._name())}</strong> {escape(self._counts())}</div>",
            _findings_table(self.findings) if self.findings else "",
            f"<div>{self._more()}</div>" if self._more() else "",
            f'<pre style="margin: 6px 0"><code>{commands}</code></pre>',
        ]
        return f'<div style="color: inherit">{"".join(parts)}</div>'

    def _commands(self) -> list[str]:
        return [*filter(None, [declare_command(self.findings, self.path)]), self.command()]

    def command(self) -> str:
        """Return the shell command that opens the trace."""
        return f"flexinspect open {shlex.quote(escape_unprintable(str(self.path)))}"

    def _name(self) -> str:
        return escape_unprintable(self.path.name)

    def _counts(self) -> str:
        counts = f"{plural(self.n_generations, 'generation')}, {plural(self.n_steps, 'step')}, "
        return f"({self.state}): {counts}{plural(self.n_findings, 'finding')}"

    def _more(self) -> str:
        rest = self.n_findings - len(self.findings)
        return f"and {rest} more" if rest else ""


def summarize_trace(reader: TraceReader, path: Path) -> TraceSummary:
    """Return the summary of the trace that `reader` reads; `path` is its final path.

    Raises `TraceError` for a damaged trace.
    """
    with reader.snapshot():
        generations = [row.generation for row in reader.generations()]
        findings = reader.findings()
        return TraceSummary(
            path=path,
            state=reader.state,
            n_generations=len(generations),
            n_steps=sum(reader.n_steps(number) for number in generations),
            n_findings=len(findings),
            findings=sort_by_severity(findings)[:MAX_FINDINGS],
        )


def declare_command(findings: Sequence[Finding], path: Path) -> str:
    """Return the command that declares the mask as the first of the findings asks; "" for none."""
    for finding in findings:
        if "flexinspect declare" in finding.fix:
            shift = finding.evidence.get("shift")
            move = f" --move {shift}" if isinstance(shift, int) else ""
            return f"flexinspect declare {command_path(path)}{move}"
    return ""


def _findings_table(findings: tuple[Finding, ...]) -> str:
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in ("severity", "where", "finding"))
    rows = ""
    for finding in findings:
        badge = f"padding: 0 6px; border-radius: 3px; {_BADGES[finding.severity]}"
        cells = (
            f'<span style="{badge}">{finding.severity}</span>',
            escape(describe_place(finding)),
            f"{escape(escape_unprintable(finding.sentence))} <code>[{escape(finding.id)}]</code>",
        )
        row = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
        rows += f"<tr>{row}</tr>"
    style = "border-collapse: collapse; margin: 6px 0; color: inherit; background: transparent"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
