"""Runs a case script as a user does, and returns what was found in its trace."""

from __future__ import annotations

from pathlib import Path

from flexinspect.findings import Finding
from flexinspect.trace.reader import open_trace
from support.forks import run_alone

CASES = Path(__file__).parents[1] / "cases"


def found_in_case(tmp_path: Path, name: str, declare: str = "") -> list[Finding]:
    """Run `flexinspect run` over a case (or a path without its suffix), with a declaration."""
    out = tmp_path / f"{Path(name).name}.flextrace"
    words = ["-m", "flexinspect", "run", "--no-ui", "--out", str(out)]
    if declare:
        declaration = tmp_path / f"{Path(name).name}.toml"
        declaration.write_text(declare, encoding="utf-8")
        words += ["--declare", str(declaration)]
    ran = run_alone([*words, str(CASES / f"{name}.py")])
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
