"""What a kind of invariant is: it learns from several records of a part, and judges one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from flexinspect.analysis.invariants.invariant import Invariant, KindName, Violation, rounded
from flexinspect.analysis.invariants.observed_run import (
    COUNTS,
    LIMIT,
    ROWS,
    Numbers,
    Observed,
    Part,
)
from flexinspect.core.text import plural, printable

RELATIVE_TOLERANCE = 1e-6
"""Numbers that differ by less are equal: they come from the same computation in another order."""
MIN_STEPS = 10  # of all good runs together in which a call, a setting or an input must be seen


class Kind(Protocol):
    """A kind of invariant.

    `learn` gets the records of one part in all good runs (and ranks), each with a step or more, and
    yields what holds in all of them. `check` judges one record, and returns None if it holds.
    """

    name: ClassVar[KindName]
    min_runs: ClassVar[int]

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        """Yield the invariants of this kind that hold in all records."""

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        """Return how a record breaks an invariant."""


def common(maps: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys that all have, in the order of the first."""
    first, *others = maps
    return [key for key in first if all(key in other for other in others)]


def is_count(channel: str) -> bool:
    """Whether a channel is not measured but counted or configured."""
    return channel in COUNTS or channel == LIMIT or channel.startswith(ROWS)


def within(one: Invariant, record: Observed) -> NDArray[np.bool_]:
    """The steps in which an invariant is judged, as a mask (steps,)."""
    mask: NDArray[np.bool_] = record.steps >= one.first
    return mask if one.last is None else mask & (record.steps <= one.last)


def same_number(one: Numbers, other: Numbers | float) -> NDArray[np.bool_]:
    """Where numbers are equal up to rounding; NaN is equal to nothing."""
    found: NDArray[np.bool_] = np.isclose(one, other, rtol=RELATIVE_TOLERANCE, atol=0.0)
    return found


def violation(
    one: Invariant, record: Observed, broken: NDArray[np.bool_], found: str, learnt: str
) -> Violation | None:
    """Return the violation of the steps where `broken` (steps,) is true, None without one.

    `found` is what the first of them shows; it may name the step's number as `{step}`.
    """
    at = np.flatnonzero(broken)
    if not len(at):
        return None
    step = int(record.steps[at[0]])
    more = f" (and in {plural(len(at) - 1, 'later step')})" if len(at) > 1 else ""
    sentence = f"At step {step} {found}{more}; {one.support}, {learnt}."
    return Violation(one, sentence, step, record.rank, len(at))


def shown(value: float) -> str:
    """A number with four digits."""
    return f"{rounded(value):.4g}"


def named(text: str) -> str:
    """A name of the program's, printable."""
    return printable(text)


class RankKind(Protocol):
    """A kind of invariant about all ranks of a part together."""

    def learn_ranks(self, parts: Sequence[Part]) -> Iterator[Invariant]:
        """Yield what holds in all parts."""

    def check_ranks(self, one: Invariant, part: Part) -> Violation | None:
        """Return how the ranks of a part break an invariant."""
