"""Batch rows beyond the first that see their padding: the mask of another row, or of none.

How many padding tokens a row begins with is told by the 2D mask that was fed, else by their ids.
Cells are recorded of batch row 0 alone: of the others the capture tells where they differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flexinspect.findings import Finding, Severity
from flexinspect.pieces import declared_tokenizer
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.batches import BATCH_ROWS_EVENT
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers as in_layers
from flexinspect.rules.words import format_ranges, plural

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
