"""The rules for masks that depend on the head or the batch row, and for padding in a batch.

- `HeadsRule`: heads with a mask of their own, and KV heads that were repeated in the wrong order.
  Query heads that share a KV head are neighbours, and `h` in a mask_mod counts query heads.
- `BatchRowsRule`: masks built for one batch row although they depend on it, and batch rows that see
  the future.
- `BatchPaddingRule`: batch rows that see padding. Padding is counted in the 2D attention mask that
  the model received, or else by the token ids.

Cells are recorded of batch row 0 only. The capture compares it with a sample of the other rows,
once per mask, and writes the result as an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_ranges, plural
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.masks.mask_findings import format_mask_mod
from flexinspect.rules.masks.mask_views import format_step_layers

BY_HEAD = "mask.by-head"
KEYS_TILED = "attention.keys-tiled"

KEYS_TILED_EVENT = "keys-tiled"
_MaskCalls = tuple[MaskRecord, list[CallRecord]]
_MAX_NAMED_HEADS = 8
"""Up to this many heads with a mask of their own, a sentence names the KV head of each."""


class HeadsRule(Rule):
    """Reports heads with a mask of their own, with their KV heads, and wrongly repeated keys."""

    name: ClassVar[str] = "heads"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        BY_HEAD: FindingKind(
            Severity.NOTE,
            "the executed mask depends on the head",
            why="A mask_mod counts query heads. Code that counts KV heads, or assumes that the "
            "query heads of a group are not neighbours, masks another head than intended.",
            confirm="In the mask panel, switch to the named head; its label shows which KV head "
            "it reads.",
            fix="No action needed if the named heads are the intended ones. Otherwise convert: "
            "query head h reads KV head h // (query heads / KV heads).",
            query="SELECT c.layer, c.q_heads, c.kv_heads, m.heads, m.rule, m.rule_source "
            "FROM calls c JOIN masks m ON m.fingerprint = c.mask "
            "WHERE c.generation = {generation} AND c.branch = {branch} AND c.step = {step} "
            "ORDER BY c.call",
        ),
        KEYS_TILED: FindingKind(
            Severity.ERROR,
            "KV heads were repeated as a whole instead of head by head",
            why="The query heads of a group are neighbours. If KV heads are repeated as a whole, "
            "nearly every query head reads the keys and values of another group.",
            confirm="Compare the layer with `enable_gqa=True` on keys that are not repeated: equal "
            "up to rounding under repeat_interleave, far off under repeat.",
            fix="Use `repeat_interleave(n, dim=1)` (transformers' `repeat_kv`), or pass the keys "
            "unrepeated with `enable_gqa=True`.",
            query="SELECT step, text, data FROM events WHERE kind = 'keys-tiled' AND generation = "
            "{generation} AND step = {step}",
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return findings for the new masks of a step, and for its events about repeated keys."""
        findings = [
            self._tiled_finding(step, event)
            for event in step.events
            if event.kind == KEYS_TILED_EVENT
        ]
        alike: dict[tuple[str | None, tuple[int, ...]], _MaskCalls] = {}
        for mask in step.masks:
            if mask.cells is not None and len(mask.cells) > 1:
                calls = [call for call in step.calls if call.mask == mask.fingerprint]
                if calls and (odd := find_odd_heads(mask.cells)):
                    # Layers that each build their own mask share one finding.
                    alike.setdefault((mask.rule, tuple(odd)), (mask, []))[1].extend(calls)
        for (_, odd_heads), (mask, calls) in alike.items():
            findings.append(self._by_head_finding(step, mask, calls, odd_heads))
        return findings

    def _by_head_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord], odd: Sequence[int]
    ) -> Finding:
        call, layers = calls[0], sorted({call.layer for call in calls})
        where = "" if self.context.is_standalone else f" in {format_step_layers(layers, step)}"
        rest = call.q_heads - len(odd)
        sentence = (
            f"The mask of {format_mask_mod(mask)} depends on the head{where}: "
            f"{_format_odd_heads(call, odd)} {'has' if len(odd) == 1 else 'have'} other cells than "
            f"the remaining {plural(rest, 'query head')}; h counts query heads"
            f"{_format_kv_groups(call)}."
        )
        evidence = {
            "mask": mask.fingerprint,
            "heads": list(odd),
            "key_heads": sorted({_key_head(call, head) for head in odd}),
            "q_heads": call.q_heads,
            "kv_heads": call.kv_heads,
        }
        return self.finding(
            step,
            BY_HEAD,
            sentence,
            layers=() if self.context.is_standalone else layers,
            head=odd[0],
            evidence=evidence,
            series=f"{mask.rule} {list(odd)}",
        )

    def _tiled_finding(self, step: StepRecord, event: EventRecord) -> Finding:
        layers = [int(layer) for layer in event.data["layers"]]
        sentence = (
            f"In {format_step_layers(layers, step)} the keys of {event.data['q_heads']} query "
            "heads were repeated as a whole (repeat), not head by head (repeat_interleave): query "
            "head 1 reads the keys of another group than its neighbour, query head 0."
        )
        return self.finding(
            step,
            KEYS_TILED,
            sentence,
            layers=layers,
            head=1,
            evidence=event.data,
            series="tiled",
        )


