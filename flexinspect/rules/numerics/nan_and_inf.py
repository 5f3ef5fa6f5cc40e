"""Finds the origin of NaN and Inf: the layer, and the part of the layer if it is known.

The first layer of a step with a non-finite output is the producer. Later layers and steps only
propagate it, so there is another finding only if it later appears in an earlier layer. The
log-sum-exp shows whether the scores of the newest row are finite, and the LSE check whether its
output is. Together they separate queries and keys, values, and what follows the attention in that
row (`find_nonfinite_part`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from flexinspect.core.text import Positions, is_or_are, plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, LayerStatRecord, LogitsRecord, StepRecord
from flexinspect.rules.attention.attention_shape import (
    ROW_STREAMS,
    NewestRow,
    NumberArray,
    count_open_keys,
    newest_row,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Findings, Rule, finding_kinds

_AFTER_LAST_LAYER = 1 << 30  # stands for the final norm and the output head
_UNLIMITED = 1 << 62

LARGEST_FLOAT16 = 65504


class NumbersRule(Rule):
    """Names the layer, the step and, if recorded, the rows of the first NaN or Inf.

    From level advanced every layer of every step is recorded. At level basic on a CPU, layers are
    recorded only if the logit of the chosen token is not finite.
    """

    name = "numbers"
    needs = (imported.STATISTICS,)
    streams = ("hidden", *ROW_STREAMS)
    handles_standalone_calls = True
    handles_packed_requests = True
    findings = finding_kinds("numbers.nan", "numbers.inf")

    def reset(self) -> None:
        self._reported_layers: dict[int, int] = {}  # by branch: the earliest reported layer
        self._n_closed: dict[int, int] = {}  # by branch: -Inf logits that count as intended

    def on_step(self, step: StepRecord) -> Iterable[Finding]:
        """Report the producing layer, or the logits if all layers are finite."""
        # A step without NaN or Inf costs only these lines.
        nonfinite = [stat for stat in step.layer_stats if stat.n_nan or stat.n_inf]
        row = newest_row(step)
        if row is not None and step.layer_stats and not math.isfinite(float(row.lse.sum())):
            finding = self._check_scores(step, row, nonfinite)
            if finding is not None:
                return (finding,)
        if nonfinite:
            return self._check_layers(step, nonfinite)
        logits = step.logits
        if logits is None:
            return () if step.layer_stats else self._check_calls(step)
        if logits.n_nan or logits.n_inf:
            return self._check_logits(step, logits)
        self._n_closed.setdefault(step.branch, 0)
        return ()

    def _check_layers(self, step: StepRecord, nonfinite: Sequence[LayerStatRecord]) -> Findings:
        producer = min(nonfinite, key=attrgetter("layer"))
        earlier = self._reported_layers.get(step.branch, _AFTER_LAST_LAYER + 1)
        if producer.layer >= earlier:
            return
        self._reported_layers[step.branch] = producer.layer
        carriers = sorted({stat.layer for stat in nonfinite} - {producer.layer})
        rows = _find_nonfinite_rows(step, producer.layer)
        in_logits = step.logits is not None and bool(step.logits.n_nan or step.logits.n_inf)
        is_newest = step.q_len - 1 == producer.bad_row or (
            rows is not None and step.kv_before + step.q_len - 1 in rows
        )
        layer = producer.layer
        number = next((n for n, call in enumerate(step.calls) if call.layer == layer), None)
        part = find_nonfinite_part(step, number, self.context, layer=layer, is_newest=is_newest)
        sentence = (
            f"{'NaN' if producer.n_nan else 'Inf'} "
            f"{'first' if earlier >= _AFTER_LAST_LAYER else 'now'} appears in the output of layer "
            f"{producer.layer} ({printable(producer.module)}), in step {step.step} "
            f"{self._format_rows(step, rows, producer)}: "
            f"{_format_value_counts(producer)}; {_format_carriers(carriers, in_logits)}"
        )
        if part is not None:
            sentence += f"; {part.description}"
        elif producer.layer == 0:
            sentence += ", and the input embeddings are not recorded"
        fields = ("module", "n_nan", "n_inf", "min", "max")
        evidence = {name: getattr(producer, name) for name in fields}
        evidence |= {"rows_of_step": step.q_len, "rows": None if rows is None else len(rows)}
        evidence |= {"first_row": producer.bad_row, "part": None if part is None else part.name}
        evidence |= {"carriers": carriers, "in_logits": in_logits}
        if rows is None and producer.bad_row is not None:
            rows = np.array([step.kv_before + producer.bad_row])
        id_ = "numbers.nan" if producer.n_nan else "numbers.inf"
        options: dict[str, Any] = {"layers": (layer,), "positions": () if rows is None else rows}
        yield self.finding(step, id_, f"{sentence}.", evidence=evidence, **options)

    def _check_scores(
        self, step: StepRecord, row: NewestRow, nonfinite: Sequence[LayerStatRecord]
    ) -> Finding | None:
        """Report a call with NaN scores whose layer output is finite."""
        # Kernels may ignore NaN: SDPA on a CPU (torch 2.13) returns zeros for a row of NaN scores.
        reported = self._reported_layers.get(step.branch, _AFTER_LAST_LAYER)
        earliest = min(reported, *(stat.layer for stat in nonfinite), _AFTER_LAST_LAYER)
        for number, call in enumerate(step.calls):
            if call.layer >= earliest:
                return None
            lse = row.lse[number]
            part = _score_part(step, call, lse, call.layer, self.context)
            if part is None or not np.isnan(lse).any():
                continue
            self._reported_layers[step.branch] = call.layer
            sentence = (
                f"NaN is among the scores of layer {call.layer} in step {step.step} at "
                f"{self.context.format_position(step.kv_after - 1)}: {part.description}; the "
                f"kernel ({call.path}) ignores it, so the layer's output is finite but wrong."
            )
            return self._call_finding(step, call, sentence, {"part": part.name, "path": call.path})
        return None

    def _check_calls(self, step: StepRecord) -> Findings:
        """Check standalone calls: their LSE check is NaN if their output is."""
        for number, call in enumerate(step.calls):
            part = None
            # The compiled kernel skips closed blocks: a NaN recomputed in them was not part of it.
            if call.lse_error != call.lse_error and call.path != "flex compiled":
                part = find_nonfinite_part(step, number, self.context)
            if part is not None:
                sentence = (
                    f"The output of the newest of {plural(call.q_len, 'row')} of the call "
                    f"({call.path}) is NaN; {part.description}."
                )
                evidence = {"part": part.name, "path": call.path, "keys": call.kv_len}
                yield self._call_finding(step, call, sentence, evidence)

    def _call_finding(
        self, step: StepRecord, call: CallRecord, sentence: str, evidence: Mapping[str, Any]
    ) -> Finding:
        id_, at, query = "numbers.nan", (step.kv_after - 1,), "nan-call"
        return self.finding(step, id_, sentence, (call.layer,), evidence, positions=at, query=query)

    def _format_rows(
        self, step: StepRecord, rows: Positions | None, producer: LayerStatRecord
    ) -> str:
        context = self.context
        if rows is not None and len(rows) == 1:
            return f"at {context.format_position(int(rows[0]))}"
        if rows is not None and len(rows):
            return f"in {context.format_rows(rows)} ({context.format_first_position(rows)})"
        if producer.bad_row is None:
            return f"(somewhere in its {step.q_len} rows)"
        first = context.format_position(step.kv_before + producer.bad_row)
        return f"(of its {step.q_len} rows the first is {first})"

    def _check_logits(self, step: StepRecord, logits: LogitsRecord) -> Findings:
        """Check logits before any logits processor."""
        # A model may exclude tokens with -Inf by design (vocabulary padding), but then in every
        # step: their number in the first step counts as intended, and a larger one is reported.
        evidence = {"module": "logits", "n_nan": logits.n_nan, "n_inf": logits.n_inf}
        options: dict[str, Any] = {"positions": (step.kv_after - 1,), "query": "logits"}
        is_reported = step.branch in self._reported_layers
        if logits.n_nan or any(candidate.logit == np.inf for candidate in logits.candidates):
            if is_reported:
                return
            self._reported_layers[step.branch] = _AFTER_LAST_LAYER
            source = "and its source is not recorded (level advanced records all layers)"
            if step.layer_stats:
                source = "while every layer's output is finite: it comes from the final norm or "
                source += "the output head"
            sentence = (
                f"{'NaN' if logits.n_nan else 'Inf'} appears in the logits of step {step.step} "
                f"({_format_value_counts(logits)}), {source}."
            )
        else:
            before = self._n_closed.setdefault(step.branch, logits.n_inf)
            if logits.n_inf <= before or is_reported:
                return
            self._n_closed[step.branch] = _UNLIMITED
            evidence["before"], options["severity"] = before, Severity.WARNING
            sentence = (
                f"{plural(logits.n_inf, 'logit')} of step {step.step} {is_or_are(logits.n_inf)} "
                f"-Inf before any logits processor, where the first step had {before}: no "
                "processor or sampling option excluded these tokens."
            )
        id_ = "numbers.nan" if logits.n_nan else "numbers.inf"
        yield self.finding(step, id_, sentence, evidence=evidence, **options)


def _format_value_counts(record: LayerStatRecord | LogitsRecord) -> str:
    if record.n_nan and record.n_inf:
        return f"{record.n_nan} NaN and {record.n_inf} Inf values"
    return plural(record.n_nan or record.n_inf, "value")


def _format_carriers(carriers: Sequence[int], in_logits: bool) -> str:
    """Which later layers contain it too, and whether it reaches the logits."""
    names = [f"layer {carriers[0]}" if len(carriers) == 1 else f"{len(carriers)} later layers"]
    names = (names if carriers else []) + (["the logits"] if in_logits else [])
    if not names:
        return "no later layer of this step contains it"
    verb = "contains" if len(carriers) == 1 and not in_logits else "contain"
    return f"{' and '.join(names)} {verb} it too"


def _find_nonfinite_rows(step: StepRecord, layer: int) -> Positions | None:
    """The positions with a non-finite output; None if they are not known (output not stored)."""
    if step.q_len == 1:
        return np.array([step.kv_before])
    for record in step.arrays:
        if record.stream == "hidden" and record.layer == layer:
            array = record.array.reshape(len(record.array), -1)
            # The bits of a bfloat16 that is not finite have all ones in the exponent.
            is_bits = record.dtype == "bfloat16"
            is_finite = (array & 0x7F80) != 0x7F80 if is_bits else np.isfinite(array)
            return step.kv_before + np.flatnonzero(~is_finite.all(axis=1))
    return None


class LayerPart(NamedTuple):
    """The part of a layer that is not finite: its name in the evidence, and a description."""

    name: str
    description: str


def find_nonfinite_part(
    step: StepRecord,
    number: int | None,
    context: RuleContext,
    *,
    layer: int | None = None,
    is_newest: bool = False,
) -> LayerPart | None:
    """The part of a layer that is not finite, None if it is not known.

    `number` is that of the layer's call in the step; `layer` is None for a standalone call.
    `is_newest` says that the newest row of the layer's output is non-finite: if its attention is
    finite, the fault follows it.
    """
    row = newest_row(step)
    if number is None or row is None:
        return None
    call = step.calls[number]
    part = _score_part(step, call, row.lse[number], layer, context)
    if part is not None or call.lse_error is None:
        return part
    if call.lse_error != call.lse_error:
        words = "its scores are finite, so NaN is among the values"
        n_open = count_open_keys(step, context, number)
        n_closed = 0 if n_open is None else call.kv_len - int(n_open.max())
        if n_closed:
            words += f" ({plural(n_closed, 'key')} of {call.kv_len} {is_or_are(n_closed)} closed "
            words += "to the newest row, but 0 times NaN is NaN)"
        return LayerPart("values", words)
    if not is_newest:
        return None
    if call.check_kind == "output":
        words = "the attention of that row is finite, so it comes from a later part: the output "
        return LayerPart("after attention", f"{words}projection, the MLP or a norm")
    words = "the scores of that row are finite, so it comes from the values or a later part"
    return LayerPart("after the scores", words)


def _score_part(
    step: StepRecord, call: CallRecord, lse: NumberArray, layer: int | None, context: RuleContext
) -> LayerPart | None:
    """The part, if the scores of the newest row are not finite or the row has no open key."""
    if call.lse_error is None:
        return None
    is_nan = call.lse_error != call.lse_error
    if np.isneginf(lse).any():
        words = "its newest row has no open key, and the softmax of an empty row is NaN"
        return LayerPart("row without keys", words) if is_nan else None
    bad = ~np.isfinite(lse)
    if call.dtype == "float16" and is_nan and (np.abs(lse[~bad]) > LARGEST_FLOAT16).any():
        words = f"its scores exceed the largest float16 ({LARGEST_FLOAT16}) and overflow to Inf"
        return LayerPart("scores", words)
    n_bad = int(bad.sum())
    if not n_bad:
        return None
    heads = "every head" if n_bad == len(lse) else f"{n_bad} of {plural(len(lse), 'head')}"
    if np.isposinf(lse).any():
        return LayerPart("scores", f"the scores of its newest row are already Inf, in {heads}")
    words = f"the queries or keys of its newest row are already not finite, in {heads}"
    if layer != 0 or n_bad < len(lse):
        return LayerPart("queries or keys", words)
    row = f" of {context.format_position(step.kv_after - 1)}" if step.q_len == 1 else "s"
    words += f", so check the embedding{row} and the first norm"
    return LayerPart("embedding or first norm", words)
