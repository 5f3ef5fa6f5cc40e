"""The rule for wrong lengths: of a mask (rows, keys, batch, heads), or of the keys of a layer.

FlexAttention rejects a block mask whose lengths differ from those of the call, so a mismatch is
found in the event of the failed call, even if its exception was suppressed. FlexAttention does not
reject a block mask of another batch or number of heads, nor a dense mask that is too large, which
it reads from the upper left corner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexinspect.core.text import plural
from flexinspect.records.finding import Finding
from flexinspect.records.step import CallRecord, EventRecord, InputsRecord, MaskRecord, StepRecord
from flexinspect.rules.attention.kernel_failures import KERNEL_FAILED_EVENT, event_layers
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds
from flexinspect.rules.masks.mask_views import (
    calls_by_mask,
    format_call_place,
    has_wrong_size,
    layers_of,
    wrong_size_finding,
)


class LengthsRule(Rule):
    """Compares the lengths of masks and keys with those of the calls that received them.

    It works at every level. Mask cells, which are recorded from level advanced on, only help to
    decide whether a layer with fewer keys has a sliding window.
    """

    name = "lengths"
    handles_standalone_calls = True
    findings = finding_kinds(
        "lengths.mask-kv", "lengths.mask-q", "lengths.batch-heads", "lengths.layer-keys"
    )

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the known lengths."""
        super().on_generation_start(context)
        self._n_cached: int | None = None
        self._lookback: dict[int, int] = {}
        """Layer to the number of keys that the last row of the prompt sees before its own."""
        self._n_missing_keys: dict[int, int] = {}
        """Layer to the number of keys that it lacked in the previous step."""

    # -- calls that raised -----------------------------------------------------------------------

    def on_event(self, event: EventRecord) -> Iterator[Finding]:
        """Return a finding if a call raised whose lengths are not those of its mask."""
        data = event.data
        mismatches = _find_mismatches(data) if event.kind == KERNEL_FAILED_EVENT else []
        if not mismatches:
            return
        place = [f"layer {layer}" for layer in event_layers(event)]
        place += [] if event.step is None else [f"step {event.step}"]
        where = "; ".join(filter(None, (", ".join(place), self._format_cache(data))))
        sentence = (
            f"{', and '.join(text for _, text in mismatches)}{f' ({where})' if where else ''}: "
            f"{data.get('kernel')} raised {str(data.get('error')).partition(':')[0]}."
        )
        yield self.finding(
            event,
            mismatches[0][0],
            sentence,
            layers=event_layers(event),
            evidence={**data, "cached": self._n_cached},
            series=str(data.get("kernel")),
            query="length-event",
        )

    def _format_cache(self, data: Mapping[str, Any]) -> str:
        if self._n_cached is None:
            return ""
        after = self._n_cached + int(data["q_len"])
        holds = f"cache holds {self._n_cached} before"
        return f"{holds}, {after} after" if after == data["kv_len"] else holds

    # -- calls that were made --------------------------------------------------------------------

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Return findings for masks and layers of a step with wrong lengths."""
        calls = step.calls
        for fingerprint, same_mask in calls_by_mask(step).items():
            mask = self.context.mask(fingerprint)
            if mask is None:
                continue
            if mask.batch > 1 or mask.heads > 1:
                wrong = [call for call in same_mask if has_wrong_size(mask, call)]
                if wrong:
                    yield wrong_size_finding(self, step, "lengths.batch-heads", mask, wrong)
            if step.kv_before:
                yield from self._check_dense_rows(step, mask, same_mask)
        if step.inputs is not None and calls:
            if step.kv_before:
                if {call.kv_len for call in calls} != {step.kv_after}:
                    yield from self._check_short_layers(step, step.inputs)
            elif step.masks:
                self._record_lookback(step)
        has_cache = step.inputs is None or bool(step.inputs.cached_after)
        self._n_cached = step.kv_after if has_cache else None

    def _check_dense_rows(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord]
    ) -> Iterator[Finding]:
        """Return a finding if a decode step reads a larger dense mask from its first row.

        For a prompt, the upper left corner of a larger mask is correct.
        """
        rows = _dense_mask_rows(mask, calls[0])
        if rows is None or rows == step.q_len:
            return
        sentence = (
            f"{format_call_place(self.context, step, calls)} received a dense mask of "
            f"{rows} rows in step {step.step}, which has {plural(step.q_len, 'row')} "
            f"({self.context.format_position(step.kv_before)}): FlexAttention reads it from row 0, "
            "so the new row gets the mask of the first token."
        )
        yield self.finding(
            step,
            "lengths.mask-q",
            sentence,
            layers=layers_of(calls),
            evidence={
                "mask_rows": rows,
                "rows": step.q_len,
                "mask_passed_to_layer": calls[0].mask_passed_to_layer,
            },
            series="read at row 0",
            query="length-call",  # that of the kind lists failed calls
        )

    # -- keys per layer --------------------------------------------------------------------------

    def _record_lookback(self, step: StepRecord) -> None:
        """Record how far back each layer sees from the last row of the prompt."""
        for fingerprint, calls in calls_by_mask(step).items():
            lookback = _find_lookback(self.context.mask(fingerprint))
            if lookback is not None:
                self._lookback.update(dict.fromkeys(layers_of(calls), lookback))

    def _check_short_layers(self, step: StepRecord, inputs: InputsRecord) -> Iterator[Finding]:
        """Return a finding for layers that receive fewer keys than their cache holds.

        A sliding window explains missing keys if one more is missing at each step and if the prompt
        did not see further back.
        """
        previous, self._n_missing_keys = self._n_missing_keys, {}
        cached_keys = inputs.cached_after
        short: list[CallRecord] = []
        for call in step.calls:
            n_missing = step.kv_after - call.kv_len
            n_cached = cached_keys[call.layer] if call.layer < len(cached_keys) else None
            if n_missing <= 0 or n_cached != step.kv_after or call.kv_len <= step.q_len:
                continue
            self._n_missing_keys[call.layer] = n_missing
            sees_less = call.kv_len - 1 < self._lookback.get(call.layer, -1)
            if sees_less or previous.get(call.layer) == n_missing:
                short.append(call)
        if not short:
            return
        least = min(call.kv_len for call in short)
        others = {call.kv_len for call in step.calls} - {call.kv_len for call in short}
        compared = f"the others get {max(others)}, " if others else ""
        verb = "gets" if len(layers_of(short)) == 1 else "get"
        sentence = (
            f"{format_call_place(self.context, step, short)} {verb} {plural(least, 'key')} in step "
            f"{step.step}, {compared}and the cache holds {step.kv_after}: a sliding window does "
            f"not explain it, because {self._format_reason(short[0], previous)}."
        )
        yield self.finding(
            step,
            "lengths.layer-keys",
            sentence,
            layers=layers_of(short),
            evidence={
                "kv_len": {call.layer: call.kv_len for call in step.calls},
                "cached": step.kv_after,
                "reach": {call.layer: self._lookback.get(call.layer) for call in short},
            },
            series=",".join(str(call.layer) for call in short),
        )

    def _format_reason(self, call: CallRecord, previous: Mapping[int, int]) -> str:
        lookback = self._lookback.get(call.layer, -1)
        if call.kv_len - 1 < lookback:
            return f"the last row of the prompt saw {plural(lookback, 'key')} back"
        return f"the previous step lacked {previous[call.layer]} as well"


def _find_mismatches(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (id, text) for each length in which a failed call and its mask differ."""
    q_len, kv_len, shape = data.get("q_len"), data.get("kv_len"), data.get("mask")
    mask_q, mask_kv = data.get("mask_q"), data.get("mask_kv")
    dense = shape if isinstance(shape, tuple | list) and len(shape) >= 2 else None
    if dense is not None:
        mask_q, mask_kv = (None if size == 1 else size for size in dense[-2:])
    if None in (q_len, kv_len):
        return []
    mismatches = []
    if mask_kv is not None and mask_kv != kv_len:
        mismatches.append(("lengths.mask-kv", f"KV length {kv_len} but mask built for {mask_kv}"))
    if mask_q is not None and mask_q != q_len:
        text = f"q length {q_len} but mask built for {plural(mask_q, 'row')}"
        mismatches.append(("lengths.mask-q", text))
    return mismatches or [
        ("lengths.batch-heads", text) for text in _batch_head_mismatches(data, dense)
    ]


