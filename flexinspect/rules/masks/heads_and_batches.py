"""Which head is which: masks that tell heads apart, and keys that were repeated in a wrong order.

Query heads that share a key head are neighbours, and `h` in a rule counts query heads.

Cells are recorded of batch row 0 alone. What a sample of the other rows shows is told by the
capture, once for each mask.

How many padding tokens a row begins with is told by the 2D mask that was fed, else by their ids.
Cells are recorded of batch row 0 alone: of the others the capture tells where they differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_layers as in_layers
from flexinspect.core.text import format_ranges, plural, printable
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

BY_HEAD = "mask.by-head"
KEYS_TILED = "attention.keys-tiled"

KEYS_TILED_EVENT = "keys-tiled"
_MaskCalls = tuple[MaskRecord, list[CallRecord]]
_MAX_NAMED_HEADS = 8
"""Heads with a mask of their own that a sentence names."""


class HeadsRule(Rule):
    """Names the heads that a mask treats apart, with their key heads, and keys in another order."""

    name: ClassVar[str] = "heads"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        BY_HEAD: FindingKind(
            Severity.NOTE,
            "the mask that ran tells heads apart",
            "A rule counts query heads. Whoever counts key heads, or takes the query heads of a "
            "group to lie apart, has given the mask to another head than was meant.",
            "In the mask panel, switch to the named head; its label says which key head it reads.",
            "Nothing if the named heads are the ones that were meant. Else convert: query head h "
            "reads key head h // (query heads / key heads).",
            "SELECT c.layer, c.q_heads, c.kv_heads, m.heads, m.rule, m.rule_source FROM calls c "
            "JOIN masks m ON m.fingerprint = c.mask WHERE c.generation = {generation} AND "
            "c.branch = {branch} AND c.step = {step} ORDER BY c.call",
        ),
        KEYS_TILED: FindingKind(
            Severity.ERROR,
            "keys were repeated as a whole instead of head by head",
            "Query heads of a group are neighbours: repeated as a whole, nearly every query head "
            "reads the keys and values of another group, and the answer is that of no model.",
            "Compare the layer with `enable_gqa=True` on keys that are not repeated: the same to "
            "rounding under repeat_interleave, far off under repeat.",
            "Use `repeat_interleave(n, dim=1)` (transformers' `repeat_kv`), or hand the keys over "
            "as they are with `enable_gqa=True`.",
            "SELECT step, text, data FROM events WHERE kind = 'keys-tiled' AND generation = "
            "{generation} AND step = {step}",
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Look at the masks that are new, and at what the capture says of the keys."""
        found = [
            self._tiled_finding(step, event)
            for event in step.events
            if event.kind == KEYS_TILED_EVENT
        ]
        alike: dict[tuple[str | None, tuple[int, ...]], _MaskCalls] = {}
        for mask in step.masks:
            if mask.cells is not None and len(mask.cells) > 1:
                calls = [call for call in step.calls if call.mask == mask.fingerprint]
                if calls and (odd := find_odd_heads(mask.cells)):
                    # Layers that build a mask each have one of their own.
                    alike.setdefault((mask.rule, tuple(odd)), (mask, []))[1].extend(calls)
        for (_, odd_ones), (mask, calls) in alike.items():
            found.append(self._by_head_finding(step, mask, calls, odd_ones))
        return found

    def _by_head_finding(
        self, step: StepRecord, mask: MaskRecord, calls: Sequence[CallRecord], odd: Sequence[int]
    ) -> Finding:
        call, which = calls[0], sorted({call.layer for call in calls})
        where = "" if self.context.is_standalone else f" in {_format_call_layers(which, step)}"
        rest = call.q_heads - len(odd)
        one = len(odd) == 1
        sentence = (
            f"The mask of {printable(mask.rule or 'an unnamed rule')} tells heads apart{where}: "
            f"{_format_odd_heads(call, odd)} {'has' if one else 'have'} other cells than the remaining "
            f"{plural(rest, 'query head')}; h counts query heads{_format_kv_groups(call)}."
        )
        evidence = {
            "mask": mask.fingerprint,
            "heads": list(odd),
            "key_heads": sorted({_key_head(call, head) for head in odd}),
            "q_heads": call.q_heads,
            "kv_heads": call.kv_heads,
        }
        layers = () if self.context.is_standalone else which
        series = f"{mask.rule} {list(odd)}"
        about: dict[str, Any] = {"layers": layers, "head": odd[0], "series": series}
        return self.finding(step, BY_HEAD, sentence, evidence=evidence, **about)

    def _tiled_finding(self, step: StepRecord, event: EventRecord) -> Finding:
        which = [int(layer) for layer in event.data["layers"]]
        sentence = (
            f"In {_format_call_layers(which, step)} the keys of {event.data['q_heads']} query heads were "
            "repeated as a whole (repeat), not head by head (repeat_interleave): query head 1 "
            "reads the keys of another group than query head 0, its neighbour."
        )
        about: dict[str, Any] = {"layers": which, "head": 1, "series": "tiled"}
        return self.finding(step, KEYS_TILED, sentence, evidence=event.data, **about)


