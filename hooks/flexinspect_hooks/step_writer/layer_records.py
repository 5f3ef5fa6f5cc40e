"""Makes records of what modules return: statistics of layers, digests, lens, attention weights.

The interface shows recomputed weights, never those that a forward returns. But the program may use
them, and they may be something else: a log-sum-exp, or a layer's output under the name of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flexinspect.records.step import ArrayRecord, CallRecord, LayerStatRecord, LensRecord
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts
from flexinspect_hooks.step_writer.values import MODIFIED, Values

DIGEST_STREAM, WEIGHTS_STREAM = "audit.digests", "audit.weights"
NO_WEIGHTS = "not-attention-weights"

TOLERANCE = 0.05
"""Largest deviation of a row's sum from 1: rounding of bfloat16 over many keys."""

WeightShapes = list[tuple[int, ...] | None]
"""The shape of each layer's returned attention weights, None for what is no tensor."""


class ReducedLayers(NamedTuple):
    """The layers whose outputs were reduced, and those that the logit lens has read."""

    reduced: Sequence[int] = ()
    lens: Sequence[int] = ()


class LayerRecords:
    """Makes the records of decoder layers: `names` by layer, the number of the last layer."""

    def __init__(
        self, names: Mapping[int, str], last_layer: int, text_of: Callable[[int], str]
    ) -> None:
        self._names, self._last_layer, self._text_of = names, last_layer, text_of

    def record(
        self, step: StepFacts, kept: ReducedLayers, values: Values, draft: StepDraft
    ) -> None:
        """Write one `LayerStatRecord` per layer (at basic: per layer with NaN/Inf)."""
        if MODIFIED in values:
            draft.are_values_lost = True
            text = (
                "Outputs of layers were modified in place before they were read: this step has no "
                "statistics of layers, and no digests."
            )
            draft.add_event(MODIFIED, text, {})
        if "modules.stats" not in values:
            return
        for stream in (DIGEST_STREAM, WEIGHTS_STREAM):
            if stream in values:
                draft.arrays.append(ArrayRecord(stream, values[stream]))
        if kept.lens:
            draft.lens += lens_records(kept.lens, self._last_layer, step, values, self._text_of)
        for layer, row in zip(kept.reduced, values["modules.stats"].tolist(), strict=True):
            *statistics, n_nan, n_bad, first = row
            if step.level == "basic" and not n_bad:
                continue
            draft.layer_stats.append(
                LayerStatRecord(
                    layer=layer,
                    module=self._names[layer],
                    n_nan=int(n_nan),
                    n_inf=int(n_bad - n_nan),
                    bad_row=int(first) if n_bad else None,
                    **dict(zip(("min", "max", "mean", "std", "norm"), statistics, strict=True)),
                )
            )
        if step.level == "extreme":
            draft.add_activations(values, ("hidden",))


def lens_records(
    layers: Sequence[int],
    last_layer: int,
    step: StepFacts,
    values: Values,
    text_of: Callable[[int], str],
) -> list[LensRecord]:
    """Return the records of the layers that `LogitLens.reduce` returned."""
    found = []
    chosen = values["lens.chosen"].tolist() if "lens.chosen" in values else None
    error = float(values["lens.error"]) if "lens.error" in values else None
    ids, logprobs = values["lens.ids"].tolist(), values["lens.logprobs"].tolist()
    for number, layer in enumerate(layers):
        rank, logprob = (-1, math.nan)
        if chosen:
            rank, logprob = chosen[number]
        elif step.token_id in ids[number]:  # of a program, whose choice became known later
            rank = ids[number].index(step.token_id)
            logprob = logprobs[number][rank]
        found.append(
            LensRecord(
                layer,
                tuple(ids[number]),
                tuple(map(text_of, ids[number])),
                tuple(logprobs[number]),
                int(rank),
                logprob,
                error if layer == last_layer else None,
            )
        )
    return sorted(found, key=lambda record: record.layer)


class ReturnedWeightsRecords:
    """Reports what a forward returned as attention weights and cannot be them."""

    def record(self, step: StepFacts, kept: WeightShapes, values: Values, draft: StepDraft) -> None:
        """Write an event for each layer whose tensor cannot be attention weights."""
        errors = iter(values["weights.off"].tolist() if "weights.off" in values else ())
        call_of = {call.layer: call for call in draft.calls}
        for layer, shape in enumerate(kept):
            if shape is None:
                continue
            error = next(errors) if len(shape) > 1 else 0.0
            if problem := _weights_problem(shape, error, call_of.get(layer)):
                facts = {"layer": layer, "shape": list(shape)}
                draft.add_event(NO_WEIGHTS, f"Layer {layer} returned {problem}", facts)


def _weights_problem(shape: tuple[int, ...], error: float, call: CallRecord | None) -> str:
    expected = (call.batch, call.q_heads, call.q_len, call.kv_len) if call is not None else None
    if len(shape) != 4 or (expected is not None and shape != expected):
        wanted = expected or "(sequences, heads, rows, keys)"
        sums = "" if error <= TOLERANCE else ", whose rows do not sum to 1"
        return f"as attention weights a tensor {shape}{sums}; weights would be {wanted}."
    if not error <= TOLERANCE:  # a NaN is an error, too
        return f"attention weights whose newest row does not sum to 1: it is {error:.3g} off."
    return ""


class SelectedOutputRecords:
    """Stores the outputs of the modules that the user selected."""

    def record(
        self,
        step: StepFacts,
        kept: Sequence[tuple[str, int | None, bool]],
        values: Values,
        draft: StepDraft,
    ) -> None:
        """Add an array per stored output: its stream, its layer, and whether it is bfloat16."""
        for number, (stream, layer, is_bfloat16) in enumerate(kept or ()):
            dtype = "bfloat16" if is_bfloat16 else None
            array = values[f"selected/{number}"]
            draft.arrays.append(ArrayRecord(stream, array, layer, dtype))
