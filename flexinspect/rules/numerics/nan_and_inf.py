"""NaN and Inf: which layer they come from, and whether they are in the logits.

The first layer of a step whose output is not finite is the producer; the layers after it only carry
on what they were given, and so do later steps, through the cache. So one finding is made where the
trouble first appears, and another one only when it later appears in an earlier layer. Which part of
the layer made it is said as far as the attention of its newest row tells (see `sickparts`).

A layer's output is its input, its attention and its MLP added up. The scores of the newest row are
known by their log-sum-exp, its output by the gate that compares it with what was recomputed. So
queries and keys, values, and what comes after the attention can be told apart in that row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from flexinspect.core.text import Positions, limit_positions, plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import (
    ArrayRecord,
    CallRecord,
    LayerStatRecord,
    LogitsRecord,
    StepRecord,
)
from flexinspect.rules.attention.attention_shape import (
    ROW_STREAMS,
    NumberArray,
    count_open_keys,
    newest_row,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

NAN = "numbers.nan"
INF = "numbers.inf"

_AFTER_LAST_LAYER = 1 << 30
"""Stands for what comes after the last layer: the final norm and the output head."""

_UNLIMITED = 1 << 62

_NONFINITE_QUERY = (
    "SELECT layer, module, n_nan, n_inf, bad_row, min, max FROM layer_stats WHERE generation = "
    "{generation} AND branch = {branch} AND step = {step} AND (n_nan > 0 OR n_inf > 0) "
    "ORDER BY layer"
)
_LOGITS_QUERY = (
    "SELECT step, n_nan, n_inf FROM steps WHERE generation = {} AND branch = {} AND step = {}"
)
_NAN_CALL_QUERY = (
    "SELECT layer, path, mask, gate, gate_kind FROM calls WHERE generation = {} AND branch = {} "
    "AND step = {} AND gate = 'nan'"
)


class NumbersRule(Rule):
    """Names the layer, the step and (where the record says it) the rows of the first NaN or Inf.

    What is known depends on the level: from advanced on every layer of every step; at basic on CPU
    layers are looked at only when the chosen token's logit is not finite.
    """

    name: ClassVar[str] = "numbers"
    streams: ClassVar[tuple[str, ...]] = ("hidden", *ROW_STREAMS)
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        NAN: FindingKind(
            Severity.ERROR,
            "NaN in a layer's output, in an attention call or in the logits",
            why=(
                "NaN goes into whatever is computed from it: every row that reads the sick one, "
                "every later layer, and through the cache every later step."
            ),
            confirm=(
                "Go to the step and look at the named layer in the layers panel: the one above it "
                "is finite. At level extreme its hidden rows, q, k and v are stored."
            ),
            fix=(
                "Look for weights that are not finite, a division by 0 or a logarithm of 0 in "
                "patched code, a row that sees no key under eager attention, and cache slots that "
                "were allocated and never written."
            ),
            query=_NONFINITE_QUERY,
        ),
        INF: FindingKind(
            Severity.ERROR,
            "Inf in a layer's output or in the logits",
            why="The next norm or softmax makes NaN of it, in the whole row.",
            confirm=(
                "Go to the step and look at min and max of the layers up to the named one: "
                "whether they grow towards the end of the dtype, or one value stands alone."
            ),
            fix=(
                "In float16 use bfloat16 or float32 for this layer; else look for a division by 0 "
                "or a mask of -Inf that was added to something else than scores."
            ),
            query=_NONFINITE_QUERY,
        ),
    }

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._reported_layers: dict[int, int] = {}
        """Branch to the earliest layer told of."""
        self._n_closed: dict[int, int] = {}
        """Branch to the number of -Inf logits that need no word."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing told."""
        super().on_generation_start(context)
        self._reset()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return at most one finding: about the producer, or about the logits if no layer is."""
        # These lines are what a step costs in which nothing is wrong.
        sick = [stat for stat in step.layer_stats if stat.n_nan or stat.n_inf]
        row = newest_row(step)
        if row is not None and step.layer_stats and not math.isfinite(float(row.lse.sum())):
            swallowed = self._check_scores(step, sick)
            if swallowed:
                return swallowed
        if sick:
            return self._check_layers(step, sick)
        logits = step.logits
        if logits is None:
            return () if step.layer_stats else self._check_calls(step)
        if logits.n_nan or logits.n_inf:
            return self._check_logits(step, logits)
        self._n_closed.setdefault(step.branch, 0)
        return ()

    def _check_layers(
        self, step: StepRecord, nonfinite: Sequence[LayerStatRecord]
    ) -> Sequence[Finding]:
        nonfinite = sorted(nonfinite, key=lambda stat: stat.layer)
        producer = nonfinite[0]
        earlier = self._reported_layers.get(step.branch, _AFTER_LAST_LAYER + 1)
        if producer.layer >= earlier:
            return ()
        self._reported_layers[step.branch] = producer.layer
        carriers = sorted({stat.layer for stat in nonfinite} - {producer.layer})
        rows = _find_nonfinite_rows(step, producer.layer)
        in_logits = step.logits is not None and bool(step.logits.n_nan or step.logits.n_inf)
        part = find_nonfinite_part(
            step, producer, self.context, is_newest=_is_newest_nonfinite(step, producer, rows)
        )
        sentence = (
            f"{_nan_or_inf(producer)} {'first' if earlier >= _AFTER_LAST_LAYER else 'now'} appears in the output of "
            f"layer {producer.layer} ({printable(producer.module)}), "
            f"{self._format_where(step, rows, producer)}: {_format_value_counts(producer)}; "
            f"{_format_carriers(carriers, in_logits)}"
        )
        if part is not None:
            sentence += f"; {part.description}"
        elif producer.layer == 0:
            sentence += ", and the embeddings that feed layer 0 are not recorded"
        evidence: dict[str, Any] = {
            "module": producer.module,
            "n_nan": producer.n_nan,
            "n_inf": producer.n_inf,
            "min": producer.min,
            "max": producer.max,
            "rows_of_step": step.q_len,
            "rows": None if rows is None else len(rows),
            "first_row": producer.bad_row,
            "part": None if part is None else part.name,
            "carriers": carriers,
            "in_logits": in_logits,
        }
        finding_id = NAN if producer.n_nan else INF
        if rows is None and producer.bad_row is not None:
            rows = np.array([step.kv_before + producer.bad_row])
        return [
            _nonfinite_finding(step, finding_id, f"{sentence}.", evidence, producer.layer, rows)
        ]

    def _check_scores(
        self, step: StepRecord, nonfinite: Sequence[LayerStatRecord]
    ) -> Sequence[Finding]:
        """Return the call whose queries or keys are NaN though its layer's output is finite.

        Kernels may pass over NaN: SDPA on a CPU (torch 2.13) gives zeros for a row of NaN scores.
        """
        earliest = min((stat.layer for stat in nonfinite), default=_AFTER_LAST_LAYER)
        told = self._reported_layers.get(step.branch, _AFTER_LAST_LAYER + 1)
        for number, call in enumerate(step.calls):
            if call.layer >= min(earliest, told):
                return ()
            part = find_nan_scores(step, number, self.context)
            if part is None:
                continue
            self._reported_layers[step.branch] = call.layer
            row = np.array([step.kv_after - 1])
            sentence = (
                f"NaN is among the scores of layer {call.layer} in step {step.step} at "
                f"{self.context.format_position(int(row[0]))}: {part.description}; the kernel ({call.path}) "
                "passes over it, so the layer's output is finite, and wrong."
            )
            evidence = {"part": part.name, "path": call.path}
            query = _NAN_CALL_QUERY.format(step.generation, step.branch, step.step)
            return [_nonfinite_finding(step, NAN, sentence, evidence, call.layer, row, query=query)]
        return ()

    def _check_calls(self, step: StepRecord) -> Sequence[Finding]:
        """Judge calls of FlexAttention outside of a model: their gate is NaN when they are."""
        found = []
        for number, call in enumerate(step.calls):
            part = find_nonfinite_call(step, number, self.context)
            if part is not None:
                sentence = (
                    f"The newest of {plural(call.q_len, 'row')} of the call ({call.path}) comes "
                    f"out as NaN; {part.description}."
                )
                evidence = {"part": part.name, "path": call.path, "keys": call.kv_len}
                rows = np.array([step.kv_after - 1])
                query = _NAN_CALL_QUERY.format(step.generation, step.branch, step.step)
                found.append(
                    _nonfinite_finding(step, NAN, sentence, evidence, call.layer, rows, query=query)
                )
        return found

    def _format_where(
        self, step: StepRecord, rows: Positions | None, producer: LayerStatRecord
    ) -> str:
        if (rows is None or not len(rows)) and producer.bad_row is not None:
            first = self.context.format_position(step.kv_before + producer.bad_row)
            return f"in step {step.step} (of its {step.q_len} rows the first is {first})"
        if rows is None or not len(rows):
            return f"in step {step.step} (somewhere in its {step.q_len} rows)"
        if len(rows) == 1:
            return f"in step {step.step} at {self.context.format_position(int(rows[0]))}"
        scene = self.context
        return f"in step {step.step} in {scene.format_rows(rows)} ({scene.format_first_position(rows)})"

    def _check_logits(self, step: StepRecord, logits: LogitsRecord) -> Sequence[Finding]:
        highest = any(candidate.logit == np.inf for candidate in logits.candidates)
        if not logits.n_nan and not highest:
            return self._check_closed_logits(step, logits)
        if step.branch in self._reported_layers:
            return ()
        self._reported_layers[step.branch] = _AFTER_LAST_LAYER
        source = (
            "while every layer's output is finite: it comes from the final norm or the output head"
            if step.layer_stats
            else "and no layer is recorded as its source (from level advanced on all are looked at)"
        )
        sentence = (
            f"{_nan_or_inf(logits)} appears in the logits of step {step.step} ({_format_value_counts(logits)}), "
            f"{source}."
        )
        rows = np.array([step.kv_after - 1])
        evidence = _logits_evidence(logits)
        finding_id = NAN if logits.n_nan else INF
        query = _LOGITS_QUERY.format(step.generation, step.branch, step.step)
        return [_nonfinite_finding(step, finding_id, sentence, evidence, None, rows, query=query)]

    def _check_closed_logits(self, step: StepRecord, logits: LogitsRecord) -> Sequence[Finding]:
        """Judge logits of which some are -Inf and the rest finite, before any processor.

        A model may close tokens like that by its own design (padding of the vocabulary), then in
        every step; so what the first step has is taken as meant, and only more than that is said.
        """
        before = self._n_closed.setdefault(step.branch, logits.n_inf)
        if logits.n_inf <= before or step.branch in self._reported_layers:
            return ()
        self._n_closed[step.branch] = _UNLIMITED
        sentence = (
            f"{plural(logits.n_inf, 'logit')} of step {step.step} {_is_or_are(logits.n_inf)} -Inf "
            f"before any processor, where the first step had {before}: no processor or sampling "
            "option closed these tokens."
        )
        evidence = {**_logits_evidence(logits), "before": before}
        rows = np.array([step.kv_after - 1])
        query = _LOGITS_QUERY.format(step.generation, step.branch, step.step)
        return [
            _nonfinite_finding(step, INF, sentence, evidence, None, rows, Severity.WARNING, query)
        ]


def _nonfinite_finding(
    step: StepRecord,
    finding_id: str,
    sentence: str,
    evidence: dict[str, Any],
    layer: int | None,
    rows: Positions | None,
    severity: Severity | None = None,
    query: str = "",
) -> Finding:
    return Finding(
        id=finding_id,
        severity=severity or NumbersRule.findings[finding_id].severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=layer,
        positions=() if rows is None else limit_positions(rows),
        evidence=evidence,
        query=query,
    )


def _logits_evidence(logits: LogitsRecord) -> dict[str, Any]:
    return {"module": "logits", "n_nan": logits.n_nan, "n_inf": logits.n_inf}


def _nan_or_inf(record: LayerStatRecord | LogitsRecord) -> str:
    return "NaN" if record.n_nan else "Inf"


def _format_value_counts(record: LayerStatRecord | LogitsRecord) -> str:
    if record.n_nan and record.n_inf:
        return f"{record.n_nan} NaN and {record.n_inf} Inf values"
    return plural(record.n_nan or record.n_inf, "value")


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"


def _format_carriers(carriers: Sequence[int], in_logits: bool) -> str:
    """Say which later layers hold it as well, and whether it reaches the logits."""
    names = []
    if carriers:
        one = len(carriers) == 1
        names.append(f"layer {carriers[0]}" if one else f"{len(carriers)} later layers")
    if in_logits:
        names.append("the logits")
    if not names:
        return "nothing recorded after it in this step shows it"
    verb = "carries" if len(carriers) == 1 and not in_logits else "carry"
    return f"{' and '.join(names)} {verb} it on"


def _is_newest_nonfinite(
    step: StepRecord, producer: LayerStatRecord, rows: Positions | None
) -> bool:
    """Say whether the newest row is known to be sick in this layer."""
    last = step.q_len - 1
    return last == producer.bad_row or (rows is not None and step.kv_before + last in rows)


def _find_nonfinite_rows(step: StepRecord, layer: int) -> Positions | None:
    """Return the positions whose output is not finite; None where only their number is known.

    A decode step has one row; of a prompt the rows are known where the layer's output is stored.
    """
    if step.q_len == 1:
        return np.array([step.kv_before])
    for record in step.arrays:
        if record.stream == "hidden" and record.layer == layer:
            return step.kv_before + np.flatnonzero(~_find_finite_rows(record))
    return None


def _find_finite_rows(record: ArrayRecord) -> Any:
    array = record.array.reshape(len(record.array), -1)
    if record.dtype == "bfloat16":  # as bits: all ones in the exponent
        return ((array & 0x7F80) != 0x7F80).all(axis=1)
    return np.isfinite(array).all(axis=1)


LARGEST_FLOAT16 = 65504


class LayerPart(NamedTuple):
    """A part of a layer, by a name for evidence, and what is said of it."""

    name: str
    description: str


def find_nonfinite_part(
    step: StepRecord, producer: LayerStatRecord, context: RuleContext, *, is_newest: bool
) -> LayerPart | None:
    """Return the part of the first sick layer, None where it cannot be told.

    `is_newest` says that the newest row of this layer's output is known to be sick: then an
    attention that is fine there means that what follows it is not.
    """
    number = next((n for n, call in enumerate(step.calls) if call.layer == producer.layer), None)
    lse = _call_lse(step, number)
    if number is None or lse is None:
        return None
    call = step.calls[number]
    sick = _score_part(step, call, lse, producer.layer, context)
    if sick is not None:
        return sick
    if call.gate is None:
        return None
    if call.gate != call.gate:
        return _value_part(step, number, context)
    if not is_newest:
        return None
    if call.gate_kind == "output":
        words = "the attention call of that row is finite, so it comes after it: the output "
        return LayerPart("after attention", f"{words}projection, the MLP or a norm")
    words = "the scores of that row are finite, so it comes from the values or after the attention"
    return LayerPart("after the scores", words)


def find_nonfinite_call(step: StepRecord, number: int, context: RuleContext) -> LayerPart | None:
    """Return what is sick in a call outside of a model, None when nothing is known to be.

    The compiled kernel skips closed blocks, so what recomputing finds in them says nothing of it.
    """
    call = step.calls[number]
    if call.gate is None or call.gate == call.gate or call.path == "flex compiled":
        return None
    lse = _call_lse(step, number)
    if lse is None:
        return None
    return _score_part(step, call, lse, None, context) or _value_part(step, number, context)


def find_nan_scores(step: StepRecord, number: int, context: RuleContext) -> LayerPart | None:
    """Return what is said of a call some of whose scores are NaN, None for any other."""
    call, lse = step.calls[number], _call_lse(step, number)
    if lse is None or not np.isnan(lse).any():
        return None
    return _score_part(step, call, lse, call.layer, context)


def _call_lse(step: StepRecord, number: int | None) -> NumberArray | None:
    row = newest_row(step)
    return None if row is None or number is None else row.lse[number]


def _score_part(
    step: StepRecord, call: CallRecord, lse: NumberArray, layer: int | None, context: RuleContext
) -> LayerPart | None:
    """Say that the scores are sick already, or that there are none as the row sees nothing."""
    if call.gate is None:
        return None
    if np.isneginf(lse).any():
        words = "its newest row sees no key, and a softmax over nothing is NaN"
        return LayerPart("row without keys", words) if call.gate != call.gate else None
    bad = ~np.isfinite(lse)
    is_beyond = bool((np.abs(lse[~bad]) > LARGEST_FLOAT16).any())
    if call.dtype == "float16" and call.gate != call.gate and is_beyond:
        words = f"its scores lie beyond the largest float16 ({LARGEST_FLOAT16}), in which softmax sees Inf"
        return LayerPart("scores", words)
    if not bad.any():
        return None
    n_sick = int(bad.sum())
    heads = "every head" if n_sick == len(lse) else f"{n_sick} of {plural(len(lse), 'head')}"
    if np.isposinf(lse).any():
        return LayerPart("scores", f"already the scores of its newest row are Inf, in {heads}")
    words = f"already the queries or keys of its newest row are not finite, in {heads}"
    if layer != 0 or n_sick < len(lse):
        return LayerPart("queries or keys", words)
    row = f" of {context.format_position(step.kv_after - 1)}" if step.q_len == 1 else "s"
    words += f", so look at the embedding{row} and the first norm"
    return LayerPart("embedding or first norm", words)


def _value_part(step: StepRecord, number: int, context: RuleContext) -> LayerPart:
    """Say that values are sick, and how many of them the mask closes to the newest row."""
    call = step.calls[number]
    words = "its scores are finite, so NaN is among the values that it adds up"
    n_open = count_open_keys(step, context, number)
    n_closed = 0 if n_open is None else call.kv_len - int(n_open.max())
    if n_closed:
        verb = "is" if n_closed == 1 else "are"
        words += f" ({plural(n_closed, 'key')} of {call.kv_len} {verb} closed to the newest row, "
        words += "but a weight of 0 does not keep NaN out: 0 times NaN is NaN)"
    return LayerPart("values", words)
