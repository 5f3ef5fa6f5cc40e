"""The programs of `benchmarks/generation_bugs` once: every error is named, every twin is clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.captures import capture

from benchmarks.common import RESULTS
from benchmarks.generation_bugs import runner
from benchmarks.generation_bugs.cases import CASES, CORRECT, Case, Named
from benchmarks.generation_bugs.first_list import FIRST_LIST
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.job import Declaration
from flexinspect.trace.reader import open_trace

pytestmark = pytest.mark.slow


def found_in(folder: Path, name: str, variant: str, declared: Declaration) -> list[Finding]:
    out = folder / f"{name}-{variant}.flextrace"
    capture(runner.PROGRAM, out, args=(name, variant), declared=declared)
    with open_trace(out) as reader:
        return reader.findings()


@pytest.mark.parametrize("name", CASES)
def test_a_default_run_names_the_error(tmp_path: Path, name: str) -> None:
    found = found_in(tmp_path, name, "bug", CASES[name].declaration)
    assert runner.score(found, CASES[name])[0] == 2, [one.sentence for one in found]


@pytest.mark.parametrize("name", CASES)
def test_the_repaired_twin_gets_no_error_and_no_warning(tmp_path: Path, name: str) -> None:
    assert runner.alarms(found_in(tmp_path, name, "fixed", CASES[name].declaration)) == []


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_gets_no_error_and_no_warning(tmp_path: Path, name: str) -> None:
    assert runner.alarms(found_in(tmp_path, name, "fixed", CORRECT[name])) == []


def test_a_finding_counts_only_with_its_words_and_a_note_never() -> None:
    case = Case("", (Named("a.b", ("layer 1", "RoPE")),), ("c.d",))
    right = Finding("a.b", Severity.WARNING, "In layer 1 RoPE is missing.")
    assert runner.score([right], case) == (2, right)
    note = replace(right, severity=Severity.NOTE)
    assert runner.score([note], case) == (0, None)
    other = replace(right, sentence="In layer 2 RoPE is missing.")
    assert runner.score([other], case) == (1, other)
    hint = replace(right, id="c.d")
    assert runner.score([note, hint], case) == (1, hint)
    assert runner.score([replace(right, id="e.f")], case) == (0, None)


def test_the_page_has_the_tables_of_the_last_measurement() -> None:
    facts = json.loads((RESULTS / "generation-bugs.json").read_text("utf-8"))
    assert [list(facts[part]) for part in ("bugs", "clean", "first")] == [
        list(CASES),
        list(CORRECT),
        list(FIRST_LIST),
    ]
    assert runner.section(facts) in runner.PAGE.read_text("utf-8")
