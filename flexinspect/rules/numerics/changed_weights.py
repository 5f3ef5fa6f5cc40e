"""Weights that the program changed after it made or loaded the model, unevenly between layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flexinspect.core.text import format_layers, printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.engine import Findings, Rule, as_consequence, finding_kinds
from flexinspect.rules.numerics.weight_sentences import (
    describe_orders,
    describe_scaled,
    describe_twice,
    describe_wrapped,
)

CHANGED_EVENT = "weights-changed"
"""The event of a first step: parameters that changed since the model was made or loaded."""
SCALES_EVENT = "quantized-scales"
"""The event of a module with integer weights whose scales multiply the other axis."""
REPLACED_EVENT = "replaced-weights"
"""The event of a program's module that is unlike the weight that was in its place."""
UNEVEN = "weights.uneven-change"
NORM_GAIN, TIED, TRANSPOSED = "weights.norm-gain", "weights.tied-change", "weights.transposed-delta"
MISPLACED, SCALES = "weights.misplaced-adapter", "weights.quantization-axis"
ORDER, WRAPPED = "weights.order", "weights.quantization-overflow"
REPLACED, TWICE = "weights.replaced-values", "weights.adapter-twice"

_SPREAD = 1.25
"""The others must be within this factor of each other, else layers differ anyway."""
_SAME_SIZE = 1.06
"""Sizes within this factor count as equal where a multiple of them is looked for."""
_MULTIPLES = (2, 3, 4, 8, 16, 32, 64)
"""How many times a change is larger, or smaller, if it was repeated or its scale is missing."""
_REPEATED = 0.15
"""How close to the ratio of their writes the ratio of two changes of full rank must be."""
_MAX_SHARE = 0.5
"""A program that changed more of the parameters loads or makes its weights by itself."""
_MAX_GROUPS = 6
_FROM_ZERO = 1e9
"""Percent of a norm; a larger change is one of a parameter that was 0, such as a new bias."""


class ChangedWeightsRule(Rule):
    """Judges what changed in a model's weights before a generation."""

    name = "changed_weights"
    needs = (imported.EVENTS,)
    findings = finding_kinds(
        UNEVEN, NORM_GAIN, TIED, TRANSPOSED, MISPLACED, SCALES, ORDER, WRAPPED, REPLACED, TWICE
    )

    def on_step(self, step: StepRecord) -> Findings:
        """Look for the event."""
        for event in step.events:
            if event.kind == CHANGED_EVENT:
                yield from self._judge(step, event.data)

    def on_event(self, event: EventRecord) -> Findings:
        """Report a module whose scales are on the wrong axis, or whose weight is another one."""
        if event.kind == REPLACED_EVENT:
            facts = event.data
            id_, describe = _REPLACED[facts["what"]]
            layers = tuple(facts["layers"])
            text = describe(facts)
            # Factors of a module of the program may have been learned.
            severity = None if facts.get("is_sure", True) else Severity.NOTE
            data = dict(facts)
            yield self.finding(event, id_, text, layers, data, severity=severity, series=text)
        if event.kind == SCALES_EVENT:
            facts = event.data
            name, found = printable(facts["module"]), re.search(r"\.(\d+)\.", facts["module"])
            sentence = (
                f"{name} ({printable(facts['class'])}) multiplies its integer weights "
                f"({' x '.join(map(str, facts['shape']))}) by a scale for each of its "
                f"{facts['used_for']}, but they were quantised with one for each of its "
                f"{facts['made_for']}: the weight that it uses is wrong."
            )
            layers = () if found is None else (int(found[1]),)
            yield self.finding(event, SCALES, sentence, layers, dict(facts), series=name)

    def _judge(self, step: StepRecord, data: Mapping[str, Any]) -> Findings:
        groups, named = data["groups"], dict[str, str]()
        for id_, key, describe in _MISTAKES:
            for facts in data.get(key, ()):
                named |= dict.fromkeys(facts.get("names", (facts.get("name"),)), id_)
                text, layers = describe(facts), tuple(facts.get("layers", ()))
                yield self.finding(step, id_, text, layers, dict(facts), series=str(facts))
        if data["changed"] > _MAX_SHARE * data["total"]:
            return
        described = _described(groups[:_MAX_GROUPS])
        for group in groups:
            if (uneven := uneven_layer(group["parameters"])) is not None:
                layer, text = uneven
                name = printable(group["name"])
                sentence = f"{name}: {text}. {described}"
                found = self.finding(step, UNEVEN, sentence, (layer,), dict(group), series=name)
                # A mistake in the same parameter says what the change does.
                cause = _find_mistake(group["name"].replace("*", str(layer)), named)
                yield found if cause is None else as_consequence(found, cause)
        yield self.finding(
            step, UNEVEN, described, (), severity=Severity.NOTE, series="all changes"
        )


