"""Programs with one fault each have one finding that names it; repaired, they have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures import capture
from support.named_programs import CLEAN, FAILURES, HEAD, OPTIONS, Program
from support.paths import TESTS

from flexinspect.cli.main import main
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace


def findings_of(folder: Path, program: Program, *, broken: bool) -> list[Finding]:
    """Run a program under capture; return its findings, without notes."""
    script, out = folder / "program.py", folder / f"{broken}.flextrace"
    script.write_text(HEAD.format(tests=str(TESTS), broken=broken) + program.body, encoding="utf-8")
    ran = capture(script, out, declare=program.declare)
    assert ran.code == (program.code if broken else 0), ran.err
    with open_trace(out) as reader:
        return [one for one in reader.findings() if one.severity is not Severity.NOTE]


@pytest.mark.parametrize("name", FAILURES)
def test_the_exception_is_named_once_and_the_repaired_twin_is_clean(
    tmp_path: Path, name: str
) -> None:
    program = FAILURES[name]
    (finding,) = findings_of(tmp_path, program, broken=True)
    assert (finding.id, finding.severity) == (program.finding, Severity.ERROR)
    for words in program.words:
        assert words in finding.sentence
    assert main(["findings", str(tmp_path / "True.flextrace")]) == 1
    assert findings_of(tmp_path, program, broken=False) == []


def test_an_exception_of_the_program_that_leaves_generate_and_is_caught_is_a_note(
    tmp_path: Path,
) -> None:
    body = """
class Enough(Exception):
    pass

def stop(ids, scores):
    if BROKEN and ids.shape[1] > 13:
        raise Enough
    return scores

try:
    generate(make_model("llama"), logits_processor=[stop])
except Enough:
    pass
"""
    assert findings_of(tmp_path, Program(body, "", ()), broken=True) == []
    other, again = body.replace("except Enough", "except KeyError"), tmp_path / "again"
    again.mkdir()
    (uncaught,) = findings_of(again, Program(other, "", (), 1), broken=True)
    assert (uncaught.id, uncaught.severity) == ("run.exception", Severity.ERROR)
    assert "raised Enough" in uncaught.sentence


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_program_told_torch_and_generate_is_judged(tmp_path: Path, name: str) -> None:
    program = OPTIONS[name]
    (finding,) = findings_of(tmp_path, program, broken=True)
    assert finding.id == program.finding
    for words in program.words:
        assert words in finding.sentence
    assert findings_of(tmp_path, program, broken=False) == []


@pytest.mark.parametrize("name", CLEAN)
def test_a_correct_program_that_resembles_a_fault_is_clean(tmp_path: Path, name: str) -> None:
    assert findings_of(tmp_path, Program(CLEAN[name], "", ()), broken=True) == []
