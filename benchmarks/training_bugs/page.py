"""The tables of `docs/diagnosis.md` about trainings, from the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.training_bugs.further import BUGS as FURTHER

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
SECTIONS = {
    "## Errors of TrainCheck's artifact": "bugs",
    "## Further errors": "further",
    "## Programs without an error": "clean",
}
"""The group of results of `training-bugs` that the tables below a heading show."""
INVARIANTS = "## Learnt invariants"
"""The heading of the tables of `inferred-invariants`."""

Results = Mapping[str, Any]  # by the name of an error or a program
MakeCells = Callable[[str, Any], list[str]]


def filled(page: str, facts: Mapping[str, Any]) -> str:
    """Return the page with the results of `training-bugs` in each row of their tables."""
    for heading, group in SECTIONS.items():
        page = _with_rows(page, heading, facts.get(group, {}), partial(_cells, group))
    return page


def with_invariants(page: str, facts: Mapping[str, Any]) -> str:
    """Return the page with the results of `inferred-invariants` in each row of their tables."""
    results = {**facts["clean"], **facts["bugs"]}
    return _with_rows(page, INVARIANTS, results, _cells_of_invariants)


def _with_rows(page: str, heading: str, results: Results, cells: MakeCells) -> str:
    """Return the page with the cells of each row below a heading that has a result.

    The first cell stays, which names an error or a program, and may link its thread.
    """
    is_below, lines = False, []
    for line in page.split("\n"):
        if line.startswith("## "):
            is_below = line == heading
        name = re.match(r"\| \[?([\w-]+)", line)
        if is_below and name and name[1] in results:
            first = line.removeprefix("| ").partition(" | ")[0]
            line = "| " + " | ".join([first, *cells(name[1], results[name[1]])]) + " |"
        lines.append(line)
    return "\n".join(lines)


def _cells_of_invariants(_: str, result: Mapping[str, Any]) -> list[str]:
    alarms = str(len(result["false_alarms"]))
    if "violations" not in result:
        return [str(result["invariants"]), str(result["dropped"]), alarms]
    kinds = ", ".join(f"`{kind}`" for kind in result["kinds"]) or "—"
    step = "—" if result["step"] is None else str(result["step"])
    return [str(len(result["violations"]) or "none"), kinds, step, alarms]


def _cells(group: str, name: str, result: Mapping[str, Any]) -> list[str]:
    if group == "clean":
        notes = ", ".join(map(_link, result["notes"])) or "—"
        return [str(len(result["false_alarms"])), notes]
    finding = _link(result["finding"])
    if group == "further":
        finding += f", `{FURTHER[name][2]}`"
    steps = [result["step"], result["steps_after"]]
    is_of_step = result["finding"].startswith("training.") and None not in steps
    alarms = str(len(result["false_alarms"]) + result["named_when_fixed"])
    return [result["score"], finding, *(map(str, steps) if is_of_step else ("—", "—")), alarms]


def _link(finding: str) -> str:
    return f"[`{finding}`](findings/{finding}.md)"
