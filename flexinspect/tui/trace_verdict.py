"""The verdict on a trace in a few words, for lists of traces."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import TraceError
from flexinspect.panels.findings_of_place import FindingSummary, summarize_groups
from flexinspect.trace.queries import finding_groups, generation_range
from flexinspect.trace.reader import TraceReader, open_trace


class TraceVerdict(NamedTuple):
    """The verdict with its sign, its colour in the theme, and the first answer."""

    text: str
    color: str = "muted"
    answer: str = ""


def read_verdict(path: Path) -> TraceVerdict:
    """Read the verdict on a trace: its worst findings, or else how its run has ended."""
    try:
        with open_trace(path) as reader, reader.snapshot():
            text, color = _judge(reader)
            return TraceVerdict(text, color, _first_answer(reader))
    except TraceError:
        return TraceVerdict("? damaged", "error")


def _judge(reader: TraceReader) -> tuple[str, str]:
    summary = summarize_groups(finding_groups(reader))
    if summary.errors:
        return f"✖ {FindingSummary(errors=summary.errors).counts()}", "error"
    state, run = reader.state, reader.run()
    if state in ("failed", "interrupted"):
        return f"✖ {state}", "error"
    if state == "recording":
        return ("● recording", "accent") if is_recorder_alive(run) else ("✖ not ended", "error")
    if summary.warnings:
        return f"▲ {FindingSummary(warnings=summary.warnings).counts()}", "warning"
    if summary.notes:
        return f"● {FindingSummary(notes=summary.notes).counts()}", "foreground"
    if run.get("rules") or reader.reviews():
        return "✓ no problems", "success"
    return "– not checked", "muted"


def _first_answer(reader: TraceReader) -> str:
    rows = generation_range(reader, 0, 1)  # there may be a hundred thousand
    return " ".join(rows[0].answer.split()) if rows else ""
