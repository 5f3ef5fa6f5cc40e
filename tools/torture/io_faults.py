"""Errors of the disk: every scenario under every error, at a random call, once or for good.

The program must go on, say in one sentence what was lost if anything was, and leave a trace that
opens and holds what was acknowledged.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

from msgspec import Struct

from tools.torture import crash_points
from tools.torture.crash_points import SEED
from tools.torture.faults import EVER, Fault
from tools.torture.forks import Outcome, Tell, run_child
from tools.torture.results import Failure
from tools.torture.scenarios import SCENARIOS, Scenario

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENOLCK, errno.ENOMEM)
TOUCHED = ("open", "write", "sync", "truncate", "lock", "map", "rename", "unlink", "read")
LIMIT_S = 30.0
"""Seconds that a scenario may take: closing waits for other programs, and calls may be slow."""
SLOW_MS = 20
N_SLOW = 40
MAX_SENTENCE = 600
MAX_SENTENCES = 4
"""One each for creating or recording, closing and moving, and one for a record that is refused."""


class Calls(Struct, frozen=True):
    """The calls of a scenario without a fault: operation, role and their number."""

    scenario: Scenario
    counts: tuple[tuple[str, str, int], ...]


def prepare(folder: Path) -> list[Calls]:
    """Count the calls of each scenario."""
    found: dict[str, dict[tuple[str, str], int]] = {}
    for point in crash_points.prepare(folder):
        pair = (point.fault.op or "", point.fault.role or "")
        of = found.setdefault(point.scenario.name, {})
        of[pair] = max(of.get(pair, 0), point.fault.first)
    return [
        Calls(one, tuple((*pair, n) for pair, n in sorted(found[one.name].items())))
        for one in SCENARIOS
    ]


def choose(calls: list[Calls], seed: int) -> tuple[Scenario, Fault]:
    """Return the scenario and the fault of a seed."""
    rng = random.Random(seed)
    one = calls[seed % len(calls)]
    op, role, n_calls = rng.choice([each for each in one.counts if each[0] in TOUCHED])
    first = rng.randint(1, n_calls)
    kind = rng.choice(("fail", "fail", "fail", "short", "slow"))
    if kind == "slow":
        return one.scenario, Fault("slow", None, None, first, first + N_SLOW, SLOW_MS)
    if kind == "short":
        return one.scenario, Fault("short", "write", role, first, rng.choice((first, EVER)))
    last = rng.choice((first, first + 3, EVER, EVER))
    return one.scenario, Fault("fail", op, role, first, last, rng.choice(ERRORS))


def attempt(calls: list[Calls], seed: int, folder: Path) -> list[Failure]:
    """Run a scenario under a fault, and check what it said and what it left."""
    scenario, fault = choose(calls, seed)
    before = scenario.prepare(folder, SEED)

    def body(tell: Tell) -> None:
        fault.arm()
        scenario.act(folder, tell, SEED)

    done = run_child(body, LIMIT_S)
    wrong = [] if not done.end else [f"ended with {done.end}"]
    told = crash_points.told(done)
    wrong += scenario.judge(folder, before, told) + _silence(scenario, done)
    how = f"{scenario.name}: {fault.words()}"
    return [Failure(kind="disk error", detail=each, how=how) for each in wrong]


def _silence(scenario: Scenario, done: Outcome) -> list[str]:
    """Return what is wrong with what was said: nothing in spite of a loss, or too much."""
    said = [line for line in done.lines if line.startswith("says ")]
    wrong = [f"a long sentence: {line[:80]}" for line in said if len(line) > MAX_SENTENCE]
    if len(said) > MAX_SENTENCES:
        wrong.append(f"{len(said)} sentences: {said[-1][:80]}")
    if scenario.records and not said and not done.end and "closed" not in done.lines:
        wrong.append("nothing was said of what is lost")
    return wrong
