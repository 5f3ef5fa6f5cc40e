"""Learn invariants from good runs, and judge a run by them.

What the records of all good runs share is a candidate. Each good run is then judged by what the
others alone teach; a candidate that this breaks is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.analysis.invariants import number_kinds as numbers
from flexinspect.analysis.invariants import program_kinds as program
from flexinspect.analysis.invariants import relation_kinds as relations
from flexinspect.analysis.invariants.invariant import Invariant, Violation
from flexinspect.analysis.invariants.kind import Kind
from flexinspect.analysis.invariants.observed_run import ObservedRun, Part
from flexinspect.core.text import printable

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(program.Parameter(), program.ProgramOutput(), program.Setting(), program.Input()),
        program.Contains(),
        *(program.Before(), numbers.Range(), numbers.Median(), numbers.Constant()),
        *(numbers.Changes(), numbers.Monotone(), numbers.Falls(), numbers.Total()),
        *(relations.Present(), relations.Together(), relations.Moves()),
        relations.Equal(),
        *(relations.Proportional(), relations.AtMost()),
    )
}
RANKS = relations.RanksEqual()


class Learnt(Struct, frozen=True):
    """The invariants of good runs; `dropped` are candidates that a run left out broke.

    `left_out` has for each run the violations of what the other runs alone teach.
    """

    invariants: tuple[Invariant, ...]
    dropped: tuple[Invariant, ...] = ()
    left_out: tuple[tuple[str, tuple[Violation, ...]], ...] = ()


def learn(
    runs: Sequence[ObservedRun], update: Callable[[int, int], object] | None = None
) -> Learnt:
    """Learn from good runs; ranges need two, totals three.

    `update` is told how many runs were left out so far, and how many will be.
    """
    candidates = [*_candidates(runs, min_runs=len(runs))]
    dropped: set[tuple[str, str, str, str, int]] = set()
    left_out = []
    for number, run in enumerate(runs if len(runs) > 1 else ()):
        others = [*runs[:number], *runs[number + 1 :]]
        # In a run alone the spread between runs is unknown, but the rest can be tested.
        found = judge([*_candidates(others, min_runs=max(len(others), 2))], run)
        dropped |= {one.invariant.key for one in found}
        left_out.append((run.label, tuple(found)))
        if update is not None:
            update(number + 1, len(runs))
    return Learnt(
        tuple(one for one in candidates if one.key not in dropped),
        tuple(one for one in candidates if one.key in dropped),
        tuple(left_out),
    )


def _candidates(runs: Sequence[ObservedRun], min_runs: int) -> Iterator[Invariant]:
    """Yield what all runs share, of the kinds that need no more than `min_runs` runs."""
    names = [name for name in runs[0].parts if all(name in one.parts for one in runs)]
    for name in names:
        parts = [one.parts[name] for one in runs]
        records = [record for part in parts for record in part]
        n_steps = sum(len(one.steps) for one in records)
        support = {"runs": len(runs)}
        yield Invariant(name, "part", name, runs=len(runs), samples=n_steps)
        for kind in KINDS.values():
            if kind.min_runs <= min_runs:
                yield from (replace(one, **support) for one in kind.learn(records))
        yield from (replace(one, **support) for one in RANKS.learn_ranks(parts))


def judge(invariants: Iterable[Invariant], run: ObservedRun) -> list[Violation]:
    """Return what a run breaks, the earliest steps first; what is about the whole run last."""
    found = [one for each in invariants for one in _violations(each, run)]
    return sorted(found, key=lambda one: (one.step is None, one.step or 0))


def _violations(one: Invariant, run: ObservedRun) -> Iterator[Violation]:
    part = run.parts.get(one.part)
    if one.kind == "part" and part is None:
        known = ", ".join(map(printable, run.parts))
        text = f"The run has no {printable(one.part)} (it has {known}); {one.support}, "
        yield Violation(one, f"{text}there was one.", None)
    elif part is not None:
        yield from _violations_of(one, part)


def _violations_of(one: Invariant, part: Part) -> Iterator[Violation]:
    """Yield the first violation of a part: of the rank in which it comes first."""
    if one.kind == RANKS.name:
        found = [RANKS.check_ranks(one, part)]
    elif one.kind in KINDS:
        found = [KINDS[one.kind].check(one, record) for record in part]
    else:
        found = []
    broken = [each for each in found if each is not None]
    if broken:
        first = min(broken, key=lambda each: (each.step is None, each.step or 0))
        rank = "" if first.rank is None or one.kind == RANKS.name else f"Rank {first.rank}: "
        yield replace(first, sentence=f"{rank}{first.sentence}")


_OF_CHANNELS = {
    *("range", "median", "constant", "changes", "monotone", "falls"),
    *("moves", "equal", "proportional", "at-most"),
}
"""The kinds that are about numbers of each step, and are not judged without these."""


def without_numbers(invariants: Iterable[Invariant], run: ObservedRun) -> list[Invariant]:
    """Return the invariants about a number that the run does not have, so that none can break."""
    return [
        one
        for one in invariants
        if one.kind in _OF_CHANNELS
        and (part := run.parts.get(one.part)) is not None
        and not any({one.subject, one.other} - {""} <= {*each.channels} for each in part)
    ]


def unjudged(invariants: Iterable[Invariant], run: ObservedRun) -> list[str]:
    """Return the parts of a run that no invariant is about."""
    known = {one.part for one in invariants}
    return [name for name in run.parts if name not in known]
