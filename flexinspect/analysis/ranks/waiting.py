"""Which rank is late: how long ranks wait for each other in collective calls.

In a collective that no rank can leave before the last one has entered, a rank waits from its own
entry to that of the last rank. The calls of the ranks are matched by process group and order within
a step. The first step of a generation waits for ranks that start later, so sums leave it out.
Clocks of one machine are the same. Those of several machines are aligned by the ends of
their common collectives, which all ranks leave at almost the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.analysis.ranks.rank_run import RankRun
from flexinspect.records.collectives import CALLS_STREAM, COMMON_END, KINDS, TIMES_STREAM
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.stream_ranges import arrays_by_step

STEPS_PER_READ = 2048
LATE_SHARE = 0.01
"""Of the time from the first call to the last, by which a rank is later than all others together:
below it, no rank is called late."""

LATE_STEPS = 2 / 3
"""Of the steps, in which a rank is the latest one: below it, no rank is called late."""

MIN_STEPS = 4
"""Steps below which no rank is called late: it may have been by chance."""

Floats = npt.NDArray[np.float64]


class MatchedCalls(Struct, frozen=True):
    """The calls of one process group in one step, of all its ranks in the same order.

    `rows` are the places of the ranks in the run, `entered` and `left` have seconds (calls, ranks).
    """

    generation: int
    step: int
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    entered: Floats
    left: Floats


class OtherCalls(Struct, frozen=True):
    """A step in which the ranks of a group made other calls: their kinds, by rank."""

    generation: int
    step: int
    kinds: Mapping[int, tuple[str, ...]]


class StepWaits(Struct, frozen=True):
    """One step: by rank, the seconds that it waited and that the others waited for it alone.

    `late_s` of the last rank to enter is its distance from the one before it. `last_call` is the
    kind of the call with the largest one.
    """

    waited_s: tuple[float, ...]
    late_s: tuple[float, ...]
    last_call: str = ""


class ClockOffset(Struct, frozen=True):
    """How far the clock of a machine is ahead of that of the first rank, in seconds.

    `spread_s` is the range of the middle half of the estimates, `n` their number.
    """

    offset_s: float
    spread_s: float
    n: int


class Waiting(Struct, frozen=True):
    """All waits of a run; sums are in the order of its ranks, without first steps.

    `n_calls` counts the calls that were matched, `n_steps` the steps that the sums are of, `n_last`
    those in which each rank was the
    latest, `total_s` is the time from the first of these calls to the end of the last. `late` is
    the rank that the others wait for in most steps, None if none stands out. `others` are steps in
    which ranks made other calls, `clocks` the offsets by machine, empty if all ranks ran on one.
    """

    n_calls: int = 0
    waited_s: tuple[float, ...] = ()
    late_s: tuple[float, ...] = ()
    n_last: tuple[int, ...] = ()
    total_s: float = 0.0
    late: int | None = None
    n_steps: int = 0
    steps: Mapping[tuple[int, int], StepWaits] = {}
    others: tuple[OtherCalls, ...] = ()
    clocks: Mapping[str, ClockOffset] = {}

    def longest_late(self) -> tuple[tuple[int, int], int]:
        """Return the step with the longest lateness of one rank, and the place of that rank."""
        step = max(_without_first(self.steps), key=lambda key: max(self.steps[key].late_s))
        late = self.steps[step].late_s
        return step, late.index(max(late))


def measure_waiting(run: RankRun, readers: Sequence[TraceReader]) -> Waiting:
    """Return how long the ranks of a run waited for each other. Raises `TraceError`."""
    found = [*_matched_steps(run, readers)]
    matched = [one for one in found if isinstance(one, MatchedCalls)]
    others = tuple(one for one in found if isinstance(one, OtherCalls))
    if not matched:
        return Waiting(others=others)
    clocks = _estimate_clocks(run, matched)
    offsets = [clocks[one.hostname].offset_s if clocks else 0.0 for one in run.traces]
    return _sum_waits(run, matched, np.array(offsets), clocks, others)


# -- matching -------------------------------------------------------------------------------------


def _matched_steps(
    run: RankRun, readers: Sequence[TraceReader]
) -> Iterator[MatchedCalls | OtherCalls]:
    numbers = sorted({row.generation for reader in readers for row in reader.generations()})
    for generation in numbers:
        known = [{row.generation for row in reader.generations()} for reader in readers]
        own = [row for row, numbers in enumerate(known) if generation in numbers]
        lasts = [readers[row].last_step(generation) for row in own]
        stop = max((last + 1 for last in lasts if last is not None), default=0)
        for start in range(0, stop, STEPS_PER_READ):
            bounds = (start, min(start + STEPS_PER_READ, stop))
            streams = (CALLS_STREAM, TIMES_STREAM)
            arrays = {
                row: arrays_by_step(readers[row], generation, streams, *bounds) for row in own
            }
            for step in range(*bounds):
                calls = {
                    row: one[step] for row, one in arrays.items() if len(one.get(step, ())) == 2
                }
                yield from _match_step(run, generation, step, calls)


def _match_step(
    run: RankRun, generation: int, step: int, calls: Mapping[int, Mapping[str, Any]]
) -> Iterator[MatchedCalls | OtherCalls]:
    """Yield the calls of a step by process group, matched if all of its ranks made the same."""
    common = [KINDS.index(kind) for kind in COMMON_END]
    by_group: dict[int, dict[int, tuple[tuple[str, ...], Floats]]] = {}
    for row, arrays in calls.items():
        facts, times = arrays[CALLS_STREAM], arrays[TIMES_STREAM]
        if facts.shape != (len(times), 3) or times.shape[1:] != (2,):
            continue  # of another program
        for group in dict.fromkeys(facts[:, 2].tolist()):
            chosen = (facts[:, 2] == group) & np.isin(facts[:, 0], common)
            kinds = tuple(KINDS[kind] for kind in facts[chosen, 0].tolist())
            if kinds:
                by_group.setdefault(group, {})[row] = (kinds, times[chosen])
    for own in by_group.values():
        sequences = {kinds for kinds, _ in own.values()}
        if len(sequences) > 1:
            ranks = {run.traces[row].rank: kinds for row, (kinds, _) in own.items()}
            yield OtherCalls(generation, step, ranks)
        elif len(own) > 1:
            times = np.stack([each for _, each in own.values()], axis=1)  # (calls, ranks, 2)
            (kinds,) = sequences
            yield MatchedCalls(generation, step, kinds, tuple(own), times[..., 0], times[..., 1])


# -- clocks ---------------------------------------------------------------------------------------


def _estimate_clocks(run: RankRun, matched: Sequence[MatchedCalls]) -> dict[str, ClockOffset]:
    """Return how far the clock of each machine is ahead of the first rank's; {} for one machine."""
    hosts = run.hostnames
    if len(hosts) < 2:
        return {}
    differences: dict[str, list[Floats]] = {host: [] for host in hosts[1:]}
    for calls in matched:
        columns = {run.traces[row].hostname: at for at, row in reversed([*enumerate(calls.rows)])}
        if hosts[0] in columns:
            first = calls.left[:, columns[hosts[0]]]
            for host in hosts[1:]:
                if host in columns:
                    differences[host].append(calls.left[:, columns[host]] - first)
    clocks = {hosts[0]: ClockOffset(0.0, 0.0, 0)}
    for host, parts in differences.items():
        values = np.concatenate(parts) if parts else np.array([])
        values = values[np.isfinite(values)]
        if not len(values):
            clocks[host] = ClockOffset(0.0, float("inf"), 0)
            continue
        low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
        clocks[host] = ClockOffset(middle, high - low, len(values))
    return clocks


