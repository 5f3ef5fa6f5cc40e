"""The rules for masks that depend on the head or the batch row, and for padding in a batch.

Cells are recorded of batch row 0 only. The capture compares it with a sample of the other rows,
once per mask, and writes the result as an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_numbers, format_ranges, plural, printable
from flexinspect.masks.attention_row import kv_head_of
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import format_step_layers, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.mask_findings import KNOWN_BACKENDS, MASK_FUNCTION_EVENT, NO_MASK
from flexinspect.rules.masks.mask_views import Calls, call_layers, format_mask_mod, layers_of

_MAX_NAMED_HEADS = 8  # up to this many, a sentence names the KV head of each head


class HeadsRule(Rule):
    """Reports heads with a mask of their own, with their KV heads."""

    name = "heads"
    needs = (imported.MASKS,)
    handles_standalone_calls = True
    findings = finding_kinds("mask.by-head")

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings for the new masks of a step."""
        # Layers that each build their own mask share one finding.
        alike: dict[tuple[str | None, tuple[int, ...]], tuple[MaskRecord, list[CallRecord]]] = {}
        for mask in step.masks:
            if mask.cells is not None and len(mask.cells) > 1:
                calls = [call for call in step.calls if call.mask == mask.fingerprint]
                if calls and (odd := find_odd_heads(mask.cells)):
                    alike.setdefault((mask.mask_mod, tuple(odd)), (mask, []))[1].extend(calls)
        for (_, odd_heads), (mask, calls) in alike.items():
            yield self._by_head_finding(step, mask, calls, odd_heads)

    def _by_head_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Calls, odd: Sequence[int]
    ) -> Finding:
        call, layers, groups = calls[0], call_layers(self.context, calls), ""
        where = f" in {format_step_layers(layers, step)}" if layers else ""
        if call.q_heads != call.kv_heads:
            size = call.q_heads // call.kv_heads
            groups = f", and {size} neighbours share each of the {call.kv_heads} kv heads"
        sentence = (
            f"The mask of {format_mask_mod(mask)} depends on the head{where}: "
            f"{_format_odd_heads(call, odd)} {'has' if len(odd) == 1 else 'have'} other cells than "
            f"the remaining {plural(call.q_heads - len(odd), 'query head')}; h counts query "
            f"heads{groups}."
        )
        facts: dict[str, Any] = {"mask": mask.fingerprint, "heads": list(odd)}
        facts["key_heads"] = sorted({kv_head_of(n, call.q_heads, call.kv_heads) for n in odd})
        facts |= {"q_heads": call.q_heads, "kv_heads": call.kv_heads}
        id_, series = "mask.by-head", f"{mask.mask_mod} {list(odd)}"
        return self.finding(step, id_, sentence, layers, facts, head=odd[0], series=series)


def find_odd_heads(cells: BoolArray) -> list[int]:
    """Return the heads of cells, bool (heads, rows, keys), that differ from most heads."""
    packed = [bits.tobytes() for bits in np.packbits(cells.reshape(len(cells), -1), axis=1)]
    usual = max(dict.fromkeys(packed), key=packed.count)
    return [head for head, bits in enumerate(packed) if bits != usual]


def _format_odd_heads(call: CallRecord, odd: Sequence[int]) -> str:
    """Return `query head 3 -> kv head 1`, or only the heads if each has a KV head of its own."""
    if len(odd) > _MAX_NAMED_HEADS:
        return f"query heads {format_ranges(odd)}"
    if call.q_heads == call.kv_heads:
        return format_numbers("head", odd)
    kv_heads = [kv_head_of(head, call.q_heads, call.kv_heads) for head in odd]
    pairs = zip(odd, kv_heads, strict=True)
    return ", ".join(f"query head {head} -> kv head {kv_head}" for head, kv_head in pairs)


BATCH_ROWS_EVENT = "batch-rows"
_MAX_BATCH_ROWS = 8


