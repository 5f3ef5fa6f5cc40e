"""Why a breakpoint was met, in words: the place, and the values that decided it."""

from __future__ import annotations

from flexinspect.breaks.evaluate import EvaluationResult, Unknown, evidence_text
from flexinspect.breaks.facts import StepObservations, Value
from flexinspect.breaks.tree import (
    Expression,
    FindingCondition,
    ObservationCondition,
    leaves,
    quote,
    to_text,
    value_names_in,
)
from flexinspect.breaks.words import VALUE_NAMES, ValueKind

_PLACE_NAMES = ("step", "generation", "branch", "layer")
"""Names that say where; they are told before the values."""


def hit_reason(
    expression: Expression, observations: StepObservations, result: EvaluationResult
) -> str:
    """Say where an expression holds, and why."""
    said = [
        *_evidence_texts(expression, observations, result.layer),
        *_value_texts(expression, observations, result.layer),
    ]
    token = observations.values.get("token")
    if token is not None and "token" not in value_names_in(expression):
        said.append(f"it chose {quote(str(token))}")
    where = describe_location(observations, result.layer)
    return f"{to_text(expression)}: {where}" + (f": {'; '.join(said)}" if said else "")


def describe_location(observations: StepObservations, layer: int | None = None) -> str:
    """Return "step 7 (decode) of generation 1, layer 3"."""
    values = observations.values
    if "step" in values:
        phase = values.get("phase")
        text = f"step {values['step']}" + (f" ({phase})" if phase else "")
        if values.get("generation"):
            text += f" of generation {values['generation']}"
    else:
        text = f"the end of generation {values.get('generation', 0)}"
    text += f", branch {values['branch']}" if values.get("branch") else ""
    return text if layer is None else f"{text}, layer {layer}"


def describe_unknown(text: str, unknown: Unknown, observations: StepObservations) -> str:
    """Say that a breakpoint could not be judged, and what would help."""
    names = ", ".join(unknown.missing)
    verb = "is" if len(unknown.missing) == 1 else "are"
    where = describe_location(observations)
    return (
        f"The breakpoint {text} could not be judged in {where}: {names} {verb} not known there. "
        "It may not be recorded at this level, or not be seen in this kind of run."
    )


def _evidence_texts(
    expression: Expression, observations: StepObservations, layer: int | None
) -> list[str]:
    wanted = [
        leaf
        for leaf in leaves(expression)
        if isinstance(leaf, ObservationCondition | FindingCondition)
    ]
    found = (evidence_text(leaf, observations, layer).rstrip(".") for leaf in wanted)
    return list(dict.fromkeys(text for text in found if text))


def _value_texts(
    expression: Expression, observations: StepObservations, layer: int | None
) -> list[str]:
    own = observations.layers.get(layer, {}) if layer is not None else {}
    known = {**observations.values, **own}
    names = [
        name for name in value_names_in(expression) if name not in _PLACE_NAMES and name in known
    ]
    return [f"{name} {_format_value(name, known[name])}" for name in names if name != "phase"]


def _format_value(name: str, value: Value) -> str:
    if isinstance(value, str):
        return quote(value)
    if VALUE_NAMES[name].kind is ValueKind.BYTES:
        return f"{value / (1 << 20):.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
