"""SIGKILL at every crash point of every scenario, and at random moments.

A seed names the scenario and the point; the first `len(points)` seeds are all points once.
"""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path

from msgspec import Struct

from tools.torture import faults, recordings
from tools.torture.faults import Fault
from tools.torture.forks import Child, Outcome, Tell, run_child
from tools.torture.results import Failure
from tools.torture.scenarios import SCENARIOS, Scenario

KILLED = "killed"
SEED = 1
"""The seed of what a scenario writes: the points are numbered in this one recording."""


class Point(Struct, frozen=True):
    """A moment in a scenario."""

    scenario: Scenario
    fault: Fault

    def words(self) -> str:
        """Return the scenario and the fault."""
        return f"{self.scenario.name}: {self.fault.words()}"


def prepare(folder: Path) -> list[Point]:
    """Run each scenario once without a fault, and return its crash points."""
    recordings.import_all(folder)
    points: list[Point] = []
    for number, scenario in enumerate(SCENARIOS):
        place = folder / f"healthy-{number}"
        place.mkdir()
        before = scenario.prepare(place, SEED)
        done = run_child(partial(_counted, scenario, place))
        found = _counts(done)
        wrong = scenario.judge(place, before, told(done))
        if done.end or wrong:
            raise RuntimeError(f"{scenario.name} fails without a fault: {done.end} {wrong}")
        for (op, role), n_calls in found.items():
            kills = faults.KILLS if op == "write" else faults.KILLS[:2]
            points += [
                Point(scenario, Fault(kill, op, role, number, number))
                for number in range(1, n_calls + 1)
                for kill in kills
            ]
    random.Random(0).shuffle(points)
    return points


def _counted(scenario: Scenario, folder: Path, tell: Tell) -> None:
    faults.disarm()
    scenario.act(folder, tell, SEED)
    for (op, role), n_calls in faults.counts().items():
        tell(f"count {op} {role} {n_calls}")


def _counts(done: Outcome) -> dict[tuple[str, str], int]:
    rows = [line.split()[1:] for line in done.lines if line.startswith("count ")]
    return {(op, role): int(n_calls) for op, role, n_calls in rows}


def told(done: Outcome) -> tuple[str, ...]:
    """Return what a child has acknowledged."""
    return tuple(line for line in done.lines if not line.startswith(("count ", "raised ", "says ")))


def attempt(points: list[Point], seed: int, folder: Path) -> list[Failure]:
    """Kill at one point, and check what is left."""
    point = points[seed % len(points)]
    before = point.scenario.prepare(folder, SEED)

    def body(tell: Tell) -> None:
        point.fault.arm()
        point.scenario.act(folder, tell, SEED)

    done = run_child(body)
    failures = [] if done.end in (KILLED, "") else [f"not killed: {done.end}"]
    failures += point.scenario.judge(folder, before, told(done))
    return [Failure(kind="lost or refused", detail=each, how=point.words()) for each in failures]


def describe(points: list[Point]) -> str:
    """Return what the seeds of this part are."""
    return f"{len(points)} crash points of {len(SCENARIOS)} scenarios"


# -- random moments --------------------------------------------------------------------------------


def prepare_random(folder: Path) -> dict[str, float]:
    """Return how long each scenario takes, in seconds."""
    recordings.import_all(folder)
    found = {}
    for number, scenario in enumerate(SCENARIOS):
        place = folder / f"timed-{number}"
        place.mkdir()
        scenario.prepare(place, SEED)
        started = time.monotonic()
        run_child(partial(scenario.act, place, seed=SEED))
        found[scenario.name] = time.monotonic() - started
    return found


def attempt_random(lengths: dict[str, float], seed: int, folder: Path) -> list[Failure]:
    """Kill a scenario at a random moment, and check what is left."""
    rng = random.Random(seed)
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    before = scenario.prepare(folder, seed)
    child = Child(lambda tell: scenario.act(folder, tell, seed))
    moment = rng.uniform(0, 1.1 * lengths[scenario.name])
    time.sleep(moment)
    child.send(signal.SIGKILL)
    end = child.finish()
    failures = [] if end in (KILLED, "") else [f"not killed: {end}"]
    failures += scenario.judge(folder, before, told(Outcome(end, tuple(child.lines))))
    how = f"{scenario.name}: after {1000 * moment:.1f} ms"
    return [Failure(kind="lost or refused", detail=each, how=how) for each in failures]