def find_odd_heads(cells: BoolArray) -> list[int]:
    """Return the heads of cells, bool (heads, rows, keys), that differ from most heads."""
    packed = [bits.tobytes() for bits in np.packbits(cells.reshape(len(cells), -1), axis=1)]
    usual = max(dict.fromkeys(packed), key=packed.count)
    return [head for head, bits in enumerate(packed) if bits != usual]


def _key_head(call: CallRecord, head: int) -> int:
    return head * call.kv_heads // call.q_heads


def _format_odd_heads(call: CallRecord, odd: Sequence[int]) -> str:
    """Return `query head 3 -> kv head 1`, or only the heads if each has a KV head of its own."""
    if len(odd) > _MAX_NAMED_HEADS:
        return f"query heads {format_ranges(odd)}"
    if call.q_heads == call.kv_heads:
        return f"head {odd[0]}" if len(odd) == 1 else f"heads {format_ranges(odd)}"
    return ", ".join(f"query head {head} -> kv head {_key_head(call, head)}" for head in odd)


def _format_kv_groups(call: CallRecord) -> str:
    if call.q_heads == call.kv_heads:
        return ""
    size = call.q_heads // call.kv_heads
    return f", and {size} neighbours share each of the {call.kv_heads} kv heads"


# -- batch rows ------------------------------------------------------------------------------------

IGNORES_BATCH = "mask.ignores-batch"
BATCH_FUTURE = "mask.batch-future"

BATCH_ROWS_EVENT = "batch-rows"
_MAX_BATCH_ROWS = 8

_BATCH_QUERY = (
    "SELECT step, text, data FROM events WHERE kind = 'batch-rows' AND generation = {generation} "
    "AND step = {step}"
)


