"""Evaluation of breakpoint expressions on the observations of a step.

Names without a value are unknown. "and", "or" and "not" follow three-valued (Kleene) logic: an
unknown matters only where it could change the result.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from msgspec import Struct, field

from flexinspect.breakpoints import grammar
from flexinspect.core.text import is_or_are, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import UNKNOWN, LayerStatRecord, LogitsRecord, StepRecord

Value = float | str


class Observation(NamedTuple):
    """Something that was observed: `kind` is one of `grammar.OBSERVATIONS`, `text` describes it.

    `module` is empty if it belongs to no module.
    """

    kind: str
    module: str = ""
    layer: int | None = None
    text: str = ""


class StepObservations(Struct, frozen=True):
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

    def values_at(self, layer: int | None) -> dict[str, Value]:
        """Return the values of the step, with those of a layer in their place."""
        return {**self.values, **(self.layers.get(layer, {}) if layer is not None else {})}


def observe_step(
    step: StepRecord, *, observed: Iterable[Observation] = (), checked: Iterable[str] = ()
) -> StepObservations:
    """Return the observations in a step's record, together with those made while it ran."""
    has_numbers = step.logits is not None or step.layer_stats
    of_findings = (
        Observation(_CONDITION_OF_FINDING[finding.id], "", layer, finding.sentence)
        for finding in step.findings
        if finding.id in _CONDITION_OF_FINDING
        for layer in finding.layers or (finding.layer,)
    )
    return StepObservations(
        values=_step_values(step),
        layers=_layer_values(step),
        observed=(*observed, *_nonfinite_observations(step), *of_findings),
        checked=frozenset({*checked, *((grammar.NAN, grammar.INF) if has_numbers else ())}),
        findings=step.findings,
    )


def _step_values(step: StepRecord) -> dict[str, Value]:
    token = next((token for token in step.tokens if token.step == step.step), None)
    logits, memory = step.logits, step.memory
    is_chosen = logits is not None and logits.chosen_id != UNKNOWN
    names = ("step", "phase", "generation", "branch", "q_len", "wall_ms")
    values = {
        **_attributes(step, *names, kv_len="kv_after"),
        **_attributes(token, "token_id", token="text"),
        **_attributes(logits, entropy="entropy", margin="margin"),
        **(_attributes(logits, rank="chosen_rank", logprob="chosen_logprob") if is_chosen else {}),
        **_attributes(memory, *("rss", "kv_cache", "cuda_allocated", "cuda_reserved", "cuda_peak")),
    }
    if "logprob" in values:
        values["prob"] = math.exp(values["logprob"])
    return values


def _layer_values(step: StepRecord) -> dict[int, dict[str, Value]]:
    found = defaultdict[int, dict[str, Value]](dict)
    for call in step.calls:
        found[call.layer] |= _attributes(call, "layer", "path", "q_len", "kv_len", "lse_error")
    for stats in step.layer_stats:
        found[stats.layer] |= _attributes(stats, "layer", "norm", "std", "mean", "min", "max")
    return dict(found)


def _attributes(record: object | None, *same: str, **renamed: str) -> dict[str, Any]:
    """Return the known attributes of a record by name; a NaN cannot be compared, so it is none."""
    attributes = (dict(zip(same, same, strict=True)) | renamed) if record is not None else {}
    found = {name: getattr(record, attribute) for name, attribute in attributes.items()}
    return {name: value for name, value in found.items() if value is not None and value == value}


def _nonfinite_observations(step: StepRecord) -> list[Observation]:
    """Return the recorded NaNs and infinities, from the first layer to the logits."""
    places: list[tuple[str, int | None, LayerStatRecord | LogitsRecord]]
    places = [(stats.module, stats.layer, stats) for stats in step.layer_stats]
    places += [] if step.logits is None else [("", None, step.logits)]
    fields = ((grammar.NAN, "n_nan", "NaN value"), (grammar.INF, "n_inf", "infinite value"))
    return [
        Observation(kind, module, layer, f"{plural(n, what)} in {module or 'the logits'}")
        for module, layer, counts in places
        for kind, name, what in fields
        if (n := getattr(counts, name))
    ]


_CONDITION_OF_FINDING = dict.fromkeys(("path.fallback", "path.bypass"), grammar.FALLBACK)
_CONDITION_OF_FINDING["mask.empty-row"] = grammar.EMPTY_ROW
"""Findings that fulfil a condition which was not checked while the step ran."""


class Unknown(Struct, frozen=True):
    """The result of an expression that depends on unknown names or conditions."""

    missing: tuple[str, ...]

    def __bool__(self) -> bool:
        """An unknown result does not stop the run."""
        return False


class EvaluationResult(NamedTuple):
    """Whether an expression holds, and in which layer (None if it is not per layer)."""

    holds: bool | Unknown
    layer: int | None = None


def evaluate(expression: grammar.Expression, observations: StepObservations) -> EvaluationResult:
    """Return whether an expression holds, and for which layer.

    An expression per layer holds if the whole expression holds for one of the layers.
    """
    if not grammar.is_per_layer(expression):
        return EvaluationResult(_Evaluator(observations, None).evaluate(expression))
    if not observations.layers:
        return EvaluationResult(Unknown(("layer",)))
    results = {n: _Evaluator(observations, n).evaluate(expression) for n in observations.layers}
    layer = next((layer for layer, holds in results.items() if holds is True), None)
    return EvaluationResult(_combine(results.values(), decides=True), layer)


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda part, whole: part in whole,
}


