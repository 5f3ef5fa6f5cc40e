"""Invariants of what the program does: its calls, their order, modes, inputs and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flexinspect.analysis.invariants.invariant import Invariant, KindName, Violation
from flexinspect.analysis.invariants.kind import MIN_STEPS, common, named, violation, within
from flexinspect.analysis.invariants.observed_run import Observed

ANY = "*"
"""A dimension of an input that changes between steps."""


class Parameter:
    """A parameter has this dtype and size, and is trained by this group, or frozen."""

    name: ClassVar[KindName] = "parameter"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for name in common([one.parameters for one in records]):
            if len({one.parameters[name] for one in records}) == 1:
                value = records[0].parameters[name]
                yield Invariant(records[0].name, self.name, name, value=value)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        if not record.parameters or record.parameters.get(one.subject) == one.value:
            return None
        now = record.parameters.get(one.subject, "not there")
        text = f"Parameter {named(one.subject)} is {named(now)}; {one.support}, it was "
        return Violation(one, f"{text}{named(str(one.value))}.", None, record.rank, 1)


class ProgramOutput:
    """The output of a module has this dtype in the first step."""

    name: ClassVar[KindName] = "output"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for name in common([one.outputs for one in records]):
            if len({one.outputs[name] for one in records}) == 1:
                yield Invariant(records[0].name, self.name, name, value=records[0].outputs[name])

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        now = record.outputs.get(one.subject)
        if now is None or now == one.value:
            return None
        text = f"The output of module {named(one.subject)} is {named(now)} in the first step; "
        text += f"{one.support}, it was {named(str(one.value))}."
        return Violation(one, text, int(record.steps[0]), record.rank)


class Setting:
    """The model's mode, or the dtype of autocast, is the same in each step."""

    name: ClassVar[KindName] = "setting"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        for key in common([one.settings for one in records]):
            values = {word for one in records for word in one.settings[key]}
            n = sum(len(one.settings[key]) for one in records)
            if n >= MIN_STEPS and len(values) == 1 and (value := values.pop()):
                yield Invariant(records[0].name, self.name, key, value=value, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        words = record.settings.get(one.subject, ())
        broken = np.array([bool(word) and word != one.value for word in words], bool)
        if not broken.any():
            return None
        now = words[int(np.argmax(broken))]
        found = f"{named(one.subject)} is {named(now)}"
        learnt = f"it was {named(str(one.value))} in each step"
        return violation(one, record, broken & within(one, record), found, learnt)


class Input:
    """An input of the model has this dtype and size; `*` stands for any number."""

    name: ClassVar[KindName] = "input"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        known = [one for record in records for one in record.inputs if one is not None]
        if len(known) < MIN_STEPS:
            return
        for name in common(known):
            form = _form([one[name] for one in known])
            if form is not None:
                part = records[0].name
                yield Invariant(part, self.name, name, value=form, samples=len(known))

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        forms = [None if each is None else _text(each.get(one.subject)) for each in record.inputs]
        broken = np.array([form is not None and not _fits(form, str(one.value)) for form in forms])
        if not len(broken) or not broken.any():
            return None
        now = forms[int(np.argmax(broken))] or ""
        found = f"input {named(one.subject)} is {named(now)}"
        learnt = f"it was {named(str(one.value))}"
        return violation(one, record, broken & within(one, record), found, learnt)


def _text(form: Sequence[str | int] | None) -> str:
    """A dtype and a size as a text, such as `float32 32 x 16`."""
    if not form:
        return "not there"
    dtype, *size = map(str, form)
    return f"{dtype} {' x '.join(size)}".rstrip()


def _form(forms: Sequence[Sequence[str | int]]) -> str | None:
    """What the forms of an input share, None if dtype or number of dimensions differ."""
    if len({(one[0], len(one)) for one in forms if one}) != 1 or not all(forms):
        return None
    dimensions = [set(each) for each in zip(*forms, strict=True)]
    return _text([each.pop() if len(each) == 1 else ANY for each in dimensions])


def _fits(form: str, wanted: str) -> bool:
    words, pattern = form.split(), wanted.split()
    pairs = zip(words, pattern, strict=False)
    return len(words) == len(pattern) and all(b in (a, ANY) for a, b in pairs)


class Contains:
    """Each step from the second on has a call."""

    name: ClassVar[KindName] = "contains"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        steps = [calls for one in records for calls in _later_calls(one)]
        if len(steps) < MIN_STEPS:
            return
        for call in dict.fromkeys(steps[0]):
            if all(call in calls for calls in steps):
                part = records[0].name
                yield Invariant(part, self.name, call, first=1, samples=len(steps))

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        broken = [bool(calls) and one.subject not in calls for calls in record.calls]
        if not any(broken):
            return None
        where = within(one, record) & np.array(broken)
        if not where.any():
            return None
        calls = ", ".join(map(named, record.calls[int(np.argmax(where))]))
        found = f"{named(one.subject)} was not called (the calls were {calls})"
        return violation(one, record, where, found, "each step had it")


def _later_calls(record: Observed) -> Iterator[tuple[str, ...]]:
    for number, calls in zip(record.steps, record.calls, strict=False):
        if number >= 1 and calls:
            yield calls


class Before:
    """Between two steps, all calls of one function come before all of another."""

    name: ClassVar[KindName] = "before"
    min_runs: ClassVar[int] = 1

    def learn(self, records: Sequence[Observed]) -> Iterator[Invariant]:
        steps = [calls for one in records for calls in one.calls if calls]
        names = dict.fromkeys(call for calls in steps for call in calls)
        found: dict[tuple[str, str], int] = {}
        for one, other in combinations(names, 2):
            both = [calls for calls in steps if one in calls and other in calls]
            for first, second in ((one, other), (other, one)):
                if len(both) >= MIN_STEPS and all(_is_before(c, first, second) for c in both):
                    found[first, second] = len(both)
        always = {name for name in names if all(name in calls for calls in steps)}
        for (first, second), n in _without_implied(found, always).items():
            yield Invariant(records[0].name, self.name, first, second, samples=n)

    def check(self, one: Invariant, record: Observed) -> Violation | None:
        broken = [
            one.subject in calls
            and one.other in calls
            and not _is_before(calls, one.subject, one.other)
            for calls in record.calls
        ]
        if not any(broken):
            return None
        found = f"{named(one.other)} came before {named(one.subject)}"
        learnt = f"{named(one.subject)} always came first"
        where: NDArray[np.bool_] = np.array(broken) & within(one, record)
        return violation(one, record, where, found, learnt)


def _is_before(calls: Sequence[str], first: str, second: str) -> bool:
    last = len(calls) - 1 - tuple(reversed(calls)).index(first)
    return last < calls.index(second)


def _without_implied(
    found: Mapping[tuple[str, str], int], always: set[str]
) -> dict[tuple[str, str], int]:
    """Leave out what follows from two others, whose middle call is in each step."""
    return {
        (first, second): n
        for (first, second), n in found.items()
        if not any((first, via) in found and (via, second) in found for via in always)
    }
