"""Rows of a batch that were probably cut at the right, by what all other rows end with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexinspect.core.text import format_numbers, plural
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds

CUT_ROW = "inputs.row-cut"
_MIN_SHARED = 2
"""Ids with which all rows must begin, and with which those with padding must end."""
_MAX_LISTED = 8

Ids = tuple[int, ...]


class CutRowRule(Rule):
    """Compares the ends of the rows of a padded batch.

    Prompts of one template begin and end with the same ids. A limit of the length that is applied
    at the right leaves rows that are as long as the batch, and have lost this end.
    """

    name = "cut_rows"
    needs = (imported.BATCHES,)
    streams = ("inputs.mask", "inputs.ids")
    findings = finding_kinds(CUT_ROW)

    def on_step(self, step: StepRecord) -> Findings:
        """Check the ids of a first forward."""
        if step.step or step.kv_before or step.inputs is None or step.inputs.batch < 3:
            return
        mask, ids = step_array(step, "inputs.mask"), step_array(step, "inputs.ids")
        if mask is None or ids is None or mask.shape != ids.shape:
            return
        real = np.asarray(mask, np.bool_)
        rows = [tuple(row[keep].tolist()) for row, keep in zip(np.asarray(ids), real, strict=True)]
        found = find_cut_rows(rows, ids.shape[1])
        if found is None:
            return
        cut, end = found
        listed = " ".join(map(str, end[:_MAX_LISTED])) + (" …" if len(end) > _MAX_LISTED else "")
        lost = {row: end[_kept(rows[row], end) :] for row in cut}
        first = lost[cut[0]]
        verb, was = ("is", "it was") if len(cut) == 1 else ("are", "they were")
        lacks = "lacks" if len(cut) == 1 else "lack"
        part = listed if len(first) == len(end) else " ".join(map(str, first[:_MAX_LISTED]))
        sentence = (
            f"Batch {format_numbers('row', cut)} of {len(rows)} {verb} as long as the batch "
            f"({plural(ids.shape[1], 'token')}, no padding) and {lacks} the last "
            f"{plural(len(first), 'id')} ({part}) with which all other rows end, although all rows "
            f"begin alike: {was} probably cut at the right."
        )
        evidence = {"rows": cut, "end": list(end[:_MAX_LISTED]), "width": int(ids.shape[1])}
        yield self.finding(step, CUT_ROW, sentence, evidence=evidence, series="cut")


def find_cut_rows(rows: Sequence[Ids], width: int) -> tuple[list[int], Ids] | None:
    """Return the rows of the batch's width that lack the common end of all others, and this end.

    None if there are none. `rows` are the ids without padding. At least two different rows must
    have padding; all rows must begin with the same two ids.
    """
    full = [number for number, row in enumerate(rows) if len(row) == width]
    others = {row for row in rows if len(row) < width}
    if not full or len(others) < 2:
        return None
    n_start = _shared([*others, *(rows[n] for n in full)])
    n_end = _shared([row[::-1] for row in others])
    shortest = min(map(len, others))
    if n_start < _MIN_SHARED or n_end < _MIN_SHARED or n_start + n_end >= shortest:
        return None
    end = next(iter(others))[-n_end:]
    if any(rows[n][-1] == end[-1] or end == rows[n][-n_end:] for n in full):
        return None
    return full, end


def _shared(rows: Sequence[Ids]) -> int:
    """Return with how many equal ids all rows begin."""
    columns = zip(*rows, strict=False)
    return next((n for n, ids in enumerate(columns) if len(set(ids)) > 1), min(map(len, rows)))


def _kept(row: Ids, end: Ids) -> int:
    """Return how many ids of the end a row that was cut still has."""
    return next((n for n in range(len(end) - 1, 0, -1) if row[-n:] == end[:n]), 0)
