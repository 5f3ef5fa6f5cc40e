"""The tables of `docs/diagnosis.md` about trainings, from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.training_bugs.further import BUGS as FURTHER

PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
SECTIONS = {
    "## Errors of TrainCheck's artifact": "bugs",
    "## Further errors": "further",
    "## Programs without an error": "clean",
}
"""The group of results that the tables below a heading show."""


def filled(page: str, facts: Mapping[str, Any]) -> str:
    """Return the page with the results in each row of these tables.

    The first cell of a row stays, which names an error or a program, and may link its thread.
    """
    group, lines = "", []
    for line in page.split("\n"):
        if line.startswith("## "):
            group = SECTIONS.get(line, "")
        name = re.match(r"\| \[?([\w-]+)", line)
        result = facts.get(group, {}).get(name[1]) if name else None
        if name and result is not None:
            first = line.removeprefix("| ").partition(" | ")[0]
            line = "| " + " | ".join([first, *_cells(group, name[1], result)]) + " |"
        lines.append(line)
    return "\n".join(lines)


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