def find_odd_heads(cells: BoolArray) -> list[int]:
    """Return the heads, of cells (heads, rows, keys), whose cells are not those of most heads."""
    packed = [bits.tobytes() for bits in np.packbits(cells.reshape(len(cells), -1), axis=1)]
    usual = max(dict.fromkeys(packed), key=packed.count)
    return [head for head, bits in enumerate(packed) if bits != usual]


def _format_call_layers(which: Sequence[int], step: StepRecord) -> str:
    return in_layers(which, len({call.layer for call in step.calls}))


def _key_head(call: CallRecord, head: int) -> int:
    return head * call.kv_heads // call.q_heads


def _format_odd_heads(call: CallRecord, odd: Sequence[int]) -> str:
    """Return `query head 3 -> kv head 1`, or the heads alone where each has keys of its own."""
    if len(odd) > _MAX_NAMED_HEADS:
        return f"query heads {format_ranges(odd)}"
    if call.q_heads == call.kv_heads:
        return f"head {odd[0]}" if len(odd) == 1 else f"heads {format_ranges(odd)}"
    return ", ".join(f"query head {head} -> kv head {_key_head(call, head)}" for head in odd)


def _format_kv_groups(call: CallRecord) -> str:
    if call.q_heads == call.kv_heads:
        return ""
    size = call.q_heads // call.kv_heads
    return f", and {size} neighbours each share one of {call.kv_heads} kv heads"


IGNORES_BATCH = "mask.ignores-batch"
BATCH_FUTURE = "mask.batch-future"

BATCH_ROWS_EVENT = "batch-rows"
_MAX_BATCH_ROWS = 8

_BATCH_QUERY = (
    "SELECT step, text, data FROM events WHERE kind = 'batch-rows' AND generation = {generation} "
    "AND step = {step}"
)


