"""Finds rejected proposals that stayed in the cache of a speculative loop.

A decode step with several rows feeds a token and proposals after it. The model confirms each
proposal that is the best token of the row before. If the next token that is fed is the best one
after an earlier row, the proposals from there on were rejected, and their keys must leave the
cache. If the next forward still finds them there, its numbers are those of another text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence, AuditedStep
from flexinspect_hooks.audit.evidence.row_comparison import (
    Divergence,
    RowComparison,
    logits_difference,
)
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit
from flexinspect_hooks.audit.forward.forward_run import LOGITS, Point, Run
from flexinspect_hooks.audit.hypotheses.search import Explanation, SearchResult
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

NAME = "cache.rejected"


class _Rejected(Struct, frozen=True):
    """Proposals at the positions `start` to `stop` (exclusive), and the step that follows."""

    start: int
    stop: int
    following: AuditedStep


def rows_of_proposals(sequence: AuditedSequence) -> list[int]:
    """Return the positions whose best tokens must be known to judge the proposals."""
    return [
        row
        for step in sequence.steps[1:]
        if len(step.positions) > 1
        for row in range(step.first_row, int(step.positions[-1]) + 1)
    ]


def find_rejected(
    reference: ReferenceModel, comparison: RowComparison, values: Mapping[Point, Tensor]
) -> tuple[Divergence, SearchResult] | None:
    """Return the first step that reads rejected proposals, with the difference that they make.

    `values` must have the logits of `rows_of_proposals`.
    """
    found = _first_rejected(comparison, values)
    if found is None:
        return None
    step = found.following
    row = int(step.positions[-1])
    if (LOGITS, None) not in step.evidence.values or comparison.sequence.batch:
        return None
    ids = comparison.sequence.ids
    committed = [*ids[: found.start], *ids[found.stop : row + 1]]
    positions = torch.arange(len(committed), device=reference.device)[None]
    right = reference.run(committed, Run(positions), [len(committed) - 1])[LOGITS, None]
    fed = values[LOGITS, None][0, [comparison.logit_rows.index(row)]]
    difference = float(logits_difference(step.evidence, right[0]).max())
    limit = comparison.limits[LOGITS, None]
    if difference <= limit:
        return None
    n = found.stop - found.start
    sentence = (
        f"in which {n} rejected proposals stay in the cache (positions {found.start} to "
        f"{found.stop - 1})"
    )
    same = float(logits_difference(step.evidence, fed).max())
    explanation = Explanation((ForwardEdit(name=NAME, sentence=sentence),), None, same, 1, 1, 0, 0)
    at = Divergence(step.evidence.step, (LOGITS, None), row, difference, limit)
    return at, SearchResult(explanation, (NAME,), 1, is_cut=False)


def _first_rejected(comparison: RowComparison, values: Mapping[Point, Tensor]) -> _Rejected | None:
    sequence, rows = comparison.sequence, list(comparison.logit_rows)
    best = values[LOGITS, None][0].argmax(-1).tolist()
    best_after = dict(zip(rows, best, strict=True))
    for step, following in zip(sequence.steps[1:], sequence.steps[2:], strict=False):
        first, stop = step.first_row, int(step.positions[-1]) + 1
        if stop - first < 2 or following.first_row != stop:
            continue
        fed = sequence.ids[stop]
        for row in range(first, stop - 1):
            if sequence.ids[row + 1] == best_after.get(row):
                continue  # confirmed
            # An ordinary input, such as a turn of a chat, is followed by its own best token.
            if fed == best_after.get(row) and fed != best_after.get(stop - 1):
                return _Rejected(row + 1, stop, following)
            break
    return None
