"""Whether an expression holds, under what is known: yes, no, or not known.

"and", "or" and "not" are those of three values (Kleene): what is not known matters only where it
could change the answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexinspect.breaks.facts import Observation, StepObservations, Value
from flexinspect.breaks.globs import matches_finding, matches_module
from flexinspect.breaks.tree import (
    And,
    Compare,
    Contains,
    Expression,
    FindingCondition,
    Member,
    Name,
    Not,
    Number,
    ObservationCondition,
    Operand,
    Or,
    Text,
    is_per_layer,
    observations_in,
    to_text,
)
from flexinspect.breaks.words import INF, NAN, UNITS
from flexinspect.findings import Finding, Severity


@dataclass(frozen=True, slots=True)
class Unknown:
    """Whether it holds cannot be said: these names, or conditions, are not known."""

    missing: tuple[str, ...]

    def __bool__(self) -> bool:
        """What is not known stops nothing."""
        return False


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Whether an expression holds, and in which layer (None: it names nothing that layers have)."""

    holds: bool | Unknown
    layer: int | None = None


def evaluate(expression: Expression, observations: StepObservations) -> bool | Unknown:
    """Return whether an expression holds.

    One that names what each layer has holds if it does so, as a whole, for one of the layers.
    """
    return evaluate_with_layer(expression, observations).holds


def evaluate_with_layer(expression: Expression, observations: StepObservations) -> EvaluationResult:
    """Return whether an expression holds, and for which layer."""
    if not is_per_layer(expression):
        return EvaluationResult(_Evaluator(observations, None).evaluate(expression))
    if not observations.layers:
        return EvaluationResult(Unknown(("layer",)))
    missing: list[str] = []
    for layer in observations.layers:
        holds = _Evaluator(observations, layer).evaluate(expression)
        if holds is True:
            return EvaluationResult(True, layer)
        if isinstance(holds, Unknown):
            missing += holds.missing
    return EvaluationResult(Unknown(tuple(dict.fromkeys(missing))) if missing else False)


_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class _Evaluator:
    """Judges a tree for the step as a whole, or for one of its layers."""

    def __init__(self, observations: StepObservations, layer: int | None) -> None:
        self._facts, self._layer = observations, layer
        own = observations.layers.get(layer, {}) if layer is not None else {}
        self._values = {**observations.values, **own}

    def evaluate(self, tree: Expression) -> bool | Unknown:
        """Return whether a tree holds."""
        if isinstance(tree, Not):
            inner = self.evaluate(tree.inner)
            return inner if isinstance(inner, Unknown) else not inner
        if isinstance(tree, And):
            return _combine(map(self.evaluate, tree.parts), decides=False)
        if isinstance(tree, Or):
            return _combine(map(self.evaluate, tree.parts), decides=True)
        if isinstance(tree, ObservationCondition):
            return self._is_observed(tree)
        if isinstance(tree, FindingCondition):
            return self._has_finding(tree)
        return self._compare(tree)

    def _compare(self, tree: Compare | Member | Contains) -> bool | Unknown:
        if isinstance(tree, Compare):
            left, right = self._value(tree.left), self._value(tree.right)
            if isinstance(left, Unknown):
                return left
            if isinstance(right, Unknown):
                return right
            return _OPERATORS[tree.op](left, right)  # type: ignore[arg-type]  # checked when it was read
        value = self._value(tree.name)
        if isinstance(value, Unknown):
            return value
        if isinstance(tree, Contains):
            return tree.part.value in str(value)
        return value in [self._value(one) for one in tree.values]

    def _value(self, operand: Operand) -> Value | Unknown:
        if isinstance(operand, Name):
            known = self._values.get(operand.name)
            return Unknown((operand.name,)) if known is None else known
        if isinstance(operand, Text):
            return operand.value
        return _number_value(operand)

    def _is_observed(self, tree: ObservationCondition) -> bool | Unknown:
        if any(self._matches_observation(tree, sighting) for sighting in self._facts.observed):
            return True
        # A record has the NaNs of layers and logits; those of other modules are looked for by name.
        by_name = tree.module_pattern is not None and tree.kind in (NAN, INF)
        wanted = to_text(tree) if by_name else tree.kind
        return False if wanted in self._facts.checked else Unknown((to_text(tree),))

    def _matches_observation(self, tree: ObservationCondition, sighting: Observation) -> bool:
        if sighting.kind != tree.kind or self._layer not in (None, sighting.layer):
            return False
        return tree.module_pattern is None or matches_module(tree.module_pattern, sighting.module)

    def _is_this_layer(self, layer: int | None) -> bool:
        return self._layer is None or layer is None or layer == self._layer

    def _has_finding(self, tree: FindingCondition) -> bool | Unknown:
        if self._facts.findings is None:
            return Unknown((to_text(tree),))
        return any(self._matches_finding(tree, finding) for finding in self._facts.findings)

    def _matches_finding(self, tree: FindingCondition, finding: Finding) -> bool:
        layers = finding.layers or (finding.layer,)
        if not any(map(self._is_this_layer, layers)) or not matches_finding(
            tree.pattern, finding.id
        ):
            return False
        if tree.op is None or tree.severity is None:
            return True
        return _OPERATORS[tree.op](
            _severity_rank(finding.severity), _severity_rank(Severity(tree.severity))
        )


def evidence_text(
    tree: ObservationCondition | FindingCondition, observations: StepObservations, layer: int | None
) -> str:
    """Return in words what made a condition true, empty where nothing did."""
    judged = _Evaluator(observations, layer)
    if isinstance(tree, ObservationCondition):
        seen = (one.text for one in observations.observed if judged._matches_observation(tree, one))
        return next(seen, "")
    found = (one for one in observations.findings or () if judged._matches_finding(tree, one))
    return next((f"{one.id}: {one.sentence}" for one in found), "")


def observed_layer(expression: Expression, observations: StepObservations) -> int | None:
    """Return the layer of the first sighting that an expression asks for, None without one."""
    judged, wanted = _Evaluator(observations, None), observations_in(expression)
    meant = (
        one
        for one in observations.observed
        if any(judged._matches_observation(seen, one) for seen in wanted)
    )
    return next((one.layer for one in meant if one.layer is not None), None)


def _combine(parts: Iterable[bool | Unknown], *, decides: bool) -> bool | Unknown:
    """Join conditions: one that `decides` settles it, else one that is not known leaves it open."""
    missing: list[str] = []
    for part in parts:
        if isinstance(part, Unknown):
            missing += part.missing
        elif part is decides:
            return decides
    return Unknown(tuple(dict.fromkeys(missing))) if missing else not decides


def _number_value(number: Number) -> float:
    return number.value * UNITS[number.unit] if number.unit else number.value


def _severity_rank(severity: Severity) -> int:
    order = list(Severity)
    return len(order) - order.index(severity)
