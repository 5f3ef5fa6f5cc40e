"""What is known of a step when a breakpoint is judged. What is not known is left out.

"and", "or" and "not" are those of three values (Kleene): what is not known matters only where it
could change the answer.
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
    """Something that was seen: `kind` is one of `words.SIGHTS`, `what` says it in words.

    `module` is empty where it belongs to none.
    """

    kind: str
    module: str = ""
    layer: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class StepObservations:
    """Values of the step and of each layer by name, what was seen, and its new findings.

    A name that is not there is not known. `looked` holds what was looked for everywhere, as
    "empty-row" or "nan @ layers.*.mlp": what was not seen of it is not so. `findings` is None until
    the rules have looked.
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
    """Return what a step's record tells, together with what was seen while it ran."""
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
    found: dict[str, Value] = {
        "step": step.step,
        "phase": step.phase,
        "generation": step.generation,
        "branch": step.branch,
        "q_len": step.q_len,
        "kv_len": step.kv_after,
        "wall_ms": step.wall_ms,
    }
    return found | _token_values(step) | _memory_values(step)


def _token_values(step: StepRecord) -> dict[str, Value]:
    """Return what is known of the distribution and of the token that was chosen from it."""
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
    """Leave out what is no number: it compares with nothing."""
    return {n: v for n, v in found.items() if isinstance(v, str) or not math.isnan(v)}


def _nonfinite_observations(step: StepRecord) -> list[Observation]:
    """Return NaNs and infinities that were recorded, from the first layer to the logits."""
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
                said = f"{n} {word} {values} in {module}"
                found.append(Observation(kind, module if layer is not None else "", layer, said))
    return found


_CONDITION_OF_FINDING = {
    "mask.empty-row": EMPTY_ROW,
    "path.fallback": FALLBACK,
    "path.bypass": FALLBACK,
}
"""Findings that say what a condition asks for, where nobody looked while the step ran."""


def _finding_observations(step: StepRecord) -> list[Observation]:
    return [
        Observation(_CONDITION_OF_FINDING[finding.id], "", layer, finding.sentence)
        for finding in step.findings
        if finding.id in _CONDITION_OF_FINDING
        for layer in finding.layers or (finding.layer,)
    ]


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
