"""Evaluation of breakpoint expressions on the observations of a step.

Names without a value are unknown. "and", "or" and "not" follow three-valued (Kleene) logic: an
unknown matters only where it could change the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flexinspect.breakpoints.names import (
    EMPTY_ROW,
    FALLBACK,
    INF,
    NAN,
    UNITS,
    VALUE_NAMES,
    ValueKind,
)
from flexinspect.breakpoints.syntax_tree import (
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
    leaves,
    matches_finding,
    matches_module,
    observations_in,
    quote,
    to_text,
    value_names_in,
)
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import UNKNOWN, CallRecord, LayerStatRecord, StepRecord

Value = float | str


@dataclass(frozen=True, slots=True)
class Observation:
    """Something that was observed: `kind` is one of `names.OBSERVATIONS`, `text` describes it.

    `module` is empty if it belongs to no module.
    """

    kind: str
    module: str = ""
    layer: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class StepObservations:
    """Values of the step and of each layer by name, observations, and new findings.

    A missing name is unknown. `checked` holds the conditions that were checked everywhere, such as
    "empty-row" or "nan @ layers.*.mlp": they are false unless observed. `findings` is None until
    the rules have run.
    """

    values: Mapping[str, Value] = field(default_factory=dict)
    layers: Mapping[int, Mapping[str, Value]] = field(default_factory=dict)
    observed: tuple[Observation, ...] = ()
    checked: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] | None = None


def observe_step(
    step: StepRecord,
    *,
    observed: Iterable[Observation] = (),
    checked: Iterable[str] = (),
) -> StepObservations:
    """Return the observations in a step's record, together with those made while it ran."""
    recorded = set(checked)
    if step.logits is not None or step.layer_stats:
        recorded |= {NAN, INF}
    return StepObservations(
        values=_step_values(step),
        layers=_layer_values(step),
        observed=(*observed, *_nonfinite_observations(step), *_finding_observations(step)),
        checked=frozenset(recorded),
        findings=step.findings,
    )


def _step_values(step: StepRecord) -> dict[str, Value]:
    values: dict[str, Value] = {
        "step": step.step,
        "phase": step.phase,
        "generation": step.generation,
        "branch": step.branch,
        "q_len": step.q_len,
        "kv_len": step.kv_after,
        "wall_ms": step.wall_ms,
    }
    return values | _token_values(step) | _memory_values(step)


def _token_values(step: StepRecord) -> dict[str, Value]:
    """Return the values of the distribution and of the token chosen from it."""
    found: dict[str, Value] = {}
    token = next((token for token in step.tokens if token.step == step.step), None)
    if token is not None:
        found |= {"token": token.text, "token_id": token.token_id}
    logits = step.logits
    if logits is None:
        return found
    found |= {"entropy": logits.entropy, "margin": logits.margin}
    if logits.chosen_id != UNKNOWN:
        logprob = logits.chosen_logprob
        found |= {"rank": logits.chosen_rank, "logprob": logprob, "prob": math.exp(logprob)}
    return _without_nan(found)


