"""Invariants of one number of each step: its range, its median, whether it changes, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flexinspect.analysis.invariants.invariant import Invariant, KindName, Violation
from flexinspect.analysis.invariants.kind import (
    MIN_STEPS,
    common,
    is_count,
    named,
    same_number,
    shown,
    violation,
    within,
)
from flexinspect.analysis.invariants.observed_run import (
    EVALUATION_RATIO,
    LOSS,
    N_DEAD,
    RATE,
    SCALE,
    TIME,
    TOTAL_NORM,
    Numbers,
    Observed,
)

MIN_VALUES, MIN_TOTAL = 3, 12  # of each record and of all, from which a range is learnt
MIN_SPARSE = 2, 6  # the same of a number that is measured every tenth step, over all steps
SPREADS = 4.0  # by which bounds lie beyond the runs: multiples of how far these lie apart
FLOOR = math.log(2.0)  # least margin of the logarithm of a positive number
EVALUATION_FLOOR = math.log(5.0)  # of the ratio of two losses, known of few evaluations
TIME_FLOOR = math.log(30.0)  # of a time, which other programs on the machine change
TIME_SLACK_MS = 100.0  # by which a time may be longer in any case
LINEAR_FLOOR = 0.25  # least margin of other numbers, as a share of the largest
MIN_RARE = 30  # steps without an event after which it counts as one that does not happen
SCHEDULE_STEPS = (0, *(base * 10**power for power in range(6) for base in (1, 2, 5)))
"""Steps in which a learning rate is compared that follows a schedule."""
MIN_CHANGES = 20  # steps in which a number must change before it has to
MAX_STILL = 2  # equal successors in succession that are still no standstill
MIN_FALL_STEPS = 20
FALL_SHARE = 5  # the first and the last fifth of a run are compared
LEAST_FALL = math.log(0.97)


def phases(records: Sequence[Observed], channel: str) -> Iterator[tuple[int, int | None]]:
    """Yield the decades of steps in which each record has enough values, else all steps.

    Most numbers change fast at first and slowly later, about with the logarithm of the step.
    """
    if channel == EVALUATION_RATIO:
        if len(records) >= MIN_VALUES and all(
            np.isfinite(o.channels[channel]).any() for o in records
        ):
            yield 0, None
        return
    longest = min(int(one.steps[-1]) for one in records)
    decades = [(0, 9)]
    while decades[-1][1] < longest:
        decades.append((decades[-1][1] + 1, 10 * decades[-1][1] + 9))
    enough = [(a, min(b, longest)) for a, b in decades if _is_enough(records, channel, a, b)]
    if enough:
        yield from enough
    elif _is_enough(records, channel, 0, longest, MIN_SPARSE):
        yield 0, longest


def _is_enough(
    records: Sequence[Observed],
    channel: str,
    first: int,
    last: int,
    least: tuple[int, int] = (MIN_VALUES, MIN_TOTAL),
) -> bool:
    counts = [len(_values(one, channel, first, last)) for one in records]
    return min(counts) >= least[0] and sum(counts) >= least[1]


def _values(record: Observed, channel: str, first: int, last: int | None) -> Numbers:
    values = record.channels[channel]
    mask = (record.steps >= first) & np.isfinite(values)
    return values[mask] if last is None else values[mask & (record.steps <= last)]


Bounds = tuple[float, float, float, float]  # low, high, and the lowest and highest that were seen


def bounds(lows: Sequence[float], highs: Sequence[float], floor: float, noise: float) -> Bounds:
    """Return bounds around the lowest and highest value of each record.

    They lie beyond these by `SPREADS` times the distance between the records, and by the noise
    within them. The logarithm is used if all values are positive.
    """
    low, high = min(lows), max(highs)
    is_positive = low > 0
    change: Callable[[float], float] = math.log if is_positive else float
    least = floor if is_positive else LINEAR_FLOOR * max(abs(low), abs(high))
    between = max(change(max(lows)) - change(low), change(high) - change(min(highs)))
    margin = max(SPREADS * between + noise, least)
    if is_positive:
        return low * math.exp(-min(margin, 600.0)), high * math.exp(min(margin, 600.0)), low, high
    return low - margin, high + margin, low, high


class Range:
    """A measured number stays within bounds, in each step of a phase."""

    name: ClassVar[KindName] = "range"
    min_runs: ClassVar[int] = 2

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for channel in common([one.channels for one in records]):
            if is_count(channel) or channel == TIME:
                continue
            for first, last in phases(records, channel):
                found = [_values(one, channel, first, last) for one in records]
                lows, highs = [float(o.min()) for o in found], [float(o.max()) for o in found]
                if min(lows) == max(highs):
                    continue
                widest = max(map(_width, lows, highs))
                if min(lows) <= 0:
                    widest = max(b - a for a, b in zip(lows, highs, strict=True))
                floor = EVALUATION_FLOOR if channel == EVALUATION_RATIO else FLOOR
                low, high, *seen = bounds(lows, highs, floor, widest)
                yield Invariant(
                    *(records[0].name, self.name, channel, "", first, last, low, high),
                    (seen[0], seen[1]),
                    samples=sum(map(len, found)),
                )

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        values = record.channels.get(one.subject)
        if values is None:
            return None
        low = -math.inf if one.low is None else one.low
        high = math.inf if one.high is None else one.high
        broken = within(one, record) & ((values < low) | (values > high))
        at = int(np.argmax(broken))
        found = f"{named(one.subject)} is {shown(values[at])}"
        return violation(one, record, broken, found, f"it was {_bounds_text(one)}")


def _width(low: float, high: float) -> float:
    return math.log(high / low) if low > 0 else 0.0


def _bounds_text(one: Invariant) -> str:
    """The learnt bounds in words, with what was observed and in which steps."""
    seen = ""
    if one.observed is not None:
        seen = f"{shown(one.observed[0])} to {shown(one.observed[1])} "
    low = "any" if one.low is None else shown(one.low)
    high = "any" if one.high is None else shown(one.high)
    where = "in all steps" if one.last is None else f"in steps {one.first} to {one.last}"
    return f"{seen}{where}, and the learnt bounds are {low} and {high}"


class Median:
    """The median of a measured number over a phase stays within bounds; of a time, below one."""

    name: ClassVar[KindName] = "median"
    min_runs: ClassVar[int] = 2

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for channel in common([one.channels for one in records]):
            if is_count(channel) or channel.startswith((RATE, EVALUATION_RATIO)):
                continue
            for first, last in phases(records, channel):
                found = [_values(one, channel, first, last) for one in records]
                if min(map(len, found)) < 5:
                    continue
                middles = [float(np.median(one)) for one in found]
                if all(one.min() == one.max() for one in found):
                    continue
                if any((one == 0).any() for one in found):
                    continue  # 0 in some steps and not in others: the median jumps between both
                noise = max(map(_error_of_median, found))
                is_time = channel == TIME
                floor = TIME_FLOOR if is_time else FLOOR
                low, high, *seen = bounds(middles, middles, floor, noise)
                if is_time:
                    high = max(high, seen[1] + TIME_SLACK_MS)
                yield Invariant(
                    *(records[0].name, self.name, channel, "", first, last),
                    *(None if is_time else low, high, (seen[0], seen[1])),
                    samples=sum(map(len, found)),
                )

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        if one.subject not in record.channels or one.last is None:
            return None
        if record.steps[-1] < one.last:
            return None  # the phase is not complete
        values = _values(record, one.subject, one.first, one.last)
        if not len(values):
            return None
        middle = float(np.median(values))
        is_high = one.high is not None and middle > one.high
        if not is_high and not (one.low is not None and middle < one.low):
            return None
        text = f"The median of {named(one.subject)} in steps {one.first} to {one.last} is "
        text += f"{shown(middle)}; {one.support}, it was {_bounds_text(one)}."
        return Violation(one, text, one.last, record.rank, len(values))


def _error_of_median(values: Numbers) -> float:
    """Three standard errors of the median, of logarithms where all values are positive."""
    used = np.log(values) if values.min() > 0 else values
    return 3 * 1.2533 * float(used.std()) / math.sqrt(len(used))


class Constant:
    """A number is the same in each step of all runs, or a learning rate in some steps of each."""

    name: ClassVar[KindName] = "constant"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for channel in common([one.channels for one in records]):
            found = [_values(one, channel, 0, None) for one in records]
            n = sum(map(len, found))
            is_rare = channel == N_DEAD
            if (
                channel == TIME
                or min(map(len, found)) < 1
                or n < (MIN_RARE if is_rare else MIN_STEPS)
            ):
                continue
            value = float(found[0][0])
            if all(_all_equal(one, value) for one in found):
                part = records[0].name
                yield Invariant(part, self.name, channel, value=value, samples=n)
            elif channel.startswith(RATE) and len(records) > 1:
                yield from _schedule(records, channel)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        values = record.channels.get(one.subject)
        if values is None or not isinstance(one.value, (int, float)):
            return None
        with np.errstate(invalid="ignore"):
            broken = within(one, record) & np.isfinite(values) & ~_equal_to(values, one.value)
        found = f"{named(one.subject)} is {shown(values[int(np.argmax(broken))])}"
        where = "in each step" if one.last is None else "then"
        return violation(one, record, broken, found, f"it was {shown(one.value)} {where}")


def _schedule(records: Sequence[Observed], channel: str) -> Iterator[Invariant]:
    """Yield a learning rate at some steps, if it is the same in all runs at each step."""
    n = min(len(one.steps) for one in records)
    first, *others = (one.channels[channel][:n] for one in records)
    same_steps = all(np.array_equal(one.steps[:n], records[0].steps[:n]) for one in records)
    if not same_steps or not all(same_number(first, one).all() for one in others):
        return
    for number in sorted({*SCHEDULE_STEPS, int(records[0].steps[n - 1])}):
        at = np.flatnonzero(records[0].steps[:n] == number)
        if len(at):
            value = float(first[at[0]])
            one = Invariant(records[0].name, Constant.name, channel, "", number, number)
            yield replace(one, value=value, samples=len(records))


def _equal_to(values: Numbers, value: float) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (values == value) | same_number(values, value)
    return found


def _all_equal(values: Numbers, value: float) -> bool:
    return bool(_equal_to(values, value).all())


class Changes:
    """A number does not stand still: it is not the same in three steps in succession."""

    name: ClassVar[KindName] = "changes"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for channel in common([one.channels for one in records]):
            if channel not in (LOSS, TOTAL_NORM):
                continue
            n = sum(len(_values(one, channel, 0, None)) for one in records)
            if n >= MIN_CHANGES and not any(
                _standstill(o.channels[channel]).any() for o in records
            ):
                yield Invariant(records[0].name, self.name, channel, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        values = record.channels.get(one.subject)
        if values is None:
            return None
        broken = within(one, record) & _standstill(values)
        at = int(np.argmax(broken))
        found = f"{named(one.subject)} is {shown(values[at])} for the "
        found += f"{('third', 'fourth')[MAX_STILL > 2]} time in succession"
        return violation(one, record, broken, found, "it never stood still")


def _standstill(values: Numbers) -> NDArray[np.bool_]:
    """Where a number is the same as in the two steps before, (steps,)."""
    still: NDArray[np.bool_] = np.zeros(len(values), bool)
    if len(values) > MAX_STILL:
        still[MAX_STILL:] = (values[2:] == values[1:-1]) & (values[1:-1] == values[:-2])
    return still


class Monotone:
    """A learning rate or a loss scale only rises or only falls, as far as the good runs went."""

    name: ClassVar[KindName] = "monotone"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        last = min(int(one.steps[-1]) for one in records)
        for channel in common([one.channels for one in records]):
            if not channel.startswith(RATE) and channel != SCALE:
                continue
            n = sum(len(_values(one, channel, 0, last)) for one in records)
            for word, sign in (("rises", 1.0), ("falls", -1.0)):
                each = [sign * np.diff(_values(one, channel, 0, last)) for one in records]
                if n >= MIN_STEPS and all(len(o) and o.min() >= 0 and o.max() > 0 for o in each):
                    one = Invariant(records[0].name, self.name, channel, last=last, samples=n)
                    yield replace(one, value=word)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        values = record.channels.get(one.subject)
        if values is None:
            return None
        sign = 1.0 if one.value == "rises" else -1.0
        broken = np.zeros(len(values), bool)
        broken[1:] = sign * np.diff(values) < 0
        broken &= within(one, record)
        at = int(np.argmax(broken))
        verb = "falls" if sign > 0 else "rises"
        before = shown(values[max(at - 1, 0)])
        found = f"{named(one.subject)} {verb} from {before} to {shown(values[at])}"
        opposite = "fell" if sign > 0 else "rose"
        return violation(one, record, broken, found, f"it never {opposite} up to step {one.last}")


class Falls:
    """The loss falls: the median of its last fifth is a share of that of its first."""

    name: ClassVar[KindName] = "falls"
    min_runs: ClassVar[int] = 2

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        falls = [_fall(one) for one in records if LOSS in one.channels]
        known = [one for one in falls if one is not None]
        if len(known) < len(records):
            return
        least = max(known)
        bound = max(least / 2, least + SPREADS * (max(known) - min(known)))
        if bound < LEAST_FALL:
            n = sum(len(one.steps) for one in records)
            shortest = min(int(one.steps[-1]) for one in records)
            yield Invariant(
                *(records[0].name, self.name, LOSS, "", shortest, None, None, math.exp(bound)),
                (math.exp(min(known)), math.exp(least)),
                samples=n,
            )

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        fall = _fall(record) if one.subject in record.channels else None
        if fall is None or one.high is None or record.steps[-1] < one.first:
            return None
        if math.exp(fall) <= one.high:
            return None
        text = f"The loss ends at {shown(math.exp(fall))} of its beginning (medians of the first "
        seen = ""
        if one.observed is not None:
            seen = f"{shown(one.observed[0])} to {shown(one.observed[1])}, and "
        text += f"and the last fifth of the steps); {one.support}, it ended at {seen}"
        text += f"the learnt bound is {shown(one.high)}."
        return Violation(one, text, None, record.rank, len(record.steps))


def _fall(record: Observed) -> float | None:
    """The logarithm of last to first loss, None if it is unknown or not positive."""
    values = _values(record, LOSS, 0, None)
    n = len(values) // FALL_SHARE
    if len(values) < MIN_FALL_STEPS:
        return None
    first, last = float(np.median(values[:n])), float(np.median(values[-n:]))
    return math.log(last / first) if first > 0 and last > 0 else None


class Total:
    """A number of a whole run is the same in all runs."""

    name: ClassVar[KindName] = "total"
    min_runs: ClassVar[int] = 3

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for key in common([one.totals for one in records]):
            values = {one.totals[key] for one in records}
            if len(values) == 1:
                n = sum(len(one.steps) for one in records)
                part = records[0].name
                yield Invariant(part, self.name, key, value=values.pop(), samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        value = record.totals.get(one.subject)
        if value is None or value == one.value or not isinstance(one.value, (int, float)):
            return None
        text = f"{named(one.subject).capitalize()}: {shown(value)}; {one.support}, there were "
        return Violation(one, f"{text}{shown(one.value)}.", None, record.rank, len(record.steps))
