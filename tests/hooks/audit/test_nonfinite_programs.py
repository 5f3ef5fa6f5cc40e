"""The finding of a NaN names the operation, the module and the rows that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.captures import capture
from support.named_programs import HEAD, NONFINITE
from support.paths import TESTS

from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.reader import open_trace


def findings_of(folder: Path, body: str, *, broken: bool) -> list[Finding]:
    script, out = folder / "program.py", folder / f"{broken}.flextrace"
    script.write_text(HEAD.format(tests=str(TESTS), broken=broken) + body, encoding="utf-8")
    ran = capture(script, out)
    assert ran.code == 0, ran.err
    with open_trace(out) as reader:
        return [one for one in reader.findings() if one.severity is not Severity.NOTE]


@pytest.mark.parametrize("name", NONFINITE)
def test_the_operation_that_made_the_first_nan_is_named(tmp_path: Path, name: str) -> None:
    program = NONFINITE[name]
    first, *others = findings_of(tmp_path, program.body, broken=True)
    assert first.id.startswith(program.finding)
    for words in program.words:
        assert words in first.sentence
    assert all(one.id.startswith("numbers.") for one in others)
    assert first.evidence["origin"]["operation"]
    assert findings_of(tmp_path, program.body, broken=False) == []
