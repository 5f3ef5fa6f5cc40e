"""Lengths that do not fit: a mask of another length, batch or head count, a layer with fewer keys.

FlexAttention refuses a block mask whose lengths are not those of the call, so a mismatch is an
event of a call that raised, heard even where its exception was swallowed. Nobody refuses a block
mask of another batch or head count, nor a dense mask that is read at its upper left corner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.core.text import format_layers, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

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
    """Compares the lengths of masks and keys with those of the calls that got them.

    At every level; only whether a layer with fewer keys is meant to have a window is told from the
    cells of its prompt's mask, which are recorded from level advanced on.
    """

    name: ClassVar[str] = "lengths"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        MASK_KV: FindingKind(
            Severity.ERROR,
            "a mask made for another number of keys than the call has",
            why="FlexAttention and SDPA refuse such a call. Code that catches the exception runs "
            "something else instead, and then the mask is lost in silence.",
            confirm="Panel path (layers that ran something else are marked), and the event "
            "'kernel-failed' with the lengths of the call and of its mask.",
            fix="Build the mask after the cache was updated, for the keys that the call gets "
            "(cached before + rows of this step), or build it anew in every step.",
            query=_LENGTH_EVENT_QUERY,
        ),
        MASK_Q: FindingKind(
            Severity.ERROR,
            "a mask made for another number of rows than the call has",
            why="A mask of the whole prompt says nothing of a decode row. Where it is refused the "
            "step fails; where it is read all the same, the new row gets the mask of row 0.",
            confirm="Panel mask at this step: what the newest row sees, against what it should.",
            fix="Slice the mask to the rows of the step (the last ones), or build one for q length "
            "1 whose rule adds the offset of the row.",
            query=_LENGTH_EVENT_QUERY,
        ),
        BATCH_HEADS: FindingKind(
            Severity.WARNING,
            "a mask made for another batch or number of heads than the call has",
            why="No version of FlexAttention checks it. Uncompiled, the rule is asked for batches "
            "or heads it was never made for; compiled, block tables are read past their end, "
            "which has been seen to kill the process.",
            confirm="Panel path shows the call's batch and heads, panel mask those of the mask.",
            fix="Give create_block_mask None for B or H where the rule ignores them, else the "
            "call's own numbers; heads count query heads, not key heads.",
            query=_LENGTH_CALL_QUERY,
        ),
        LAYER_KEYS: FindingKind(
            Severity.ERROR,
            "a layer that is given fewer keys than the others, without having a window",
            why="The layer does not see tokens that its cache holds and that its mask opened while "
            "the prompt was read; its part of the output is that of a shorter text.",
            confirm="Panel path at this step: keys per layer; panel mask: this layer at step 0 and "
            "now.",
            fix="Look for a slice of keys or values in this layer (a window of another layer type, "
            "or one taken before the cache was updated).",
            query=_LENGTH_CALL_QUERY.replace(" AND c.layer = {layer}", " ORDER BY c.layer"),
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with nothing known of lengths."""
        super().on_generation_start(context)
        self._n_cached: int | None = None
        self._lookback: dict[int, int] = {}
        """Layer to how far back the newest row of the prompt looks."""
        self._n_missing_keys: dict[int, int] = {}
        """Layer to how many keys it lacked in the step before."""

    # -- calls that raised -----------------------------------------------------------------------

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Return what a call that raised had in another length than its mask."""
        if event.kind != _KERNEL_FAILED_EVENT:
            return ()
        data = event.data
        wrong = _find_mismatches(data)
        if not wrong:
            return ()
        layer, step, generation = data.get("layer"), event.step, event.generation or 0
        error = str(data.get("error")).partition(":")[0]
        place = [] if layer is None else [f"layer {layer}"]
        place += [] if step is None else [f"step {step}"]
        where = "; ".join(part for part in (", ".join(place), self._format_cache(data)) if part)
        sentence = (
            f"{', and '.join(words for _, words in wrong)}"
            f"{f' ({where})' if where else ''}: {data.get('kernel')} raised {error}"
        )
        return [
            Finding(
                id=wrong[0][0],
                severity=Severity.WARNING if wrong[0][0] == BATCH_HEADS else Severity.ERROR,
                sentence=f"{sentence}.",
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
        """Return what does not fit in a step."""
        found: list[Finding] = []
        calls = step.calls
        for fingerprint, call in {call.mask: call for call in calls}.items():
            mask = self.context.mask(fingerprint)
            if mask is not None:
                if mask.batch > 1 or mask.heads > 1:
                    found += self._check_batch_heads(step, mask)
                if call.handed is not None and step.kv_before:
                    found += self._check_dense_rows(step, mask)
        if step.inputs is not None and calls:
            if step.kv_before:
                if {call.kv_len for call in calls} != {step.kv_after}:
                    found += self._check_short_layers(step)
            elif step.masks:
                self._record_lookback(step)
        has_cache = step.inputs is None or bool(step.inputs.cached_after)
        self._n_cached = step.kv_after if has_cache else None
        return found

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
            parts.append(f"batch {mask.batch} and the call has {call.batch}")
        if mask.heads not in (1, call.q_heads):
            kv = " (its key heads)" if mask.heads == call.kv_heads else ""
            parts.append(f"{plural(mask.heads, 'head')}{kv} and the call has {call.q_heads}")
        outcome = (
            "the compiled kernel reads block tables that are not there"
            if mask.compiled
            else "uncompiled, the rule is asked for each of them all the same; compiled, block "
            "tables would be read that are not there"
        )
        sentence = (
            f"The mask of {self._format_call_layers(step, calls)} in step {step.step} was made for "
            f"{', and for '.join(parts)}: {outcome}."
        )
        finding = self._finding(
            step,
            BATCH_HEADS,
            Severity.ERROR if mask.compiled else Severity.WARNING,
            sentence,
            calls,
            {
                "mask": mask.fingerprint,
                "mask_batch": mask.batch,
                "mask_heads": mask.heads,
                "batch": call.batch,
                "q_heads": call.q_heads,
                "kv_heads": call.kv_heads,
            },
            f"{mask.batch}/{mask.heads}/{call.batch}/{call.q_heads}",
        )
        return [finding]

    def _check_dense_rows(self, step: StepRecord, mask: MaskRecord) -> list[Finding]:
        """Judge decode steps alone: from its upper left corner, a mask is right for a prompt."""
        calls = [call for call in step.calls if call.mask == mask.fingerprint]
        rows = _dense_mask_rows(mask, calls[0])
        if rows is None or rows == step.q_len:
            return []
        sentence = (
            f"{self._format_call_layers(step, calls).capitalize()} got a dense mask of {rows} rows in step "
            f"{step.step}, which has {plural(step.q_len, 'row')} "
            f"({self.context.format_position(step.kv_before)}): FlexAttention reads it from row 0, so the "
            "new row has the mask of the first token."
        )
        finding = self._finding(
            step,
            MASK_Q,
            Severity.ERROR,
            sentence,
            calls,
            {"mask_rows": rows, "rows": step.q_len, "handed": calls[0].handed},
            "read at row 0",
        )
        return [finding]

    # -- keys per layer --------------------------------------------------------------------------

    def _record_lookback(self, step: StepRecord) -> None:
        """Note how far back each layer looks from the newest row of the prompt."""
        known: dict[str | None, int | None] = {}
        for call in step.calls:
            if call.mask not in known:
                known[call.mask] = _find_lookback(self.context.mask(call.mask))
            reach = known[call.mask]
            if reach is not None:
                self._lookback[call.layer] = reach

    def _check_short_layers(self, step: StepRecord) -> list[Finding]:
        """Return layers that get fewer keys than they have, and that no window explains.

        A window gives away one key for each that comes, and none that it sees in the prompt.
        """
        before, self._n_missing_keys = self._n_missing_keys, {}
        counted_keys = step.inputs.cached_after if step.inputs is not None else ()
        short: list[CallRecord] = []
        for call in step.calls:
            lacks = step.kv_after - call.kv_len
            held = counted_keys[call.layer] if call.layer < len(counted_keys) else None
            if lacks <= 0 or held != step.kv_after or call.kv_len <= step.q_len:
                continue
            self._n_missing_keys[call.layer] = lacks
            sees_less = call.kv_len - 1 < self._lookback.get(call.layer, -1)
            if sees_less or before.get(call.layer) == lacks:
                short.append(call)
        if not short:
            return []
        least = min(call.kv_len for call in short)
        others = {call.kv_len for call in step.calls} - {call.kv_len for call in short}
        compared = f"the others get {max(others)}, " if others else ""
        sentence = (
            f"{self._format_call_layers(step, short).capitalize()} {_format_get(short)} {plural(least, 'key')} in "
            f"step {step.step}, {compared}and the cache holds {step.kv_after}: no window explains "
            f"it, {_format_reason(short[0], self._lookback, before)}."
        )
        evidence = {
            "kv_len": {call.layer: call.kv_len for call in step.calls},
            "cached": step.kv_after,
            "reach": {call.layer: self._lookback.get(call.layer) for call in short},
        }
        series = ",".join(str(call.layer) for call in short)
        return [self._finding(step, LAYER_KEYS, Severity.ERROR, sentence, short, evidence, series)]

    # -- words -----------------------------------------------------------------------------------

    def _format_call_layers(self, step: StepRecord, calls: Sequence[CallRecord]) -> str:
        if self.context.is_standalone:
            return "the call"
        return format_layers(_layers_of_calls(calls), len({call.layer for call in step.calls}))

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        calls: Sequence[CallRecord],
        evidence: dict[str, Any],
        series: str,
    ) -> Finding:
        numbers = _layers_of_calls(calls)
        return Finding(
            id=finding_id,
            severity=severity,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=numbers[0],
            layers=tuple(numbers) if len(numbers) > 1 else (),
            evidence=evidence,
            series=series,
            query=_LENGTH_CALL_QUERY.format(
                generation=step.generation, branch=step.branch, step=step.step, layer=numbers[0]
            )
            if finding_id == MASK_Q
            else "",
        )


def _find_mismatches(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (id, words) for each length in which a failed call and its mask differ."""
    q_len, kv_len, shape = data.get("q_len"), data.get("kv_len"), data.get("mask")
    mask_q, mask_kv = data.get("mask_q"), data.get("mask_kv")
    dense = shape if isinstance(shape, tuple | list) and len(shape) >= 2 else None
    if dense is not None:
        mask_q, mask_kv = (None if size == 1 else size for size in dense[-2:])
    if None in (q_len, kv_len):
        return []
    wrong = []
    if mask_kv is not None and mask_kv != kv_len:
        wrong.append((MASK_KV, f"KV length {kv_len} but mask built for {mask_kv}"))
    if mask_q is not None and mask_q != q_len:
        wrong.append((MASK_Q, f"q length {q_len} but mask built for {plural(mask_q, 'row')}"))
    if not wrong:
        wrong = [(BATCH_HEADS, words) for words in _grid_mismatches(data, dense)]
    return wrong


