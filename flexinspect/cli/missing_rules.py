"""Runs the rules that a trace has not been checked by, for the commands that print findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexinspect.cli.progress import progress_bar

if TYPE_CHECKING:
    from flexinspect.rules.engine import Rule
    from flexinspect.trace.reader import TraceReader


def run_missing_rules(reader: TraceReader, rules: Sequence[Rule]) -> list[str]:
    """Run the rules that have not checked the trace; `reader` gets findings that are not stored."""
    from flexinspect.analysis.offline_rules import review
    from flexinspect.trace.file.writer import review_statements

    with progress_bar("checking the steps") as update:
        done = review(reader, rules, progress=update)
    if done.unstored:
        reader.add_reviews(review_statements(done.unstored))
    return [done.note] if done.note else []