# -- sums -----------------------------------------------------------------------------------------


def _sum_waits(
    run: RankRun,
    matched: Sequence[MatchedCalls],
    offsets: Floats,
    clocks: Mapping[str, ClockOffset],
    others: tuple[OtherCalls, ...],
) -> Waiting:
    n_ranks = len(run.traces)
    steps: dict[tuple[int, int], StepWaits] = {}
    bounds: dict[tuple[int, int], tuple[float, float]] = {}
    for calls in matched:
        rows, shift = list(calls.rows), offsets[list(calls.rows)]
        entered, left = calls.entered - shift, calls.left - shift
        waited, late = _waits(entered, left)
        sums = np.zeros((2, n_ranks))
        sums[0, rows], sums[1, rows] = waited.sum(axis=0), late.sum(axis=0)
        longest = calls.kinds[int(late.max(axis=1).argmax())]
        key = (calls.generation, calls.step)
        steps[key] = _added(steps.get(key), sums, longest)
        begin, end = bounds.get(key, (np.inf, -np.inf))
        bounds[key] = (min(begin, entered.min()), np.nanmax([*left.flat, *entered.flat, end]))
    counted = _without_first(steps)
    begin, end = min(bounds[key][0] for key in counted), max(bounds[key][1] for key in counted)
    total = max(float(end - begin), 0.0)
    every = np.array([(steps[key].waited_s, steps[key].late_s) for key in counted])
    n_last = np.bincount(every[:, 1].argmax(axis=1), minlength=n_ranks)
    sums = every.sum(axis=0)  # of (steps, 2, ranks)
    return Waiting(
        n_calls=sum(len(calls.kinds) for calls in matched),
        waited_s=tuple(sums[0].tolist()),
        late_s=tuple(sums[1].tolist()),
        n_last=tuple(n_last.tolist()),
        total_s=total,
        late=_late_rank(run, sums[1], n_last, total),
        n_steps=len(counted),
        steps=steps,
        others=others,
        clocks=clocks,
    )


def _without_first(steps: Mapping[tuple[int, int], StepWaits]) -> list[tuple[int, int]]:
    """Return the steps without the first of each generation, if there are any others."""
    firsts: dict[int, int] = {}
    for generation, step in steps:
        firsts[generation] = min(firsts.get(generation, step), step)
    return [key for key in steps if firsts[key[0]] != key[1]] or [*steps]


def _waits(entered: Floats, left: Floats) -> tuple[Floats, Floats]:
    """Return how long each rank waited in each call, and was late in it, as (calls, ranks)."""
    last, rows = entered.argmax(axis=1), np.arange(len(entered))
    newest = entered[rows, last]
    ends = np.fmin(newest[:, None], left)  # a rank that left before was not held up: rounding
    waits = np.maximum(ends - entered, 0.0)
    late = np.zeros_like(entered)
    late[rows, last] = newest - np.partition(entered, -2, axis=1)[:, -2]
    return waits, late


def _added(before: StepWaits | None, sums: Floats, longest: str) -> StepWaits:
    """Return the waits of a step with those of one more process group."""
    if before is not None:
        sums = sums + np.array([before.waited_s, before.late_s])
    return StepWaits(tuple(sums[0].tolist()), tuple(sums[1].tolist()), longest)


def _late_rank(
    run: RankRun, late: Floats, n_last: npt.NDArray[np.int64], total_s: float
) -> int | None:
    """Return the rank that is the latest in most steps, if that is worth a sentence."""
    row = int(late.argmax())
    excess = 2 * late[row] - late.sum()  # over all other ranks together
    is_often = n_last[row] >= LATE_STEPS * n_last.sum() and n_last.sum() >= MIN_STEPS
    return run.traces[row].rank if is_often and excess > LATE_SHARE * total_s else None