class _Evaluator:
    """Evaluates a tree for the whole step, or for one of its layers."""

    def __init__(self, observations: StepObservations, layer: int | None) -> None:
        self._observations, self._layer = observations, layer
        self._values = observations.values_at(layer)

    def evaluate(self, tree: grammar.Expression) -> bool | Unknown:
        if isinstance(tree, grammar.Not):
            inner = self.evaluate(tree.inner)
            return inner if isinstance(inner, Unknown) else not inner
        if isinstance(tree, grammar.And):
            return _combine(map(self.evaluate, tree.parts), decides=False)
        if isinstance(tree, grammar.Or):
            return _combine(map(self.evaluate, tree.parts), decides=True)
        if isinstance(tree, grammar.Compare):
            sides = [self._value(tree.left), self._value(tree.right)]
            unknown = next((side for side in sides if isinstance(side, Unknown)), None)
            return _OPERATORS[tree.op](*sides) if unknown is None else unknown
        if any(self.evidence(tree)):
            return True
        text, checked = grammar.to_text(tree), self._observations.checked
        if isinstance(tree, grammar.FindingCondition):
            return False if self._observations.findings is not None else Unknown((text,))
        # A record has the NaNs of layers and logits; other modules are checked by name.
        is_checked = (text if tree.is_checked_by_name else tree.kind) in checked
        return False if is_checked else Unknown((text,))

    def _value(self, operand: grammar.Operand | tuple[grammar.Operand, ...]) -> Any:
        """Return a value, an `Unknown` without one, or the values of a list."""
        if isinstance(operand, tuple):
            return [self._value(member) for member in operand]
        if isinstance(operand, grammar.Name):
            return self._values.get(operand.name, Unknown((operand.name,)))
        if isinstance(operand, grammar.Number) and operand.unit:
            return operand.value * grammar.UNITS[operand.unit]
        return operand.value

    def evidence(self, tree: grammar.Leaf) -> Iterator[Observation | Finding]:
        """Yield the observations or findings that fulfil a condition; none for a comparison."""
        if isinstance(tree, grammar.ObservationCondition):
            pattern = tree.module_pattern
            for seen in self._observations.observed:
                is_here = seen.kind == tree.kind and self._layer in (None, seen.layer)
                if is_here and (pattern is None or grammar.matches_module(pattern, seen.module)):
                    yield seen
        elif isinstance(tree, grammar.FindingCondition):
            findings = self._observations.findings or ()
            yield from (found for found in findings if self._matches_finding(tree, found))

    def _matches_finding(self, tree: grammar.FindingCondition, finding: Finding) -> bool:
        layers = finding.layers or (finding.layer,)
        is_here = self._layer is None or None in layers or self._layer in layers
        if not is_here or not fnmatchcase(finding.id, tree.pattern):
            return False
        if tree.op is None or tree.severity is None:
            return True
        worst_last = list(Severity)[::-1]
        rank, limit = worst_last.index(finding.severity), worst_last.index(Severity(tree.severity))
        return _OPERATORS[tree.op](rank, limit)


def observed_layer(expression: grammar.Expression, observations: StepObservations) -> int | None:
    """Return the layer of the first observation that matches an expression, or None."""
    evaluator, conditions = _Evaluator(observations, None), grammar.observations_in(expression)
    matching = [seen for condition in conditions for seen in evaluator.evidence(condition)]
    layers = (seen.layer for seen in observations.observed if seen in matching)
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


_PLACE_NAMES = ("step", "phase", "generation", "branch", "layer")  # reported before the values


def hit_reason(
    expression: grammar.Expression, observations: StepObservations, result: EvaluationResult
) -> str:
    """Return where an expression holds, and why."""
    layer, evaluator = result.layer, _Evaluator(observations, result.layer)
    texts = (
        found.text if isinstance(found, Observation) else f"{found.id}: {found.sentence}"
        for found in (next(evaluator.evidence(leaf), None) for leaf in grammar.leaves(expression))
        if found is not None
    )
    reasons = [text for text in dict.fromkeys(text.rstrip(".") for text in texts) if text]
    values = observations.values_at(layer)
    names, token = grammar.value_names_in(expression), observations.values.get("token")
    shown = [name for name in names if name not in _PLACE_NAMES and name in values]
    reasons += [f"{name} {_format_value(name, values[name])}" for name in shown]
    if token is not None and "token" not in names:
        reasons.append(f"token {grammar.quote(str(token))}")
    where = describe_location(observations, layer)
    return ": ".join([grammar.to_text(expression), where, *filter(None, ["; ".join(reasons)])])


def describe_location(observations: StepObservations, layer: int | None = None) -> str:
    """Return "step 7 (decode) of generation 1, layer 3"."""
    values = observations.values
    text = f"the end of generation {values.get('generation', 0)}"
    if "step" in values:
        text = f"step {values['step']}" + (f" ({values['phase']})" if values.get("phase") else "")
        text += f" of generation {values['generation']}" if values.get("generation") else ""
    text += f", branch {values['branch']}" if values.get("branch") else ""
    return text if layer is None else f"{text}, layer {layer}"


def describe_unknown(text: str, unknown: Unknown, observations: StepObservations) -> str:
    """Return why a breakpoint could not be evaluated."""
    missing = f"{', '.join(unknown.missing)} {is_or_are(len(unknown.missing))} not known there"
    where = describe_location(observations)
    return (
        f"The breakpoint {text} could not be evaluated in {where}: {missing}. It may not be "
        "recorded at this level, or not be available in this kind of run."
    )


def _format_value(name: str, value: Value) -> str:
    if isinstance(value, str):
        return grammar.quote(value)
    if grammar.VALUE_NAMES[name].kind is grammar.ValueKind.BYTES:
        return f"{value / (1 << 20):.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