def _batch_head_mismatches(data: Mapping[str, Any], shape: Sequence[int] | None) -> list[str]:
    sizes = [data.get("mask_batch"), data.get("mask_heads")]
    if shape is not None and len(shape) == 4:
        sizes = list(shape[:2])
    names = (("batch", "batch"), ("heads", "number of heads"))
    return [
        f"{label} {data[name]} but mask built for {size}"
        for size, (name, label) in zip(sizes, names, strict=True)
        if size is not None and data.get(name) is not None and size not in (1, data[name])
    ]


def _dense_mask_rows(mask: MaskRecord, call: CallRecord) -> int | None:
    """Return the rows of a dense mask that FlexAttention reads in part, None for other masks."""
    if call.mask_passed_to_layer is None or mask.kind not in ("bool", "float"):
        return None
    if not call.path.startswith("flex"):
        return None
    shape = re.fullmatch(r"\w+ \(.*?(\d+), (\d+)\)", call.mask_passed_to_layer)
    return None if shape is None else int(shape[1])


def _find_lookback(mask: MaskRecord | None) -> int | None:
    """Return how many keys before its own the newest row sees, None if that is not known."""
    if mask is None or mask.cells is None or mask.q_len < 2:
        return None
    sees = mask.cells[:, -1].any(axis=0)
    return mask.kv_len - 1 - int(sees.argmax()) if sees.any() else None
