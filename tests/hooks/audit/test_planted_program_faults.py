"""Programs with one planted fault: the audit names it, and says nothing about the repaired twin."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures import capture
from support.faulty_programs import HEAD, PROGRAMS
from support.paths import TESTS

from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AUDIT_SKIPPED_EVENT
from flexinspect.trace.reader import open_trace

KINDS = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)


def audited(folder: Path, body: str, *, broken: bool) -> tuple[list[Finding], list[EventRecord]]:
    """Run a program under capture; return the audit's findings and events."""
    script, out = folder / "program.py", folder / f"{broken}.flextrace"
    script.write_text(HEAD.format(tests=str(TESTS), broken=broken) + body, encoding="utf-8")
    ran = capture(script, out)
    assert ran.code == 0, ran.err
    with open_trace(out) as reader:
        events = [row.event for row in reader.events() if row.event.kind in KINDS]
        findings = [one for one in reader.findings() if one.id.startswith("audit.")]
    return findings, events


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_finding_names_the_planted_fault_and_the_repaired_twin_is_clean(
    tmp_path: Path, name: str
) -> None:
    body, words = PROGRAMS[name]
    findings, events = audited(tmp_path, body, broken=True)
    assert [words in one.sentence for one in findings] == [True], (findings, events)
    findings, events = audited(tmp_path, body, broken=False)
    assert not findings, [one.sentence for one in findings]
    assert all("agree with the untouched implementation" in one.text for one in events), events
