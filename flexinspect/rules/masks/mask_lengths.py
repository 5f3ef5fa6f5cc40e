"""The rule for wrong lengths: of a mask (rows, keys, batch, heads), or of the keys of a layer.

FlexAttention rejects a block mask whose lengths differ from those of the call, so a mismatch is
found in the event of the failed call, even if its exception was suppressed. FlexAttention does not
reject a block mask of another batch or number of heads, nor a dense mask that is too large, which
it reads from the upper left corner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.core.text import plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_views import format_step_layers

MASK_KV = "lengths.mask-kv"
MASK_Q = "lengths.mask-q"
BATCH_HEADS = "lengths.batch-heads"
LAYER_KEYS = "lengths.layer-keys"

_KERNEL_FAILED_EVENT = "kernel-failed"
_LENGTH_EVENT_QUERY = (
    "SELECT event, step, text, data FROM events "
    "WHERE kind = 'kernel-failed' AND generation = {generation}"
)
_LENGTH_CALL_QUERY = (
    "SELECT c.step, c.layer, c.path, c.batch, c.q_heads, c.q_len, c.kv_len, c.handed, "
    "m.kind, m.batch AS mask_batch, m.heads AS mask_heads, m.q_len AS mask_q, m.kv_len AS mask_kv "
    "FROM calls c LEFT JOIN masks m ON m.fingerprint = c.mask "
    "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
    "AND c.layer = {layer}"
)


class LengthsRule(Rule):
    """Compares the lengths of masks and keys with those of the calls that received them.

    It works at every level. Mask cells, which are recorded from level advanced on, only help to
    decide whether a layer with fewer keys has a sliding window.
    """

    name: ClassVar[str] = "lengths"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        MASK_KV: FindingKind(
            Severity.ERROR,
            "a mask built for another number of keys than the call has",
            why="FlexAttention and SDPA reject such a call. Code that catches the exception runs "
            "something else instead, and the mask is silently lost.",
            confirm="The path panel marks layers that ran something else. The event "
            "'kernel-failed' has the lengths of the call and of its mask.",
            fix="Build the mask in every step, after the cache was updated, for the number of keys "
            "that the call receives (cached before + rows of this step).",
            query=_LENGTH_EVENT_QUERY,
        ),
        MASK_Q: FindingKind(
            Severity.ERROR,
            "a mask built for another number of rows than the call has",
            why="A mask of the whole prompt has no row for the new token. If the kernel rejects "
            "the mask, the step fails; if not, the new row gets the mask of row 0.",
            confirm="The mask panel at this step shows what the newest row sees.",
            fix="Slice the mask to the last rows, those of the step, or build one for q length 1 "
            "whose mask_mod adds the offset of the row.",
            query=_LENGTH_EVENT_QUERY,
        ),
        BATCH_HEADS: FindingKind(
            Severity.WARNING,
            "a mask built for another batch or number of heads than the call has",
            why="FlexAttention does not check this. Uncompiled, the mask_mod is evaluated for "
            "batches or heads that it was not built for; compiled, the kernel reads past the end "
            "of the block tables, which can crash the process.",
            confirm="The path panel shows the batch and heads of the call, the mask panel those of "
            "the mask.",
            fix="Pass None for B or H to create_block_mask if the mask_mod ignores them, otherwise "
            "the numbers of the call. H counts query heads, not KV heads.",
            query=_LENGTH_CALL_QUERY,
        ),
        LAYER_KEYS: FindingKind(
            Severity.ERROR,
            "a layer without a sliding window that receives fewer keys than the others",
            why="The layer does not see tokens that its cache holds and that its mask opened "
            "during prefill. It computes the output of a shorter text.",
            confirm="The path panel shows the number of keys per layer. In the mask panel, compare "
            "this layer at step 0 and at this step.",
            fix="Look for a slice of keys or values in this layer: a window of another layer type, "
            "or keys taken before the cache was updated.",
            query=_LENGTH_CALL_QUERY.replace(" AND c.layer = {layer}", " ORDER BY c.layer"),
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the known lengths."""
        super().on_generation_start(context)
        self._n_cached: int | None = None
        self._lookback: dict[int, int] = {}
        """Layer to the number of keys that the last row of the prompt sees before its own."""
        self._n_missing_keys: dict[int, int] = {}
        """Layer to the number of keys that it lacked in the previous step."""

    # -- calls that raised -----------------------------------------------------------------------

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Return a finding if a call raised whose lengths are not those of its mask."""
        if event.kind != _KERNEL_FAILED_EVENT:
            return ()
        data = event.data
        mismatches = _find_mismatches(data)
        if not mismatches:
            return ()
        finding_id = mismatches[0][0]
        layer, step, generation = data.get("layer"), event.step, event.generation or 0
        error = str(data.get("error")).partition(":")[0]
        place = [] if layer is None else [f"layer {layer}"]
        place += [] if step is None else [f"step {step}"]
        where = "; ".join(part for part in (", ".join(place), self._format_cache(data)) if part)
        sentence = (
            f"{', and '.join(text for _, text in mismatches)}"
            f"{f' ({where})' if where else ''}: {data.get('kernel')} raised {error}."
        )
        return [
            Finding(
                id=finding_id,
                severity=Severity.WARNING if finding_id == BATCH_HEADS else Severity.ERROR,
                sentence=sentence,
                generation=generation,
                step=step,
                layer=layer,
                evidence={**data, "cached": self._n_cached},
                query=_LENGTH_EVENT_QUERY.format(generation=generation),
                series=str(data.get("kernel")),
            )
        ]

    def _format_cache(self, data: Mapping[str, Any]) -> str:
        if self._n_cached is None:
            return ""
        after = self._n_cached + int(data["q_len"])
        holds = f"cache holds {self._n_cached} before"
        return f"{holds}, {after} after" if after == data["kv_len"] else holds

    # -- calls that were made --------------------------------------------------------------------

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return findings for masks and layers of a step with wrong lengths."""
        findings: list[Finding] = []
        calls = step.calls
        for fingerprint, call in {call.mask: call for call in calls}.items():
            mask = self.context.mask(fingerprint)
            if mask is not None:
                if mask.batch > 1 or mask.heads > 1:
                    findings += self._check_batch_heads(step, mask)
                if call.handed is not None and step.kv_before:
                    findings += self._check_dense_rows(step, mask)
        if step.inputs is not None and calls:
            if step.kv_before:
                if {call.kv_len for call in calls} != {step.kv_after}:
                    findings += self._check_short_layers(step)
            elif step.masks:
                self._record_lookback(step)
        has_cache = step.inputs is None or bool(step.inputs.cached_after)
        self._n_cached = step.kv_after if has_cache else None
        return findings

    def _check_batch_heads(self, step: StepRecord, mask: MaskRecord) -> list[Finding]:
        calls = [
            call
            for call in step.calls
            if call.mask == mask.fingerprint
            and (mask.batch not in (1, call.batch) or mask.heads not in (1, call.q_heads))
        ]
        if not calls:
            return []
        call, parts = calls[0], []
        if mask.batch not in (1, call.batch):
            parts.append(f"batch {mask.batch}, but the call has {call.batch}")
        if mask.heads not in (1, call.q_heads):
            kv = " (its KV heads)" if mask.heads == call.kv_heads else ""
            parts.append(f"{plural(mask.heads, 'head')}{kv}, but the call has {call.q_heads}")
        outcome = (
            "the compiled kernel reads past the end of the block tables"
            if mask.compiled
            else "uncompiled FlexAttention does not notice, the compiled kernel would read past "
            "the end of the block tables"
        )
        sentence = (
            f"The mask of {self._format_call_layers(step, calls)} in step {step.step} was built "
            f"for {', and for '.join(parts)}: {outcome}."
        )
        finding = self._finding(
            step,
            BATCH_HEADS,
            sentence,
            calls,
            severity=Severity.ERROR if mask.compiled else Severity.WARNING,
            evidence={
                "mask": mask.fingerprint,
                "mask_batch": mask.batch,
                "mask_heads": mask.heads,
                "batch": call.batch,
                "q_heads": call.q_heads,
                "kv_heads": call.kv_heads,
            },
            series=f"{mask.batch}/{mask.heads}/{call.batch}/{call.q_heads}",
        )
        return [finding]

    def _check_dense_rows(self, step: StepRecord, mask: MaskRecord) -> list[Finding]:
        """Return a finding if a decode step reads a larger dense mask from its first row.

        For a prompt, the upper left corner of a larger mask is correct.
        """
        calls = [call for call in step.calls if call.mask == mask.fingerprint]
        rows = _dense_mask_rows(mask, calls[0])
        if rows is None or rows == step.q_len:
            return []
        sentence = (
            f"{self._format_call_layers(step, calls).capitalize()} received a dense mask of "
            f"{rows} rows in step {step.step}, which has {plural(step.q_len, 'row')} "
            f"({self.context.format_position(step.kv_before)}): FlexAttention reads it from row 0, "
            "so the new row gets the mask of the first token."
        )
        finding = self._finding(
            step,
            MASK_Q,
            sentence,
            calls,
            evidence={"mask_rows": rows, "rows": step.q_len, "handed": calls[0].handed},
            series="read at row 0",
        )
        return [finding]

    # -- keys per layer --------------------------------------------------------------------------

    def _record_lookback(self, step: StepRecord) -> None:
        """Record how far back each layer sees from the last row of the prompt."""
        by_mask: dict[str | None, int | None] = {}
        for call in step.calls:
            if call.mask not in by_mask:
                by_mask[call.mask] = _find_lookback(self.context.mask(call.mask))
            lookback = by_mask[call.mask]
            if lookback is not None:
                self._lookback[call.layer] = lookback

    def _check_short_layers(self, step: StepRecord) -> list[Finding]:
        """Return a finding for layers that receive fewer keys than their cache holds.

        A sliding window explains missing keys if one more is missing at each step and if the prompt
        did not see further back.
        """
        previous, self._n_missing_keys = self._n_missing_keys, {}
        cached_keys = step.inputs.cached_after if step.inputs is not None else ()
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
            return []
        least = min(call.kv_len for call in short)
        others = {call.kv_len for call in step.calls} - {call.kv_len for call in short}
        compared = f"the others get {max(others)}, " if others else ""
        verb = "gets" if len(_layers_of_calls(short)) == 1 else "get"
        sentence = (
            f"{self._format_call_layers(step, short).capitalize()} {verb} {plural(least, 'key')} "
            f"in step {step.step}, {compared}and the cache holds {step.kv_after}: a sliding window "
            f"does not explain it, because {self._format_reason(short[0], previous)}."
        )
        finding = self._finding(
            step,
            LAYER_KEYS,
            sentence,
            short,
            evidence={
                "kv_len": {call.layer: call.kv_len for call in step.calls},
                "cached": step.kv_after,
                "reach": {call.layer: self._lookback.get(call.layer) for call in short},
            },
            series=",".join(str(call.layer) for call in short),
        )
        return [finding]

    def _format_reason(self, call: CallRecord, previous: Mapping[int, int]) -> str:
        lookback = self._lookback.get(call.layer, -1)
        if call.kv_len - 1 < lookback:
            return f"the last row of the prompt saw {plural(lookback, 'key')} back"
        return f"the previous step lacked {previous[call.layer]} as well"

    # -- findings --------------------------------------------------------------------------------

    def _format_call_layers(self, step: StepRecord, calls: Sequence[CallRecord]) -> str:
        if self.context.is_standalone:
            return "the standalone call"
        return format_step_layers(_layers_of_calls(calls), step)

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        calls: Sequence[CallRecord],
        *,
        severity: Severity = Severity.ERROR,
        evidence: dict[str, Any],
        series: str,
    ) -> Finding:
        layers = _layers_of_calls(calls)
        # The query of the kind lists failed calls, but this call did not fail.
        query = "" if finding_id != MASK_Q else _LENGTH_CALL_QUERY
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=layers[0],
            layers=tuple(layers) if len(layers) > 1 else (),
            evidence=evidence,
            series=series,
            query=query.format(
                generation=step.generation, branch=step.branch, step=step.step, layer=layers[0]
            ),
        )


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
        mismatches.append((MASK_KV, f"KV length {kv_len} but mask built for {mask_kv}"))
    if mask_q is not None and mask_q != q_len:
        text = f"q length {q_len} but mask built for {plural(mask_q, 'row')}"
        mismatches.append((MASK_Q, text))
    return mismatches or [(BATCH_HEADS, text) for text in _batch_head_mismatches(data, dense)]


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
    if call.handed is None or mask.kind not in ("bool", "float"):
        return None
    if not call.path.startswith("flex"):
        return None
    shape = re.fullmatch(r"\w+ \(.*?(\d+), (\d+)\)", call.handed)
    return None if shape is None else int(shape[1])


def _find_lookback(mask: MaskRecord | None) -> int | None:
    """Return how many keys before its own the newest row sees, None if that is not known."""
    if mask is None or mask.cells is None or mask.q_len < 2:
        return None
    sees = mask.cells[:, -1].any(axis=0)
    return mask.kv_len - 1 - int(sees.argmax()) if sees.any() else None


def _layers_of_calls(calls: Sequence[CallRecord]) -> list[int]:
    return sorted({call.layer for call in calls})
