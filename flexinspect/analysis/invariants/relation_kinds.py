"""Invariants of two numbers of a step, and of one number on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import ClassVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flexinspect.analysis.invariants.invariant import Invariant, KindName, Violation
from flexinspect.analysis.invariants.kind import (
    MIN_STEPS,
    common,
    named,
    same_number,
    shown,
    violation,
    within,
)
from flexinspect.analysis.invariants.observed_run import (
    EVALUATION_LOSS,
    GROUP_NORM,
    LIMIT,
    LOSS,
    NORM_BEFORE,
    RATE,
    RATIO,
    SCALE,
    TIME,
    TOTAL_NORM,
    Numbers,
    Observed,
    Part,
)

MIN_MOVES = 3  # measured updates
MIN_EQUAL = 20  # steps in which two numbers are equal, or one is present with the other
TOLERANCE = 1e-3  # by which a number may be above its limit: clipping divides by norm + 1e-6
BELOW = ((TOTAL_NORM, LIMIT), (TOTAL_NORM, NORM_BEFORE))
CONFIGURED = (LOSS, LIMIT, SCALE)  # numbers that do not depend on how much was measured


class Present:
    """A number is there in each step from the second on, such as the limit of clipping."""

    name: ClassVar[KindName] = "present"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for channel in common([one.channels for one in records]):
            if channel not in CONFIGURED:
                continue
            later = [one.channels[channel][one.steps >= 1] for one in records]
            n = sum(map(len, later))
            if n >= MIN_STEPS and all(np.isfinite(one).all() for one in later):
                yield Invariant(records[0].name, self.name, channel, first=1, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        values = record.channels.get(one.subject, np.full(len(record.steps), np.nan))
        broken = within(one, record) & ~np.isfinite(values)
        found = f"there is no finite {named(one.subject)}"
        return violation(one, record, broken, found, "each step had one")


class Together:
    """In each step that has one number there is the other, too."""

    name: ClassVar[KindName] = "together"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        names = [n for n in (*CONFIGURED, EVALUATION_LOSS) if any(n in o.channels for o in records)]
        there = {name: np.concatenate([_is_there(o, name) for o in records]) for name in names}
        some = [n for n in names if there[n].sum() >= MIN_EQUAL and not there[n].all()]
        for subject in some:
            for other in names:
                if other != subject and other in some and (there[other] | ~there[subject]).all():
                    n = int(there[subject].sum())
                    yield Invariant(records[0].name, self.name, subject, other, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        broken = _is_there(record, one.subject) & ~_is_there(record, one.other)
        found = f"there is {named(one.subject)}, but no {named(one.other)}"
        return violation(one, record, broken & within(one, record), found, "both came together")


def _is_there(record: Observed, channel: str) -> NDArray[np.bool_]:
    values = record.channels.get(channel)
    if values is None:
        return np.zeros(len(record.steps), bool)
    found: NDArray[np.bool_] = np.isfinite(values)
    return found


class Moves:
    """The weights of a group change where their gradient and a learning rate are not 0."""

    name: ClassVar[KindName] = "moves"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for subject in common([one.channels for one in records]):
            other = subject.replace(RATIO, GROUP_NORM)
            if not subject.startswith(RATIO) or any(other not in o.channels for o in records):
                continue
            one = Invariant(records[0].name, self.name, subject, other)
            counts = [int(_can_move(one, record).sum()) for record in records]
            holds = all(self.check(one, record) is None for record in records)
            if holds and min(counts) and sum(counts) >= MIN_MOVES:
                yield replace(one, samples=sum(counts))

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        if one.subject not in record.channels or one.other not in record.channels:
            return None
        broken = _can_move(one, record) & (record.channels[one.subject] == 0)
        at = int(np.argmax(broken & within(one, record)))
        norm = shown(record.channels[one.other][at])
        found = f"{named(one.subject)} is 0, although {named(one.other)} is {norm}"
        return violation(one, record, broken & within(one, record), found, "it never was")


def _can_move(one: Invariant, record: Observed) -> NDArray[np.bool_]:
    """The steps whose update was measured, and whose gradient and learning rate are not 0."""
    rates = [values for name, values in record.channels.items() if name.startswith(RATE)]
    is_on = np.any([one > 0 for one in rates], axis=0) if rates else True
    found: NDArray[np.bool_] = np.isfinite(record.channels[one.subject]) & is_on
    return found & (record.channels[one.other] > 0)


class Equal:
    """Two numbers that change are equal in each step."""

    name: ClassVar[KindName] = "equal"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        by_values: dict[tuple[bytes, ...], list[str]] = {}
        for channel in common([one.channels for one in records]):
            each = [one.channels[channel] for one in records]
            finite = [one[np.isfinite(one)] for one in each]
            if channel == TIME or sum(map(len, finite)) < MIN_EQUAL or not min(map(len, finite)):
                continue
            if any(one.min() < one.max() for one in finite):
                by_values.setdefault(tuple(one.tobytes() for one in each), []).append(channel)
        for first, *others in by_values.values():
            n = sum(int(np.isfinite(one.channels[first]).sum()) for one in records)
            for other in others:
                if not _is_the_only_group(records[0], first, other):
                    yield Invariant(records[0].name, self.name, first, other, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        a, b = (record.channels.get(name) for name in (one.subject, one.other))
        if a is None or b is None:
            return None
        known = np.isfinite(a) & np.isfinite(b)
        broken = within(one, record) & known & ~(same_number(a, b) | (a == b))
        at = int(np.argmax(broken))
        found = f"{named(one.subject)} is {shown(a[at])} and {named(one.other)} {shown(b[at])}"
        return violation(one, record, broken, found, "both were equal in each step")


def _is_the_only_group(record: Observed, one: str, other: str) -> bool:
    """Whether two norms are equal because there is one group of parameters, or no clipping."""
    if {one, other} == {TOTAL_NORM, NORM_BEFORE}:
        return True
    groups = [name for name in record.channels if name.startswith("gradient norm of")]
    return len(groups) < 2 and bool({one, other} & {TOTAL_NORM, NORM_BEFORE})


class Proportional:
    """The learning rates of two groups of the optimizer keep their ratio."""

    name: ClassVar[KindName] = "proportional"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        rates = [n for n in common([one.channels for one in records]) if n.startswith(RATE)]
        for subject, other in ((one, rates[0]) for one in rates[1:]):
            a, b = (np.concatenate([o.channels[n] for o in records]) for n in (subject, other))
            known = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
            a, b = a[known], b[known]
            if len(a) < MIN_EQUAL or np.array_equal(a, b) or a.min() == a.max():
                continue
            ratio = float(np.median(a / b))
            if same_number(a, ratio * b).all():
                part = records[0].name
                yield Invariant(part, self.name, subject, other, value=ratio, samples=len(a))

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        a, b = (record.channels.get(name) for name in (one.subject, one.other))
        if a is None or b is None or not isinstance(one.value, (int, float)):
            return None
        known = within(one, record) & np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
        broken = known & ~same_number(a, one.value * b)
        at = int(np.argmax(broken))
        found = f"{named(one.subject)} is {shown(a[at])}, {named(one.other)} {shown(b[at])}"
        learnt = f"the first was {shown(one.value)} times the second"
        return violation(one, record, broken, found, learnt)


class AtMost:
    """The norm of the gradients is not above the limit of clipping, nor above that before it."""

    name: ClassVar[KindName] = "at-most"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        known = common([one.channels for one in records])
        for subject, other in BELOW:
            if subject in known and other in known:
                n = sum(_n_both(one, subject, other) for one in records)
                one = Invariant(records[0].name, self.name, subject, other, samples=n)
                if n >= MIN_STEPS and all(self.check(one, record) is None for record in records):
                    yield one

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        a, b = (record.channels.get(name) for name in (one.subject, one.other))
        if a is None or b is None:
            return None
        with np.errstate(invalid="ignore"):
            broken = within(one, record) & (a > b * (1 + TOLERANCE))
        at = int(np.argmax(broken))
        found = f"{named(one.subject)} is {shown(a[at])}, above {named(one.other)} {shown(b[at])}"
        return violation(one, record, broken, found, "it never was")


def _n_both(record: Observed, one: str, other: str) -> int:
    return int((np.isfinite(record.channels[one]) & np.isfinite(record.channels[other])).sum())


class RanksEqual:
    """A number or the weights of a group are equal on all ranks, in each step."""

    name: ClassVar[KindName] = "ranks-equal"
    min_runs: ClassVar[int] = 1

    def learn_ranks(self, parts: Sequence[Part]) -> Iterator[Invariant]:
        several = [part for part in parts if len(part) > 1]
        if len(several) < len(parts) or not parts:
            return
        everything = [one for part in parts for one in part]
        known = common([{**one.channels, **one.digests} for one in everything])
        for channel in known:
            if channel == TIME:
                continue
            pairs = [(a, b) for part in parts for a, b in combinations(part, 2)]
            n = sum(int(np.isfinite(_column(part[0], channel)).sum()) for part in parts)
            if n >= MIN_STEPS and not any(len(_parted(*pair, channel)[0]) for pair in pairs):
                yield Invariant(everything[0].name, self.name, channel, samples=n)

    def check_ranks(self, one: Invariant, part: Part) -> Violation | None:
        if len(part) < 2:
            return None
        reference, *others = part
        parted = ((_parted(reference, other, one.subject), other) for other in others)
        found = [(numbers, values, other) for (numbers, values), other in parted if len(numbers)]
        if not found:
            return None
        numbers, (a, b), other = min(found, key=lambda each: int(each[0][0]))
        text = f"At step {numbers[0]} {named(one.subject)} differs between rank {reference.rank} "
        if one.subject not in reference.digests:
            text = text.removesuffix(" ") + f" ({shown(a)}) "
        text += f"and rank {other.rank}"
        text += f" ({shown(b)})" * (one.subject not in reference.digests)
        text += f"; {one.support}, it was equal on all ranks."
        return Violation(one, text, int(numbers[0]), other.rank, len(numbers))


def _column(record: Observed, channel: str) -> Numbers:
    missing = np.full(len(record.steps), np.nan)
    return record.channels.get(channel, record.digests.get(channel, missing))


def _parted(
    one: Observed, other: Observed, channel: str
) -> tuple[NDArray[np.int64], tuple[float, float]]:
    """The steps in which two ranks differ, and their values in the first of them."""
    steps, at, at_other = np.intersect1d(one.steps, other.steps, return_indices=True)
    a, b = _column(one, channel)[at], _column(other, channel)[at_other]
    is_equal = a == b if channel in one.digests else (a == b) | same_number(a, b)
    differ = np.isfinite(a) & np.isfinite(b) & ~is_equal
    if channel in (LIMIT, NORM_BEFORE):
        differ |= np.isfinite(a) != np.isfinite(b)  # one rank clips and the other does not
    first = int(np.argmax(differ))
    return steps[differ], (float(a[first]), float(b[first])) if len(a) else (np.nan, np.nan)
