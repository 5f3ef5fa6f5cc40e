"""What is known of a step when a breakpoint is judged. What is not known is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flexinspect.breaks.words import EMPTY_ROW, FALLBACK, INF, NAN
from flexinspect.findings import Finding
from flexinspect.records import UNKNOWN, CallRecord, LayerStatRecord, StepRecord

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
