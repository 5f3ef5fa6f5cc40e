"""The contract of a rule, and what runs rules over the steps of a trace as they come.

A rule is a plug-in of the group `flexinspect.rules`: a class that takes no arguments (the built-in
ones are named `RULE` in their modules). One object of it looks at one run, in the writer thread:
records in, findings out, no I/O. It is called for every step, so a step in which nothing is wrong
must cost it microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding, Severity
from flexinspect.prompts import Segment
from flexinspect.records import EventRecord, GenerationRecord, StepRecord, TokenRecord

Positions = npt.NDArray[np.intp]

MAX_POSITIONS = 32
"""Positions that one finding lists; its sentence and evidence count them all."""

_WORD = 24

_SIGNS = {"\n": "↵", "\t": "⇥"}


@dataclass(frozen=True, slots=True)
class FindingKind:
    """What an id stands for: its usual severity, and its meaning in one line."""

    severity: Severity
    meaning: str


class Rule(Protocol):
    """Looks at the steps of one run, generation by generation, and says what is wrong."""

    name: ClassVar[str]
    findings: ClassVar[Mapping[str, FindingKind]]
    """Every id that `look` may return; others are refused."""

    def begin(self, generation: GenerationRecord) -> None:
        """Forget the last generation; this one's steps come next."""
        ...

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong in a step and was not yet said of this generation.

        Steps come in order, each once. What stays wrong for a thousand steps is said once.
        """
        ...


class RuleBook:
    """The rules of one run. A rule that raises is switched off, and an event says so."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = list(rules)

    def begin(self, generation: GenerationRecord) -> tuple[EventRecord, ...]:
        """Begin a generation; returns the events of rules that failed at it."""
        events = []
        for rule in list(self._rules):
            try:
                rule.begin(generation)
            except Exception as error:
                events.append(self._switch_off(rule, error, generation.generation, None))
        return tuple(events)

    def look(self, step: StepRecord) -> StepRecord:
        """Return the step with its findings, and with an event for each rule that failed."""
        found: list[Finding] = []
        events: list[EventRecord] = []
        for rule in tuple(self._rules):
            try:
                new = rule.look(step)
                if new:
                    found += _checked(rule, new)
            except Exception as error:
                events.append(self._switch_off(rule, error, step.generation, step.step))
        if not found and not events:
            return step
        return replace(step, findings=(*step.findings, *found), events=(*step.events, *events))

    def _switch_off(
        self, rule: Rule, error: Exception, generation: int, step: int | None
    ) -> EventRecord:
        self._rules.remove(rule)
        where = f"the beginning of generation {generation}" if step is None else f"step {step}"
        what = f"{type(error).__name__}: {error}"
        text = f"The rule '{_name(rule)}' failed at {where} and is off: {what}"
        return EventRecord("rule-off", text, time.time(), generation, step)


def _name(rule: Rule) -> str:
    return str(getattr(rule, "name", type(rule).__name__))


def _checked(rule: Rule, found: Sequence[Finding]) -> list[Finding]:
    """Return findings that the trace can hold. Raises `TypeError` for any other.

    A wrong one would take its whole step down with it when the step is written.
    """
    for finding in found:
        if not isinstance(finding, Finding) or not isinstance(finding.severity, Severity):
            raise TypeError(f"{type(finding).__name__} is no Finding with a Severity")
        if finding.id not in rule.findings:
            raise TypeError(f"the rule does not declare the finding {finding.id}")
    return list(found)


class Scene:
    """What the positions of the current generation are, for sentences: segments and words."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()
        self._tokens: dict[int, TokenRecord] = {}

    def begin(self, generation: GenerationRecord) -> None:
        """Take a generation's segments and prompt."""
        self._segments = generation.segments
        self._tokens = {token.pos: token for token in generation.tokens}

    def learn(self, step: StepRecord) -> None:
        """Take the tokens that a step chose."""
        for token in step.tokens:
            self._tokens[token.pos] = token

    @property
    def n_prompt(self) -> int:
        """Positions of the prompt: where the open last segment starts."""
        return self._segments[-1].start if self._segments else 0

    def position(self, pos: int) -> str:
        """Return `position 14 "What"`, without the word where it is not known."""
        token = self._tokens.get(pos)
        word = printable((token.text or token.token) if token is not None else "")
        if len(word) > _WORD:
            word = word[: _WORD - 1] + "…"
        return f'position {pos} "{word}"' if word else f"position {pos}"

    def rows(self, positions: Positions) -> str:
        """Return `12 rows of paraphrase 2 and separator 2`, positions ascending."""
        labels = self._labels(positions)
        if len(labels) > 2:
            labels = [labels[0], f"{len(labels) - 1} other segments"]
        return counted(len(positions), "row") + (f" of {' and '.join(labels)}" if labels else "")

    def first(self, positions: Positions) -> str:
        """Return `first: position 14 "What"`, or without "first" for a single one."""
        return ("first: " if len(positions) > 1 else "") + self.position(int(positions[0]))

    def _labels(self, positions: Positions) -> list[str]:
        """Return the labels of the segments that hold some of the positions, in order."""
        last = len(self._segments) - 1
        out = []
        for index, segment in enumerate(self._segments):
            inside = positions >= segment.start
            if index < last:  # the last one is open
                inside &= positions < segment.stop
            if inside.any():
                out.append(printable(segment.label))
        return out


def printable(text: str) -> str:
    """Return a word or name of the model's for a sentence, on one line.

    Without backslashes of ours: a sentence is made safe once more where it is shown.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _SIGNS.get(c, f"<U+{ord(c):04X}>") for c in text)


def counted(n: int, what: str) -> str:
    """Return `1 row` or `12 rows`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def listed(positions: Positions) -> tuple[int, ...]:
    """Return the positions that a finding lists."""
    return tuple(positions[:MAX_POSITIONS].tolist())