class BatchRowsRule(Rule):
    """Reports masks built for one batch row that depend on it, and rows that see the future."""

    name = "batches"
    needs = (imported.BATCHES,)
    handles_standalone_calls = True
    findings = finding_kinds("mask.ignores-batch", "mask.batch-future")

    def on_step(self, step: StepRecord) -> Findings:
        """Return findings from the step's events about the batch rows of its masks."""
        for data in _batch_row_events(step):
            if data["differ"]:
                yield from self._check_event(step, data)

    def _check_event(self, step: StepRecord, data: Mapping[str, Any]) -> Findings:
        calls = [call for call in step.calls if call.mask == data["mask"]]
        mask = self.context.mask(str(data["mask"]))
        if not calls or mask is None:
            return
        future, severity = [row for row, n in enumerate(data["future"]) if n], None
        if mask.kind == "block" and data["made_for"] == 1:
            id_, what = "mask.ignores-batch", _describe_ignored_batch(step, mask, data)
            severity = None if mask.compiled else Severity.WARNING
        elif future and 0 not in future and calls[0].causal is not False and step.q_len > 1:
            id_, n_pairs = "mask.batch-future", sum(data["future"])
            what = (
                f"batch {_format_batch_rows(future)} of {data['batch']} "
                f"{'sees' if len(future) == 1 else 'see'} the future ({plural(n_pairs, 'pair')} in "
                f"the checked rows) under the {mask.kind} mask, but batch row 0 does not"
            )
        else:
            return
        layers = call_layers(self.context, calls)
        where = format_step_layers(layers, step) if layers else "a standalone call"
        sentence, rows = f"In {where} {what}.", (step.kv_before + int(data["first"][1]),)
        yield self.finding(
            step, id_, sentence, layers, data, severity=severity, positions=rows, series=id_
        )


def _batch_row_events(step: StepRecord) -> list[Mapping[str, Any]]:
    """Return the data of a step's events about the batch rows of its masks."""
    return [event.data for event in step.events if event.kind == BATCH_ROWS_EVENT]


def _describe_ignored_batch(step: StepRecord, mask: MaskRecord, data: Mapping[str, Any]) -> str:
    other, row, key = data["first"]
    n_open, differ = data["open"], data["differ"]
    uses = "uncompiled FlexAttention is correct, compiled it would use"
    if mask.compiled:
        uses = "compiled FlexAttention used"
    return (
        f"the block mask of {format_mask_mod(mask)} was built for one batch row (B=None), but its "
        f"mask_mod depends on the batch: batch {_format_batch_rows(differ)} of {data['batch']} "
        f"{'differs' if len(differ) == 1 else 'differ'} from row 0, first at row "
        f"{step.kv_before + row}, key {key} of batch row {other} ({n_open[other]} cells open in "
        f"the checked rows, {n_open[0]} in batch row 0); {uses} the tables of batch row 0 for all "
        "of them"
    )


def _format_batch_rows(rows: Sequence[int]) -> str:
    """Return `row 1` or `rows 1, 3`."""
    return format_numbers("row", rows[:_MAX_BATCH_ROWS])


_MAX_PADDED_POSITIONS = 8
PadCounts = npt.NDArray[np.int64]  # leading padding tokens, or another count of positions, (batch,)


