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
from flexinspect_hooks.audit.trace_audit import audit_trace

KINDS = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)

SAVED = """
unsaved = make_model
def make_model(family, **options):
    model = unsaved(family, **options)
    model.save_pretrained({folder!r})
    model.name_or_path = {folder!r}
    return model
"""
BY_DIGESTS = (
    "key and value heads are tiled",
    "padding is not masked",
    "the residual of a layer is lost",
    "rotary tables of another base",
    "the cache keeps a key of another row",
    "attention in bfloat16",
    "rejected proposals stay in the cache",
)
"""Programs whose traces are judged as well: all others would give the same, and take time. Not
judged are programs with a score_mod, with other parameters than the saved ones, and steps whose
cache was filled before."""


def audited(folder: Path, body: str, *, broken: bool) -> tuple[list[Finding], list[EventRecord]]:
    """Run a program under capture; return the audit's findings and events."""
    script, out = folder / "program.py", folder / f"{broken}.flextrace"
    saved = SAVED.format(folder=str(folder / "model"))
    script.write_text(HEAD.format(tests=str(TESTS), broken=broken) + saved + body, "utf-8")
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
    if name in BY_DIGESTS:
        again = audit_trace(tmp_path / "True.flextrace").findings
        assert [words in one.sentence for one in again] == [True], again
        assert (again[0].step, again[0].layer) == (findings[0].step, findings[0].layer)
    findings, events = audited(tmp_path, body, broken=False)
    assert not findings, [one.sentence for one in findings]
    assert all("agree with the untouched implementation" in one.text for one in events), events
    if name in BY_DIGESTS:
        found = audit_trace(tmp_path / "False.flextrace")
        assert not found.findings, [one.sentence for one in found.findings]
        assert any(one.data["steps"] for one in found.events)