class BatchRowsRule(Rule):
    """Reports masks built for one batch row that depend on it, and rows that see the future."""

    name: ClassVar[str] = "batches"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        IGNORES_BATCH: FindingKind(
            Severity.ERROR,
            "a mask was built for one batch row, but its mask_mod depends on the batch",
            why="The block tables are those of batch row 0. Compiled FlexAttention uses them for "
            "every batch row, so others lose blocks or see blocks that their mask_mod closes. "
            "Uncompiled it is correct, so a debug run does not show the fault.",
            confirm="The event has the number of open cells of each batch row. Evaluate the "
            "mask_mod at b = 0 and at the named row.",
            fix="Pass the batch size as B to `create_block_mask` if the mask_mod reads `b`.",
            query=_BATCH_QUERY,
        ),
        BATCH_FUTURE: FindingKind(
            Severity.WARNING,
            "a batch row sees the future, but batch row 0 does not",
            why="The named sequence sees the tokens that it should predict. Panels and most rules "
            "show batch row 0, whose mask is causal.",
            confirm="Run the named sequence alone, so that it is batch row 0.",
            fix="Add `kv_idx <= q_idx` for every batch row. Look for tensors indexed by `b` that "
            "were filled for the first row only.",
            query=_BATCH_QUERY,
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return findings from the step's events about the batch rows of its masks."""
        findings: list[Finding] = []
        for event in step.events:
            if event.kind == BATCH_ROWS_EVENT and event.data["differ"]:
                findings += self._check_event(step, event)
        return findings

    def _check_event(self, step: StepRecord, event: EventRecord) -> list[Finding]:
        data = event.data
        calls = [call for call in step.calls if call.mask == data["mask"]]
        mask = self.context.mask(str(data["mask"]))
        if not calls or mask is None:
            return []
        if mask.kind == "block" and data["made_for"] == 1:
            return [self._ignores_batch_finding(step, mask, calls, data)]
        future = [row for row, n in enumerate(data["future"]) if n and not data["future"][0]]
        if future and calls[0].causal is not False and step.q_len > 1:
            return [self._future_finding(step, mask, calls, data, future)]
        return []

    def _ignores_batch_finding(
        self,
        step: StepRecord,
        mask: MaskRecord,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
    ) -> Finding:
        other, row, key = data["first"]
        n_open = data["open"]
        differ = data["differ"]
        effect = (
            "compiled FlexAttention used the tables of batch row 0 for all of them"
            if mask.compiled
            else "uncompiled FlexAttention is correct, compiled it would use the tables of batch "
            "row 0 for all of them"
        )
        sentence = (
            f"{self._format_where(step, calls)}the block mask of {format_mask_mod(mask)} was built "
            f"for one batch row (B=None), but its mask_mod depends on the batch: batch "
            f"{_format_batch_rows(differ)} of {data['batch']} "
            f"{'differs' if len(differ) == 1 else 'differ'} from row 0, "
            f"first at row {step.kv_before + row}, key {key} of batch row {other} "
            f"({n_open[other]} cells open in the checked rows, {n_open[0]} in batch row 0); "
            f"{effect}."
        )
        severity = Severity.ERROR if mask.compiled else Severity.WARNING
        position = step.kv_before + row
        return self._finding(step, IGNORES_BATCH, severity, sentence, calls, data, position)

    def _future_finding(
        self,
        step: StepRecord,
        mask: MaskRecord,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
        future: Sequence[int],
    ) -> Finding:
        n_pairs = sum(data["future"][row] for row in future)
        verb = "sees" if len(future) == 1 else "see"
        sentence = (
            f"{self._format_where(step, calls)}batch {_format_batch_rows(future)} of "
            f"{data['batch']} {verb} the future ({plural(n_pairs, 'pair')} in the "
            f"checked rows) under the {mask.kind} mask, but batch row 0 does not."
        )
        position = step.kv_before + int(data["first"][1])
        return self._finding(step, BATCH_FUTURE, Severity.WARNING, sentence, calls, data, position)

    def _format_where(self, step: StepRecord, calls: Sequence[CallRecord]) -> str:
        if self.context.is_standalone:
            return "In a standalone call "
        return f"In {format_step_layers({call.layer for call in calls}, step)} "

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
        position: int,
    ) -> Finding:
        return self.finding(
            step,
            finding_id,
            sentence,
            severity=severity,
            layers=() if self.context.is_standalone else {call.layer for call in calls},
            positions=(position,),
            evidence=data,
            series=finding_id,
        )


def _format_batch_rows(rows: Sequence[int]) -> str:
    """Return `row 1` or `rows 1, 3`."""
    return f"row{'' if len(rows) == 1 else 's'} {format_ranges(rows[:_MAX_BATCH_ROWS])}"


# -- padding in a batch ----------------------------------------------------------------------------

BATCH_PADDING = "mask.batch-padding"

_MAX_PADDED_POSITIONS = 8

PadCounts = npt.NDArray[np.int64]
"""Number of leading padding tokens, or another count of positions, (batch,)."""

_PADDING_QUERY = (
    "SELECT a.stream, a.shape, c.layer, c.path, c.mask FROM arrays a JOIN calls c USING "
    "(generation, branch, step) WHERE a.stream IN ('inputs.mask', 'inputs.ids') AND "
    "a.generation = {generation} AND a.branch = {branch} AND a.step = 0"
)