def _memory_values(step: StepRecord) -> dict[str, Value]:
    memory = step.memory
    if memory is None:
        return {}
    names = ("rss", "kv_cache", "cuda_allocated", "cuda_reserved", "cuda_peak")
    found = {name: getattr(memory, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _layer_values(step: StepRecord) -> dict[int, dict[str, Value]]:
    found: dict[int, dict[str, Value]] = {}
    for call in step.calls:
        found.setdefault(call.layer, {"layer": call.layer}).update(_call_values(call))
    for stats in step.layer_stats:
        found.setdefault(stats.layer, {"layer": stats.layer}).update(_output_values(stats))
    return found


def _call_values(call: CallRecord) -> dict[str, Value]:
    found: dict[str, Value] = {"path": call.path, "q_len": call.q_len, "kv_len": call.kv_len}
    if call.gate is not None:
        found["gate"] = call.gate
    return _without_nan(found)


def _output_values(stats: LayerStatRecord) -> dict[str, Value]:
    names = ("norm", "std", "mean", "min", "max")
    return _without_nan({name: getattr(stats, name) for name in names})


def _without_nan(found: dict[str, Value]) -> dict[str, Value]:
    """Remove NaN values: they cannot be compared."""
    return {n: v for n, v in found.items() if isinstance(v, str) or not math.isnan(v)}


def _nonfinite_observations(step: StepRecord) -> list[Observation]:
    """Return the recorded NaNs and infinities, from the first layer to the logits."""
    places: list[tuple[str, int | None, int, int]] = [
        (stats.module, stats.layer, stats.n_nan, stats.n_inf) for stats in step.layer_stats
    ]
    if step.logits is not None:
        places.append(("the logits", None, step.logits.n_nan, step.logits.n_inf))
    found = []
    for module, layer, n_nan, n_inf in places:
        for kind, n, word in ((NAN, n_nan, "NaN"), (INF, n_inf, "infinite")):
            if n:
                values = "value" if n == 1 else "values"
                text = f"{n} {word} {values} in {module}"
                found.append(Observation(kind, module if layer is not None else "", layer, text))
    return found


_CONDITION_OF_FINDING = {
    "mask.empty-row": EMPTY_ROW,
    "path.fallback": FALLBACK,
    "path.bypass": FALLBACK,
}
"""Findings that fulfil a condition which was not checked while the step ran."""


def _finding_observations(step: StepRecord) -> list[Observation]:
    return [
        Observation(_CONDITION_OF_FINDING[finding.id], "", layer, finding.sentence)
        for finding in step.findings
        if finding.id in _CONDITION_OF_FINDING
        for layer in finding.layers or (finding.layer,)
    ]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result of an expression that depends on unknown names or conditions."""

    missing: tuple[str, ...]

    def __bool__(self) -> bool:
        """An unknown result does not stop the run."""
        return False


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Whether an expression holds, and in which layer (None if it is not per layer)."""

    holds: bool | Unknown
    layer: int | None = None


def evaluate(expression: Expression, observations: StepObservations) -> bool | Unknown:
    """Return whether an expression holds.

    An expression per layer holds if the whole expression holds for one of the layers.
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
    """Evaluates a tree for the whole step, or for one of its layers."""

    def __init__(self, observations: StepObservations, layer: int | None) -> None:
        self._observations, self._layer = observations, layer
        layer_values = observations.layers.get(layer, {}) if layer is not None else {}
        self._values = {**observations.values, **layer_values}

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
            return _OPERATORS[tree.op](left, right)  # type: ignore[arg-type]  # checked by the parser
        value = self._value(tree.name)
        if isinstance(value, Unknown):
            return value
        if isinstance(tree, Contains):
            return tree.part.value in str(value)
        return value in [self._value(member) for member in tree.values]

    def _value(self, operand: Operand) -> Value | Unknown:
        if isinstance(operand, Name):
            value = self._values.get(operand.name)
            return Unknown((operand.name,)) if value is None else value
        if isinstance(operand, Text):
            return operand.value
        return _number_value(operand)

    def _is_observed(self, tree: ObservationCondition) -> bool | Unknown:
        if any(self._matches_observation(tree, seen) for seen in self._observations.observed):
            return True
        # A record has the NaNs of layers and logits; other modules are checked by name.
        by_name = tree.module_pattern is not None and tree.kind in (NAN, INF)
        condition = to_text(tree) if by_name else tree.kind
        return False if condition in self._observations.checked else Unknown((to_text(tree),))

    def _matches_observation(self, tree: ObservationCondition, seen: Observation) -> bool:
        if seen.kind != tree.kind or self._layer not in (None, seen.layer):
            return False
        return tree.module_pattern is None or matches_module(tree.module_pattern, seen.module)

    def _is_this_layer(self, layer: int | None) -> bool:
        return self._layer is None or layer is None or layer == self._layer

    def _has_finding(self, tree: FindingCondition) -> bool | Unknown:
        if self._observations.findings is None:
            return Unknown((to_text(tree),))
        return any(self._matches_finding(tree, finding) for finding in self._observations.findings)

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
    """Return what made a condition true as text, empty if it is not true."""
    evaluator = _Evaluator(observations, layer)
    if isinstance(tree, ObservationCondition):
        observed = (o for o in observations.observed if evaluator._matches_observation(tree, o))
        return next((observation.text for observation in observed), "")
    findings = (f for f in observations.findings or () if evaluator._matches_finding(tree, f))
    return next((f"{finding.id}: {finding.sentence}" for finding in findings), "")


def observed_layer(expression: Expression, observations: StepObservations) -> int | None:
    """Return the layer of the first observation that matches an expression, or None."""
    evaluator, conditions = _Evaluator(observations, None), observations_in(expression)
    layers = (
        seen.layer
        for seen in observations.observed
        if any(evaluator._matches_observation(condition, seen) for condition in conditions)
    )
    return next((layer for layer in layers if layer is not None), None)


def _combine(parts: Iterable[bool | Unknown], *, decides: bool) -> bool | Unknown:
    """Combine results: `decides` determines the result, otherwise an unknown makes it unknown."""
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


_PLACE_NAMES = ("step", "generation", "branch", "layer")
"""Names of the location, which is reported before the values."""


def hit_reason(
    expression: Expression, observations: StepObservations, result: EvaluationResult
) -> str:
    """Return where an expression holds, and why."""
    reasons = [
        *_evidence_texts(expression, observations, result.layer),
        *_value_texts(expression, observations, result.layer),
    ]
    token = observations.values.get("token")
    if token is not None and "token" not in value_names_in(expression):
        reasons.append(f"it chose {quote(str(token))}")
    where = describe_location(observations, result.layer)
    return f"{to_text(expression)}: {where}" + (f": {'; '.join(reasons)}" if reasons else "")


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
    """Return why a breakpoint could not be evaluated."""
    names = ", ".join(unknown.missing)
    verb = "is" if len(unknown.missing) == 1 else "are"
    where = describe_location(observations)
    return (
        f"The breakpoint {text} could not be evaluated in {where}: {names} {verb} not known there. "
        "It may not be recorded at this level, or not be available in this kind of run."
    )


def _evidence_texts(
    expression: Expression, observations: StepObservations, layer: int | None
) -> list[str]:
    conditions = [
        leaf
        for leaf in leaves(expression)
        if isinstance(leaf, ObservationCondition | FindingCondition)
    ]
    texts = (evidence_text(leaf, observations, layer).rstrip(".") for leaf in conditions)
    return list(dict.fromkeys(text for text in texts if text))


def _value_texts(
    expression: Expression, observations: StepObservations, layer: int | None
) -> list[str]:
    layer_values = observations.layers.get(layer, {}) if layer is not None else {}
    values = {**observations.values, **layer_values}
    return [
        f"{name} {_format_value(name, values[name])}"
        for name in value_names_in(expression)
        if name not in (*_PLACE_NAMES, "phase") and name in values
    ]


def _format_value(name: str, value: Value) -> str:
    if isinstance(value, str):
        return quote(value)
    if VALUE_NAMES[name].kind is ValueKind.BYTES:
        return f"{value / (1 << 20):.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