class BatchRowsRule(Rule):
    """Says where a mask made for one batch row has a rule that tells rows apart, and the like."""

    name: ClassVar[str] = "batches"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        IGNORES_BATCH: FindingKind(
            Severity.ERROR,
            "a mask for one batch row, whose rule tells batch rows apart",
            "The block tables are those of batch row 0. Compiled FlexAttention goes by them for "
            "every sequence: others lose blocks or see blocks that their rule closes. Uncompiled "
            "it is right, so it goes unnoticed while one debugs.",
            "The event gives the open cells of each batch row; evaluate the rule at b = 0 and at "
            "the named row.",
            "Give `create_block_mask` the batch size as B whenever the rule reads `b`.",
            _BATCH_QUERY,
        ),
        BATCH_FUTURE: FindingKind(
            Severity.WARNING,
            "a batch row sees the future, and batch row 0 does not",
            "Panels and most rules look at batch row 0, whose mask is causal: the sequence that is "
            "named is shown the tokens that it predicts.",
            "Run the named sequence alone: it is batch row 0 then.",
            "Add `kv_idx <= q_idx` for every batch row; look for tables indexed by `b` that were "
            "filled for the first row alone.",
            _BATCH_QUERY,
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what the step's events say of its masks' batch rows."""
        found: list[Finding] = []
        for event in step.events:
            if event.kind == BATCH_ROWS_EVENT and event.data["differ"]:
                found += self._check_event(step, event)
        return found

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
        runs = (
            "compiled flex went by the tables of batch row 0 for all of them"
            if mask.compiled
            else "uncompiled flex asks the rule and is right, compiled it would go by one table"
        )
        sentence = (
            f"{self._format_where(step, calls)}the block mask of "
            f"{printable(mask.rule or 'an unnamed rule')} was built for one batch row (B=None), "
            f"and its rule tells the {data['batch']} apart: {_format_differing_rows(data['differ'])} not as row 0, "
            f"first at row {step.kv_before + row}, key {key} of batch row {other} "
            f"({n_open[other]} cells open of those looked at, {n_open[0]} in row 0); {runs}."
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
        pairs = sum(data["future"][row] for row in future)
        sentence = (
            f"{self._format_where(step, calls)}batch {_format_batch_rows(future)} of {data['batch']} "
            f"{'sees' if len(future) == 1 else 'see'} the future ({plural(pairs, 'pair')} of "
            f"those looked at) under the {mask.kind} mask, and batch row 0 does not."
        )
        position = step.kv_before + int(data["first"][1])
        about = (BATCH_FUTURE, Severity.WARNING, sentence)
        return self._finding(step, *about, calls, data, position)

    def _format_where(self, step: StepRecord, calls: Sequence[CallRecord]) -> str:
        if self.context.is_standalone:
            return "In a call outside of a model "
        which = sorted({call.layer for call in calls})
        return f"In {in_layers(which, len({call.layer for call in step.calls}))} "

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
        which = () if self.context.is_standalone else {call.layer for call in calls}
        about: dict[str, Any] = {"severity": severity, "layers": which, "positions": (position,)}
        return self.finding(step, finding_id, sentence, evidence=data, series=finding_id, **about)


def _format_batch_rows(which: Sequence[int]) -> str:
    """Return `row 1` or `rows 1, 3`."""
    return f"row{'s' * (len(which) > 1)} {format_ranges(which[:_MAX_BATCH_ROWS])}"


def _format_differing_rows(differ: Sequence[int]) -> str:
    """Return `batch row 1 is` or `batch rows 1, 3 are`."""
    return f"batch {_format_batch_rows(differ)} {'is' if len(differ) == 1 else 'are'}"


BATCH_PADDING = "mask.batch-padding"

_MAX_PADDED_ROWS = 8

PadCounts = npt.NDArray[np.int64]

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
            "batch rows see keys of their padding",
            "Padding is noise, and how much of it there is depends on the batch: these sequences "
            "answer otherwise in other company. Panels show batch row 0, where all is well.",
            "Run the named sequence alone, without padding, and compare its logits; or feed it as "
            "the first of the batch and look at the mask panel.",
            "Give the model the 2D attention mask of the tokenizer; in a rule of your own read "
            "the padding of batch row `b`, and give `create_block_mask` the batch size as B.",
            _PADDING_QUERY,
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no padding known."""
        super().on_generation_start(context)
        self._pads: PadCounts | None = None
        self._has_padding_mask = False
        self._checked_phases: set[bool] = set()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return which sequences see their padding: in the prompt, and in the first row after."""
        inputs = step.inputs
        if inputs is None or inputs.batch < 2:
            return ()
        if not step.kv_before:
            self._count_pads(step)
        if self._pads is None or len(self._pads) != inputs.batch:
            return ()
        kind, is_looked_at = (
            step.q_len == 1,
            any(event.kind == BATCH_ROWS_EVENT for event in step.events),
        )
        if kind in self._checked_phases or not is_looked_at:
            return ()
        self._checked_phases.add(kind)
        return self._check_calls(step, self._pads)

    def _count_pads(self, step: StepRecord) -> None:
        """Take how many padding tokens each sequence begins with."""
        tables = {one.stream: one.array for one in step.arrays if one.stream in self.streams}
        self._pads = None
        self._has_padding_mask = "inputs.mask" in tables
        if self._has_padding_mask:
            real = np.asarray(tables["inputs.mask"], np.bool_)
            ends_well = bool(len(real)) and bool(real[:, -1].all())
            self._pads = _count_leading(~real) if ends_well else None
        elif "inputs.ids" in tables:
            words = declared_tokenizer(self.context.generation.declared)
            if words.pad is not None and words.pad not in (words.bos, *words.eos):
                pads = _count_leading(np.asarray(tables["inputs.ids"]) == words.pad)
                # As many in each sequence may be a token that the model begins every text with.
                self._pads = pads if pads.min() < pads.max() else None

    def _check_calls(self, step: StepRecord, pads: PadCounts) -> list[Finding]:
        seeing: dict[tuple[int, ...], list[CallRecord]] = {}
        for call in step.calls:
            first = self._first_keys(step, call, len(pads))
            if first is not None:
                rows = tuple(np.flatnonzero(first < pads).tolist())
                others = tuple(row for row in rows if row)  # row 0 is for the rule of its cells
                seeing.setdefault(others, []).append(call)
        return [self._finding(step, rows, calls, pads) for rows, calls in seeing.items() if rows]

    def _first_keys(self, step: StepRecord, call: CallRecord, batch: int) -> PadCounts | None:
        """Return the first position that each sequence's newest row sees, None if not known."""
        mask = self.context.mask(call.mask)
        is_seen = call.batch == batch and call.q_len == step.q_len and call.causal is not False
        if mask is None or mask.cells is None or not is_seen or _is_averaged(mask):
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
        return None  # the capture did not look at the other rows of this mask

    def _finding(
        self, step: StepRecord, rows: Sequence[int], calls: Sequence[CallRecord], pads: PadCounts
    ) -> Finding:
        layers = {call.layer for call in calls}
        where = in_layers(sorted(layers), len({call.layer for call in step.calls}))
        one, first = len(rows) == 1, rows[0]
        said = (
            "" if self._has_padding_mask else ", going by their ids, as no attention mask was fed"
        )
        sentence = (
            f"In {where} batch row{'' if one else 's'} {format_ranges(rows[:_MAX_PADDED_ROWS])} of {len(pads)} "
            f"{'sees' if one else 'see'} keys of padding in step {step.step}: batch row {first} "
            f"begins with {plural(int(pads[first]), 'token')} of padding, which its newest row "
            f"sees{said}."
        )
        severity = Severity.ERROR if self._has_padding_mask else Severity.WARNING
        evidence = {"rows": list(rows), "pads": [int(pads[row]) for row in rows]}
        about: dict[str, Any] = {"severity": severity, "layers": layers, "evidence": evidence}
        at = tuple(range(min(int(pads[first]), _MAX_PADDED_ROWS)))
        return self.finding(
            step, BATCH_PADDING, sentence, positions=at, series=BATCH_PADDING, **about
        )


def _count_leading(flags: npt.NDArray[np.bool_]) -> PadCounts:
    """Return how many flags each row begins with."""
    whole = np.concatenate((flags, np.zeros((len(flags), 1), np.bool_)), axis=1)
    found: PadCounts = (~whole).argmax(axis=1).astype(np.int64)
    return found


def _is_averaged(mask: MaskRecord) -> bool:
    return mask.averaged is not None and bool(mask.averaged[:, -1].any())
