"""The result of a run, read back from its trace: answers, speed, cost, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flexinspect.answers import is_correct_answer
from flexinspect.commands.output import Output
from flexinspect.commands.progress import first_question
from flexinspect.findings import Finding, Severity, sort_by_severity
from flexinspect.sizes import human_bytes
from flexinspect.text import escape_unprintable
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.rows import GenerationRow

_SHOWN_ANSWERS = 3
_SHOWN_FINDINGS = 5
_MAX_FINDINGS = 200
_MAX_ANSWER_CHARS = 300
"""Characters of an answer that are printed."""


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """One generation's outcome; `correct` is None when nothing was expected."""

    generation: int
    sample_id: str
    question: str
    answer: str
    expected: tuple[str, ...]
    correct: bool | None
    state: str
    stop_reason: str
    tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished (or interrupted) run left."""

    trace: Path
    state: str
    size: int
    run: Mapping[str, Any]
    answers: tuple[GenerationSummary, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the summary for scripts."""
        return {
            "trace": str(self.trace),
            "state": self.state,
            "bytes": self.size,
            "model": self.run.get("model"),
            "level": self.run.get("level"),
            "cost": self.run.get("cost"),
            "generations": [asdict(answer) for answer in self.answers],
            "notes": list(self.notes),
            "findings": [_finding_json(finding) for finding in self.findings],
        }


def summarize_run(path: Path, code: int) -> RunSummary:
    """Read a trace's outcome. Raises `TraceError`."""
    with open_trace(path) as reader:
        rows = reader.generations()
        return RunSummary(
            trace=path,
            state=reader.state,
            size=path.stat().st_size,
            run=reader.run(),
            answers=tuple(_generation_summary(row, reader) for row in rows),
            notes=tuple(
                row.event.text
                for row in reader.events()
                if row.event.kind not in ("phase", "error")
            ),
            findings=sort_by_severity(
                row.finding for row in reader.finding_rows(limit=_MAX_FINDINGS)
            ),
        )


def _finding_json(finding: Finding) -> dict[str, Any]:
    facts = asdict(finding)
    return {**facts, "severity": str(finding.severity), "evidence": dict(finding.evidence)}


def _generation_summary(row: GenerationRow, reader: TraceReader) -> GenerationSummary:
    steps = reader.steps(row.generation)
    decode_ms = sum(step.wall_ms for step in steps[1:])
    answer = row.answer or _partial_answer(row, reader)
    return GenerationSummary(
        generation=row.generation,
        sample_id=row.sample_id,
        question=first_question(row, reader),
        answer=answer,
        expected=row.expected,
        correct=is_correct_answer(answer, row.expected) if row.expected else None,
        state=row.state,
        stop_reason=row.stop_reason,
        tokens=len(steps),
        tokens_per_s=round((len(steps) - 1) / (decode_ms / 1e3), 2) if decode_ms else None,
    )


def _partial_answer(row: GenerationRow, reader: TraceReader) -> str:
    """Return what a generation that never ended had said."""
    last = next(iter(reader.segments(row.generation)[::-1]), None)
    tokens = [] if last is None else reader.tokens(row.generation, start=last.start)
    return "".join(token.text for token in tokens if not token.special).strip()


def print_summary(
    summary: RunSummary, console: Console | None = None, *, limit: int | None = None
) -> None:
    """Print the answers beside those expected, what capture cost, and the next commands.

    On stdout, unless another `console` is given; of more than `most` answers only the last.
    """
    console = console or Output()
    spoken = [answer for answer in summary.answers if answer.question or answer.answer]
    n_more = len(spoken) - limit if limit is not None else 0
    if n_more > 0:
        console.print(f"      {n_more} generations before these, in the interface", soft_wrap=True)
    for answer in spoken[max(n_more, 0) :]:
        console.print(_answer_text(answer), soft_wrap=True)
    if silent := len(summary.answers) - len(spoken):
        console.print(f"{silent} generation{'s' if silent > 1 else ''} without tokens")
    console.print(_cost_line(summary), soft_wrap=True)
    for finding in summary.findings[:_SHOWN_FINDINGS]:
        console.print(_finding_text(finding), soft_wrap=True)
    if len(summary.findings) > _SHOWN_FINDINGS:
        more = len(summary.findings) - _SHOWN_FINDINGS
        console.print(f"      and {more} more findings, in the interface", soft_wrap=True)
    where = escape_unprintable(str(summary.trace))
    console.print(f"trace {where} ({human_bytes(summary.size)}, {summary.state})", soft_wrap=True)
    name = escape_unprintable(shlex.quote(_relative_path(summary.trace)))
    console.print(f"next  flexinspect open {name}", soft_wrap=True)


def _finding_text(finding: Finding) -> Text:
    style = {Severity.ERROR: "red", Severity.WARNING: "yellow"}.get(finding.severity, "")
    text = Text(f"{finding.severity}: ", style=style)
    text.append(escape_unprintable(finding.sentence))
    text.append(f"  [{finding.id}]", style="dim")
    return text


def _answer_text(answer: GenerationSummary) -> Text:
    mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "")}[answer.correct]
    text = Text(f"{mark} ", style=style)
    text.append(escape_unprintable(answer.question), style="bold")
    text.append("  →  ")
    shown = escape_unprintable(answer.answer[:_MAX_ANSWER_CHARS]) + (
        "…" if len(answer.answer) > _MAX_ANSWER_CHARS else ""
    )
    text.append(shown or "(nothing)", style=style)
    if answer.expected:
        shown = " | ".join(answer.expected[:_SHOWN_ANSWERS])
        more = len(answer.expected) - _SHOWN_ANSWERS
        text.append(f"  expected: {escape_unprintable(shown)}", style="dim")
        text.append(f" (+{more} more)" if more > 0 else "", style="dim")
    if answer.state != "finished":
        text.append(f"  [{answer.state}]", style="yellow")
    return text


def _cost_line(summary: RunSummary) -> str:
    tokens = sum(answer.tokens for answer in summary.answers)
    rates = [a.tokens_per_s for a in summary.answers if a.tokens_per_s]
    parts = [f"{tokens} token{'s' * (tokens != 1)}"]
    if rates:
        parts.append(f"{sum(rates) / len(rates):.1f} tokens/s")
    cost = summary.run.get("cost")
    if isinstance(cost, Mapping) and cost.get("steps"):
        ratio = 100 * float(cost["ratio"])
        took = f"{ratio:.1f} %" if ratio < 1000 else "longer than the model"
        parts.append(f"capture at level {summary.run.get('level')} took {took}")
    return "      " + ", ".join(parts)


def _relative_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
