"""The question of an exhibit of the museum: who names its fault in the interface, has solved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.inputs.broken_run_catalog import BROKEN_RUNS, BrokenRun, find_broken_run
from flexinspect.tui.saved_state import add_solved_exhibit
from flexinspect.tui.screens.dialogs import ask_choice

N_CHOICES = 4


def fault_of(run: BrokenRun) -> str:
    """Return the fault of an exhibit in a few words."""
    from flexinspect.rules.engine import finding_kinds  # only exhibits need it

    return finding_kinds(run.expected[0])[run.expected[0]].meaning


def faults_to_choose(run: BrokenRun) -> list[str]:
    """Return the fault of an exhibit among those of its neighbours, in alphabetical order."""
    at = BROKEN_RUNS.index(run)
    faults = dict.fromkeys(map(fault_of, (*BROKEN_RUNS[at:], *BROKEN_RUNS[:at])))
    return sorted(list(faults)[:N_CHOICES])


async def ask_fault(app: Any, exhibit: object) -> None:
    """Ask for the fault of the exhibit that a trace describes, and keep that it is solved.

    Raises `UsageError` for an exhibit that this version does not have.
    """
    if not isinstance(exhibit, Mapping) or exhibit.get("repaired"):
        app.notify("This trace is no exhibit of the museum: there is no question to answer.")
        return
    run = find_broken_run(str(exhibit.get("name")))
    options = [(fault, fault) for fault in faults_to_choose(run)]
    chosen = await ask_choice(app, f"{run.question}\nWhat is the fault?", options)
    if chosen == fault_of(run):
        n_solved = add_solved_exhibit(run.name)
        progress = f"{n_solved} of {len(BROKEN_RUNS)} exhibits solved."
        app.notify(f"Right. {run.answer} {progress}", timeout=30)
    elif chosen is not None:
        place = f"look at the {run.panel} panel at step {run.step}"
        again = f"press {app.keys_of('exhibit.answer')} again"
        app.notify(f"That is not it: {place}, and {again}.", severity="warning", timeout=15)
