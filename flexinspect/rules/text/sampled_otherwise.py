"""Samples that a program draws from other probabilities than those of its model's logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import plural
from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

SAMPLED_EVENT = "sampled-otherwise"
"""The event of a generation with such samples; docs/trace-format.md has its data."""
FINDING = "generate.sampled-otherwise"


class SampledOtherwiseRule(Rule):
    """Reports the error that explains the probabilities of every step that was looked at."""

    name = "sampled_otherwise"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a generation."""
        if event.kind == SAMPLED_EVENT:
            what = f"{_SENTENCES[str(event.data['pattern'])](event.data)} ({event.data['total']} "
            yield self.finding(event, FINDING, f"{what}steps compared).", evidence=event.data)


def _ranks(data: Mapping[str, Any]) -> str:
    return (
        f"torch.multinomial draws a place among the {data['n']} best tokens, sorted by their "
        "probability, and the program feeds that number as a token: in step "
        f"{data['step']} it drew place {data['rank']}, which is token {data['meant']}, and fed "
        f"token {data['rank']}"
    )


def _logits_of_before(data: Mapping[str, Any]) -> str:
    return (
        f"The probabilities from which step {data['step']} and the following ones sample are those "
        "of the logits of the step before"
    )


def _twice(data: Mapping[str, Any]) -> str:
    return (
        "The probabilities from which the program samples are a softmax of a softmax: in step "
        f"{data['step']} the best token has probability {data['best']:.3g} instead of "
        f"{data['right']:.3g}"
    )


def _negated(data: Mapping[str, Any]) -> str:
    return (
        "The probabilities from which the program samples fall with the logits: from step "
        f"{data['step']} on the least probable tokens are the likeliest"
    )


def _other_set(data: Mapping[str, Any]) -> str:
    rule = f"top-k with k = {data['top_k']}" if "top_k" in data else f"top-p {data['top_p']:.2g}"
    return (
        f"The program keeps as many tokens as {rule} does, but other ones: of the {data['kept']} "
        f"kept in step {data['step']}, {data['n_best']} are among the {data['kept']} most probable"
    )


def _penalty_sign(data: Mapping[str, Any]) -> str:
    factor, negative, positive = (data[one] for one in ("factor", "n_negative", "n_positive"))
    how, likelier, others = f"divides the scores by {1 / factor:.3g}", negative, positive
    if factor > 1:
        how, likelier, others = f"multiplies the scores by {factor:.3g}", positive, negative
    less = f" and {others} less" if others else ""
    return (
        f"Before it samples, the program {how} for tokens of the text, whatever their sign: in "
        f"step {data['step']}, {plural(likelier, 'token')} became more likely{less}"
    )


def _penalty_of_newest(data: Mapping[str, Any]) -> str:
    return (
        f"A penalty moves the scores of {plural(data['moved'], 'token')} of the prompt in the "
        f"first step, and from step {data['step']} on that of the newest token alone: the other "
        "tokens of the text are not penalized any more"
    )


_SENTENCES = {
    "ranks": _ranks,
    "logits-of-before": _logits_of_before,
    "twice": _twice,
    "negated": _negated,
    "other-set": _other_set,
    "penalty-sign": _penalty_sign,
    "penalty-of-newest": _penalty_of_newest,
}
