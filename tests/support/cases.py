"""Runs a case script as a user does, and returns what was found in its trace."""

from __future__ import annotations

from pathlib import Path

from flexinspect.findings import Finding
from flexinspect.trace.reader import open_trace
from support.captures import capture

CASES = Path(__file__).parents[1] / "cases"


def found_in_case(tmp_path: Path, name: str, declare: str = "") -> list[Finding]:
    """Capture a case (or a path without its suffix) as `flexinspect run` does, as declared."""
    out = tmp_path / f"{Path(name).name}.flextrace"
    ran = capture(CASES / f"{name}.py", out, declare=declare)
    assert ran.code == 0, ran
    with open_trace(out) as reader:
        off = [row.event.text for row in reader.events() if row.event.kind == "rule-off"]
        assert off == []
        return reader.findings()


def segments(*spans: tuple[int, int], mask: str = "", label: str = "paraphrase") -> str:
    """Return the declaration of spans, numbered from 1."""
    tables = [
        f'[[segments]]\nstart = {start}\nstop = {stop}\nlabel = "{label} {number}"\n'
        for number, (start, stop) in enumerate(spans, start=1)
    ]
    return (f'mask = "{mask}"\n' if mask else "") + "\n".join(tables)