def _grid_mismatches(data: Mapping[str, Any], shape: Sequence[int] | None) -> list[str]:
    made = [data.get("mask_batch"), data.get("mask_heads")]
    if shape is not None and len(shape) == 4:
        made = list(shape[:2])
    names = (("batch", "batch"), ("heads", "number of heads"))
    return [
        f"{words} {data[name]} but mask built for {size}"
        for size, (name, words) in zip(made, names, strict=True)
        if size is not None and data.get(name) is not None and size not in (1, data[name])
    ]


def _dense_mask_rows(mask: MaskRecord, call: CallRecord) -> int | None:
    """Return the rows of a dense mask that flex reads in part, None for any other mask."""
    if call.handed is None or mask.kind not in ("bool", "float"):
        return None
    if not call.path.startswith("flex"):
        return None
    shape = re.fullmatch(r"\w+ \(.*?(\d+), (\d+)\)", call.handed)
    return None if shape is None else int(shape[1])


def _find_lookback(mask: MaskRecord | None) -> int | None:
    """Return how many keys before its own the newest row sees, None where it is not known."""
    if mask is None or mask.cells is None or mask.q_len < 2:
        return None
    sees = mask.cells[:, -1].any(axis=0)
    return mask.kv_len - 1 - int(sees.argmax()) if sees.any() else None


def _layers_of_calls(calls: Sequence[CallRecord]) -> list[int]:
    return sorted({call.layer for call in calls})


def _format_get(calls: Sequence[CallRecord]) -> str:
    return "gets" if len(_layers_of_calls(calls)) == 1 else "get"


def _format_reason(call: CallRecord, reach: Mapping[int, int], before: Mapping[int, int]) -> str:
    seen = reach.get(call.layer, -1)
    if call.kv_len - 1 < seen:
        return f"as the prompt's last row looked {plural(seen, 'key')} back"
    return f"as the step before lacked {before[call.layer]} as well"
