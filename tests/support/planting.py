"""Plants a fault in a run of a real tiny model through the public API, and returns what was found.

found = planted(tmp_path, model, lambda: model(ids), segments=[(1, 7, "paraphrase 1"), ...])
assert one(found, "mask.leak").layer == 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flexinspect
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace


def planted(
    tmp_path: Path, model: Any, run: Callable[[], Any], *, name: str = "planted", **watch: Any
) -> list[Finding]:
    """Run under `flexinspect.watch` and return the findings of the trace, in order."""
    out = tmp_path / f"{name}.flextrace"
    with flexinspect.watch(model, out=out, **watch):
        run()
    with open_trace(out) as reader:
        off = [row.event.text for row in reader.events() if row.event.kind == "rule-disabled"]
        assert off == [], off
        found = reader.findings()
        for finding in found:
            if finding.query:  # evidence that cannot be looked up is none
                reader._query(finding.query, ())
        return found


def of(found: Sequence[Finding], finding_id: str) -> list[Finding]:
    """Return the findings of one id."""
    return [finding for finding in found if finding.id == finding_id]


def one(found: Sequence[Finding], finding_id: str) -> Finding:
    """Return the only finding of an id."""
    (finding,) = of(found, finding_id)
    return finding


def serious(found: Sequence[Finding]) -> list[Finding]:
    """Return errors and warnings: what a clean run must not have."""
    return [finding for finding in found if finding.severity is not Severity.NOTE]
