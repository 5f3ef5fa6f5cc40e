"""How a program chooses tokens by other numbers than the logits of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import plural
from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

SAMPLED_EVENT = "sampled-otherwise"
"""The event of a generation with such samples; docs/trace-format.md has its data."""
SCORES_EVENT = "choice-scores"
"""The event of a generation whose scores follow from the logits in a way that may be meant."""
FINDING, SCORES = "generate.sampled-otherwise", "generate.choice-scores"


class SampledOtherwiseRule(Rule):
    """Reports the error that explains the choice of every step, or how scores are made."""

    name = "sampled_otherwise"
    needs = (imported.EVENTS,)
    findings = finding_kinds(FINDING, SCORES)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a generation."""
        if event.kind == SAMPLED_EVENT:
            what = f"{_SENTENCES[str(event.data['pattern'])](event.data)} ({event.data['total']} "
            yield self.finding(event, FINDING, f"{what}steps compared).", evidence=event.data)
        elif event.kind == SCORES_EVENT:
            what = f"{scores_sentence(event.data)} ({event.data['total']} steps compared)."
            yield self.finding(event, SCORES, what, evidence=event.data)


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
    what = "whatever their sign"
    if data.get("of_logs"):
        what = "which are log-probabilities, so all negative"
    return (
        f"Before it chooses, the program {how} for tokens of the text, {what}: in step "
        f"{data['step']}, {plural(likelier, 'token')} became more likely{less}"
    )


def _penalty_of_newest(data: Mapping[str, Any]) -> str:
    return (
        f"A penalty moves the scores of {plural(data['moved'], 'token')} of the prompt in the "
        f"first step, and from step {data['step']} on that of the newest token alone: the other "
        "tokens of the text are not penalized any more"
    )


def _factor_of(data: Mapping[str, Any]) -> float:
    return float(data["factor"])


def _multiplied(data: Mapping[str, Any]) -> str:
    factor = _factor_of(data)
    return (
        f"The logits are multiplied by {factor:.3g} before a token is chosen, which is "
        f"temperature {1 / factor:.3g}: temperature {factor:.3g} divides by it"
    )


def _divided_twice(data: Mapping[str, Any]) -> str:
    once = (1 / _factor_of(data)) ** 0.5
    return (
        f"The logits are divided by {1 / _factor_of(data):.3g}, which is {once:.3g} times "
        f"{once:.3g}: the temperature is applied twice"
    )


def _crossing_dropped(data: Mapping[str, Any]) -> str:
    low, high = data["mass"]
    return (
        f"Tokens are kept as long as their probability stays below {data['top_p']:.2g} (it is "
        f"{low:.2g} to {high:.2g}), and the token that reaches it is not: top-p keeps that one, too"
    )


def _best_removed(data: Mapping[str, Any]) -> str:
    low, high = data["kept"]
    return (
        f"The best tokens are removed, up to {data['better_removed']} in a step, and a token is "
        f"chosen from the other {low} to {high}: the filter keeps the wrong end"
    )


def _exponential_noise(data: Mapping[str, Any]) -> str:
    return (
        "Exponential noise, -log(u), is added to the logits, and the highest sum is taken: samples "
        "need Gumbel noise, -log(-log(u))"
    )


_SENTENCES = {
    "multiplied": _multiplied,
    "divided-twice": _divided_twice,
    "crossing-dropped": _crossing_dropped,
    "best-removed": _best_removed,
    "exponential-noise": _exponential_noise,
    "ranks": _ranks,
    "logits-of-before": _logits_of_before,
    "twice": _twice,
    "negated": _negated,
    "other-set": _other_set,
    "penalty-sign": _penalty_sign,
    "penalty-of-newest": _penalty_of_newest,
}


# -- scores that may be meant ----------------------------------------------------------------------


def scores_sentence(data: Mapping[str, Any]) -> str:
    """Return how the scores follow from the logits, from the data of a `SCORES_EVENT`."""
    how = "Tokens are drawn" if data["draws"] else "The token with the highest score is taken"
    if "mixed" in data:
        now, before = data["weights"]
        what = "logits" if data["mixed"] == "logits" else "scores"
        return (
            f"{how}, and from step {data['step']} on the scores are {now:.3g} times the logits of "
            f"the step plus {before:.3g} times the {what} of the step before"
        )
    parts = [part(data) for part in (_divided, _filtered, _shifted)]
    return "; ".join(filter(None, [how + parts[0], *parts[1:]]))


def _divided(data: Mapping[str, Any]) -> str:
    if "factors" in data:
        low, high = data["factors"]
        return f" at temperatures from {1 / high:.3g} to {1 / low:.3g}"
    if "factor" in data:
        return f" at temperature {1 / _factor_of(data):.4g}"
    return " at temperature 1" if data["draws"] else ""


def _filtered(data: Mapping[str, Any]) -> str:
    if "kept" not in data:
        return ""
    (low, high), (least, most) = data["kept"], data["mass"]
    count = f"{low}" if low == high else f"{low} to {high}"
    mass = f"{least:.3g}" if f"{least:.3g}" == f"{most:.3g}" else f"{least:.3g} to {most:.3g}"
    if n := data.get("better_removed"):
        ids = ", ".join(map(str, data.get("always_removed", ())))
        always = f", token ids {ids} among them in every step" if ids else ""
        return (
            f"of {data['size']} tokens {count} can be chosen, with {mass} of the probability, and "
            f"up to {plural(n, 'token')} that are better than some of these cannot{always}"
        )
    return f"the {count} best of {data['size']} tokens are kept, with {mass} of the probability"


def _shifted(data: Mapping[str, Any]) -> str:
    if "moved" not in data:
        return ""
    count = f"up to {plural(data['moved'], 'token')}"
    which = {
        "text": f"{count} of the text, all that can be chosen,",
        "some": f"{count} of the text, and not of {data.get('still')} others of it,",
        "newest": "the newest token of the text alone",
        "generated": f"{count} that were generated, and not those of the prompt,",
        "prompt": f"{count} of the prompt, and not those that were generated,",
        "others": f"{count}",
    }[data["which"]]
    if ids := data.get("tokens"):
        which += f" (token ids {', '.join(map(str, ids))} in every step)"
    if "first" in data:
        first, last = data["first"], data["last"]
        by = f"{_by(first)} in step {first['step']}, and most {_by(last)} in step {last['step']}"
        return f"the scores of {which} are {by}"
    return f"the scores of {which} are {_by(data)}"


def _by(data: Mapping[str, Any]) -> str:
    if (penalty := data.get("penalty")) is not None:
        return f"penalized by {penalty:.3g} (positive ones divided by it, others multiplied)"
    if (factor := data.get("scaled")) is not None:
        return f"multiplied by {factor:.3g}"
    for name, each in (("added", ""), ("added_each", " for each time that they are in the text")):
        if (value := data.get(name)) is not None:
            return f"{'raised' if value > 0 else 'lowered'} by {abs(value):.3g}{each}"
    return "changed"