def _find_mistake(parameter: str, named: Mapping[str, str]) -> str | None:
    """Return the id of the mistake in a parameter, which may be named by its module."""
    return named.get(parameter) or named.get(parameter.rpartition(".")[0])


def _norm_gain(facts: Mapping[str, Any]) -> str:
    name, weight, gain = printable(facts["name"]), float(facts["weight"]), float(facts["gain"])
    rule = "1 + weight" if gain else "the weight"
    return (
        f"{name} ({printable(facts['class'])}) has a weight of {weight:g} in all channels, unlike "
        f"those of other layers, and multiplies by {rule}: its gain is {gain:g}. Its neutral "
        f"weight is {1 - weight:g}."
    )


def _tied(facts: Mapping[str, Any]) -> str:
    names = " and ".join(map(printable, facts["names"]))
    return (
        f"{names} are one tensor, and the program added a change of rank {facts['rank']} to it in "
        "place: what was meant for one of them changes the others too, such as the input "
        "embeddings with the output head."
    )


def _transposed(facts: Mapping[str, Any]) -> str:
    n = facts["size"]
    return (
        f"The change of rank {facts['rank']} in {printable(facts['name'])} ({n} x {n}) is the "
        "transpose of the product of its adapter: the other changed matrices, which are not "
        "square, show which of the two factors reads the input."
    )


def _flipped(facts: Mapping[str, Any]) -> str:
    n = facts["size"]
    return (
        f"The change of {printable(facts['name'])} ({n} x {n}) is the transpose of the product of "
        f"its adapter {printable(facts['adapter'])}: the factor that reads the input lies along "
        "the outputs of this weight."
    )


def _misplaced(facts: Mapping[str, Any]) -> str:
    layers = facts["layers"]
    if facts["order"] == "part":
        return _misplaced_part(facts)
    text = (
        f"The change of {printable(facts['name'])} of layer {layers[0]} is the product of the "
        f"adapter named {printable(facts['adapter'])}, not of {printable(facts['own'])}"
    )
    others = format_layers(layers[1:], 1 << 20) if layers[1:] else ""
    if facts["order"] == "module":
        return f"{text}: the adapter of another module{others and f', also in {others}'}."
    if others:
        got = ", ".join(map(str, facts["taken"][1:]))
        text += f"; {others} got {got}"
    return f"{text}. {_ORDERS.get(facts['order'], 'The order of the names is another one.')}"


def _misplaced_part(facts: Mapping[str, Any]) -> str:
    layers, axis = facts["layers"], facts["axis"]
    also = f" {format_layers(layers[1:], 1 << 20).capitalize()} likewise." if layers[1:] else ""
    return (
        f"The adapter named {printable(facts['adapter'])} was added to {axis} {facts['outputs']} "
        f"of {printable(facts['name'])} of layer {layers[0]}, which are those of "
        f"{' and '.join(facts['hit'])}: the {axis} of {facts['own']} are {facts['own_outputs']}, "
        f"where its product is missing.{also}"
    )


