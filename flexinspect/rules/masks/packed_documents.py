"""Packed documents that a mask joins: position ids begin again where the mask has no border.

transformers makes a mask of documents from position ids that begin again, but only if it receives
no attention_mask (`find_packed_sequence_indices` in its masking_utils): one of all ones switches
that off (https://github.com/huggingface/transformers/pull/46634).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import capitalize, format_numbers, plural
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.heads_and_batches import BATCH_ROWS_EVENT
from flexinspect.rules.masks.mask_views import StepMaskView, broadcast_rows, step_mask_views

JOINED_DOCUMENTS = "mask.joined-documents"
_MAX_LISTED = 6


class _Joined(NamedTuple):
    """Documents of a batch row that see the one before them; `starts` are their first columns."""

    row: int
    starts: list[int]
    documents: int


class PackedDocumentsRule(Rule):
    """Compares where position ids begin again with the borders of the executed masks.

    Only prompts whose mask was not declared are looked at: for others the executed mask is compared
    with the declared one. A batch row other than 0 is judged where the mask is the same in all.
    """

    name = "packed_documents"
    needs = (imported.POSITIONS, imported.MASKS)
    streams = ("inputs.positions", "inputs.mask")
    findings = finding_kinds(JOINED_DOCUMENTS)

    def on_step(self, step: StepRecord) -> Findings:
        """Check the first forward of a prompt."""
        inputs = step.inputs
        if step.kv_before or step.q_len < 3 or inputs is None or not inputs.positions:
            return
        table = step_array(step, "inputs.positions")
        ids = np.asarray([inputs.position_ids]) if table is None else np.asarray(table)
        starts = {row: _document_starts(one) for row, one in enumerate(ids)}
        if not any(map(len, starts.values())) or self.context.declared_spec is not None:
            return
        for view in step_mask_views(step, self.context)[0]:
            joined = list(self._joined(step, view, starts))
            if joined:
                yield self._finding(step, view, joined, len(ids))
                return

    def _joined(
        self, step: StepRecord, view: StepMaskView, starts: dict[int, list[int]]
    ) -> Iterator[_Joined]:
        cells: BoolArray = np.any(broadcast_rows(view.cells, step.q_len), axis=0)
        if cells.shape != (step.q_len, step.q_len):
            return
        real = step_array(step, "inputs.mask")
        for row, columns in starts.items():
            if row and not self._is_same_in_all_rows(step, view):
                return
            kept = columns
            if real is not None and len(real) > row:  # padding has any id
                kept = [c for c in columns if real[row][c] and real[row][c - 1]]
            if found := [c for c in kept if cells[c, c] and cells[c, c - 1]]:
                yield _Joined(row, found, len(kept) + 1)

    def _is_same_in_all_rows(self, step: StepRecord, view: StepMaskView) -> bool:
        mask = self.context.mask(view.fingerprint)
        if mask is not None and mask.batch == 1:
            return True
        about = (event.data for event in step.events if event.kind == BATCH_ROWS_EVENT)
        return any(one["mask"] == view.fingerprint and not one["differ"] for one in about)

    def _finding(
        self, step: StepRecord, view: StepMaskView, joined: list[_Joined], batch: int
    ) -> Any:
        first = joined[0]
        subject = "the prompt" if batch == 1 else f"batch row {first.row} of {batch}"
        where = format_step_layers(view.layers, step)
        more = len(first.starts) - _MAX_LISTED
        listed = format_numbers("column", first.starts[:_MAX_LISTED])
        sentence = (
            f"Position ids of {subject} begin again {plural(first.documents - 1, 'time')}, as "
            f"those of packed documents do, but the mask of {where} has no border at {listed}"
            f"{f' and {more} more' if more > 0 else ''}: a document attends to the one before it"
        )
        if len(joined) > 1:
            sentence += f" (as in {plural(len(joined) - 1, 'other row')})"
        evidence = {
            "batch_row": first.row,
            "columns": first.starts,
            "documents": first.documents,
            "mask": view.fingerprint,
        }
        return self.finding(
            step,
            JOINED_DOCUMENTS,
            f"{capitalize(sentence)}.",
            view.layers,
            evidence,
            positions=first.starts if first.row == 0 else (),  # other rows have other tokens
        )


def _document_starts(ids: npt.NDArray[Any]) -> list[int]:
    """Return the columns at which position ids (keys,) begin again at that of the first column."""
    again = (ids[1:] == ids[0]) & (ids[:-1] > ids[0])
    return (np.flatnonzero(again) + 1).tolist()