class BatchPaddingRule(Rule):
    """Compares what the newest row of each sequence sees with where its padding ends."""

    name = "batch_padding"
    needs = (imported.BATCHES,)
    streams = ("inputs.mask", "inputs.ids")
    findings = finding_kinds("mask.batch-padding")

    def reset(self) -> None:
        self._pads: PadCounts | None = None
        self._has_padding_mask = self._has_mask_function = False
        self._checked_phases: set[bool] = set()

    def on_step(self, step: StepRecord) -> Findings:
        """Return a finding if sequences see their padding, in prefill and the first decode step."""
        inputs = step.inputs
        if inputs is None or inputs.batch < 2:
            return
        if not step.kv_before:
            self._count_pads(step)
            kinds = {event.kind for event in step.events}
            self._has_mask_function = MASK_FUNCTION_EVENT in kinds
        if self._pads is None or len(self._pads) != inputs.batch:
            return
        is_decode = step.q_len == 1
        if _batch_row_events(step) and is_decode not in self._checked_phases:
            self._checked_phases.add(is_decode)
            yield from self._check_calls(step, self._pads)

    def _count_pads(self, step: StepRecord) -> None:
        mask, ids = step_array(step, "inputs.mask"), step_array(step, "inputs.ids")
        self._pads, self._has_padding_mask = None, mask is not None
        if mask is not None:
            real = np.asarray(mask, np.bool_)
            if len(real) and real[:, -1].all():  # padded on the left
                self._pads = _count_leading(~real)
        elif ids is not None and self.context.pad_id is not None:
            pads = _count_leading(np.asarray(ids) == self.context.pad_id)
            # Behind the prompt it is a token that the model chose.
            pads = np.minimum(pads, self.context.n_prompt or pads.max())
            # If each sequence has as many, the model may begin every text with this token.
            self._pads = pads if pads.min() < pads.max() else None

    def _check_calls(self, step: StepRecord, pads: PadCounts) -> Findings:
        seeing: dict[tuple[int, ...], list[CallRecord]] = {}
        for call in step.calls:
            first = self._first_keys(step, call, len(pads))
            if first is not None:
                rows = np.flatnonzero(first < pads).tolist()
                closing = self._event(step, call).get("closing") or ()
                # `mask.padding` reports row 0
                others = tuple(row for row in rows if row and row not in closing)
                seeing.setdefault(others, []).append(call)
        for others, calls in seeing.items():
            if others:
                yield self._padding_finding(step, others, calls, pads)

    def _event(self, step: StepRecord, call: CallRecord) -> Mapping[str, Any]:
        """Return what was recorded of the batch rows of a call's mask, empty if nothing was."""
        events = (data for data in _batch_row_events(step) if data["mask"] == call.mask)
        return next(events, {})

    def _first_keys(self, step: StepRecord, call: CallRecord, batch: int) -> PadCounts | None:
        """Return the first position that each sequence's newest row sees, or None if unknown."""
        mask = self.context.mask(call.mask)
        is_self = call.batch == batch and call.q_len == step.q_len and call.causal is not False
        if mask is None or mask.cells is None or not is_self:
            return None
        if mask.uniform_rows is not None and mask.uniform_rows[:, -1].any():
            return None
        start = max(step.kv_after - mask.kv_len, 0)
        data = self._event(step, call)
        if not data:
            return None  # the capture did not compare the other batch rows of this mask
        if not data["differ"]:
            keys = np.flatnonzero(mask.cells[:, -1].any(axis=0))
            return np.full(batch, start + int(keys[0])) if len(keys) else None
        if (mask.kind == "block" and data["made_for"] == 1) or "newest_from" not in data:
            return None
        return start + np.asarray(data["newest_from"], np.int64)

    def _padding_finding(
        self, step: StepRecord, rows: Sequence[int], calls: Calls, pads: PadCounts
    ) -> Finding:
        layers, n_pads, source = layers_of(calls), int(pads[rows[0]]), ""
        if not self._has_padding_mask:
            source = " (counted by token ids, because the model received no attention mask)"
        sentence = (
            f"In {format_step_layers(layers, step)} batch {_format_batch_rows(rows)} of "
            f"{len(pads)} {'sees' if len(rows) == 1 else 'see'} padding keys in step {step.step}: "
            f"batch row {rows[0]} begins with {plural(n_pads, 'padding token')}, which its newest "
            f"row sees{source}{self._cause(calls[0])}."
        )
        id_, severity = "mask.batch-padding", None if self._has_padding_mask else Severity.WARNING
        keys = range(min(n_pads, _MAX_PADDED_POSITIONS))
        facts = {"rows": list(rows), "pads": [int(pads[row]) for row in rows]}
        return self.finding(
            step, id_, sentence, layers, facts, severity=severity, positions=keys, series=id_
        )

    def _cause(self, call: CallRecord) -> str:
        """Return why a function of the program got no mask, empty if that is not known."""
        mask = self.context.mask(call.mask)
        is_none = mask is not None and mask.kind.startswith(NO_MASK)
        is_empty = is_none and call.mask_passed_to_layer is None
        is_known = call.backend in KNOWN_BACKENDS or self._has_mask_function
        if not is_empty or is_known or not self._has_padding_mask:
            return ""
        return (
            f": attention '{printable(call.backend)}' has no mask function "
            "(AttentionMaskInterface), so transformers passed None to it in place of the padding "
            "mask"
        )


def _count_leading(flags: npt.NDArray[np.bool_]) -> PadCounts:
    """Return how many flags each row of flags, bool (batch, positions), begins with."""
    counts: PadCounts = np.pad(flags, ((0, 0), (0, 1))).argmin(axis=1)
    return counts