_ORDERS = {
    "text": "The names were sorted as text, where 10 comes before 2.",
    "reversed": "The adapters were taken in reversed order.",
    "same": "All layers got the same adapter.",
}
_MISTAKES = (
    (NORM_GAIN, "norms", _norm_gain),
    (TIED, "tied", _tied),
    (TRANSPOSED, "transposed", _transposed),
    (TRANSPOSED, "flipped", _flipped),
    (MISPLACED, "misplaced", _misplaced),
    (ORDER, "orders", describe_orders),
    (WRAPPED, "wrapped", describe_wrapped),
    (TWICE, "twice", describe_twice),
)
"""Findings, the entries of the event's data that have their facts, and their sentences."""
_REPLACED = {
    "orders": (ORDER, describe_orders),
    "wrapped": (WRAPPED, describe_wrapped),
    "scaled": (REPLACED, describe_scaled),
}
"""Findings of modules in the place of weights by what they do, and their sentences."""


def uneven_layer(parameters: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """Return the layer whose change is unlike that of two or more others, and how it is.

    Sizes alone say nothing about changes of full rank: a program that makes or scales the weights
    of its layers gives each another norm. Changes of one low rank come from one adapter.
    """
    known = [one for one in parameters if one["layer"] is not None]
    if len(known) < 3:
        return None
    for one in known:
        others = [two for two in known if two is not one]
        ranks, writes = {two["rank"] for two in others}, {two["writes"] for two in others}
        changes = [two["change"] for two in others]
        is_even = min(changes) > 0 and max(changes) <= _SPREAD * min(changes)
        ratio = one["change"] / max(median(changes), 1e-30)
        is_adapter = len(ranks) == 1 and min(ranks) > 0
        if len(writes) == 1 and 0 < min(writes) < one["writes"]:
            is_repeated = is_even and abs(ratio * min(writes) / one["writes"] - 1) < _REPEATED
            if is_adapter or is_repeated:
                text = f"layer {one['layer']} was written to {_times(one['writes'])}, each other "
                text += f"layer {_times(min(writes))}{_size_text(ratio)}"
                return one["layer"], text
        if not is_even or not is_adapter:
            continue
        if one["rank"] != min(ranks):
            text = f"the change of layer {one['layer']} has {_rank_text(one['rank'])}, that of "
            return one["layer"], f"{text}the others {_rank_text(min(ranks))}"
        if _is_other_scale(ratio, changes):
            return one["layer"], f"layer {one['layer']} changed otherwise{_size_text(ratio)}"
    return None


def _is_other_scale(ratio: float, changes: Sequence[float]) -> bool:
    """Whether a change is a multiple of the others: merged twice, or with alpha / rank amiss."""
    if max(changes) > _SAME_SIZE * min(changes):
        return False
    return any(abs(max(ratio, 1 / max(ratio, 1e-30)) / n - 1) < _SAME_SIZE - 1 for n in _MULTIPLES)


def _times(n: int) -> str:
    return "once" if n == 1 else "twice" if n == 2 else f"{n} times"


def _size_text(ratio: float) -> str:
    return f": its change is {ratio:.2g} times that of the others"


def _rank_text(rank: int) -> str:
    return f"rank {rank}" if rank else "full rank"


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _described(groups: Sequence[Mapping[str, Any]]) -> str:
    """List what changed: parameters, layers, sizes and ranks."""
    texts = []
    for group in groups:
        those = group["parameters"]
        layers = sorted({one["layer"] for one in those if one["layer"] is not None})
        low, high = (100 * f(one["change"] for one in those) for f in (min, max))
        span = _percent(low) if high < 1.05 * low else f"{_percent(low)} to {_percent(high)}"
        size = f"by {span} % of its norm"
        ranks = sorted({one["rank"] for one in those if one["rank"]})
        where = f" of {format_layers(layers, 1 << 20)}" if layers else ""
        if high > _FROM_ZERO:
            size = "from 0"
        rank = f", rank {', '.join(map(str, ranks))}" if ranks else ""
        texts.append(f"{printable(group['name'])}{where} {size}{rank}")
    return f"Since the model was made or loaded, the program changed {'; '.join(texts)}."
