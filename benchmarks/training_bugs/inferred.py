"""What invariants that are learnt from good runs find, and how often they are wrong.

Of each program without an error, invariants are learnt from three seeds, and other seeds are judged
by them: each violation is a false alarm. Those of each silent error are learnt from its fixed twin;
another seed of the twin and the program with the error are judged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from benchmarks.training_bugs.runner import import_all, recorded
from flexinspect.analysis.invariants.learning import judge, learn
from flexinspect.analysis.invariants.observed_run import ObservedRun, observe_run
from flexinspect.core.errors import UsageError

LEARNT, JUDGED = 3, 4
"""Seeds that are learnt from, and other seeds that are judged."""


def measure(*, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run every program; return the invariants and their violations by program."""
    from benchmarks.training_bugs.bugs import BUGS, RANKED
    from benchmarks.training_bugs.clean import PROGRAMS

    import_all()
    clean, bugs = {}, {}
    for name in PROGRAMS:
        if not names or name in names:
            clean[name] = _measure_clean(name)
    for name in BUGS:
        if not names or name in names:
            bugs[name] = _measure_bug(name, 2 if name in RANKED else 1)
    return {"learnt": LEARNT, "judged": JUDGED, "clean": clean, "bugs": bugs}


def _run(script: str, *args: str, n_ranks: int = 1) -> ObservedRun | None:
    """Run a program; None if it has no step of a training."""

    def observe(folder: Path) -> ObservedRun | None:
        try:
            return observe_run(folder if n_ranks > 1 else folder / "t.flextrace")
        except UsageError:
            return None

    return recorded(observe, script, *args, n_ranks=n_ranks)


def _measure_clean(name: str) -> dict[str, Any]:
    runs = [_run("clean.py", name, str(seed)) for seed in range(LEARNT + JUDGED)]
    known = [one for one in runs if one is not None]
    if len(known) < len(runs):
        return {"invariants": 0, "dropped": 0, "false_alarms": []}
    found = learn(known[:LEARNT])
    alarms = [v.sentence for run in known[LEARNT:] for v in judge(found.invariants, run)]
    print(name, len(found.invariants), len(found.dropped), alarms, file=sys.stderr)
    return {
        "invariants": len(found.invariants),
        "dropped": len(found.dropped),
        "false_alarms": alarms,
    }


def _measure_bug(name: str, n_ranks: int) -> dict[str, Any]:
    seeds = [str(seed) for seed in range(LEARNT + 1)]
    twins = [_run("bugs.py", name, "fixed", seed, n_ranks=n_ranks) for seed in seeds]
    bug = _run("bugs.py", name, "bug", seeds[-1], n_ranks=n_ranks)
    good = [one for one in twins if one is not None]
    found = learn(good[:LEARNT])
    broken = judge(found.invariants, bug) if bug is not None else []
    alarms = [v.sentence for v in judge(found.invariants, good[LEARNT])]
    result = {
        "invariants": len(found.invariants),
        "violations": [v.sentence for v in broken],
        "kinds": sorted({v.invariant.kind for v in broken}),
        "step": min((v.step for v in broken if v.step is not None), default=None),
        "false_alarms": alarms,
    }
    print(name, len(broken), result["kinds"], result["step"], alarms, file=sys.stderr)
    return result


def table(facts: dict[str, Any]) -> str:
    """Return the results as tables in Markdown, and write them into the page if all were run."""
    from benchmarks.training_bugs import bugs as artifact
    from benchmarks.training_bugs import clean as correct
    from benchmarks.training_bugs import page

    if [*facts["bugs"]] == [*artifact.BUGS] and [*facts["clean"]] == [*correct.PROGRAMS]:
        text = page.PAGE.read_text(encoding="utf-8")
        page.PAGE.write_text(page.with_invariants(text, facts), encoding="utf-8")
    head = ["program", "invariants", "dropped by a run left out", "false alarms"]
    rows = [
        [name, *(str(one[key]) for key in ("invariants", "dropped")), str(len(one["false_alarms"]))]
        for name, one in facts["clean"].items()
    ]
    clean = markdown(head, rows)
    head = ["error", "flagged", "violations", "first step", "first violation", "false alarms"]
    rows = [
        [
            *(name, "yes" if one["violations"] else "no", str(len(one["violations"]))),
            str(one["step"]),
            (one["violations"] or ["none"])[0],
            str(len(one["false_alarms"])),
        ]
        for name, one in facts["bugs"].items()
    ]
    return f"{clean}\n\n{markdown(head, rows)}"