class BatchPaddingRule(Rule):
    """Compares what the newest row of each sequence sees with where its padding ends."""

    name: ClassVar[str] = "paddings"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask", "inputs.ids")
    findings: ClassVar[Mapping[str, FindingKind]] = {
        BATCH_PADDING: FindingKind(
            Severity.ERROR,
            "batch rows see their padding",
            why="Padding is noise, and its amount depends on the batch: the same sequence gets "
            "another output in another batch. Panels show batch row 0, which is correct.",
            confirm="Run the named sequence alone, without padding, and compare its logits. Or put "
            "it first in the batch and open the mask panel.",
            fix="Pass the 2D attention mask of the tokenizer to the model. In your own mask_mod, "
            "read the padding of batch row `b`, and pass the batch size as B to "
            "`create_block_mask`.",
            query=_PADDING_QUERY,
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the known padding."""
        super().on_generation_start(context)
        self._pads: PadCounts | None = None
        self._has_padding_mask = False
        self._checked_phases: set[bool] = set()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return a finding if sequences see their padding, in prefill and the first decode step."""
        inputs = step.inputs
        if inputs is None or inputs.batch < 2:
            return ()
        if not step.kv_before:
            self._count_pads(step)
        if self._pads is None or len(self._pads) != inputs.batch:
            return ()
        is_decode = step.q_len == 1
        has_sample = any(event.kind == BATCH_ROWS_EVENT for event in step.events)
        if is_decode in self._checked_phases or not has_sample:
            return ()
        self._checked_phases.add(is_decode)
        return self._check_calls(step, self._pads)

    def _count_pads(self, step: StepRecord) -> None:
        """Count the padding tokens that each sequence begins with."""
        arrays = {one.stream: one.array for one in step.arrays if one.stream in self.streams}
        self._pads = None
        self._has_padding_mask = "inputs.mask" in arrays
        if self._has_padding_mask:
            real = np.asarray(arrays["inputs.mask"], np.bool_)
            is_left_padded = bool(len(real)) and bool(real[:, -1].all())
            self._pads = _count_leading(~real) if is_left_padded else None
        elif "inputs.ids" in arrays:
            tokenizer = declared_tokenizer(self.context.generation.declared)
            if tokenizer.pad is not None and tokenizer.pad not in (tokenizer.bos, *tokenizer.eos):
                pads = _count_leading(np.asarray(arrays["inputs.ids"]) == tokenizer.pad)
                # If each sequence has as many, the model may begin every text with this token.
                self._pads = pads if pads.min() < pads.max() else None

    def _check_calls(self, step: StepRecord, pads: PadCounts) -> list[Finding]:
        seeing: dict[tuple[int, ...], list[CallRecord]] = {}
        for call in step.calls:
            first = self._first_keys(step, call, len(pads))
            if first is not None:
                rows = tuple(np.flatnonzero(first < pads).tolist())
                others = tuple(row for row in rows if row)  # `mask.padding` reports row 0
                seeing.setdefault(others, []).append(call)
        return [self._finding(step, rows, calls, pads) for rows, calls in seeing.items() if rows]

    def _first_keys(self, step: StepRecord, call: CallRecord, batch: int) -> PadCounts | None:
        """Return the first position that each sequence's newest row sees, or None if unknown."""
        mask = self.context.mask(call.mask)
        is_self = call.batch == batch and call.q_len == step.q_len and call.causal is not False
        if mask is None or mask.cells is None or not is_self or _is_averaged(mask):
            return None
        start = max(step.kv_after - mask.kv_len, 0)
        for event in step.events:
            if event.kind == BATCH_ROWS_EVENT and event.data["mask"] == call.mask:
                if not event.data["differ"]:
                    keys = np.flatnonzero(mask.cells[:, -1].any(axis=0))
                    return np.full(batch, start + int(keys[0])) if len(keys) else None
                made_for_one = mask.kind == "block" and event.data["made_for"] == 1
                if made_for_one or "newest_from" not in event.data:
                    return None
                return start + np.asarray(event.data["newest_from"], np.int64)
        return None  # the capture did not compare the other batch rows of this mask

    def _finding(
        self, step: StepRecord, rows: Sequence[int], calls: Sequence[CallRecord], pads: PadCounts
    ) -> Finding:
        layers = {call.layer for call in calls}
        first = rows[0]
        n_pads = int(pads[first])
        source = (
            ""
            if self._has_padding_mask
            else " (counted by token ids, because the model received no attention mask)"
        )
        sentence = (
            f"In {format_step_layers(layers, step)} batch {_format_batch_rows(rows)} of "
            f"{len(pads)} {'sees' if len(rows) == 1 else 'see'} padding keys in step {step.step}: "
            f"batch row {first} begins with {plural(n_pads, 'padding token')}, which its newest "
            f"row sees{source}."
        )
        return self.finding(
            step,
            BATCH_PADDING,
            sentence,
            severity=Severity.ERROR if self._has_padding_mask else Severity.WARNING,
            layers=layers,
            positions=tuple(range(min(n_pads, _MAX_PADDED_POSITIONS))),
            evidence={"rows": list(rows), "pads": [int(pads[row]) for row in rows]},
            series=BATCH_PADDING,
        )


def _count_leading(flags: npt.NDArray[np.bool_]) -> PadCounts:
    """Return how many flags each row of flags, bool (batch, positions), begins with."""
    with_end = np.concatenate((flags, np.zeros((len(flags), 1), np.bool_)), axis=1)
    counts: PadCounts = (~with_end).argmax(axis=1).astype(np.int64)
    return counts


def _is_averaged(mask: MaskRecord) -> bool:
    return mask.averaged is not None and bool(mask.averaged[:, -1].any())
