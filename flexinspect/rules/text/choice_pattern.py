"""The rule for how a program chose its tokens, where it did not take the best one of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.numerics.audit_findings import CHOICE_EVENT
from flexinspect.rules.text.sampled_otherwise import SAMPLED_EVENT, SCORES_EVENT

CHOICE = "audit.choice"
_MEANT = (
    "maybe-again",
    "maybe-padding",
    "maybe-proposals",
    "maybe-rank",
    "avoids-text",
    "banned",
    "unrelated",
    "temperature",
    "steps",
)
"""Patterns that a correct program may have: they are notes."""
_MAX_LISTED = 6


class ChoicePatternRule(Rule):
    """Reports the rule by which tokens were chosen, as the audit found it."""

    name = "choice_pattern"
    needs = (imported.EVENTS,)
    findings = finding_kinds(CHOICE)

    def __init__(self) -> None:
        super().__init__()
        self._explained = set[int | None]()
        """Generations whose scores are known, which say more than the tokens."""

    def on_event(self, event: EventRecord) -> Findings:
        """Judge the choices of a generation."""
        if event.kind in (SAMPLED_EVENT, SCORES_EVENT):
            self._explained.add(event.generation)
        elif event.kind == CHOICE_EVENT and not self._is_explained(event):
            yield self._choice(event)

    def _is_explained(self, event: EventRecord) -> bool:
        is_weaker = event.data["pattern"] in ("avoids-text", "temperature")
        return is_weaker and event.generation in self._explained

    def _choice(self, event: EventRecord) -> Finding:
        data = event.data
        severity = Severity.NOTE if data["pattern"] in _MEANT else None
        evidence = {name: value for name, value in data.items() if name != "wrong"}
        return self.finding(
            event, CHOICE, self._sentence(data), (), evidence, severity=severity, series="choice"
        )

    def _sentence(self, data: Mapping[str, Any]) -> str:
        pattern, total, wrong = data["pattern"], int(data["total"]), list(data["wrong"])
        row = f"Batch row {data['batch']}, " if data.get("batch") else ""
        if (single := _SINGLE.get(pattern)) is not None:
            begin = f"{row}{'step' if row else 'Step'} {wrong[0]}: "
            return begin + single(data, self.context.format_position)
        listed = ", ".join(map(str, wrong[:_MAX_LISTED])) + (", …" if len(wrong) > 6 else "")
        steps = f"{len(wrong)} of {plural(total, 'token')} (steps {listed})"
        begin = f"Batch row {data['batch']}: " if row else ""
        return f"{begin}{_PATTERNS[pattern](data).format(total=total)} Not the best one: {steps}."


Place = Callable[[int], str]


def _row(data: Mapping[str, Any], place: Place) -> str:
    back = int(data["back"])
    return (
        "the token that follows is not the best one after the newest row, but the best one after "
        f"{place(int(data['row']))}: the logits of the row {plural(back, 'row')} before the last "
        f"were used (as logits[:, -{back + 1}])."
    )


def _padding(data: Mapping[str, Any], place: Place) -> str:
    return (
        f"the text ends at column {int(data['row'])}, and {plural(int(data['columns']), 'column')} "
        "of padding follow: the next token was not chosen by the logits of the text's last token, "
        "but by others, as logits[:, -1] gives in a batch that is padded on the right."
    )


def _maybe_padding(data: Mapping[str, Any], place: Place) -> str:
    return (
        f"the text ends at column {int(data['row'])}, and {plural(int(data['columns']), 'column')} "
        "of padding follow: the next token is the best one after the padding, and one of the best "
        "after the text. It may be a sample; a greedy loop uses the wrong column (logits[:, -1])."
    )


def _again(data: Mapping[str, Any], place: Place) -> str:
    n = int(data["tokens"])
    what = "the last token" if n == 1 else f"the last {n} tokens"
    if len(data["wrong"]) > 1:
        return (
            f"this forward and {plural(len(data['wrong']) - 1, 'later one')} begin with {what} of "
            "the text that is in the cache already: the model reads them twice."
        )
    if not data["wrong"][0] and n == 1:
        return (
            "the token that follows is the last token of the prompt, not the best one: it is fed "
            "again, though it is in the cache already, so the model reads it twice."
        )
    return (
        f"the forward begins with {what} of the text that is in the cache already: the model "
        "reads them twice, at later positions."
    )


def _crossed(data: Mapping[str, Any], place: Place) -> str:
    listed = ", ".join(f"row {row} a token of row {other}" for row, other in data["pairs"][:6])
    return (
        "batch rows were fed tokens that were chosen by the logits of other rows: "
        f"{listed}. Rows of the cache and rows of the tokens are in another order."
    )


_SINGLE: dict[str, Callable[[Mapping[str, Any], Place], str]] = {
    "row": _row,
    "padding": _padding,
    "maybe-padding": _maybe_padding,
    "again": _again,
    "maybe-again": _again,
    "crossed": _crossed,
}


def _token(data: Mapping[str, Any]) -> str:
    return f"token id {printable(str(data['token']))}"


def _rank(data: Mapping[str, Any]) -> str:
    rank = int(data["rank"]) + 1
    return "second best" if rank == 2 else f"{rank}th best"


def _kept(data: Mapping[str, Any]) -> str:
    return (
        "Proposals of a draft were kept although the model's best token is another one (positions "
        f"{', '.join(map(str, data['positions'][:_MAX_LISTED]))})"
    )


_PATTERNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "proposals": lambda data: (
        _kept(data)
        + (
            f", with probabilities down to {data['probability']:.2g}"
            if "probability" in data
            else ""
        )
        + ": the loop accepts tokens that it did not check, or checked against the logits of "
        "another row."
    ),
    "maybe-proposals": lambda data: (
        f"{_kept(data)}. They are as probable as samples are, at least {data['probability']:.2g}: "
        "speculative sampling and typical acceptance keep such tokens, a greedy loop must not."
    ),
    "last-row": lambda data: (
        "After rejected proposals the next token is the best one of the last row of the forward, "
        "which read a rejected proposal, not of the row of the last proposal that was kept."
    ),
    "late": lambda data: (
        "Each token that was fed is the best one of the step before, not of its own step: the "
        "loop uses logits that are one step old."
    ),
    "last": lambda data: "Each of {total} tokens is the least likely one (argmin, not argmax).",
    "rank": lambda data: f"Each of {{total}} tokens is the {_rank(data)} one of its step.",
    "maybe-rank": lambda data: (
        f"Each of {{total}} tokens is the {_rank(data)} one of its step. So few may be samples."
    ),
    "steps": lambda data: (
        f"The {_rank(data)} token is chosen in "
        + (
            f"every step from {data['first']} on."
            if data["every"] == 1
            else f"every {data['every']}th step, from step {data['first']} on."
        )
    ),
    "rare": lambda data: (
        f"All of {{total}} tokens are among the {data['lowest']} least likely of {data['size']}: "
        "the set that is sampled from keeps the wrong end."
    ),
    "prefers-text": lambda data: (
        "Tokens that are in the text already are preferred: the best of them is chosen over the "
        "best token, as by a repetition penalty with the wrong sign."
    ),
    "avoids-text": lambda data: (
        "Tokens that are in the text already are passed over, as by a repetition penalty or a ban."
    ),
    "banned": lambda data: (
        f"The {_token(data)} is never chosen where it is the best one; the second best is."
    ),
    "unrelated": lambda data: (
        "The tokens that are fed do not depend on the logits: as with a text that is given, or "
        "samples from a softmax over the wrong dimension."
    ),
    "temperature": lambda data: (
        f"The tokens are like samples with temperature {data['value']:.2g} ({data['low']:.2g} to "
        f"{data['high']:.2g})."
    ),
}
"""What a pattern means, from its data; `{{total}}` is the number of choices."""
