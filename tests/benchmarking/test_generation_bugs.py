"""The programs of `benchmarks/generation_bugs` once: every error is named, every twin is clean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.captures import capture

from benchmarks.generation_bugs import runner
from benchmarks.generation_bugs.cases import CASES, CORRECT, KNOWN_ALARMS, NOT_NAMED, Case
from flexinspect.records.finding import Finding
from flexinspect.records.job import Declaration
from flexinspect.trace.reader import open_trace

pytestmark = pytest.mark.slow


def marked(names: Iterable[str]) -> list[object]:
    """Return names as parameters; those with a known false alarm are expected to fail."""
    known = pytest.mark.xfail(reason="a known false alarm", strict=False)
    return [pytest.param(one, marks=(known,) if one in KNOWN_ALARMS else ()) for one in names]


def found_in(folder: Path, name: str, variant: str, declared: Declaration) -> list[Finding]:
    out = folder / f"{name}-{variant}.flextrace"
    capture(runner.PROGRAM, out, args=(name, variant), declared=declared)
    with open_trace(out) as reader:
        return reader.findings()


@pytest.mark.parametrize(("name", "case"), CASES.items())
def test_a_default_run_names_the_error_and_says_nothing_about_its_repaired_twin(
    tmp_path: Path, name: str, case: Case
) -> None:
    found = found_in(tmp_path, name, "bug", case.declaration)
    points, _ = runner.score(found, case)
    sentences = [one.sentence for one in found]
    assert points == NOT_NAMED.get(name, 2), sentences
    assert runner.alarms(found_in(tmp_path, name, "fixed", case.declaration)) == []


@pytest.mark.parametrize("name", marked(CORRECT))
def test_a_correct_program_gets_no_error_and_no_warning(tmp_path: Path, name: str) -> None:
    assert runner.alarms(found_in(tmp_path, name, "fixed", CORRECT[name])) == []
